"""Where each load lies in the staging area. One fixed offset a load, the same in every forward.

Loads that are needed at once (their spans of uses meet) must not share bytes; any other two may, and then the later one is copied
after the earlier one was evicted. So every placement that keeps needed-at-once loads apart is right, and what it is worth is
how early the copies can start. Two strategies, because neither wins everywhere:

- laps: loads in the order of need from byte 0 up, then again from 0: a ring, cut where a forward ends. The laps are balanced (the
  largest lap as small as possible), so that the cut costs no look-ahead: seven equal loads in three slots become laps of 3, 2, 2.
- ends: in turns from the bottom and from the top. Two loads fit at a time, whatever their sizes: the least memory that overlaps
  copy and compute.

Both begin at any load (`rotation`), which moves the cut to where compute hides it.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from fxoffload.stream import Stream


def place_laps(stream: Stream, cap_nbytes: int, rotation: int = 0) -> list[int] | None:
    """Offsets in balanced laps within `cap_nbytes`; None if loads that are needed at once do not fit side by side."""
    order = _rotated(stream, rotation)
    group_nbytes = _group_nbytes(stream)
    lap_nbytes = _balance([group_nbytes[j] for j in order if group_nbytes[j]], cap_nbytes)
    offsets = [0] * len(stream)
    position = 0
    open_loads: list[int] = []
    for j in order:
        open_loads = _needed_with(stream, open_loads, j)
        if position + group_nbytes[j] > lap_nbytes:
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


def _lowest_clear(stream: Stream, offsets: list[int], open_loads: list[int], position: int, nbytes: int, cap_nbytes: int) -> int | None:
    """The lowest offset from `position` on that shares no byte with `open_loads`; None if it ends beyond the cap."""
    for start, end in sorted((offsets[o], offsets[o] + stream.nbytes[o]) for o in open_loads):
        if start < position + nbytes and position < end:
            position = end
    return position if position + nbytes <= cap_nbytes else None


def _balance(nbytes: list[int], cap_nbytes: int) -> int:
    """The least lap size (almost) that needs no more laps than `cap_nbytes` does."""
    ends = list(accumulate(nbytes))
    laps = _count_laps(ends, cap_nbytes)
    low, high = max(nbytes, default=0) - 1, cap_nbytes
    # A few halvings: what is left is less than the difference of two buckets.
    for _ in range(10):
        middle = (low + high) // 2
        low, high = (low, middle) if _count_laps(ends, middle) <= laps else (middle, high)
    return high


def _count_laps(ends: list[int], lap_nbytes: int) -> int:
    laps = done = index = 0
    while index < len(ends):
        index = max(bisect_right(ends, done + lap_nbytes, index), index + 1)
        done = ends[index - 1]
        laps += 1
    return laps
