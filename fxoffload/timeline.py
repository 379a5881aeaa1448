"""What a plan costs in time: a two-engine machine, and the bound that no plan can beat.

The machine: one copy engine runs the loads in the order in which they are issued, one compute engine runs the segments in order,
and the host is far ahead of both. With `E(i)` the end of segment `i`, all over consecutive forwards:

    copy l starts at     max(end of the copy issued before l, E of the segment whose eviction `after` names)
    copy l ends          copy_ms later
    segment i starts at  max(E(i - 1), ends of the copies that it waits for)
    stall of i           start of i - E(i - 1)

Without asynchronous copies there is one engine, so a copy starts at `E(i - 1)` or behind the copy before, too.
Where forwards are replayed as captured graphs (`Plan.cuda_graph`), what a forward issues for itself is a part of its graph: such
a copy starts at E of the last segment of the forward before, or later.

The windowed bound: at the start of any window of consecutive segments (cyclic, at most one forward) at most M bytes of weights
are on the device, so the rest of the S_w bytes that the window reads passes the link B in it. Disjoint windows add up:

    step >= C + max over sets of disjoint windows of sum(S_w / B - C_w - M / B)

Each window pays M / B once and then gains `s_i / B - c_i` per segment, so the maximum is a two-state scan (in a window, or not),
O(segments). A window may lie across the end of a forward: then the scan starts and ends inside one.
A bucket that several segments read counts at the first of them only, which keeps the bound valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum, inf
from typing import Any

from fxoffload.cost import Costs
from fxoffload.plan import Load, Plan

FORWARDS = 64
"""Forwards after which the simulation stops even if one still differs from the one before."""
_SETTLED_MS = 1e-9


@dataclass(frozen=True, slots=True)
class SegmentTime:
    """One segment on the compute engine. `stall_ms`: how long the engine waited for weights right before it."""

    name: str
    start_ms: float
    end_ms: float
    stall_ms: float


@dataclass(frozen=True, slots=True)
class LoadTime:
    """One load on the copy engine. A load that wraps starts in the forward before: its times may be negative."""

    name: str
    start_ms: float
    end_ms: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """One forward in steady state; 0 is where the forward before ended."""

    segments: tuple[SegmentTime, ...]
    loads: tuple[LoadTime, ...]
    """In the order of `Plan.loads`: each load that this forward uses."""
    step_ms: float

    @property
    def stall_ms(self) -> float:
        return sum(segment.stall_ms for segment in self.segments)

    @property
    def copy_ms(self) -> float:
        return sum(load.end_ms - load.start_ms for load in self.loads)

    def __str__(self) -> str:
        from fxoffload.show import timeline_table

        return timeline_table(self)


def simulate(plan: Plan, costs: Costs, *, forwards: int = FORWARDS) -> Timeline:
    """Run `plan` until two forwards take the same time, at most `forwards` (>= 1) of them, and return the last one.

    The first forward finds the loads of the forward before just issued, none copied yet.
    """
    machine = _Machine(plan, costs)
    for load in plan.live_at_start():
        machine.copy(load)
    steps_ms = [machine.forward()]
    for _ in range(forwards - 1):
        before = machine.state()
        steps_ms.append(machine.forward())
        # The state relative to the forward's end repeats: every later forward is the same.
        if all(abs(a - b) < _SETTLED_MS for a, b in zip(before, machine.state(), strict=True)):
            return machine.last(steps_ms[-1])
    # Two kinds of forward may take turns; the user sees their mean.
    late = steps_ms[forwards // 2 :]
    return machine.last(sum(late) / len(late))


class _Machine:
    def __init__(self, plan: Plan, costs: Costs) -> None:
        self.plan = plan
        self.compute_ms = [segment.compute_ms for segment in costs.segments]
        copy_ms = {bucket.name: bucket.copy_ms for bucket in costs.buckets}
        self.copy_ms = {load.name: copy_ms[load.bucket] for load in plan.loads}
        n = len(plan.segments)
        self.issued = [plan.prefetches_before(i) for i in range(n)]
        self.waits: list[list[Load]] = [[] for _ in range(n)]
        self.evictions: list[list[Load]] = [[] for _ in range(n)]
        for load in plan.loads:
            self.waits[load.wait_before].append(load)
            self.evictions[load.evict_after].append(load)
        self.copy_free_ms = self.compute_free_ms = 0.0
        self.copies: dict[str, tuple[float, float]] = {}
        self.evicted_ms: dict[str, float] = {}
        self.segment_times: list[SegmentTime] = []
        self.load_times: dict[str, LoadTime] = {}

    def copy(self, load: Load) -> None:
        start = max(self.copy_free_ms, self.evicted_ms.get(load.after or "", 0.0))
        if not self.plan.async_transfer:
            start = max(start, self.compute_free_ms)
        self.copy_free_ms = start + self.copy_ms[load.name]
        self.copies[load.name] = (start, self.copy_free_ms)

    def forward(self) -> float:
        began = self.compute_free_ms
        if self.plan.cuda_graph:
            # All of what the last forward issued for this one precedes what this one issues.
            self.copy_free_ms = max(self.copy_free_ms, began)
        self.segment_times.clear()
        for i, name in enumerate(self.plan.segments):
            for load in self.issued[i]:
                self.copy(load)
            start = self.compute_free_ms
            for load in self.waits[i]:
                copy_start, copy_end = self.copies[load.name]
                self.load_times[load.name] = LoadTime(load.name, copy_start - began, copy_end - began)
                start = max(start, copy_end)
            end = start + self.compute_ms[i]
            self.segment_times.append(SegmentTime(name, start - began, end - began, start - self.compute_free_ms))
            self.compute_free_ms = end
            for load in self.evictions[i]:
                self.evicted_ms[load.name] = end
        # Not a difference of two times since the start, so that no stall is exactly no stall.
        return fsum([*self.compute_ms, *(segment.stall_ms for segment in self.segment_times)])

    def state(self) -> list[float]:
        """All that the next forward depends on, relative to the end of this one."""
        now = self.compute_free_ms
        copies = [self.copies[load.name][1] - now for load in self.plan.loads]
        return [*copies, *(self.evicted_ms[load.name] - now for load in self.plan.loads)]

    def last(self, step_ms: float) -> Timeline:
        loads = tuple(self.load_times[load.name] for load in self.plan.loads)
        return Timeline(tuple(self.segment_times), loads, step_ms)


def windowed_bound(costs: Costs, weight_nbytes: int) -> float:
    """The least time (ms) of a forward in steady state with `weight_nbytes` of weights on the device, whatever the schedule.

    Two segments of 1 ms, of which the first reads 300 bytes, at 100 bytes a ms:

    >>> from fxoffload.cost import BucketCost, SegmentCost
    >>> costs = Costs((SegmentCost("a", 1.0, 0), SegmentCost("b", 1.0, 0)), (BucketCost("a", 300, 3.0, (0,)),), 100.0)
    >>> windowed_bound(costs, 0), windowed_bound(costs, 100), windowed_bound(costs, 300)
    (4.0, 3.0, 2.0)
    """
    gains = [-segment.compute_ms for segment in costs.segments]
    for bucket in costs.buckets:
        if bucket.uses:
            gains[bucket.uses[0]] += bucket.nbytes / costs.link_bytes_per_ms
    fee = weight_nbytes / costs.link_bytes_per_ms
    compute_ms = fsum(segment.compute_ms for segment in costs.segments)
    return compute_ms + _best_windows(gains, fee)


def _best_windows(gains: Sequence[float], fee: float) -> float:
    """Most gain of disjoint windows that pay `fee` each, where one may lie across the end.

    Two cases in one scan each: no window is open at the start, or one is, which then never closes or opens again at the end.
    """
    inside, outside = -inf, 0.0
    open_inside, open_outside, first = -inf, -inf, 0.0
    for gain in gains:
        inside = max(inside, outside - fee) + gain
        outside = max(outside, inside)
        first += gain
        open_inside = max(open_inside, open_outside - fee) + gain
        open_outside = max(open_outside, open_inside, first)
    return max(outside, first - fee, open_inside)


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """The timeline as Chrome trace events, for Perfetto: `json.dump` it. Times are microseconds from the first copy."""
    zero = min([0.0, *(load.start_ms for load in timeline.loads)])
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": engine}}
        for tid, engine in enumerate(("compute", "copy"))
    ]
    for tid, spans in ((0, timeline.segments), (1, timeline.loads)):
        for span in spans:
            start, end = span.start_ms - zero, span.end_ms - zero
            events.append({"ph": "X", "pid": 0, "tid": tid, "name": span.name, "ts": start * 1e3, "dur": (end - start) * 1e3})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
