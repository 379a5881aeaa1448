"""The handle of an offloaded model: what is effective, what happened, and the way back."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from fxoffload import api
from fxoffload.attached import attached_beside, attachment_of
from fxoffload.budget import Budget
from fxoffload.config import OffloadConfig
from fxoffload.eager import Attachment, attach
from fxoffload.engine import Stats
from fxoffload.errors import OffloadError
from fxoffload.planner import persistent_indices
from fxoffload.sizes import show_size

if TYPE_CHECKING:
    from fxoffload.plan import Plan
    from fxoffload.report import Explanation

Spans = tuple[tuple[int, int], ...]

_handles: weakref.WeakValueDictionary[int, LayerwiseOffloadHandle] = weakref.WeakValueDictionary()


class LayerwiseOffloadHandle(api.Handle):
    """One offloaded module. Every function that takes a model takes its handle, too.

    Leaving a `with` block of it removes the offloading. Attributes are the settings in effect, as in `OffloadConfig`; those that
    the planner chooses are known from the first forward on.
    """

    def __init__(self, attachment: Attachment) -> None:
        """Not for direct use: `layerwise_offload` makes handles."""
        config = attachment.config
        self._attachment = attachment
        self.root = attachment.root
        """The module that is offloaded."""
        self.engine = attachment.engine
        self.config = config
        self.onload_device: torch.device = self.engine.device
        self.offload_device = config.offload_device
        self.output_device = config.output_device
        self.async_transfer = config.async_transfer
        self.prefetch_limit = config.prefetch_limit
        self.max_copy_streams = config.max_copy_streams
        self.max_inflight_prefetch_bytes = config.max_inflight_prefetch_bytes
        self._removed = False
        _handles[id(attachment)] = self

    # -- what is effective ---------------------------------------------------------------------------------------------

    @property
    def is_removed(self) -> bool:
        """Whether `remove` was called."""
        return self._removed

    @property
    def module_names(self) -> tuple[str, ...]:
        """Dotted names of the modules whose weights move together; `""` is the root. Spans are ranges of indices into these."""
        return self._attachment.module_names

    @property
    def memory_budget(self) -> int | float | str | Budget:
        """The budget as it was given last. A `Budget` is shared with other models."""
        return (self.engine.budget or self.config).memory_budget

    @property
    def memory_budget_nbytes(self) -> int:
        """What the budget comes to, in bytes."""
        return self.engine.budget_nbytes(self.config)

    @property
    def copy_streams(self) -> int:
        """How many streams copy beside compute: one, which fills the link, or none without `async_transfer`."""
        return int(self.async_transfer)

    @property
    def transfer_buckets(self) -> int | None:
        """How many buckets may be ahead of their use. Left to the planner: the most that are in its plan, once there is one."""
        plan = self.plan
        if self.config.transfer_buckets is not None or plan is None:
            return self.config.transfer_buckets
        return most_ahead(plan)

    @property
    def persistent_spans(self) -> Spans:
        """Half-open ranges of indices into `module_names`, of the modules that stay on the onload device for good.

        Before the first forward: those that `persistent_buckets` asks for.
        """
        if self._removed:
            return ()
        plan, config = self.plan, self.config
        n = len(self.module_names)
        if plan is None:
            return spans(persistent_indices(n, config.persistent_buckets or 0, config.persistent_bins or 1))
        resident = {r.bucket for r in plan.residents}
        return spans(i for i in range(n) if (buckets := self._buckets(i)) and buckets <= resident)

    @property
    def persistent_buckets(self) -> int:
        """How many of the modules stay."""
        return sum(end - start for start, end in self.persistent_spans)

    @property
    def persistent_bins(self) -> int:
        """Over how many ranges they are spread."""
        return len(self.persistent_spans)

    @property
    def persistent_module_names(self) -> tuple[str, ...]:
        """Names of the modules that stay on the device, in order."""
        return tuple(name for start, end in self.persistent_spans for name in self.module_names[start:end])

    @property
    def plan(self) -> Plan | None:
        """The plan that ran last; None before the first forward, and after `remove`."""
        return api.get_plan(self) if not self._removed and api.planned_of(self) else None

    # -- what can be asked and changed ---------------------------------------------------------------------------------

    def get_plan(self) -> Plan:
        """The plan that ran last. Raises OffloadError before the first forward."""
        return api.get_plan(self._present())

    def stats(self) -> Stats:
        """Bytes copied in the last forward, bytes resident, and so on."""
        return api.stats(self._present())

    def explain(self, *inputs: Any, **options: Any) -> Explanation:
        """What the plan does and why, as a value that prints (`fxoffload.explain`)."""
        from fxoffload.report import explain

        return explain(self._present(), *inputs, **options)

    def set_memory_budget(self, memory_budget: int | float | str | Budget) -> None:
        """Another budget, from the next forward on. Raises BudgetError, and changes nothing, where the model does not fit."""
        api.set_memory_budget(self._present(), memory_budget)

    def changing_budget(self, memory_budget: Budget) -> AbstractContextManager[None]:
        """`set_memory_budget` at the end of a `with` block, where nothing in it raises."""
        return api.changing_budget(self._present(), memory_budget)

    def smallest_budget(self, *, overlap: bool = True) -> int:
        """The least budget, in bytes, that is not slow (`fxoffload.smallest_budget`); without `overlap`, that works at all."""
        return api.smallest_budget(self._present(), overlap=overlap)

    def refresh(self) -> None:
        """The next forward copies all it needs from the host again: for edits that leave no trace (`fxoffload.refresh`)."""
        api.refresh(self._present())

    # -- the way back --------------------------------------------------------------------------------------------------

    def remove(self, device: torch.device | str | None = None) -> None:
        """Make the module a normal one again, with its weights as they are now on `device`; None: on the offload device.

        Copies that are under way are waited for. A second call does nothing.
        """
        if self._removed:
            return
        self._attachment.detach(torch.device(device) if device is not None else None)
        self._removed = True

    def __enter__(self) -> LayerwiseOffloadHandle:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def __repr__(self) -> str:
        name, count = type(self.root).__name__, len(self.module_names)
        if self._removed:
            return f"<LayerwiseOffloadHandle {name}: removed>"
        budget = self.memory_budget
        shown = show_size(budget) if isinstance(budget, int) else repr(budget)
        return f"<LayerwiseOffloadHandle {name}: {count} modules, {self.offload_device} to {self.onload_device}, budget {shown}>"

    def _present(self) -> LayerwiseOffloadHandle:
        if self._removed:
            name = type(self.root).__name__
            raise OffloadError(f"handle: {name}: its offloading was removed; call fxoffload.layerwise_offload on it again")
        return self

    def _buckets(self, i: int) -> set[str]:
        """Names of the buckets that the weights of a module lie in."""
        store = self.engine.store
        found = (store.find(tensor) for _, tensor in self._attachment.units.units[i].tensors)
        return {part.bucket.name for packed in found if packed is not None for part in packed.parts}


def offload_module(root: torch.nn.Module, config: OffloadConfig) -> LayerwiseOffloadHandle:
    """Offload one module. Raises OffloadError, and leaves it as it was, where that cannot be."""
    for other in (*root.modules(), *_ancestors(root)):
        if attachment_of(other) is not None:
            what = "it" if other is root else f"{type(other).__name__}, which shares modules with it,"
            raise OffloadError(
                f"handle: {type(root).__name__}: {what} is offloaded already; call fxoffload.remove_layerwise_offload first, "
                "or fxoffload.set_memory_budget for another budget"
            )
    return LayerwiseOffloadHandle(attach(root, config))


def _ancestors(root: torch.nn.Module) -> list[torch.nn.Module]:
    """Offloaded models that `root` is part of."""
    return [other for other, _ in attached_beside(root) if any(module is root for module in other.modules())]


def handle_of(root: torch.nn.Module) -> LayerwiseOffloadHandle | None:
    """The handle of a module, the same as long as anybody has it; None where the module is not offloaded."""
    attachment = attachment_of(root)
    if attachment is None:
        return None
    return _handles.get(id(attachment)) or LayerwiseOffloadHandle(attachment)


def spans(indices: Any) -> Spans:
    """Ascending indices as half-open ranges; ranges that touch are one."""
    found: list[tuple[int, int]] = []
    for i in sorted(indices):
        if found and found[-1][1] == i:
            found[-1] = (found[-1][0], i + 1)
        else:
            found.append((i, i + 1))
    return tuple(found)


def most_ahead(plan: Plan) -> int:
    """The most loads of a plan that are issued and not yet needed, over a forward in steady state."""
    n = len(plan.segments)
    return max(
        (
            sum((i - load.prefetch_before) % n < (load.wait_before - load.prefetch_before) % n for load in plan.loads)
            for i in range(n)
        ),
        default=0,
    )
