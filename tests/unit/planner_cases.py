"""Costs for the planner's tests: a model of FLUX.1-dev's size, and small ones."""

from __future__ import annotations

from fxoffload.cost import BucketCost, Costs, SegmentCost

GIB = 2**30
LINK_BYTES_PER_MS = 55.4e6
_MB = 10**6

# (bytes, weight in the block's compute): bf16 weights of one block, cut into pieces of at most 117 MB.
DOUBLE = ((113.2, 0.0), (113.2, 0.0), (56.6, 0.7), (56.6, 0.7), (37.8, 0.6), (75.5, 1.0), (75.5, 1.0), (75.5, 1.0), (75.5, 1.0))
SINGLE = ((56.6, 0.0), (56.6, 1.0), (75.5, 1.2), (94.4, 1.5))


def chain(sizes: list[int], compute_ms: list[float], link_bytes_per_ms: float, latency_ms: float = 0.0, activation_nbytes: int = 0) -> Costs:
    """One bucket a segment, in order; size 0: a segment without weights."""
    segments = tuple(SegmentCost(f"s{i}", c, activation_nbytes) for i, c in enumerate(compute_ms))
    buckets = tuple(
        BucketCost(f"b{i}", nbytes, nbytes / link_bytes_per_ms + latency_ms, (i,)) for i, nbytes in enumerate(sizes) if nbytes
    )
    return Costs(segments, buckets, link_bytes_per_ms)


def flux(batch: int) -> Costs:
    """19 double and 38 single blocks of about equal compute: 131.3 ms at batch 1, 388 ms at batch 3."""
    total_ms, activation_gib = {1: (131.3, 0.45), 3: (388.0, 0.95)}[batch]
    sizes: list[int] = []
    compute_ms: list[float] = []
    for block in [DOUBLE] * 19 + [SINGLE] * 38:
        weight = sum(share for _, share in block)
        for megabytes, share in block:
            sizes.append(int(megabytes * _MB) // 256 * 256)
            compute_ms.append(total_ms / 57 * share / weight)
    return chain(sizes, compute_ms, LINK_BYTES_PER_MS, 0.01, int(activation_gib * GIB))
