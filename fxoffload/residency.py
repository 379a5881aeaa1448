"""Which buckets stay on the device: candidates by copy debt, then a bounded local search.

Copy debt: walk the segments, `debt += copy_ms` of what streams, `debt = max(0, debt - stretch * compute_ms)`. Where the debt
passes what the staging area holds (`slack_ms`), a bucket of that stretch of the graph stays resident. `stretch` is the slowdown
at which the link keeps up everywhere; the least one whose residents fit the memory is found by bisection. So residents go where
the link is the bottleneck, evenly, and nowhere else.

The staging area is worth no more than what keeps the link busy: each byte beyond is better spent on residents. So the candidates
are (bytes above which a bucket is never streamed) x (staging bytes) x (which bucket of an indebted stretch stays), each laid
out and simulated; `Layout.score_ms` compares them. Costs are predictions, so the score adds a little of the step on a machine on
which they are off, and of the copy time: of two plans with equal steps, the one with more slack and fewer copies wins.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from fxoffload.offsets import place_ends, place_laps
from fxoffload.stream import Problem, Stream, delay, earliest_positions, latest_overlaps, make_stream, step_ms

Strategy = Callable[[Stream, int, int], "list[int] | None"]
_STRATEGIES: tuple[Strategy, ...] = (place_laps, place_ends)
_STAGING = (1.0, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Staging bytes to try, in units of what the neediest segment reads."""
_THRESHOLDS = 8
_HALVINGS = 8
_ROTATIONS = 12
_FEW = 6
"""So many buckets are few enough to try every set of residents, and so many loads to try every rotation."""
_GOLDEN = 0.6180339887498949
_ROUGH_WEIGHT = 0.05
_COPY_WEIGHT = 0.002


@dataclass(frozen=True, slots=True)
class Layout:
    """A complete choice: what stays, and where the rest streams through. Offsets are within the staging area."""

    residents: frozenset[int]
    stream: Stream
    offsets: list[int]
    latest: list[tuple[int, int]]
    strategy: Strategy
    staging_nbytes: int
    score_ms: float
    """The step, and a little of what would be added by a machine on which costs are off, and by a busy link."""

    def beats(self, other: Layout) -> bool:
        return (self.score_ms, self.staging_nbytes) < (other.score_ms, other.staging_nbytes)


def lay_out(
    problem: Problem,
    residents: frozenset[int],
    staging_nbytes: int,
    *,
    strategies: Sequence[Strategy] = _STRATEGIES,
    rotations: int = 1,
) -> Layout | None:
    """The best layout that streams what is not resident through `staging_nbytes`; None if it does not fit.

    `rotations`: how many places to try for the cut, evenly spaced.
    """
    best: Layout | None = None
    if staging_nbytes < 0:
        return None
    # Two uses of one bucket are served by one load where that is within half of the look-ahead; or by one each.
    tied = any(len(uses) > 1 and b not in residents for b, uses in enumerate(problem.uses))
    for merge_nbytes in (staging_nbytes // 2, -1) if tied else (-1,):
        stream = make_stream(problem, residents, merge_nbytes)
        m = len(stream)
        if not m:
            return _judged(problem, residents, stream, [], place_laps)
        cuts = m if m <= _FEW else min(rotations, m)
        for strategy in strategies:
            for k in range(cuts):
                offsets = strategy(stream, staging_nbytes, k * m // cuts)
                if offsets is not None:
                    best = better(best, _judged(problem, residents, stream, offsets, strategy))
    return best


def _judged(problem: Problem, residents: frozenset[int], stream: Stream, offsets: list[int], strategy: Strategy) -> Layout:
    latest = latest_overlaps(stream, offsets, problem.n)
    positions = earliest_positions(problem, stream)
    if positions is not None:
        latest = delay(stream, latest, positions, problem.n)
    score_ms = step_ms(problem, stream, latest)
    score_ms += _ROUGH_WEIGHT * step_ms(problem, stream, latest, rough=True) + _COPY_WEIGHT * stream.total_ms
    used = max((offset + nbytes for offset, nbytes in zip(offsets, stream.nbytes, strict=True)), default=0)
    # Rounded, so that the last bits of a float decide nothing.
    return Layout(residents, stream, offsets, latest, strategy, used, round(score_ms, 9))


def better(best: Layout | None, found: Layout | None) -> Layout | None:
    if best is None or (found is not None and found.beats(best)):
        return found
    return best


def choose(problem: Problem, weight_nbytes: int, always: frozenset[int], effort: int) -> Layout | None:
    """The best layout found when the planner is free to keep any bucket; None if nothing fits.

    `effort`: how many sets of residents the local search tries.
    """
    best: Layout | None = None
    free = [b for b in range(len(problem.nbytes)) if b not in always]
    few = len(free) <= _FEW
    for residents in _all_sets(always, free) if few else _candidates(problem, weight_nbytes, always):
        best = better(best, lay_out(problem, residents, weight_nbytes - problem.size(residents)))
    if best is None or few or len(best.residents) == len(problem.nbytes):
        return best
    best = _improve(problem, weight_nbytes, always, best, effort)
    cap = weight_nbytes - problem.size(best.residents)
    return better(best, lay_out(problem, best.residents, cap, rotations=_ROTATIONS))


def choose_fixed(problem: Problem, weight_nbytes: int, residents: frozenset[int], rotations: int = _ROTATIONS) -> Layout | None:
    """The best layout found for given residents: how many bytes to stage, and where the wrap-around falls."""
    best: Layout | None = None
    cap = weight_nbytes - problem.size(residents)
    least = max(problem.needed_nbytes(residents), default=0)
    sizes = [int(least * factor) for factor in _STAGING]
    for staging_nbytes in [*(size for size in sizes if size < cap), cap]:
        best = better(best, lay_out(problem, residents, staging_nbytes, rotations=rotations))
    return best


def _all_sets(always: frozenset[int], free: list[int]) -> Iterator[frozenset[int]]:
    for bits in range(1 << len(free)):
        yield always | {b for k, b in enumerate(free) if bits >> k & 1}


def _candidates(problem: Problem, weight_nbytes: int, always: frozenset[int]) -> Iterator[frozenset[int]]:
    # The one that fits whenever anything does.
    yield always
    always = always | _tiny(problem, weight_nbytes, always)
    free = [b for b in range(len(problem.nbytes)) if b not in always]
    sizes = sorted({problem.nbytes[b] for b in free}, reverse=True)
    seen: set[frozenset[int]] = set()
    for largest_nbytes in sizes[:: max(1, -(-len(sizes) // _THRESHOLDS))]:
        kept = always | {b for b in free if problem.nbytes[b] > largest_nbytes}
        least = max(problem.needed_nbytes(kept), default=0)
        for factor in _STAGING:
            staging_nbytes = int(least * factor)
            room_nbytes = weight_nbytes - staging_nbytes
            if problem.size(kept) > room_nbytes:
                break
            for by_size in (False, True):
                residents = _by_debt(problem, room_nbytes, staging_nbytes / problem.link_bytes_per_ms, kept, by_size)
                residents = _filled(problem, residents, room_nbytes)
                if residents not in seen:
                    seen.add(residents)
                    yield residents


def _tiny(problem: Problem, weight_nbytes: int, always: frozenset[int]) -> frozenset[int]:
    """Buckets whose copy is mostly latency: nearly free to keep. At most 2% of the memory, the smallest first."""
    tiny: set[int] = set()
    spare = weight_nbytes // 50
    for b in sorted(set(range(len(problem.nbytes))) - always, key=lambda b: (problem.nbytes[b], b)):
        spare -= problem.nbytes[b]
        if spare < 0 or problem.copy_ms[b] * problem.link_bytes_per_ms < 2 * problem.nbytes[b]:
            break
        tiny.add(b)
    return frozenset(tiny)


def _filled(problem: Problem, residents: frozenset[int], room_nbytes: int) -> frozenset[int]:
    """With what still fits, spread over the graph by multiples of the golden ratio."""
    filled = set(residents)
    spare = room_nbytes - problem.size(residents)
    for b in sorted(set(range(len(problem.nbytes))) - residents, key=lambda b: b * _GOLDEN % 1.0):
        if problem.nbytes[b] <= spare:
            filled.add(b)
            spare -= problem.nbytes[b]
    return frozenset(filled)


def _by_debt(problem: Problem, room_nbytes: int, slack_ms: float, kept: frozenset[int], by_size: bool) -> frozenset[int]:
    """`kept`, and the residents of the least stretch that fits into `room_nbytes` with them (none if no stretch fits)."""
    reads: list[list[int]] = [[] for _ in range(problem.n)]
    for b, uses in enumerate(problem.uses):
        if b not in kept:
            for use in uses:
                reads[use].append(b)
    room_nbytes -= problem.size(kept)
    low, high = 0.0, 2.0
    best = _walk(problem, reads, high, slack_ms, by_size, room_nbytes)
    while best is None and high < 1e6:
        low, high = high, high * 8
        best = _walk(problem, reads, high, slack_ms, by_size, room_nbytes)
    if best is None:
        return kept
    for _ in range(_HALVINGS):
        stretch = (low + high) / 2
        residents = _walk(problem, reads, stretch, slack_ms, by_size, room_nbytes)
        if residents is None:
            low = stretch
        else:
            high, best = stretch, residents
    return kept | best


def _walk(
    problem: Problem, reads: list[list[int]], stretch: float, slack_ms: float, by_size: bool, room_nbytes: int
) -> set[int] | None:
    """Buckets that have to stay for the debt to remain below `slack_ms`; None if they are more than `room_nbytes`."""
    nbytes, copy_ms = problem.nbytes, problem.copy_ms
    debt = 0.0
    residents: set[int] = set()
    # Two rounds, because the debt at the end of a forward is there at the start of the next.
    for _ in (0, 1):
        residents = set()
        spare = room_nbytes
        indebted: list[int] = []
        for here, compute_ms in zip(reads, problem.compute_ms, strict=True):
            for b in here:
                if b in residents:
                    continue
                debt += copy_ms[b]
                indebted.append(b)
                while debt > slack_ms and indebted:
                    stays = max(indebted, key=nbytes.__getitem__) if by_size else indebted[-1]
                    indebted.remove(stays)
                    residents.add(stays)
                    debt -= copy_ms[stays]
                    spare -= nbytes[stays]
            if spare < 0:
                return None
            debt -= stretch * compute_ms
            if debt <= 0:
                debt = 0.0
                indebted = []
    return residents


def _improve(problem: Problem, weight_nbytes: int, always: frozenset[int], best: Layout, effort: int) -> Layout:
    """Move single buckets in and out while that helps. Random, but of a fixed seed: equal input, equal plan."""
    draw = random.Random(0).random
    count = len(problem.nbytes)
    for _ in range(effort):
        residents = set(best.residents)
        what = draw()
        removable = sorted(residents - always)
        if what < 0.7 and removable:
            residents.discard(removable[int(draw() * len(removable))])
        if what > 0.2:
            residents.add(int(draw() * count))
        cap = weight_nbytes - problem.size(residents)
        if cap >= 0:
            found = lay_out(problem, frozenset(residents), cap, strategies=(best.strategy,))
            best = found if found is not None and found.beats(best) else best
    return best


def choose_unoverlapped(problem: Problem, weight_nbytes: int, always: frozenset[int]) -> Layout | None:
    """Without overlap each copy costs its whole time: keep as much copy time as fits beside the neediest segment."""
    best: Layout | None = None
    needed = problem.needed_nbytes(always)
    for staging_nbytes in sorted(set(needed)):
        residents = set(always)
        for b in _by_copy_per_byte(problem, always):
            # Everything that such a small staging area can't serve has to stay.
            if any(needed[use] > staging_nbytes for use in problem.uses[b]):
                residents.add(b)
        spare = weight_nbytes - staging_nbytes - problem.size(residents)
        for b in _by_copy_per_byte(problem, residents):
            if problem.nbytes[b] <= spare:
                residents.add(b)
                spare -= problem.nbytes[b]
        if spare >= 0:
            best = better(best, lay_out(problem, frozenset(residents), staging_nbytes))
    return best


def _by_copy_per_byte(problem: Problem, without: Collection[int]) -> list[int]:
    buckets = [b for b in range(len(problem.nbytes)) if b not in without]
    return sorted(buckets, key=lambda b: (-problem.copy_ms[b] * len(problem.uses[b]) / problem.nbytes[b], -problem.nbytes[b], b))
