"""The places of a plan in the memory of the arena: slots of its loads and residents, and views of the weights there."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from fxoffload.arena import Arena
from fxoffload.packed import HostBucket, HostWeight
from fxoffload.plan import Load, Plan
from fxoffload.transfer import Slot, Transfer


class Slots:
    """Good for one plan, and until the arena gives memory back: it holds views of it. `hosts`: the buckets by name."""

    def __init__(self, plan: Plan, hosts: Mapping[str, HostBucket], arena: Arena, transfer: Transfer) -> None:
        self.plan = plan
        self.arena = arena
        self.transfer = transfer
        self._hosts = hosts
        self._offsets = {r.bucket: r.offset for r in plan.residents}
        self._loads = {(i, load.bucket): load for load in plan.loads for i in load.uses}
        self.of_load = {load.name: self._slot(load.bucket, load.offset, load.name) for load in plan.loads}
        self._resident_slots = [(r, self._slot(r.bucket, r.offset)) for r in plan.residents]

    def restore(self, present: Mapping[int, str]) -> dict[int, str]:
        """Bring the arena into the state that the plan begins with: copy what is not there.

        `present`, residents that the arena holds for sure, by offset. Returns the same for afterwards.
        """
        self.transfer.drain()
        kept = {offset: bucket for bucket, offset in self._offsets.items() if present.get(offset) == bucket}
        for resident, slot in self._resident_slots:
            if resident.offset not in kept:
                self.transfer.prefetch(slot)
                self.transfer.wait(slot)
                kept[resident.offset] = resident.bucket
        for load in self.plan.live_at_start():
            self.transfer.prefetch(self.of_load[load.name])
        return kept

    def load_for(self, segment: int, bucket: str) -> Load | None:
        """The load whose copy of a bucket a segment (by index) reads, or None where the bucket is resident."""
        return None if bucket in self._offsets else self._loads[segment, bucket]

    def view(self, weight: HostWeight, load: Load | None) -> torch.Tensor:
        """A weight in the arena, as one load brings it; None: as the resident that it is."""
        bucket = weight.bucket
        return weight.device_view(*self.arena.find(self._offsets[bucket.name] if load is None else load.offset, bucket.nbytes))

    def _slot(self, bucket: str, offset: int, load: str = "") -> Slot:
        host = self._hosts[bucket]
        return self.transfer.slot(host.flat, self.arena.view(offset, host.nbytes), load)
