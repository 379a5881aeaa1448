"""A plan made real: its slots and views in the arena, and its top level as a function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import torch

from fxoffload import ops, passes
from fxoffload.arena import Arena
from fxoffload.debug import switches
from fxoffload.lower import TopLevel, generate
from fxoffload.names import identifier
from fxoffload.plan import Plan
from fxoffload.profile import SegmentTimer
from fxoffload.program import Program
from fxoffload.store import HostWeight
from fxoffload.transfer import Slot, Transfer


class Staged:
    """Good for one plan and one allocation of the arena, of which it holds views. `weights` by placeholder."""

    def __init__(
        self,
        program: Program,
        plan: Plan,
        weights: Mapping[str, HostWeight],
        arena: Arena,
        transfer: Transfer,
        timer: SegmentTimer | None,
    ) -> None:
        self.plan = plan
        self._memory = arena.memory
        self._transfer = transfer
        self._weights = weights
        self._hosts = {w.bucket.name: w.bucket for w in weights.values()}
        self._offsets = {r.bucket: r.offset for r in plan.residents}
        self._slots = {load.name: self._slot(load.bucket, load.offset, load.name) for load in plan.loads}
        self._resident_slots = [(r, self._slot(r.bucket, r.offset)) for r in plan.residents]
        self._empty = {
            w.placeholder: torch.empty_strided(w.shape, w.stride, dtype=getattr(torch, w.dtype), device=program.onload)
            for w in program.facts.weights
            if w.placeholder not in weights
        }
        self.top = self._generate(program, timer)

    def restore(self, present: Mapping[int, str]) -> dict[int, str]:
        """Bring the arena into the state that the plan begins with: copy what is not there.

        `present`, residents that the arena holds for sure, by offset. Returns the same for afterwards.
        """
        self._transfer.drain()
        kept = {offset: bucket for bucket, offset in self._offsets.items() if present.get(offset) == bucket}
        for resident, slot in self._resident_slots:
            if resident.offset not in kept:
                self._transfer.prefetch(slot)
                self._transfer.wait(slot)
                kept[resident.offset] = resident.bucket
        for load in self.plan.live_at_start():
            self._transfer.prefetch(self._slots[load.name])
        return kept

    def resident_view(self, weight: HostWeight) -> torch.Tensor:
        """A weight of a resident bucket, in the arena."""
        return weight.device_view(self._memory, self._offsets[weight.bucket.name])

    def _slot(self, bucket: str, offset: int, load: str = "") -> Slot:
        host = self._hosts[bucket]
        return self._transfer.slot(host.flat, self._memory[offset : offset + host.nbytes], load)

    def _generate(self, program: Program, timer: SegmentTimer | None) -> TopLevel:
        dump = switches().dump
        top = generate(
            passes.run(program.top, self.plan, dump=dump),
            programs=timer.wrap(program.programs) if timer is not None else program.programs,
            weights=frozenset(w.placeholder for w in program.facts.weights),
            weight=self._viewer(),
            inputs={placeholder: name for _, placeholder, name in program.inputs},
            operations={ops.prefetch: self._prefetch, ops.wait: self._wait, ops.evict: self._evict},
            output_weights={i: placeholder if itself else None for i, placeholder, itself in program.facts.output_weights},
            device=program.onload,
        )
        if dump is not None:
            (dump / "top_level.py").write_text(top.source)
            self.plan.save(dump / "plan.json")
        return top

    def _viewer(self) -> Callable[[str, str], tuple[str, torch.Tensor]]:
        """Name and view of a weight, for the segment that reads it."""
        plan = self.plan
        loads = {(identifier(plan.segments[i]), load.bucket): load for load in plan.loads for i in load.uses}

        def view(placeholder: str, segment: str) -> tuple[str, torch.Tensor]:
            weight = self._weights.get(placeholder)
            if weight is None:
                return identifier(placeholder), self._empty[placeholder]
            if weight.bucket.name in self._offsets:
                return identifier(weight.name), self.resident_view(weight)
            load = loads[segment, weight.bucket.name]
            _, mark, number = load.name.partition("#")
            return identifier(f"{weight.name}{mark}{number}"), weight.device_view(self._memory, load.offset)

        return view

    def _prefetch(self, load: str, after: str | None) -> Callable[[], None]:
        return functools.partial(self._transfer.prefetch, self._slots[load], self._slots[after] if after is not None else None)

    def _wait(self, load: str) -> Callable[[], None]:
        return functools.partial(self._transfer.wait, self._slots[load])

    def _evict(self, load: str) -> Callable[[], None]:
        return functools.partial(self._transfer.evict, self._slots[load])
