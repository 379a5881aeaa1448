"""Which buckets stay on the device: candidates by copy debt, then a bounded local search.

Copy debt: walk the segments, `debt += copy_ms` of what streams, `debt = max(0, debt - stretch * compute_ms)`. Where the debt passes what
the staging area holds (`slack_ms`), a bucket of that stretch of the graph stays resident. `stretch` is the slowdown at which the link
keeps up everywhere; the least one whose residents fit the memory is found by bisection. So residents go where the link is the bottleneck,
evenly, and nowhere else.

The staging area is worth no more than what keeps the link busy: each byte beyond is better spent on residents. So the candidates are
(bytes above which a bucket is never streamed) x (staging bytes) x (which bucket of an indebted stretch stays), each laid out
and simulated; `score` compares them.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from fxoffload.offsets import place_ends, place_laps
from fxoffload.stream import Problem, Stream, delay, earliest_positions, latest_overlaps, make_stream, step_ms

_STRATEGIES = (place_laps, place_ends)
_STAGING = (1.0, 2.0, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Staging bytes to try, in units of what the neediest segment reads."""
_THRESHOLDS = 8
_COPY_WEIGHT = 0.002
"""Of two plans with equal steps the one that copies less wins: it leaves more of the link when the costs are wrong."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A complete choice: what stays, and where the rest streams through. Offsets are within the staging area."""

    residents: frozenset[int]
    stream: Stream
    offsets: list[int]
    latest: list[tuple[int, int]]
    staging_nbytes: int
    step_ms: float

    @property
    def score(self) -> tuple[float, int]:
        return round(self.step_ms + _COPY_WEIGHT * sum(self.stream.copy_ms), 6), self.staging_nbytes


def lay_out(problem: Problem, residents: frozenset[int], staging_nbytes: int, rotation: int = 0) -> Layout | None:
    """The best layout of all strategies that streams what is not resident through `staging_nbytes`; None if it does not fit."""
    best: Layout | None = None
    # Two uses of one bucket are served by one load where that is within half of the look-ahead; or by one each.
    tied = any(len(uses) > 1 and b not in residents for b, uses in enumerate(problem.uses))
    for merge_nbytes in (staging_nbytes // 2, -1) if tied else (-1,):
        stream = make_stream(problem, residents, merge_nbytes)
        if not stream.bucket:
            return Layout(residents, stream, [], [], 0, problem.total_ms)
        positions = earliest_positions(problem, stream)
        for place in _STRATEGIES:
            offsets = place(stream, staging_nbytes, rotation)
            if offsets is None:
                continue
            latest = latest_overlaps(stream, offsets, problem.n)
            if positions is not None:
                latest = delay(stream, latest, positions, problem.n)
            used = max(offset + nbytes for offset, nbytes in zip(offsets, stream.nbytes, strict=True))
            found = Layout(residents, stream, offsets, latest, used, step_ms(problem, stream, latest))
            best = _better(best, found)
    return best


def _better(best: Layout | None, found: Layout | None) -> Layout | None:
    if best is None or (found is not None and found.score < best.score):
        return found
    return best


def choose(problem: Problem, weight_nbytes: int, always: frozenset[int], effort: int) -> Layout | None:
    """The best layout found when the planner is free to keep any bucket; None if nothing fits."""
    best: Layout | None = None
    for residents in _candidates(problem, weight_nbytes, always):
        best = _better(best, lay_out(problem, residents, weight_nbytes - problem.size(residents)))
    if best is None or not best.stream.bucket:
        return best
    return _improve(problem, weight_nbytes, always, best, effort)


def choose_fixed(problem: Problem, weight_nbytes: int, residents: frozenset[int]) -> Layout | None:
    """The best layout found for given residents: how many bytes to stage, and where the wrap-around falls."""
    best: Layout | None = None
    cap = weight_nbytes - problem.size(residents)
    least = max(problem.needed_nbytes(residents))
    sizes = [int(least * factor) for factor in _STAGING]
    for staging_nbytes in [*(size for size in sizes if size < cap), cap]:
        best = _better(best, lay_out(problem, residents, staging_nbytes))
    return best


def _candidates(problem: Problem, weight_nbytes: int, always: frozenset[int]) -> Iterator[frozenset[int]]:
    free = [b for b in range(len(problem.nbytes)) if b not in always]
    sizes = sorted({problem.nbytes[b] for b in free}, reverse=True)
    seen: set[frozenset[int]] = set()
    for largest_nbytes in sizes[:: max(1, -(-len(sizes) // _THRESHOLDS))]:
        kept = always | {b for b in free if problem.nbytes[b] > largest_nbytes}
        least = max(problem.needed_nbytes(kept))
        for factor in _STAGING:
            staging_nbytes = int(least * factor)
            room_nbytes = weight_nbytes - staging_nbytes
            if problem.size(kept) > room_nbytes:
                break
            for by_size in (False, True):
                residents = _by_debt(problem, room_nbytes, staging_nbytes / problem.link_bytes_per_ms, kept, by_size)
                if residents not in seen:
                    seen.add(residents)
                    yield residents


def _by_debt(problem: Problem, room_nbytes: int, slack_ms: float, kept: frozenset[int], by_size: bool) -> frozenset[int]:
    """Residents of at most `room_nbytes` at the least stretch, `kept` included."""
    reads: list[list[int]] = [[] for _ in range(problem.n)]
    for b, uses in enumerate(problem.uses):
        if b not in kept:
            for use in uses:
                reads[use].append(b)
    low, high = 0.0, 2.0
    best = kept
    while high < 1e9:
        residents = _walk(problem, reads, high, slack_ms, by_size)
        if problem.size(kept) + problem.size(residents) <= room_nbytes:
            best = kept | residents
            break
        low, high = high, high * 4
    for _ in range(10):
        stretch = (low + high) / 2
        residents = _walk(problem, reads, stretch, slack_ms, by_size)
        if problem.size(kept) + problem.size(residents) <= room_nbytes:
            high, best = stretch, kept | residents
        else:
            low = stretch
    return best


def _walk(problem: Problem, reads: list[list[int]], stretch: float, slack_ms: float, by_size: bool) -> set[int]:
    """Buckets that have to stay for the debt to remain below `slack_ms`. Two rounds, because the debt wraps around."""
    debt = 0.0
    residents: set[int] = set()
    for _ in (0, 1):
        residents = set()
        indebted: list[int] = []
        for here, compute_ms in zip(reads, problem.compute_ms, strict=True):
            for b in here:
                if b in residents:
                    continue
                debt += problem.copy_ms[b]
                indebted.append(b)
                while debt > slack_ms and indebted:
                    b = max(indebted, key=lambda b: (problem.nbytes[b], b)) if by_size else indebted[-1]
                    indebted.remove(b)
                    residents.add(b)
                    debt -= problem.copy_ms[b]
            debt -= stretch * compute_ms
            if debt <= 0:
                debt = 0.0
                indebted = []
    return residents


def _improve(problem: Problem, weight_nbytes: int, always: frozenset[int], best: Layout, effort: int) -> Layout:
    """Move single buckets in and out while that helps. Random, but of a fixed seed: equal input, equal plan."""
    draw = random.Random(0)
    count = len(problem.nbytes)
    for _ in range(effort):
        residents = set(best.residents)
        what = draw.random()
        removable = sorted(residents - always)
        if what < 0.7 and removable:
            residents.discard(draw.choice(removable))
        if what > 0.2:
            residents.add(draw.randrange(count))
        cap = weight_nbytes - problem.size(residents)
        if cap < 0:
            continue
        found = lay_out(problem, frozenset(residents), cap)
        if found is not None and found.score < best.score:
            best = found
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
        for b in _by_copy_per_byte(problem, residents):
            if problem.size(residents) + problem.nbytes[b] + staging_nbytes <= weight_nbytes:
                residents.add(b)
        cap = weight_nbytes - problem.size(residents)
        best = _better(best, lay_out(problem, frozenset(residents), staging_nbytes) if cap >= staging_nbytes else None)
    return best


def _by_copy_per_byte(problem: Problem, without: Collection[int]) -> list[int]:
    buckets = [b for b in range(len(problem.nbytes)) if b not in without]
    return sorted(buckets, key=lambda b: (-problem.copy_ms[b] * len(problem.uses[b]) / problem.nbytes[b], -problem.nbytes[b], b))
