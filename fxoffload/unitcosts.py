"""What a forward by units costs, for the planner: a segment for every unit of the order, a bucket for what they read together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.machine import Machine
from fxoffload.managed import Managed


def price_units(
    names: Sequence[str], order: Sequence[int], managed: Managed, machine: Machine, measured_ms: Mapping[str, float]
) -> Costs:
    """`names` of the units, and the `order` in which they run. A time that was not measured is what reading the weights takes."""
    nbytes: dict[str, int] = {}
    uses: dict[str, set[int]] = {}
    segments: list[SegmentCost] = []
    for i, name in enumerate(_numbered([names[unit] for unit in order]) or ["forward"]):
        weights = managed.weights(managed.units[order[i]]) if order else []
        for weight in weights:
            nbytes[weight.bucket.name] = weight.bucket.nbytes
            uses.setdefault(weight.bucket.name, set()).add(i)
        read_ms = float(machine.compute_ms(0, sum(w.nbytes for w in weights), ""))
        segments.append(SegmentCost(name, measured_ms.get(name, read_ms), 0))
    kept = {w.bucket.name: w.bucket.nbytes for w in managed.weights(managed.rest)}
    buckets = [
        BucketCost(name, size, machine.copy_ms(size), tuple(sorted(uses.get(name, {0}))), name in kept)
        for name, size in (nbytes | kept).items()
    ]
    buckets.sort(key=lambda b: (b.uses, b.name))
    return Costs(tuple(segments), tuple(buckets), machine.link_bytes_per_ms)


def _numbered(names: Sequence[str]) -> list[str]:
    """`a`, `b`, `a@2`: every further call of a unit with its number."""
    seen: Counter[str] = Counter()
    numbered: list[str] = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}@{seen[name]}")
    return numbered
