"""Costs: what every segment computes and what every bucket weighs, as the planner sees them. Pure data, no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SegmentCost:
    """One segment: predicted compute time (ms), and activation bytes alive at its peak (inputs and outputs included)."""

    name: str
    compute_ms: float
    activation_nbytes: int


@dataclass(frozen=True, slots=True)
class BucketCost:
    """One bucket: bytes in the arena (a multiple of 256), predicted copy time (ms), the segments that read it (ascending).

    `keep`: it must stay resident (a buffer that the model writes).
    """

    name: str
    nbytes: int
    copy_ms: float
    uses: tuple[int, ...]
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Costs:
    """All that the planner knows of a graph on a machine. Buckets in order of first use."""

    segments: tuple[SegmentCost, ...]
    buckets: tuple[BucketCost, ...]
    link_bytes_per_ms: float

    def __str__(self) -> str:
        from fxoffload.show import costs_table

        return costs_table(self)
