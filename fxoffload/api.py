"""The public functions. Each takes a module, its compiled wrapper, or a handle."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any

import torch

from fxoffload.attached import attachment_of
from fxoffload.binding import Binding
from fxoffload.budget import Budget
from fxoffload.config import OffloadConfig
from fxoffload.cost import Costs
from fxoffload.engine import Engine, Stats, find_engine
from fxoffload.errors import OffloadError
from fxoffload.plan import Plan
from fxoffload.planned import Planned


class Handle:
    """What stands for an offloaded module wherever a function takes a model."""

    root: torch.nn.Module
    engine: Engine


def module_of(model: Any) -> torch.nn.Module:
    """The module itself. Raises TypeError for what is none."""
    module = model.root if isinstance(model, Handle) else getattr(model, "_orig_mod", model)
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"api: {type(model).__name__}: give a torch.nn.Module, what torch.compile made of one, or a handle")
    return module


def engine_of(model: Any) -> Engine:
    """The engine of a model. Raises OffloadError when no compiled call has packed its weights yet."""
    if isinstance(model, Handle):
        return model.engine
    module = module_of(model)
    engine = find_engine([*chain(module.parameters(), module.buffers())])
    if engine is None:
        raise OffloadError(
            f"api: {type(module).__name__}: its weights are not offloaded yet; "
            "compile it with torch.compile(model, backend='layerwise') and call it once"
        )
    return engine


def planned_of(model: Any) -> list[Planned]:
    """All that runs by a plan of a model, what ran last at the end."""
    engine = engine_of(model)
    with engine.lock:
        return sorted((p for p in engine.planned if p.plan is not None), key=lambda p: p is engine.current)


def bindings_of(model: Any) -> list[Binding]:
    """Every compiled graph of a model with its plan, the one that ran last at the end."""
    return [planned for planned in planned_of(model) if isinstance(planned, Binding)]


def last_binding(model: Any) -> Binding:
    """The compiled graph that ran last. Raises OffloadError for a model that runs without a compiler."""
    bindings = bindings_of(model)
    if not bindings:
        raise OffloadError(
            f"api: {type(module_of(model)).__name__}: no compiled graph of it has run, and what runs without a compiler has no "
            "segments to be timed; compile it with torch.compile(model, backend='layerwise') and call it once"
        )
    return bindings[-1]


def _ran(model: Any) -> list[Planned]:
    planned = planned_of(model)
    if not planned:
        raise OffloadError(
            f"api: {type(module_of(model)).__name__}: it has not run yet, and plans are made at the first call; call it once"
        )
    return planned


def stats(model: Any) -> Stats:
    """Counters of a model: bytes copied in the last forward, bytes resident, and so on (`Stats`).

    Raises OffloadError for a model whose weights are not offloaded.
    """
    return engine_of(model).stats()


def get_plan(model: Any) -> Plan:
    """The plan of the graph that ran last. Raises OffloadError for a model that has not run."""
    found = _ran(model)[-1].plan
    assert found is not None
    return found


def set_memory_budget(model: Any, memory_budget: int | float | str | Budget) -> None:
    """Give a model another budget: new plans and top levels, no compilation. Takes effect at the next call.

    `memory_budget` as in `OffloadConfig`. Without a compiler, blocks that no longer fit are split. Raises BudgetError, and leaves
    everything as it was, when a graph does not fit; OffloadError for a model that has not run, or runs now (from its hooks).

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
    >>> options = {"memory_budget": "1MiB", "onload_device": "cpu", "segment_compiler": "eager"}
    >>> compiled = torch.compile(model, backend="layerwise", options=options)
    >>> for _ in range(2):
    ...     result = compiled(torch.ones(1, 64))
    >>> stats(model).prefetches
    0
    >>> set_memory_budget(model, smallest_budget(model))
    >>> for _ in range(2):
    ...     equal = torch.equal(compiled(torch.ones(1, 64)), result)
    >>> equal, stats(model).prefetches
    (True, 8)
    """
    with changing_budget(model, memory_budget):
        pass


@contextmanager
def changing_budget(model: Any, memory_budget: int | float | str | Budget) -> Generator[None]:
    """In here a model has room in another budget, and takes it at the end. Where anything raises, it is as it was."""
    engine = engine_of(model)
    with engine.lock:
        if any(one.running for one in planned_of(model)):
            raise OffloadError(
                f"set_memory_budget: a forward of {type(module_of(model)).__name__} is under way; call it before or after"
            )
        attachment = attachment_of(module_of(model))
        budget = OffloadConfig(memory_budget=memory_budget, onload_device=engine.device)  # type: ignore[arg-type]
        undo = attachment.fit(budget) if attachment is not None else partial(setattr, engine, "budget", engine.budget)
        try:
            engine.budget = budget
            planned = planned_of(model)
            for one in planned:
                one.decide(engine.budget_nbytes(one.config))
            yield
        except BaseException:
            undo()
            raise
        for one in planned:
            one.replan()


def smallest_budget(model: Any, *, overlap: bool = True) -> int:
    """The least budget, in bytes, with which no graph of a model is slow: copies run beside compute, and by the plan the step is
    within 5% of its bound or of the time of its copies. Where two of the largest pieces more than any two neighbours do not bring
    that, it is room for any two neighbours.

    Without `overlap`: the least that the model runs in at all, with copies that wait for compute here and there. Without a
    compiler both are for the blocks as they are cut now: `set_memory_budget` cuts them further where a smaller budget wants that.
    Raises OffloadError for a model that has not run.
    """
    return max(planned.smallest_budget(overlap=overlap) for planned in _ran(model))


def profile(model: Any, call: Callable[[], object]) -> Costs:
    """Time every segment while `call` runs the model once, and return the costs with these times.

    Equal segments get their median. The plan stays as it is. Call it with everything resident for times that no waiting copy has
    given the device a rest between.
    """
    return last_binding(model).profile(call)


def refresh(model: Any) -> None:
    """The next call copies all it needs from the host again.

    For edits that leave no trace: through an alias that was taken earlier (`d = p.data; ...; d.add_(1)`), by another process, or
    by foreign code that writes to the weights' memory. Edits through the parameter are seen without it.
    """
    engine = engine_of(model)
    with engine.lock:
        engine.refresh()
