"""The planner: costs, a budget and knobs in, a `Plan` out. Deterministic, pure Python, well under a second for 250 buckets.

    weight memory M = budget - activations = residents + staging, one arena
    everything fits in M               all resident, nothing streams
    else                               choose residents (`residency`), place the loads in the staging area (`offsets`),
                                       issue each prefetch as early as its bytes are free, in the order of need

The smallest budget that works streams all that may be streamed, through a staging area that holds one segment's weights:

    smallest = activations + sum(must stay) + max over segments of sum(streamed bytes that it reads)

Explicit knobs are met exactly: `persistent_buckets` and `persistent_bins` name the residents (`persistent_indices`);
`transfer_buckets`, `prefetch_limit` and `max_inflight_prefetch_bytes` limit the loads whose first use has not begun.
A load is issued before segment `p` with

    p >= 1 + the last segment that reads bytes which it overwrites
    p >= first use of the load `transfer_buckets` places before it, and so for the bytes
    p >= p of the load needed before it (the copy engine works in the order of issue)
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

from fxoffload.buckets import ALIGNMENT, align
from fxoffload.cost import Costs
from fxoffload.errors import BudgetError
from fxoffload.offsets import Layout, better, pooled_score_ms
from fxoffload.plan import Load, Plan, Resident
from fxoffload.residency import choose, choose_fixed, choose_unoverlapped
from fxoffload.sizes import format_size, show_size
from fxoffload.stream import Problem, earliest_positions
from fxoffload.timeline import simulate, windowed_bound

if TYPE_CHECKING:
    from fxoffload.config import OffloadConfig

PREFETCH_LIMIT = 8
NOT_SLOW = 1.05
"""A step of at most this many times its windowed bound, or the time of its copies, is not slow."""
AS_SHORT = 1.001
"""Steps of which one is at most so many times the other are as short."""
_EFFORT = 120_000
"""Buckets to price in each of the local searches, over all the sets of residents that it tries."""
_MOST_TRIALS = 3000
_COUNTS = 24


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the user fixed; None and the defaults leave it to the planner. See the settings of the same names."""

    transfer_buckets: int | None = None
    persistent_buckets: int | None = None
    persistent_bins: int | None = None
    prefetch_limit: bool = False
    max_inflight_prefetch_bytes: int | None = None
    async_transfer: bool = True
    cuda_graph: bool = False

    @property
    def look_ahead(self) -> int | None:
        """The most loads that may be issued before their first use begins; None: as many as fit."""
        if not self.prefetch_limit:
            return self.transfer_buckets
        if self.transfer_buckets is None:
            return PREFETCH_LIMIT
        return min(self.transfer_buckets, 4 * self.transfer_buckets, PREFETCH_LIMIT)


def knobs_of(config: OffloadConfig) -> Knobs:
    """What the settings leave to the planner, and what they do not."""
    return Knobs(
        transfer_buckets=config.transfer_buckets,
        persistent_buckets=config.persistent_buckets,
        persistent_bins=config.persistent_bins,
        prefetch_limit=config.prefetch_limit,
        max_inflight_prefetch_bytes=config.max_inflight_prefetch_bytes,
        async_transfer=config.async_transfer,
        cuda_graph=bool(config.cuda_graph),
    )


def make_plan(costs: Costs, budget_nbytes: int, knobs: Knobs = Knobs(), *, activation_nbytes: int | None = None) -> Plan:
    """The fastest schedule found that stays within `budget_nbytes`.

    `activation_nbytes`: device bytes outside the arena; default: the largest of the segments.
    Raises BudgetError, with the smallest budget that works.
    """
    activations = _activations(costs, activation_nbytes)
    problem = _problem(costs, knobs)
    _check_budget(costs, problem, knobs, budget_nbytes, activations)
    weight_nbytes = (budget_nbytes - activations) // ALIGNMENT * ALIGNMENT
    layout = _choose(problem, knobs, weight_nbytes)
    assert layout is not None, (budget_nbytes, activations, knobs)
    plan = Plan(
        segments=tuple(segment.name for segment in costs.segments),
        residents=_residents(costs, problem, layout),
        loads=_loads(costs, problem, layout, knobs),
        arena_nbytes=problem.size(layout.residents) + align(layout.staging_nbytes),
        activation_nbytes=activations,
        budget_nbytes=budget_nbytes,
        async_transfer=knobs.async_transfer,
        compute_ms=problem.total_ms,
        step_ms=problem.total_ms,
        bound_ms=windowed_bound(costs, weight_nbytes),
        cuda_graph=knobs.cuda_graph,
    )
    plan = _timed(plan, costs)
    return _gathered(plan, costs) if knobs.cuda_graph and plan.live_at_start() else plan


def smallest_budget(costs: Costs, knobs: Knobs = Knobs(), *, activation_nbytes: int | None = None, overlap: bool = False) -> int:
    """The least budget (bytes) for which `make_plan` finds a plan.

    With `overlap`, the least found whose plan is not slow: the step is at most `NOT_SLOW` times the windowed bound, or the time
    of its copies. It holds any two segments' weights that stream one behind the other (the last and the first, too), so that a
    copy can run beside compute, and up to two more of the largest; none of these where they do not bring it, or hold everything.
    Without asynchronous copies nothing overlaps, and it makes no difference.
    """
    activations = _activations(costs, activation_nbytes)
    if overlap and knobs.async_transfer:
        return _smallest_with_overlap(costs, knobs, activations)
    problem = _problem(costs, knobs)
    residents = _must_stay(problem, knobs)
    return activations + problem.size(residents) + max(problem.needed_nbytes(residents), default=0)


@functools.lru_cache(maxsize=32)
def _smallest_with_overlap(costs: Costs, knobs: Knobs, activations: int) -> int:
    problem = _problem(costs, knobs)
    residents = _must_stay(problem, knobs)
    most = max(problem.needed_nbytes(residents), default=0)
    reads = [{b for b, uses in enumerate(problem.uses) if i in uses and b not in residents} for i in range(problem.n)]
    streaming = [buckets for buckets in reads if buckets]
    two = max((problem.size(a | b) for a, b in pairwise([*streaming, *streaming[:1]])), default=most)
    least = activations + problem.size(residents) + two
    copy_ms = {bucket.name: bucket.copy_ms for bucket in costs.buckets}
    everything = activations + problem.size(range(len(problem.nbytes)))
    for more in range(0, min(2 * most + 1, everything - least), max(align(most // 2), 1)):
        plan = make_plan(costs, least + more, knobs, activation_nbytes=activations)
        if plan.step_ms <= NOT_SLOW * max(plan.bound_ms, sum(copy_ms[load.bucket] for load in plan.loads)):
            return least + more
    return least


def persistent_indices(n: int, persistent: int, bins: int) -> frozenset[int]:
    """Which of `n` buckets stay when `persistent` of them are spread over `bins` ranges.

    E = min(persistent, n) places are dealt to B = min(max(bins, 1), E, n) bins, one a bin, round robin, full bins skipped. Bin i
    starts at floor(i * n / B) and keeps its prefix.
    """
    places = min(persistent, n)
    count = min(max(bins, 1), places, n)
    if count < 1:
        return frozenset()
    starts = [i * n // count for i in range(count + 1)]
    sizes = [end - start for start, end in pairwise(starts)]
    dealt = [0] * count
    while places:
        for i in range(count):
            if places and dealt[i] < sizes[i]:
                dealt[i] += 1
                places -= 1
    return frozenset(start + k for start, take in zip(starts, dealt, strict=False) for k in range(take))


def _gathered(plan: Plan, costs: Costs) -> Plan:
    """The plan with each forward's copies issued by that forward, where captured steps are as short so; or else as it is.

    In a captured graph these are nodes of it. What is issued for the next forward the host issues beside the graph (`capture`).
    """
    loads = tuple(dataclasses.replace(load, prefetch_before=0) if load.wraps else load for load in plan.loads)
    gathered = _timed(dataclasses.replace(plan, loads=loads), costs)
    return gathered if gathered.step_ms <= plan.step_ms * AS_SHORT else plan


def _timed(plan: Plan, costs: Costs) -> Plan:
    return dataclasses.replace(plan, step_ms=simulate(plan, costs).step_ms)


def _activations(costs: Costs, activation_nbytes: int | None) -> int:
    if activation_nbytes is not None:
        return activation_nbytes
    return max((segment.activation_nbytes for segment in costs.segments), default=0)


def _problem(costs: Costs, knobs: Knobs) -> Problem:
    return Problem(costs, ahead=knobs.look_ahead, ahead_nbytes=knobs.max_inflight_prefetch_bytes, overlap=knobs.async_transfer)


def _must_stay(problem: Problem, knobs: Knobs) -> frozenset[int]:
    if knobs.persistent_buckets is None:
        return problem.kept
    return _spread(problem, knobs.persistent_buckets, knobs.persistent_bins or 1)


def _spread(problem: Problem, persistent: int, bins: int) -> frozenset[int]:
    """What must stay anyway, and so many persistent buckets of those that may stream."""
    free = [b for b in range(len(problem.nbytes)) if b not in problem.kept]
    return problem.kept | {free[i] for i in persistent_indices(len(free), persistent, bins)}


def _check_budget(costs: Costs, problem: Problem, knobs: Knobs, budget_nbytes: int, activations: int) -> None:
    residents = _must_stay(problem, knobs)
    needed = problem.needed_nbytes(residents)
    most = max(needed, default=0)
    smallest = activations + problem.size(residents) + most
    if budget_nbytes >= smallest:
        return
    parts = [f"{show_size(activations)} of activations"]
    if residents:
        setting = "" if knobs.persistent_buckets is None else f", persistent_buckets={knobs.persistent_buckets}"
        parts.append(f"{show_size(problem.size(residents))} that must stay resident ({len(residents)} buckets{setting})")
    what = "the weights that must stay"
    if most:
        segment = needed.index(most)
        readers = [bucket.name for b, bucket in enumerate(costs.buckets) if segment in bucket.uses and b not in residents]
        what = readers[0] if len(readers) == 1 else f"segment {costs.segments[segment].name} with its {len(readers)} buckets"
        parts.append(f"{show_size(most)} of weights at once")
    advice = f"raise the budget to at least {format_size(smallest)}"
    if knobs.persistent_buckets:
        advice += ", or keep fewer persistent_buckets"
    needs = f"{what} alone needs {show_size(smallest)} ({' + '.join(parts)})"
    raise BudgetError(f"planner: budget {show_size(budget_nbytes)}: {needs}; {advice}", smallest)


def _choose(problem: Problem, knobs: Knobs, weight_nbytes: int) -> Layout | None:
    everything = frozenset(range(len(problem.nbytes)))
    if knobs.persistent_buckets is not None:
        return choose_fixed(problem, weight_nbytes, _must_stay(problem, knobs))
    if problem.size(everything) <= weight_nbytes:
        return choose_fixed(problem, weight_nbytes, everything)
    if knobs.persistent_bins is not None:
        return _choose_count(problem, knobs.persistent_bins, weight_nbytes)
    effort = min(_EFFORT // max(len(problem.nbytes), 1), _MOST_TRIALS)
    best = choose(problem, weight_nbytes, problem.kept, effort)
    return best if knobs.async_transfer else better(best, choose_unoverlapped(problem, weight_nbytes, problem.kept))


def _choose_count(problem: Problem, bins: int, weight_nbytes: int) -> Layout | None:
    """Bins are given, the number of persistent buckets is not: about the best of all counts that fit."""
    n = len(problem.nbytes) - len(problem.kept)

    def layout(count: int, limit_ms: float) -> Layout | None:
        residents = _spread(problem, count, bins)
        if pooled_score_ms(problem, residents, weight_nbytes - problem.size(residents), limit_ms) == inf:
            return None
        return choose_fixed(problem, weight_nbytes, residents, rotations=1)

    best: Layout | None = None
    best_count, stride = 0, -(-(n + 1) // _COUNTS)
    # All counts of a coarse grid, then those around the best of them.
    for refine in (False, True):
        counts = range(max(best_count - stride, 0), min(best_count + stride, n) + 1) if refine else range(0, n + 1, stride)
        for count in counts:
            found = layout(count, inf if best is None else best.score_ms)
            if found is not None and (best is None or found.beats(best)):
                best, best_count = found, count
    return best


def _residents(costs: Costs, problem: Problem, layout: Layout) -> tuple[Resident, ...]:
    residents: list[Resident] = []
    offset = 0
    for b in sorted(layout.residents):
        residents.append(Resident(costs.buckets[b].name, offset, costs.buckets[b].nbytes))
        offset += problem.nbytes[b]
    return tuple(residents)


def _loads(costs: Costs, problem: Problem, layout: Layout, knobs: Knobs) -> tuple[Load, ...]:
    stream = layout.stream
    staging = problem.size(layout.residents)
    parts = Counter(stream.bucket)
    part: Counter[int] = Counter()
    names: list[str] = []
    for b in stream.bucket:
        names.append(f"{costs.buckets[b].name}#{part[b]}" if parts[b] > 1 else costs.buckets[b].name)
        part[b] += 1
    issued = [first % problem.n for first in _positions(problem, layout, knobs)]
    return tuple(
        Load(
            name=names[j],
            bucket=costs.buckets[b].name,
            offset=staging + layout.offsets[j],
            nbytes=costs.buckets[b].nbytes,
            uses=stream.uses[j],
            prefetch_before=issued[j],
            after=names[layout.latest[j][1]],
        )
        for j, b in enumerate(stream.bucket)
    )


def _positions(problem: Problem, layout: Layout, knobs: Knobs) -> list[int]:
    """Where each load is issued: a segment index, less the number of segments for the forward before."""
    stream, n = layout.stream, problem.n
    if not knobs.async_transfer:
        return stream.first
    positions = [stream.last[a] - back * n + 1 for back, a in layout.latest]
    limits = earliest_positions(problem, stream)
    if limits is not None:
        positions = [max(pair) for pair in zip(positions, limits, strict=True)]
    before = max(positions, default=0) - n
    for j, position in enumerate(positions):
        before = positions[j] = max(position, before)
    return positions
