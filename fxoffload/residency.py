"""Which buckets stay on the device: candidates by copy debt, every set of a few buckets, then a bounded local search.

Copy debt: walk the segments, `debt += copy_ms` of what streams, `debt = max(0, debt - stretch * compute_ms)`. Where the debt
passes what the staging area holds (`slack_ms`), a bucket of that stretch of the graph stays resident. `stretch` is the slowdown
at which the link keeps up everywhere; the least one whose residents fit the memory is found by bisection. So residents go where
the link is the bottleneck, evenly, and nowhere else.

The staging area is worth no more than what keeps the link busy: each byte beyond is better spent on residents. So the candidates
are (bytes above which a bucket is never streamed) x (staging bytes) x (which bucket of an indebted stretch stays).

Sets of residents are priced first without places, as if the staging area were a pool (`pooled_score_ms`): no layout scores less,
and with more memory no set's price is higher, which keeps a larger budget from giving a slower step. Then the sets are laid out,
the least price first, until none is left that could be better. A few buckets have few enough sets to rank about all of them;
else a local search goes on from the best layout, and lays out what its price does not rule out.
"""

from __future__ import annotations

import random
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from heapq import heappop, heappush
from math import inf

from fxoffload.buckets import ALIGNMENT
from fxoffload.offsets import MANY_LOADS, Layout, Strategy, better, lay_out, least_score_ms, pooled_score_ms
from fxoffload.stream import Problem

Ranked = tuple[float, frozenset[int]]
"""The score in a pool, and the residents."""
_STAGING = (1.0, 1.25, 1.5, 1.67, 1.85, 2.0, 2.25, 2.5, 3.0, 4.0, 6.0, 10.0)
"""Staging bytes to try, in units of what the neediest segment reads."""
_THRESHOLDS = 8
_HALVINGS = 8
_ROTATIONS = 12
_FEW = 14
"""So many buckets are few enough to rank every set of residents."""
_NEAR = 1.06
"""Sets within 6% of the least price are ranked, because a layout may be as much above its price."""
_PROVED = 1.0003
_STARTS = 6
_FOUND = 32
"""Sets that the search of `_rank` hands on, besides the candidates."""
_MOST_PLACED = 128
_LAYOUT_EFFORT = 5
"""A layout takes as long as so many prices."""
_NEARBY = 4
_GOLDEN = 0.6180339887498949


def choose(problem: Problem, weight_nbytes: int, always: frozenset[int], effort: int) -> Layout | None:
    """The best layout found when the planner is free to keep any bucket; None if nothing fits.

    `effort`: about how many sets of residents are priced.
    """
    ranked = _rank(problem, weight_nbytes, always, effort)
    if len(problem.nbytes) - len(always) <= _FEW:
        ranked += _rank_all(problem, weight_nbytes, always, effort, ranked[0][0])
        ranked.sort(key=_score)
    best = _place(problem, weight_nbytes, ranked)
    if best is None or best.score_ms <= ranked[0][0] * _PROVED:
        return best
    return _improve(problem, weight_nbytes, always, best, effort)


def _rank_all(problem: Problem, weight_nbytes: int, always: frozenset[int], effort: int, best_ms: float) -> list[Ranked]:
    """All sets of residents that are about as good as `best_ms`, those first that copy little and can overlap."""
    free = [b for b in range(len(problem.nbytes)) if b not in always]
    # By the bits of what streams: staging bytes, copy time, the largest bucket.
    sets = [(weight_nbytes - problem.size(range(len(problem.nbytes))), 0.0, 0)]
    for b in free:
        nbytes, ms = problem.nbytes[b], problem.copy_ms[b]
        sets += [(staging + nbytes, copy_ms + ms, max(largest, nbytes)) for staging, copy_ms, largest in sets]
    promising = sorted(
        (least_score_ms(problem, copy_ms) + max(2 * largest - staging, 0) / problem.link_bytes_per_ms, bits)
        for bits, (staging, copy_ms, largest) in enumerate(sets)
        if staging >= largest and least_score_ms(problem, copy_ms) <= best_ms * _NEAR
    )
    ranked: list[Ranked] = []
    everything = frozenset(range(len(problem.nbytes)))
    for _, bits in promising[:effort]:
        residents = everything - {b for k, b in enumerate(free) if bits >> k & 1}
        score_ms = pooled_score_ms(problem, residents, sets[bits][0], best_ms * _NEAR)
        if score_ms < inf:
            best_ms = min(best_ms, score_ms)
            ranked.append((score_ms, residents))
    return ranked


def _rank(problem: Problem, weight_nbytes: int, always: frozenset[int], effort: int) -> list[Ranked]:
    """Candidates, and what a local search finds from the best of them, priced as if staging were a pool."""
    priced: dict[frozenset[int], float] = {}

    def price(residents: frozenset[int], limit_ms: float = inf) -> float:
        score_ms = priced.get(residents)
        if score_ms is None:
            score_ms = pooled_score_ms(problem, residents, weight_nbytes - problem.size(residents), limit_ms)
            priced[residents] = score_ms
        return score_ms

    candidates = list(_candidates(problem, weight_nbytes, always))
    draw = random.Random(0).random
    starts = sorted(((price(residents), residents) for residents in candidates), key=_score)[:_STARTS]
    for best_ms, best in starts:
        for _ in range(effort // len(starts)):
            residents = _neighbour(problem, best, always, draw)
            score_ms = price(residents, best_ms)
            if score_ms < best_ms:
                best_ms, best = score_ms, residents
    ranked = sorted(((score_ms, residents) for residents, score_ms in priced.items()), key=_score)
    # No candidate is left out: a pool may be too kind to what the search found.
    return [entry for k, entry in enumerate(ranked) if k < _FOUND or entry[1] in candidates]


def _score(ranked: Ranked) -> float:
    return ranked[0]


def _place(problem: Problem, weight_nbytes: int, ranked: Iterable[Ranked]) -> Layout | None:
    """The best layout of ranked sets of residents: none is better than its pool."""
    best: Layout | None = None
    for tried, (score_ms, residents) in enumerate(ranked):
        if best is None or (score_ms < best.score_ms and tried < _MOST_PLACED):
            best = better(best, lay_out(problem, residents, weight_nbytes - problem.size(residents), polish=True))
    return best


def _neighbour(problem: Problem, residents: frozenset[int], always: frozenset[int], draw: Callable[[], float]) -> frozenset[int]:
    """A bucket in, or out, or one for another that is read nearby or anywhere; and sometimes one more."""
    near = set(residents)
    inside = sorted(residents - always)
    outside = sorted(set(range(len(problem.nbytes))) - residents)

    def pick(buckets: list[int]) -> int:
        return buckets[int(draw() * len(buckets))]

    what = draw()
    if not outside:
        return residents
    comes = pick(outside)
    if what >= 0.88 or not inside:
        return residents | {comes}
    k = bisect_left(inside, comes)
    near.discard(pick(inside[max(k - _NEARBY, 0) : k + _NEARBY] if draw() < 0.6 else inside))
    if what < 0.76:
        near.add(comes)
    if what < 0.2:
        near.add(pick(outside))
    elif what < 0.4:
        near.discard(pick(inside))
    return frozenset(near)


def _improve(problem: Problem, weight_nbytes: int, always: frozenset[int], best: Layout, effort: int) -> Layout:
    """Change a few residents while that helps. Random, but of a fixed seed: equal input, equal plan."""
    draw = random.Random(1).random
    tried: set[frozenset[int]] = {best.residents}
    while effort > 0:
        effort -= 1
        residents = _neighbour(problem, best.residents, always, draw)
        staging_nbytes = weight_nbytes - problem.size(residents)
        if residents in tried:
            continue
        tried.add(residents)
        if pooled_score_ms(problem, residents, staging_nbytes, best.score_ms) < inf:
            best = better(best, lay_out(problem, residents, staging_nbytes, strategies=_worth_trying(best))) or best
            effort -= _LAYOUT_EFFORT
    cap = weight_nbytes - problem.size(best.residents)
    found = lay_out(problem, best.residents, cap, strategies=_worth_trying(best), rotations=_ROTATIONS, polish=True)
    return better(best, found) or best


def _worth_trying(best: Layout) -> tuple[Strategy, ...] | None:
    """For many loads a layout takes milliseconds, and the strategy of the best one so far nearly always wins again."""
    return None if len(best.stream) <= MANY_LOADS else (best.strategy,)


def choose_fixed(problem: Problem, weight_nbytes: int, residents: frozenset[int], rotations: int = _ROTATIONS) -> Layout | None:
    """The best layout found for given residents: how many bytes to stage, and where the wrap-around falls."""
    best: Layout | None = None
    cap = weight_nbytes - problem.size(residents)
    least = max(problem.needed_nbytes(residents), default=0)
    sizes = [size for size in (int(least * factor) // ALIGNMENT * ALIGNMENT for factor in _STAGING) if size < cap]
    floor_ms = pooled_score_ms(problem, residents, cap)
    for cuts in dict.fromkeys((1, rotations)):
        for staging_nbytes in [*sizes, cap]:
            if best is not None and best.score_ms <= floor_ms * _PROVED:
                return best
            strategies = None if best is None or cuts < rotations else _worth_trying(best)
            found = lay_out(problem, residents, staging_nbytes, strategies=strategies, rotations=cuts, polish=cuts > 1)
            best = better(best, found)
    return best


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
        # A heap: on top what would stay, the largest or what was read last.
        indebted: list[tuple[int, int]] = []
        count = 0
        for here, compute_ms in zip(reads, problem.compute_ms, strict=True):
            for b in here:
                if b in residents:
                    continue
                debt += copy_ms[b]
                count += 1
                heappush(indebted, (-nbytes[b] if by_size else -count, b))
                while debt > slack_ms and indebted:
                    stays = heappop(indebted)[1]
                    debt -= copy_ms[stays]
                    # A bucket that is read twice may be here twice.
                    if stays not in residents:
                        residents.add(stays)
                        spare -= nbytes[stays]
            if spare < 0:
                return None
            debt -= stretch * compute_ms
            if debt <= 0:
                debt = 0.0
                indebted = []
    return residents


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
