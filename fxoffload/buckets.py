"""Buckets: the weights that move together, as one flat piece of memory.

A segment's bucket holds the weights that the segment is the first to read and that no other segment reads. Weights that
several segments read (tied, a block called twice, a view used later) form buckets of their own, one for each set of segments;
so do the ones that the model writes, which must stay resident, and every run of rows of a weight that was cut. Inside a bucket
every weight starts at a multiple of 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from fxoffload.blocks import Blocks
from fxoffload.facts import Facts

ALIGNMENT = 256


def align(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class Bucket:
    """`weights` are placeholder names, `uses` the indices of the segments that read them, ascending."""

    name: str
    nbytes: int
    weights: tuple[str, ...]
    uses: tuple[int, ...]
    keep: bool


@dataclass(frozen=True, slots=True)
class Buckets:
    buckets: tuple[Bucket, ...]

    def __str__(self) -> str:
        from fxoffload.show import table

        total = sum(b.nbytes for b in self.buckets)
        rows = [
            (b.name, b.nbytes, len(b.weights), ",".join(map(str, b.uses)), "resident" if b.keep else "") for b in self.buckets
        ]
        return f"buckets  {len(self.buckets)} buckets  {total} bytes\n" + table(
            ("bucket", "bytes", "weights", "segments", ""), rows
        )


def pack_buckets(
    facts: Facts, blocks: Blocks, *, alone: frozenset[str] = frozenset(), keep: frozenset[str] = frozenset()
) -> Buckets:
    """Give every weight that is read to exactly one bucket, in order of first use.

    Placeholders in `alone` get buckets of their own; those in `keep` must stay resident, as the ones that the model writes must.
    """
    weights = {w.placeholder: w for w in facts.weights}
    uses: dict[str, list[int]] = {}
    for i, segment in enumerate(blocks.segments):
        for weight in segment.weights:
            uses.setdefault(weight, []).append(i)
    members: dict[tuple[tuple[int, ...], bool, str], list[str]] = {}
    for weight, segments in uses.items():
        stays = weights[weight].mutated or weight in keep
        members.setdefault((tuple(segments), stays, weight if weight in alone else ""), []).append(weight)
    buckets: list[Bucket] = []
    taken: set[str] = set()
    for (segments, stays, _), names in sorted(members.items(), key=lambda item: item[0]):
        nbytes = sum(align(weights[name].nbytes) for name in names)
        first = blocks.segments[segments[0]].name
        suffix = ".kept" if stays else ".shared" if len(segments) > 1 else ""
        name = f"{first}{suffix}"
        while name in taken:
            name += "+"
        taken.add(name)
        if nbytes:
            buckets.append(Bucket(name, nbytes, tuple(names), segments, stays))
    return Buckets(tuple(buckets))
