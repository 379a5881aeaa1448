"""Where each load lies in the staging area, and what that is worth. One fixed offset a load, the same in every forward.

Loads that are needed at once (their spans of uses meet) must not share bytes; any other two may, and then the later one is copied
after the earlier one was evicted. So every placement that keeps needed-at-once loads apart is right, and what it is worth is
how early the copies can start. Three strategies, because none wins everywhere:

- laps: loads in the order of need from byte 0 up, then again from 0: a ring, cut where a forward ends. The laps are even, so that
  the cut costs no look-ahead: seven equal loads in three slots become laps of 2, 3, 2, where laps of 3, 3, 1 would leave none.
- ends: in turns from the bottom and from the top. Two loads fit at a time, whatever their sizes: the least memory that overlaps
  copy and compute.
- oldest: each load goes where it overwrites what was needed longest ago. For loads of many sizes.

All begin at any load (`rotation`), which moves the cut to where compute hides it. What no strategy can beat is a pool without
places (`stream.pooled_latest`); a few loads get there by moving one at a time to the end of another (`moves`).

`Layout.score_ms` compares layouts. Costs are predictions, so the score adds a little of the step on a machine on which they are
off, and of the copy time: of two layouts with equal steps, the one with more slack and fewer copies wins.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import inf

from fxoffload.stream import (
    ROUGH_COPIES,
    Problem,
    Stream,
    delay,
    earliest_positions,
    latest_overlaps,
    make_stream,
    pooled_latest,
    step_ms,
)

Strategy = Callable[[Stream, int, int], "list[int] | None"]
MANY_LOADS = 64
"""More than so many are not placed over the oldest bytes, which takes long and wins only for few."""
_FEW_LOADS = 16
"""So few that every rotation is tried, and single loads are moved."""
_ROUNDS = 3
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


def better(best: Layout | None, found: Layout | None) -> Layout | None:
    if best is None or (found is not None and found.beats(best)):
        return found
    return best


def lay_out(
    problem: Problem,
    residents: frozenset[int],
    staging_nbytes: int,
    *,
    strategies: Sequence[Strategy] | None = None,
    rotations: int = 1,
    polish: bool = False,
) -> Layout | None:
    """The best layout that streams what is not resident through `staging_nbytes`; None if it does not fit.

    `rotations`: how many places to try for the cut, evenly spaced. `polish`: few loads are moved one at a time, while that helps.
    """
    best: Layout | None = None
    for stream in streams(problem, residents, staging_nbytes):
        m = len(stream)
        if not m:
            return _judged(problem, residents, stream, [], place_laps)
        cuts = m if polish and m <= _FEW_LOADS else min(rotations, m)
        for strategy in strategies or (STRATEGIES if m <= MANY_LOADS else _FAST):
            for k in range(cuts):
                offsets = strategy(stream, staging_nbytes, k * m // cuts)
                if offsets is not None:
                    best = better(best, _judged(problem, residents, stream, offsets, strategy))
    if best is None or not polish or len(best.stream) > _FEW_LOADS:
        return best
    return _polished(problem, best, staging_nbytes)


def streams(problem: Problem, residents: frozenset[int], staging_nbytes: int) -> Iterator[Stream]:
    """Two uses of one bucket are served by one load within half of the look-ahead; where nothing is copied between; or never."""
    if staging_nbytes < 0:
        return
    seen: list[list[tuple[int, ...]]] = []
    for merge_nbytes in (-1,) if problem.shared <= residents else (staging_nbytes // 2, 0, -1):
        stream = make_stream(problem, residents, merge_nbytes)
        if stream.uses not in seen:
            seen.append(stream.uses)
            yield stream


def pooled_score_ms(problem: Problem, residents: frozenset[int], staging_nbytes: int, limit_ms: float = inf) -> float:
    """The least score of any layout with these residents; `inf` if there is none, or if it would not be below `limit_ms`."""
    best_ms = limit_ms
    if max(problem.needed_nbytes(residents), default=0) > staging_nbytes:
        return inf
    for stream in streams(problem, residents, staging_nbytes):
        latest = pooled_latest(stream, staging_nbytes, problem.n)
        if latest is not None:
            best_ms = min(best_ms, _score_ms(problem, stream, _held_back(problem, stream, latest), best_ms))
    return best_ms if best_ms < limit_ms else inf


def least_score_ms(problem: Problem, copy_ms: float) -> float:
    """The least score of any layout that copies for so long."""
    rough_ms = max(problem.total_ms, ROUGH_COPIES * copy_ms)
    return max(problem.total_ms, copy_ms) + _ROUGH_WEIGHT * rough_ms + _COPY_WEIGHT * copy_ms


def _held_back(problem: Problem, stream: Stream, latest: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """By the limits on the look-ahead."""
    positions = earliest_positions(problem, stream)
    return latest if positions is None else delay(stream, latest, positions, problem.n)


def _score_ms(problem: Problem, stream: Stream, latest: list[tuple[int, int]], limit_ms: float = inf) -> float:
    copies_ms = stream.total_ms
    extra_ms = least_score_ms(problem, copies_ms) - max(problem.total_ms, copies_ms)
    score_ms = step_ms(problem, stream, latest)
    if score_ms + extra_ms >= limit_ms:
        return inf
    score_ms += _ROUGH_WEIGHT * step_ms(problem, stream, latest, rough=True) + _COPY_WEIGHT * copies_ms
    # Rounded, so that the last bits of a float decide nothing.
    return round(score_ms, 9)


def _judged(problem: Problem, residents: frozenset[int], stream: Stream, offsets: list[int], strategy: Strategy) -> Layout:
    latest = _held_back(problem, stream, latest_overlaps(stream, offsets, problem.n))
    used = max((offset + nbytes for offset, nbytes in zip(offsets, stream.nbytes, strict=True)), default=0)
    return Layout(residents, stream, offsets, latest, strategy, used, _score_ms(problem, stream, latest))


def _polished(problem: Problem, best: Layout, cap_nbytes: int) -> Layout:
    for _ in range(_ROUNDS):
        before = best
        for j in range(len(best.stream)):
            for offset in moves(best.stream, best.offsets, j, cap_nbytes):
                offsets = [*best.offsets[:j], offset, *best.offsets[j + 1 :]]
                found = _judged(problem, best.residents, best.stream, offsets, best.strategy)
                best = found if found.beats(best) else best
        if best is before:
            break
    return best


def place_laps(stream: Stream, cap_nbytes: int, rotation: int = 0) -> list[int] | None:
    """Offsets in even laps within `cap_nbytes`; None if loads that are needed at once do not fit side by side."""
    order = _rotated(stream, rotation)
    group_nbytes = _group_nbytes(stream)
    heads = [j for j in order if group_nbytes[j]]
    starts = _lap_starts([group_nbytes[j] for j in heads], cap_nbytes)
    first_of_lap = {heads[start] for start in starts}
    offsets = [0] * len(stream)
    position = 0
    open_loads: list[int] = []
    for j in order:
        open_loads = _needed_with(stream, open_loads, j)
        if j in first_of_lap:
            position = 0
        offset = _lowest_clear(stream, offsets, open_loads, position, stream.nbytes[j], cap_nbytes)
        if offset is None:
            offset = _lowest_clear(stream, offsets, open_loads, 0, stream.nbytes[j], cap_nbytes)
        if offset is None:
            return None
        offsets[j] = offset
        position = offset + stream.nbytes[j]
        open_loads.append(j)
    return offsets


def place_ends(stream: Stream, cap_nbytes: int, rotation: int = 0) -> list[int] | None:
    """Offsets in turns at the bottom and at the top of `cap_nbytes`; None if loads that are needed at once do not fit so."""
    offsets = [0] * len(stream)
    open_loads: list[int] = []
    for turn, j in enumerate(_rotated(stream, rotation)):
        nbytes = stream.nbytes[j]
        open_loads = _needed_with(stream, open_loads, j)
        position = 0 if turn % 2 == 0 else cap_nbytes - nbytes
        if position < 0:
            return None
        offset = _lowest_clear(stream, offsets, open_loads, position, nbytes, cap_nbytes)
        if offset is None:
            offset = _lowest_clear(stream, offsets, open_loads, 0, nbytes, cap_nbytes)
        if offset is None:
            return None
        offsets[j] = offset
        open_loads.append(j)
    return offsets


def place_oldest(stream: Stream, cap_nbytes: int, rotation: int = 0) -> list[int] | None:
    """Offsets over the bytes whose last load lies furthest back, with the least waste of such bytes; None as above."""
    offsets = [0] * len(stream)
    open_loads: list[int] = []
    # A skyline: from `starts[i]` on, the turn of the load that was placed there last. It ends with the cap.
    starts, turns = [0, cap_nbytes], [-1, -1]
    for turn, j in enumerate(_rotated(stream, rotation)):
        nbytes = stream.nbytes[j]
        open_loads = _needed_with(stream, open_loads, j)
        taken = [(offsets[o], offsets[o] + stream.nbytes[o]) for o in open_loads]
        best: tuple[int, int, int, int, int] | None = None
        for offset in {*starts[:-1], *(start - nbytes for start in starts[1:])}:
            end = offset + nbytes
            if offset < 0 or end > cap_nbytes or any(offset < b and a < end for a, b in taken):
                continue
            i = bisect_right(starts, offset, hi=len(starts) - 1) - 1
            k = bisect_left(starts, end, i + 1)
            latest = max(turns[i:k])
            wasted = sum((latest - turns[x]) * (min(end, starts[x + 1]) - max(offset, starts[x])) for x in range(i, k))
            found = (latest, wasted, offset, i, k)
            if best is None or found < best:
                best = found
        if best is None:
            return None
        _, _, offset, i, k = best
        offsets[j], end = offset, offset + nbytes
        new_starts, new_turns = ([offset], [turn]) if starts[k] == end else ([offset, end], [turn, turns[k - 1]])
        i += starts[i] < offset
        starts[i:k] = new_starts
        turns[i:k] = new_turns
        open_loads.append(j)
    return offsets


_FAST: tuple[Strategy, ...] = (place_laps, place_ends)
STRATEGIES: tuple[Strategy, ...] = (*_FAST, place_oldest)


def moves(stream: Stream, offsets: list[int], j: int, cap_nbytes: int) -> Iterator[int]:
    """Other offsets of load `j`, next to another load or to an end of the staging area, where nothing needed with it lies."""
    nbytes = stream.nbytes[j]
    others = [o for o in range(len(stream)) if o != j]
    taken = [(offsets[o], offsets[o] + stream.nbytes[o]) for o in _needed_with(stream, others, j)]
    ends = {offsets[o] + stream.nbytes[o] for o in others}
    for offset in sorted({0, cap_nbytes - nbytes, *ends, *(offsets[o] - nbytes for o in others)} - {offsets[j]}):
        if 0 <= offset <= cap_nbytes - nbytes and not any(offset < end and start < offset + nbytes for start, end in taken):
            yield offset


def _rotated(stream: Stream, rotation: int) -> list[int]:
    """Loads from `rotation` on, then those before; moved up to where no load is needed on both sides of the cut."""
    m = len(stream)
    while 0 < rotation < m and max(stream.last[:rotation]) >= stream.first[rotation]:
        rotation += 1
    return [*range(rotation, m), *range(min(rotation, m))]


def _needed_with(stream: Stream, loads: list[int], j: int) -> list[int]:
    if not loads:
        return loads
    first, last = stream.first[j], stream.last[j]
    return [o for o in loads if stream.last[o] >= first and stream.first[o] <= last]


def _group_nbytes(stream: Stream) -> list[int]:
    """Bytes of all loads first used by one segment, at the first of them; 0 at the others."""
    grouped = [0] * len(stream)
    head = 0
    for j, first in enumerate(stream.first):
        if first != stream.first[head]:
            head = j
        grouped[head] += stream.nbytes[j]
    return grouped


def _lowest_clear(
    stream: Stream, offsets: list[int], open_loads: list[int], position: int, nbytes: int, cap_nbytes: int
) -> int | None:
    """The lowest offset from `position` on that shares no byte with `open_loads`; None if it ends beyond the cap."""
    for start, end in sorted((offsets[o], offsets[o] + stream.nbytes[o]) for o in open_loads) if open_loads else ():
        if start < position + nbytes and position < end:
            position = end
    return position if position + nbytes <= cap_nbytes else None


def _lap_starts(nbytes: list[int], cap_nbytes: int) -> list[int]:
    """Where laps begin: as few as fit into `cap_nbytes`, and about equal in bytes."""
    ends = list(accumulate(nbytes))
    full = _full_laps(ends, cap_nbytes)
    for laps in (len(full), min(len(full) + 1, len(ends))):
        starts = _even_laps(ends, laps)
        bounds = [*starts, len(ends)]
        if all(ends[end - 1] - (ends[begin - 1] if begin else 0) <= cap_nbytes for begin, end in pairwise(bounds)):
            return starts
    return full


def _even_laps(ends: list[int], laps: int) -> list[int]:
    starts = [0]
    for lap in range(1, laps):
        begin = starts[-1]
        done = ends[begin - 1] if begin else 0
        target = done + (ends[-1] - done) / (laps - lap + 1)
        end = bisect_left(ends, target, begin)
        # The item that reaches beyond the target belongs to this lap if that brings it nearer to the target.
        if ends[end] - target < target - (ends[end - 1] if end > begin else done):
            end += 1
        starts.append(min(max(end, begin + 1), len(ends) - 1))
    return starts


def _full_laps(ends: list[int], cap_nbytes: int) -> list[int]:
    starts: list[int] = []
    index = done = 0
    while index < len(ends):
        starts.append(index)
        index = max(bisect_right(ends, done + cap_nbytes, index), index + 1)
        done = ends[index - 1]
    return starts
