"""A plan made real for units: its slots in the arena, what happens around each unit of the order, and views of all tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxoffload.engine import Engine
from fxoffload.managed import Managed, Views
from fxoffload.packed import HostTensor
from fxoffload.plan import Load, Plan
from fxoffload.slots import Slots
from fxoffload.transfer import Slot


@dataclass(slots=True, eq=False)
class Step:
    """What happens around one unit of the order."""

    prefetches: tuple[Load, ...]
    loads: tuple[Load, ...]
    evictions: tuple[Load, ...]
    views: Views


class Steps(Slots):
    """Good for one plan, and until the arena gives memory back. `order`: of the units, by their numbers."""

    def __init__(self, plan: Plan, managed: Managed, order: Sequence[int], engine: Engine) -> None:
        super().__init__(plan, {w.bucket.name: w.bucket for w in managed.whole.values()}, engine.arena, engine.transfer)
        self._managed = managed
        self._device = engine.device
        rest = {id(p) for p in managed.rest}
        self.rest_views: Views = [(p, self._device_view(p, None)) for p in managed.rest]
        """What is resident, and on the device as long as a forward runs."""
        self.steps = [self._step(i, unit, rest) for i, unit in enumerate(order)]

    def prefetch(self, loads: Sequence[Load]) -> None:
        for load in loads:
            after = self.of_load[load.after] if load.after is not None else None
            self.transfer.prefetch(self.of_load[load.name], after)

    def wait(self, loads: Sequence[Load], waited: set[str]) -> None:
        """`waited`: the loads that this forward has waited for."""
        for load in loads:
            if load.name not in waited:
                waited.add(load.name)
                self.transfer.wait(self.of_load[load.name])

    def evict(self, loads: Sequence[Load]) -> None:
        for load in loads:
            self.transfer.evict(self.of_load[load.name])

    def skip(self, first: int, end: int) -> None:
        """Pass over units of the order: what only they would use is not copied any more."""
        for step in self.steps[first:end]:
            self.prefetch([load for load in step.prefetches if load.wraps or load.evict_after >= end])
            self.evict(step.evictions)

    def load_now(self, wanted: Sequence[HostTensor]) -> tuple[Views, list[Slot], list[HostTensor]]:
        """Copy what is not resident into the staging area, behind all compute. The plan is left with that.

        Returns views of it, the slots that were taken for it, and what found no room.
        """
        self.transfer.drain()
        offset = max((r.offset + r.nbytes for r in self.plan.residents), default=0)
        places: dict[str, int] = {r.bucket: r.offset for r in self.plan.residents}
        views: Views = []
        slots: list[Slot] = []
        left: list[HostTensor] = []
        for packed in wanted:
            weight = self._managed.whole.get(id(packed))
            if weight is None:
                views.append((packed, self._device_view(packed, None)))
                continue
            bucket = weight.bucket
            if bucket.name not in places:
                place = self.arena.find_room(offset, bucket.nbytes)
                if place is None:
                    left.append(packed)
                    continue
                places[bucket.name] = place
                slots.append(self.transfer.slot(bucket.flat, self.arena.view(place, bucket.nbytes)))
                self.transfer.prefetch(slots[-1])
                self.transfer.wait(slots[-1])
                offset = place + bucket.nbytes
            views.append((packed, weight.device_view(*self.arena.find(places[bucket.name], bucket.nbytes))))
        return views, slots, left

    def _step(self, i: int, unit: int, rest: set[int]) -> Step:
        managed = self._managed
        loads = {w.bucket.name: self.load_for(i, w.bucket.name) for w in managed.weights(managed.units[unit])}
        views = [(p, self._device_view(p, i)) for p in managed.units[unit] if id(p) not in rest]
        used = tuple(load for load in loads.values() if load is not None)
        evictions = tuple(load for load in self.plan.loads if load.evict_after == i)
        return Step(self.plan.prefetches_before(i), used, evictions, views)

    def _device_view(self, packed: HostTensor, segment: int | None) -> torch.Tensor:
        """A tensor on the device, as a segment reads it; None: it is resident. Without bytes it needs no place."""
        weight = self._managed.whole.get(id(packed))
        if weight is None:
            return torch.empty_strided(packed.view.shape, packed.view.stride(), dtype=packed.view.dtype, device=self._device)
        return self.view(weight, None if segment is None else self.load_for(segment, weight.bucket.name))
