"""Costs for the planner's tests: a model of FLUX.1-dev's size, one with its shape, small chains, and random ones."""

from __future__ import annotations

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.planner import Knobs

GIB = 2**30
LINK_BYTES_PER_MS = 55.4e6
UNIT = 256
_MB = 10**6

# (megabytes, share of the compute) of the pieces of a block, at most 117 MB each, in bf16. Modulation computes next to nothing.
DOUBLE = ((113.2, 0.0), (113.2, 0.0), (56.6, 0.7), (56.6, 0.7), (37.8, 0.6), (75.5, 1.0), (75.5, 1.0), (75.5, 1.0), (75.5, 1.0))
SINGLE = ((56.6, 0.0), (56.6, 1.0), (75.5, 1.2), (94.4, 1.5))


def chain(
    sizes: Sequence[int],
    compute_ms: Sequence[float],
    link_bytes_per_ms: float = float(UNIT),
    *,
    latency_ms: float = 0.0,
    activation_nbytes: int = 0,
    names: Sequence[str] | None = None,
) -> Costs:
    """One bucket a segment, in order; size 0: a segment without weights."""
    names = names or [f"blocks.{i}" for i in range(len(sizes))]
    segments = tuple(SegmentCost(name, ms, activation_nbytes) for name, ms in zip(names, compute_ms, strict=True))
    buckets = tuple(
        BucketCost(name, nbytes, nbytes / link_bytes_per_ms + latency_ms, (i,))
        for i, (name, nbytes) in enumerate(zip(names, sizes, strict=True))
        if nbytes
    )
    return Costs(segments, buckets, link_bytes_per_ms)


def equal_chain(n: int, *, compute_ms: float = 1.0) -> Costs:
    """`n` segments with a bucket of one unit each, which takes 1 ms to copy."""
    return chain([UNIT] * n, [compute_ms] * n)


def flux(batch: int, *, doubles: int = 19, singles: int = 38) -> Costs:
    """Double and single blocks of about equal compute: 131.3 ms at batch 1, 388 ms at batch 3, on one H200."""
    total_ms, activation_gib = {1: (131.3, 0.45), 3: (388.0, 0.95)}[batch]
    sizes: list[int] = []
    compute_ms: list[float] = []
    names: list[str] = []
    blocks = [(f"double.{i}", DOUBLE) for i in range(doubles)] + [(f"single.{i}", SINGLE) for i in range(singles)]
    for name, block in blocks:
        weight = sum(share for _, share in block)
        for piece, (megabytes, share) in enumerate(block):
            names.append(f"{name}:{piece}")
            sizes.append(int(megabytes * _MB) // UNIT * UNIT)
            compute_ms.append(total_ms / 57 * share / weight)
    activation_nbytes = int(activation_gib * GIB)
    return chain(sizes, compute_ms, LINK_BYTES_PER_MS, latency_ms=0.01, activation_nbytes=activation_nbytes, names=names)


def small_flux() -> Costs:
    """The demo's denoiser: FLUX's blocks at a twelfth of its width, 12 unequal buckets."""
    compute_ms = [0.0426, 0.0364, 0.2338, 0.0221, 0.0364, 0.2338, 0.0221, 0.2256, 0.2256, 0.2256, 0.2256, 0.0225]
    sizes = [1005568, 3421184, 3945472, 2102272, 3421184, 3945472, 2102272, 3943936, 3943936, 3943936, 3943936, 542976]
    return chain(sizes, compute_ms, 25e6, latency_ms=0.01)


def mini_lm() -> Costs:
    """An embedding in 7 pieces that compute next to nothing, then 6 layers of about the same size, at 25 GB/s."""
    sizes = [26214 * UNIT] * 7 + [27852 * UNIT] * 6
    return chain(sizes, [0.001] * 7 + [0.06] * 6, 25e6, latency_ms=0.01)


def uneven_chain(seed: int, n: int) -> Costs:
    """Buckets of up to 1 MB, a third of them of the full size, whose copies take about as long as compute."""
    draw = random.Random(seed)
    sizes = [UNIT * (draw.randint(1, 4000) if draw.random() < 0.7 else 4000) for _ in range(n)]
    compute_ms = [draw.choice([0.0, 0.01, 0.03, 0.05]) for _ in range(n)]
    return chain(sizes, compute_ms, 25e6, latency_ms=draw.choice([0.0, 0.001]))


def tied_chain(seed: int) -> Costs:
    """10 segments, some of whose 12 buckets are read by two of them."""
    draw = random.Random(seed)
    segments = tuple(SegmentCost(f"s{i}", draw.choice([0.5, 1.0, 2.0]), 0) for i in range(10))
    uses = sorted(tuple(sorted(draw.sample(range(10), draw.choice([1, 1, 1, 2])))) for _ in range(12))
    sizes = [UNIT * draw.randint(1, 8) for _ in uses]
    buckets = tuple(BucketCost(f"b{i}", sizes[i], sizes[i] / (3 * UNIT), read) for i, read in enumerate(uses))
    return Costs(segments, buckets, 3.0 * UNIT)


@st.composite
def random_costs(draw: st.DrawFn) -> Costs:
    """Up to 9 segments and 10 buckets; some buckets are read by several segments, are empty, or have to stay."""
    n = draw(st.integers(1, 9))
    segments = tuple(
        SegmentCost(f"s{i}", draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 5.0])), draw(st.sampled_from([0, 100, 1000])))
        for i in range(n)
    )
    readers = draw(st.lists(st.lists(st.integers(0, n - 1), min_size=1, max_size=3, unique=True).map(sorted), max_size=10))
    buckets: list[BucketCost] = []
    for i, uses in enumerate(sorted(readers)):
        nbytes = UNIT * draw(st.sampled_from([0, 1, 1, 2, 3, 4, 8]))
        latency_ms = draw(st.sampled_from([0.0, 0.1]))
        keep = draw(st.integers(0, 11)) == 0
        buckets.append(BucketCost(f"b{i}", nbytes, nbytes / (2 * UNIT) + latency_ms, tuple(uses), keep))
    return Costs(segments, tuple(buckets), 2.0 * UNIT)


random_knobs = st.builds(
    Knobs,
    transfer_buckets=st.none() | st.integers(1, 9),
    persistent_buckets=st.none() | st.integers(0, 12),
    persistent_bins=st.none() | st.integers(1, 5),
    prefetch_limit=st.booleans(),
    max_inflight_prefetch_bytes=st.none() | st.integers(1, 10 * UNIT),
    async_transfer=st.sampled_from([True, True, True, False]),
)
