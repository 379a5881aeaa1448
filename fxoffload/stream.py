"""The planner's inner machine: what streams once the residents are chosen, where it lies, and how long a forward takes.

Plain lists of ints and floats, because the planner runs this some hundred times. `timeline.simulate` is the readable twin;
the planner ends by comparing the two.

Times in a forward are split in compute and stall. Segment `s` ends at `stall + before[s + 1]`, with `before` the prefix sums of
compute and `stall` the sum of the stalls so far; the stall only grows where a load is waited for, so one number per load
is the whole state. Load `l`, needed by segment `w`, with `a` the eviction that it has to wait for:

    copy_end  = max(copy_end of the load before, stall(a) + before[a + 1]) + copy_ms
    stall     = max(stall, copy_end - before[w])
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import fsum

from fxoffload.buckets import align
from fxoffload.cost import Costs

ROUGH_COPIES = 1.1
_SETTLED = 1e-6
"""Relative change of the step below which the fast simulation stops."""
_FORWARDS = 12


class Problem:
    """The costs as lists, and what is the same for every choice of residents.

    `ahead`, `ahead_nbytes`: the most loads, and bytes of loads, that may be issued before their first use begins.
    """

    def __init__(self, costs: Costs, *, ahead: int | None = None, ahead_nbytes: int | None = None, overlap: bool = True) -> None:
        self.n = len(costs.segments)
        self.compute_ms = [segment.compute_ms for segment in costs.segments]
        self.before_ms = [0.0, *accumulate(self.compute_ms)]
        self.total_ms = fsum(self.compute_ms)
        self.rough_before_ms = _roughen(self.compute_ms)
        self.nbytes = [align(bucket.nbytes) for bucket in costs.buckets]
        self.copy_ms = [bucket.copy_ms for bucket in costs.buckets]
        self.uses = [bucket.uses for bucket in costs.buckets]
        self.link_bytes_per_ms = costs.link_bytes_per_ms
        self.kept = frozenset(b for b, bucket in enumerate(costs.buckets) if bucket.keep or not bucket.uses or not bucket.nbytes)
        """Buckets that are resident in every plan: they must be, or it costs nothing."""
        self.shared = frozenset(b for b, uses in enumerate(self.uses) if len(uses) > 1)
        self.ahead = ahead
        self.ahead_nbytes = ahead_nbytes
        self.overlap = overlap

    def size(self, buckets: Iterable[int]) -> int:
        return sum(self.nbytes[b] for b in buckets)

    def needed_nbytes(self, residents: Collection[int]) -> list[int]:
        """For each segment: bytes of the streamed buckets that it reads."""
        needed = [0] * self.n
        for b, uses in enumerate(self.uses):
            if b not in residents:
                for use in uses:
                    needed[use] += self.nbytes[b]
        return needed


def _roughen(compute_ms: list[float]) -> list[float]:
    """Prefix sums of compute times that are each up to a quarter off, but come to the same total."""
    rough = [ms * (0.75 + (i * 7 % 11) / 20) for i, ms in enumerate(compute_ms)]
    scale = fsum(compute_ms) / (fsum(rough) or 1.0)
    return [0.0, *accumulate(ms * scale for ms in rough)]


@dataclass(slots=True)
class Stream:
    """The loads of a forward, in the order of need, as parallel lists."""

    bucket: list[int]
    uses: list[tuple[int, ...]]
    first: list[int]
    last: list[int]
    nbytes: list[int]
    copy_ms: list[float]

    @property
    def total_ms(self) -> float:
        # fsum, because sum differs in the last bit between versions of Python, and plans must not.
        return fsum(self.copy_ms)

    def __len__(self) -> int:
        return len(self.bucket)


def make_stream(problem: Problem, residents: Collection[int], merge_nbytes: int) -> Stream:
    """One load per streamed bucket, or several where more than `merge_nbytes` of other buckets stream between two of its uses.

    With -1 there is a load for each use.
    """
    parts: list[tuple[int, int, tuple[int, ...]]] = []
    several: list[int] = []
    for b, uses in enumerate(problem.uses):
        if b in residents:
            continue
        if len(uses) == 1:
            parts.append((uses[0], b, uses))
        else:
            several.append(b)
    if several:
        parts += _split_uses(problem, residents, several, merge_nbytes)
    parts.sort()
    nbytes, copy_ms = problem.nbytes, problem.copy_ms
    bucket = [b for _, b, _ in parts]
    uses = [u for _, _, u in parts]
    return Stream(
        bucket=bucket,
        uses=uses,
        first=[u[0] for u in uses],
        last=[u[-1] for u in uses],
        nbytes=[nbytes[b] for b in bucket],
        copy_ms=[copy_ms[b] for b in bucket],
    )


def _split_uses(
    problem: Problem, residents: Collection[int], several: list[int], merge_nbytes: int
) -> list[tuple[int, int, tuple[int, ...]]]:
    before = [0, *accumulate(problem.needed_nbytes(residents))]
    parts: list[tuple[int, int, tuple[int, ...]]] = []
    for b in several:
        group: list[int] = []
        for use in problem.uses[b]:
            if group and before[use] - before[group[-1] + 1] > merge_nbytes:
                parts.append((group[0], b, tuple(group)))
                group = []
            group.append(use)
        parts.append((group[0], b, tuple(group)))
    return parts


def latest_overlaps(stream: Stream, offsets: list[int], n: int) -> list[tuple[int, int]]:
    """For each load `(back, load)`: the eviction that frees the last of its bytes, in this forward (0) or the one before (1).

    A skyline over the arena holds, for each byte, the load that had it last. It is built by one forward and read by the next.
    Two loads that share bytes are never needed at once, so the one needed later is also evicted later.
    """
    m = len(stream)
    starts, owners = [0], [-1]
    latest: list[int] = [0] * m
    for forward in (0, 1):
        for j, (offset, nbytes, last) in enumerate(zip(offsets, stream.nbytes, stream.last, strict=True)):
            end = offset + nbytes
            i = bisect_right(starts, offset) - 1
            k = bisect_left(starts, end, i)
            latest[j] = max(owners[i:k])
            owner = (forward * n + last) * m + j
            tail = owners[k - 1]
            if k < len(starts) and starts[k] == end:
                new_starts, new_owners = [offset], [owner]
            else:
                new_starts, new_owners = [offset, end], [owner, tail]
            if starts[i] < offset:
                i += 1
            starts[i:k] = new_starts
            owners[i:k] = new_owners
    return [(0, owner % m) if owner >= n * m else (1, owner % m) for owner in latest]


def pooled_latest(stream: Stream, cap_nbytes: int, n: int) -> list[tuple[int, int]] | None:
    """As `latest_overlaps`, were `cap_nbytes` a pool in which any free bytes will do: no placement lets a copy start earlier.

    A load waits until it and those loads before it that are not evicted are at most `cap_nbytes`; None if it waits for ever.
    """
    m = len(stream)
    if stream.first == stream.last:
        return _pooled_in_order(stream.nbytes, cap_nbytes)
    by_eviction = sorted(
        (last - n, j - m, nbytes) for j, (last, nbytes) in enumerate(zip(stream.last, stream.nbytes, strict=True))
    )
    latest: list[tuple[int, int]] = []
    for j, (first, last, nbytes) in enumerate(zip(stream.first, stream.last, stream.nbytes, strict=True)):
        room_nbytes = cap_nbytes - nbytes
        for evicted, a, held_nbytes in reversed(by_eviction):
            # A load before `j - m` is counted by its turn in this forward.
            if a >= j - m:
                room_nbytes -= held_nbytes
            # At the latest it waits for its own eviction, by the forward before.
            if room_nbytes < 0 or a == j - m:
                if evicted >= first:
                    return None
                latest.append((int(a < 0), a % m))
                break
        insort(by_eviction, (last, j, nbytes))
    return latest


def _pooled_in_order(nbytes: list[int], cap_nbytes: int) -> list[tuple[int, int]]:
    """Where the loads are evicted in the order in which they are needed: a queue."""
    m = len(nbytes)
    latest: list[tuple[int, int]] = []
    a, held_nbytes = -m - 1, sum(nbytes)
    for j in range(m):
        held_nbytes += nbytes[j]
        while held_nbytes > cap_nbytes or a < j - m:
            a += 1
            held_nbytes -= nbytes[a]
        latest.append((0, a) if a >= 0 else (1, a + m))
    return latest


def earliest_positions(problem: Problem, stream: Stream) -> list[int] | None:
    """For each load, the first segment before which the limits on the look-ahead let it be issued (negative: a forward before).

    Load `j` may be issued once load `j - ahead` has begun to be used, and so has the last load `i < j` for which the bytes of
    `i .. j` are more than `ahead_nbytes`. None: there are no limits.
    """
    if problem.ahead is None and problem.ahead_nbytes is None:
        return None
    m, n = len(stream), problem.n
    positions = [first - n + 1 for first in stream.first]
    for j in range(m):
        behind: list[int] = [] if problem.ahead is None else [j - problem.ahead]
        if problem.ahead_nbytes is not None:
            i, nbytes = j, stream.nbytes[j]
            while nbytes <= problem.ahead_nbytes and i > j - m:
                i -= 1
                nbytes += stream.nbytes[i % m]
            behind.append(min(i, j - 1))
        for i in behind:
            positions[j] = max(positions[j], stream.first[i % m] + i // m * n)
    return positions


def delay(stream: Stream, latest: list[tuple[int, int]], positions: list[int], n: int) -> list[tuple[int, int]]:
    """`latest`, moved to later evictions so that no copy starts, on the device too, before its position is about to run."""
    by_eviction = sorted((last, j) for j, last in enumerate(stream.last))
    evictions = [last for last, _ in by_eviction]
    delayed: list[tuple[int, int]] = []
    for (back, a), position in zip(latest, positions, strict=True):
        forward, segment = divmod(position - 1, n)
        k = bisect_right(evictions, segment) - 1
        # With k == -1 the latest eviction by then is the last one of the forward before.
        evicted, candidate = by_eviction[k]
        forward -= k < 0
        later = evicted + forward * n > stream.last[a] - back * n
        delayed.append((-forward, candidate) if later else (back, a))
    return delayed


def step_ms(problem: Problem, stream: Stream, latest: list[tuple[int, int]], *, rough: bool = False) -> float:
    """Time of a forward in steady state. `rough`: on a machine on which copies and compute differ from what was predicted."""
    m = len(stream)
    slowdown = ROUGH_COPIES if rough else 1.0
    if not m or not problem.overlap:
        return problem.total_ms + slowdown * stream.total_ms
    before, total = problem.rough_before_ms if rough else problem.before_ms, problem.total_ms
    loads: list[tuple[float, float, int, float]] = []
    for w, copy_ms, (back, a) in zip(stream.first, stream.copy_ms, latest, strict=True):
        end = stream.last[a]
        # The stall at the end of segment `end` is the one recorded at the last load that is waited for by then.
        loads.append((before[w], copy_ms * slowdown, bisect_right(stream.first, end) - 1, before[end + 1] - total * back))
    stalls = [0.0] * m
    stall = free = 0.0
    least = slowdown * stream.total_ms
    step = 0.0
    for _ in range(_FORWARDS):
        stall_before = stall
        for j, (before_w, copy_ms, a, before_a) in enumerate(loads):
            start = stalls[a] + before_a
            free = (start if start > free else free) + copy_ms
            if free - before_w > stall:
                stall = free - before_w
            stalls[j] = stall
        free -= total
        previous, step = step, total + stall - stall_before
        if abs(step - previous) <= _SETTLED * step or step <= least * (1 + _SETTLED):
            break
    return step
