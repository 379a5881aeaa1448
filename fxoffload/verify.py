"""The judge: executes a plan symbolically, for several forwards, and refuses it where a byte could be wrong.

It shares no code with the planner and trusts no derived property of `Plan`. The model of the device is

- compute runs the segments in order; position `f * n + i` is segment `i` of forward `f`;
- a copy may start as soon as the eviction that its `after` names has happened, and not before;
- so a copy that is issued now may write bytes that earlier loads used only if the eviction of `after` that the host
  *issued last* lies at or behind the last reader of every one of these bytes.

What is executed: for each segment its prefetches, its waits, its reads, its evictions, in the order that `plan.py` defines.
Who owns which bytes of the arena is a list of intervals; the first forward finds the loads that the forward before issued.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import NoReturn

from fxoffload.cost import BucketCost, Costs
from fxoffload.errors import PlanError
from fxoffload.plan import Load, Plan

ALIGN = 256
FORWARDS = 3


def check_plan(plan: Plan, costs: Costs) -> None:
    """Return if every forward under `plan` reads the right bytes within the budget. Raises PlanError that names what does not."""
    buckets = _check_names(plan, costs)
    _check_ranges(plan, buckets)
    _check_uses(plan, buckets)
    _Execution(plan).run()


def _refuse(what: str) -> NoReturn:
    raise PlanError(f"judge: {what}; plan the model again, or report this as a bug if the planner made the plan")


def _check_names(plan: Plan, costs: Costs) -> dict[str, BucketCost]:
    names = tuple(segment.name for segment in costs.segments)
    if plan.segments != names:
        _refuse(f"segments: the plan has {len(plan.segments)} {plan.segments[:3]}..., the costs have {len(names)} {names[:3]}...")
    _check_unique("segment", plan.segments)
    _check_unique("bucket", [bucket.name for bucket in costs.buckets])
    _check_unique("load", [load.name for load in plan.loads])
    _check_unique("resident", [resident.bucket for resident in plan.residents])
    buckets = {bucket.name: bucket for bucket in costs.buckets}
    resident = {r.bucket for r in plan.residents}
    loaded = {load.bucket for load in plan.loads}
    for name in [*(r.bucket for r in plan.residents), *(load.bucket for load in plan.loads)]:
        if name not in buckets:
            _refuse(f"{name}: in the plan, not in the costs")
    for bucket in costs.buckets:
        if bucket.name in resident and bucket.name in loaded:
            _refuse(f"{bucket.name}: both resident and loaded")
        if bucket.name not in resident and bucket.name not in loaded and bucket.uses:
            _refuse(f"{bucket.name}: neither resident nor loaded")
        if bucket.keep and bucket.name not in resident:
            _refuse(f"{bucket.name}: must stay resident, but is loaded")
    return buckets


def _check_unique(what: str, names: list[str] | tuple[str, ...]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            _refuse(f"{name}: two of this {what} name")
        seen.add(name)


def _check_ranges(plan: Plan, buckets: dict[str, BucketCost]) -> None:
    """Sizes, alignment and bounds; residents overlap nothing at all; the peak is within the budget."""
    for name, bucket, offset, nbytes in [
        *((r.bucket, r.bucket, r.offset, r.nbytes) for r in plan.residents),
        *((load.name, load.bucket, load.offset, load.nbytes) for load in plan.loads),
    ]:
        if nbytes != buckets[bucket].nbytes:
            _refuse(f"{name}: {nbytes} bytes in the plan, {buckets[bucket].nbytes} in the costs")
        if offset % ALIGN:
            _refuse(f"{name}: offset {offset} is not a multiple of {ALIGN}")
        if offset < 0 or offset + nbytes > plan.arena_nbytes:
            _refuse(f"{name}: bytes {offset} to {offset + nbytes} are outside the arena of {plan.arena_nbytes} bytes")
    taken = sorted((r.offset, r.offset + r.nbytes, r.bucket) for r in plan.residents if r.nbytes)
    for (_, end, first), (start, _, second) in pairwise(taken):
        if start < end:
            _refuse(f"{second}: resident from byte {start} on, over resident {first} that ends at {end}")
    for load in plan.loads:
        for start, end, resident in taken:
            if load.offset < end and start < load.offset + load.nbytes:
                where = f"bytes {max(start, load.offset)} to {min(end, load.offset + load.nbytes)}"
                _refuse(f"{load.name}: overwrites resident {resident} at {where}")
    if plan.activation_nbytes < 0:
        _refuse(f"activations: {plan.activation_nbytes} bytes in the plan, less than none")
    peak = plan.arena_nbytes + plan.activation_nbytes
    if peak > plan.budget_nbytes:
        parts = f"arena {plan.arena_nbytes} + activations {plan.activation_nbytes} = {peak} bytes"
        _refuse(f"budget: {parts} are over the budget of {plan.budget_nbytes}")


def _check_uses(plan: Plan, buckets: dict[str, BucketCost]) -> None:
    """Loads cover exactly the uses of their buckets, and name segments and loads that exist."""
    n = len(plan.segments)
    names = {load.name for load in plan.loads}
    covered: dict[str, list[int]] = {}
    for load in plan.loads:
        if not load.uses or list(load.uses) != sorted(set(load.uses)):
            _refuse(f"{load.name}: uses {load.uses} are not ascending segment indices")
        if load.uses[0] < 0 or load.uses[-1] >= n:
            _refuse(f"{load.name}: uses {load.uses} name a segment outside 0 to {n - 1}")
        if not 0 <= load.prefetch_before < n:
            _refuse(f"{load.name}: prefetched before segment {load.prefetch_before}, outside 0 to {n - 1}")
        if load.after is not None and load.after not in names:
            _refuse(f"{load.name}: waits for the eviction of {load.after}, which is no load of the plan")
        covered.setdefault(load.bucket, []).extend(load.uses)
    for name, uses in covered.items():
        if sorted(uses) != list(buckets[name].uses):
            _refuse(f"{name}: the loads serve segments {sorted(uses)}, but segments {list(buckets[name].uses)} read it")


@dataclass
class _Owner:
    """Bytes `[start, end)` were last written by a load, and read for the last time at `evicted` (None: may still be read)."""

    start: int
    end: int
    load: Load
    evicted: int | None = None


@dataclass
class _Segment:
    """What happens around one segment of every forward, in this order."""

    name: str
    prefetches: list[Load] = field(default_factory=list[Load])
    waits: list[Load] = field(default_factory=list[Load])
    reads: list[Load] = field(default_factory=list[Load])
    evictions: list[Load] = field(default_factory=list[Load])


@dataclass
class _Execution:
    plan: Plan
    owners: list[_Owner] = field(default_factory=list[_Owner])
    live: dict[str, bool] = field(default_factory=dict[str, bool])
    """Loads issued and not yet evicted, in the order of issue; True once waited for."""
    last_evicted: dict[str, int] = field(default_factory=dict[str, int])
    """Position of the eviction of each load that the host issued last."""

    def run(self) -> None:
        n = len(self.plan.segments)
        segments = [_Segment(name) for name in self.plan.segments]
        for load in self.plan.loads:
            self.last_evicted[load.name] = load.uses[-1] - n
            segments[load.prefetch_before].prefetches.append(load)
            segments[load.uses[0]].waits.append(load)
            segments[load.uses[-1]].evictions.append(load)
            for use in load.uses:
                segments[use].reads.append(load)
        for index, segment in enumerate(segments):
            segment.prefetches.sort(key=lambda load, index=index: (load.uses[0] - index) % n)
        for segment in segments:
            for load in segment.prefetches:
                if load.prefetch_before > load.uses[0]:
                    self._take(load)
        at_start = list(self.live)
        for forward in range(FORWARDS):
            for index, segment in enumerate(segments):
                self._step(forward * n + index, segment)
            if list(self.live) != at_start:
                _refuse(f"not cyclic: a forward starts with loads {at_start} in flight and ends with {list(self.live)}")

    def _step(self, position: int, segment: _Segment) -> None:
        for load in segment.prefetches:
            self._prefetch(load, segment.name)
        for load in segment.waits:
            if load.name not in self.live:
                _refuse(f"{load.name}: waited for before segment {segment.name}, but no prefetch of it was issued")
            self.live[load.name] = True
        for load in segment.reads:
            if not self.live.get(load.name, False):
                _refuse(f"{load.name}: segment {segment.name} reads it, but it was not waited for")
        for load in segment.evictions:
            self._evict(load, position)

    def _prefetch(self, load: Load, segment: str) -> None:
        if load.name in self.live:
            last = self.plan.segments[load.uses[-1]]
            _refuse(f"{load.name}: prefetched again before segment {segment} while segment {last} still has to read it")
        release = None if load.after is None else self.last_evicted[load.after]
        for owner in self.owners:
            if not (owner.start < load.offset + load.nbytes and load.offset < owner.end):
                continue
            overlap = f"bytes {max(owner.start, load.offset)} to {min(owner.end, load.offset + load.nbytes)}"
            where = f"its prefetch before segment {segment} overwrites {overlap} of {owner.load.name}"
            if owner.evicted is None:
                _refuse(f"{load.name}: {where}, which may still be read")
            if release is None or release < owner.evicted:
                reader = self.plan.segments[owner.load.uses[-1]]
                _refuse(f"{load.name}: {where} and does not wait for its last reader, segment {reader} (after: {load.after})")
        self._take(load)

    def _take(self, load: Load) -> None:
        """Give the load its bytes, cutting them out of what earlier loads owned."""
        start, end = load.offset, load.offset + load.nbytes
        kept: list[_Owner] = []
        for owner in self.owners:
            if owner.end <= start or end <= owner.start:
                kept.append(owner)
                continue
            if owner.evicted is None:
                where = f"bytes {max(owner.start, start)} to {min(owner.end, end)}"
                _refuse(f"{load.name}: at the start of a forward it shares {where} with {owner.load.name}")
            if owner.start < start:
                kept.append(_Owner(owner.start, start, owner.load, owner.evicted))
            if end < owner.end:
                kept.append(_Owner(end, owner.end, owner.load, owner.evicted))
        if load.nbytes:
            kept.append(_Owner(start, end, load))
        self.owners = kept
        self.live[load.name] = False

    def _evict(self, load: Load, position: int) -> None:
        del self.live[load.name]
        self.last_evicted[load.name] = position
        for owner in self.owners:
            if owner.load is load and owner.evicted is None:
                owner.evicted = position
