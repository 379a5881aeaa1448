"""A plan made real: its slots and views in the arena, and its top level as a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Protocol

import torch
import torch.fx as fx

from fxoffload import ops, passes
from fxoffload.arena import Arena
from fxoffload.debug import switches
from fxoffload.lower import TopLevel, generate
from fxoffload.names import identifier
from fxoffload.packed import HostWeight
from fxoffload.plan import Plan
from fxoffload.profile import Compiled
from fxoffload.program import Program
from fxoffload.slots import Slots
from fxoffload.transfer import Transfer


class Watcher(Protocol):
    """Who is to see segments run: puts something around their programs."""

    def wrap(self, programs: Mapping[str, Compiled]) -> dict[str, Compiled]: ...


def write_plan(program: Program, plan: Plan) -> fx.GraphModule:
    """The program's top level with the plan in it. Good for every `Staged` of that plan."""
    dump = switches().dump
    written = passes.run(program.top, plan, dump=dump, code=False)
    if dump is not None:
        plan.save(dump / "plan.json")
    return written


class Staged(Slots):
    """Good for one plan, and until the arena gives memory back: it holds views of it.

    `written`: the top level with the plan in it (`write_plan`). `weights` by placeholder.
    """

    def __init__(
        self,
        program: Program,
        plan: Plan,
        written: fx.GraphModule,
        weights: Mapping[str, HostWeight],
        arena: Arena,
        transfer: Transfer,
        watcher: Watcher | None,
    ) -> None:
        super().__init__(plan, {w.bucket.name: w.bucket for w in weights.values()}, arena, transfer)
        self._weights = weights
        self._empty = {
            w.placeholder: torch.empty_strided(w.shape, w.stride, dtype=getattr(torch, w.dtype), device=program.onload)
            for w in program.facts.weights
            if w.placeholder not in weights
        }
        self.top = self._generate(program, written, watcher)

    def _generate(self, program: Program, written: fx.GraphModule, watcher: Watcher | None) -> TopLevel:
        top = generate(
            written,
            programs=watcher.wrap(program.programs) if watcher is not None else program.programs,
            weights=frozenset(w.placeholder for w in program.facts.weights),
            weight=self._viewer(),
            inputs={placeholder: name for _, placeholder, name in program.inputs},
            operations={ops.prefetch: self._prefetch, ops.wait: self._wait, ops.evict: self._evict},
            output_weights={i: placeholder if itself else None for i, placeholder, itself in program.facts.output_weights},
            device=program.onload,
        )
        dump = switches().dump
        if dump is not None:
            (dump / "top_level.py").write_text(top.source)
        return top

    def _viewer(self) -> Callable[[str, str], tuple[str, torch.Tensor]]:
        """Name and view of a weight, for the segment that reads it."""
        index = {identifier(name): i for i, name in enumerate(self.plan.segments)}

        def view(placeholder: str, segment: str) -> tuple[str, torch.Tensor]:
            weight = self._weights.get(placeholder)
            if weight is None:
                return identifier(placeholder), self._empty[placeholder]
            load = self.load_for(index[segment], weight.bucket.name)
            _, mark, number = load.name.partition("#") if load is not None else ("", "", "")
            return identifier(f"{weight.name}{mark}{number}"), self.view(weight, load)

        return view

    def _prefetch(self, load: str, after: str | None) -> Callable[[], None]:
        return functools.partial(self.transfer.prefetch, self.of_load[load], self.of_load[after] if after is not None else None)

    def _wait(self, load: str) -> Callable[[], None]:
        return functools.partial(self.transfer.wait, self.of_load[load])

    def _evict(self, load: str) -> Callable[[], None]:
        return functools.partial(self.transfer.evict, self.of_load[load])
