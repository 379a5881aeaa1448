"""Where each load lies in the staging area. One fixed offset a load, the same in every forward.

Loads that are needed at once (their spans of uses meet) must not share bytes; any other two may, and then the later one is copied
after the earlier one was evicted. So every placement that keeps needed-at-once loads apart is right, and what it is worth is
how early the copies can start. Two strategies, because neither wins everywhere:

- laps: loads in the order of need from byte 0 up, then again from 0: a ring, cut where a forward ends. The laps are even, so that
  the cut costs no look-ahead: seven equal loads in three slots become laps of 2, 3, 2, where laps of 3, 3, 1 would leave none.
- ends: in turns from the bottom and from the top. Two loads fit at a time, whatever their sizes: the least memory that overlaps
  copy and compute.

Both begin at any load (`rotation`), which moves the cut to where compute hides it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import accumulate, pairwise

from fxoffload.stream import Stream


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
