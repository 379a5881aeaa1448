"""Where the arena of a model that shares its budget is divided, so that an idle model gives back no more than another one needs.

    offsets   0 ............ residents ............ | .. staging ..
    pieces    about 1 GiB | about 1 GiB | about 1 GiB | the rest

The offsets of a plan are those of one address space. The pieces that it is made of are allocated one by one, and no bucket lies
across two of them; nor does the staging area, which is worth nothing while the model is idle. Graphs of one model share an arena:
it is divided only where the plans of all of them allow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fxoffload.plan import Plan

PIECE_NBYTES = 1 << 30
"""About the size of a piece with residents."""
MOST_PIECES = 16
"""CUDA's allocator rounds each up to 2 MiB. All of that is to stay below what a warm-up adds to the activations."""


@dataclass(frozen=True, order=True, slots=True)
class Span:
    """Bytes `[start, end)` that have to lie in one piece."""

    start: int
    end: int
    streams: bool


def find_spans(plan: Plan) -> list[Span]:
    """Every resident, and the staging area."""
    spans = [Span(r.offset, r.offset + r.nbytes, streams=False) for r in plan.residents]
    if plan.loads:
        ends = [load.offset + load.nbytes for load in plan.loads]
        spans.append(Span(min(load.offset for load in plan.loads), max(ends), streams=True))
    return spans


def divide(plan: Plan, others: Sequence[Plan] = ()) -> tuple[int, ...]:
    """Offsets at which the pieces of an arena for a plan start, ascending, the first of them 0.

    `others`: plans that are to fit, too. Those that need a longer arena do not count.
    """
    plans = [plan, *(other for other in others if other.arena_nbytes <= plan.arena_nbytes)]
    spans = _merged(sorted(span for each in plans for span in find_spans(each)))
    resident_nbytes = max((span.end for span in spans if not span.streams), default=0)
    count = min(max(resident_nbytes // PIECE_NBYTES, 1), MOST_PIECES)
    target = -(-resident_nbytes // count)
    starts = [0]
    streamed = False
    for span in spans:
        is_full = span.start - starts[-1] >= target and resident_nbytes - span.start >= target // 2
        if span.streams or streamed or is_full:
            starts.append(span.start)
        streamed = span.streams
    return tuple(sorted({*starts}))


def _merged(spans: Sequence[Span]) -> list[Span]:
    """Spans that share bytes as one; it streams if one of them does."""
    merged: list[Span] = []
    for span in spans:
        if merged and span.start < merged[-1].end:
            last = merged.pop()
            span = Span(last.start, max(last.end, span.end), last.streams or span.streams)
        merged.append(span)
    return merged
