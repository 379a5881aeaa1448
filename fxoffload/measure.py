"""Predicted against measured: one forward in steady state, with every segment and every copy timed."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxoffload import api
from fxoffload.binding import Binding
from fxoffload.cost import Costs
from fxoffload.errors import OffloadError
from fxoffload.names import identifier
from fxoffload.plan import Plan
from fxoffload.profile import CopyTimer, Mark, SegmentTimer, Spans, ms_between, synchronize
from fxoffload.show import table
from fxoffload.sizes import show_size
from fxoffload.timeline import LoadTime, SegmentTime, Timeline, chrome_trace, simulate

_MOST_CALLS = 16
_FORWARDS = 3
"""The last of them is the measurement: the first starts behind work that the timing itself made."""


@dataclass(frozen=True, slots=True)
class SegmentMeasure:
    """Compute time (ms) of one segment. Segments of equal `kind` run the same program."""

    name: str
    kind: int
    predicted_ms: float
    measured_ms: float


@dataclass(frozen=True, slots=True)
class LoadMeasure:
    """Time (ms) of one copy, without its wait for the bytes that it overwrites."""

    name: str
    nbytes: int
    predicted_ms: float
    measured_ms: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """One forward as it ran, and as it was predicted. Prints as tables."""

    plan: Plan
    segments: tuple[SegmentMeasure, ...]
    loads: tuple[LoadMeasure, ...]
    predicted: Timeline
    measured: Timeline
    """Stalls are all times between two segments: waits for copies, and for the host."""
    costs: Costs
    """The costs that the plan was made from, with the compute times that were measured: medians of equal segments."""

    @property
    def step_ms(self) -> float:
        """The forward as it ran, all stalls included."""
        return self.measured.step_ms

    @property
    def compute_ms(self) -> float:
        """The sum of the segments as they ran."""
        return sum(segment.measured_ms for segment in self.segments)

    def save_trace(self, path: str | Path) -> None:
        """Write the measured timeline as Chrome trace events: open the file at ui.perfetto.dev."""
        Path(path).write_text(json.dumps(chrome_trace(self.measured)) + "\n")

    def __str__(self) -> str:
        copies_ms = sum(load.measured_ms for load in self.loads)
        rows = [
            ("step", self.predicted.step_ms, self.step_ms),
            ("compute", sum(s.predicted_ms for s in self.segments), self.compute_ms),
            ("stall", self.predicted.stall_ms, self.step_ms - self.compute_ms),
            ("copies", sum(load.predicted_ms for load in self.loads), copies_ms),
        ]
        parts = [table(("", *_HEADERS), [_row((name,), a, b) for name, a, b in rows], fold=False)]
        parts.append(table(("segments that are equal", "each", *_HEADERS), self._segment_rows(), fold=False))
        if self.loads:
            parts.append(table(("copies of", "each", *_HEADERS, "GB/s"), self._load_rows(), fold=False))
        return "\n\n".join(parts)

    def _segment_rows(self) -> list[tuple[str, ...]]:
        kinds: dict[int, list[SegmentMeasure]] = {}
        for segment in self.segments:
            kinds.setdefault(segment.kind, []).append(segment)
        return [
            _row((same[0].name, f"x{len(same)}"), _median([s.predicted_ms for s in same]), _median([s.measured_ms for s in same]))
            for same in kinds.values()
        ]

    def _load_rows(self) -> list[tuple[str, ...]]:
        sizes: dict[int, list[LoadMeasure]] = {}
        for load in self.loads:
            sizes.setdefault(load.nbytes, []).append(load)
        rows: list[tuple[str, ...]] = []
        for nbytes, same in sorted(sizes.items(), reverse=True):
            measured_ms = _median([load.measured_ms for load in same])
            cells = _row((show_size(nbytes), f"x{len(same)}"), _median([load.predicted_ms for load in same]), measured_ms)
            rows.append((*cells, f"{nbytes / measured_ms / 1e6:.1f}" if measured_ms else "-"))
        return rows


_HEADERS = ("predicted ms", "measured ms", "measured / predicted")


def measure(model: Any, call: Callable[[], object]) -> Measurement:
    """Time every segment and every copy of a forward in steady state.

    `call` runs the model, once or more often; it is called until the model has settled, and then till three forwards are timed,
    of which the last one counts. Timing puts two events around every segment and every copy, here only. Raises OffloadError where
    `call` does not run the model.
    """
    call()
    for _ in range(_MOST_CALLS):
        binding = api.last_binding(model)
        if not binding.warm:
            call()
            continue
        found = _measure(binding, call)
        if found is not None:
            return found
    raise OffloadError(
        f"measure: {type(api.module_of(model)).__name__}: the graph that ran last did not run {_FORWARDS} times on end in "
        f"{_MOST_CALLS} calls; give a call that runs the model with one kind of inputs"
    )


def _measure(binding: Binding, call: Callable[[], object]) -> Measurement | None:
    """None if the plan changed meanwhile, or the graph did not run."""
    plan, device = binding.plan, binding.program.onload
    assert plan is not None
    copies = CopyTimer(device)
    with binding.timed() as segments, copies.watching(binding.engine.transfer):
        for _ in range(_FORWARDS):
            if min((len(spans) for spans in segments.spans.values()), default=0) < _FORWARDS:
                call()
        synchronize(device)
        binding.engine.transfer.drain()
    if binding.plan is not plan or min((len(spans) for spans in segments.spans.values()), default=0) < _FORWARDS:
        return None
    return _compare(binding, plan, segments, copies.spans)


def _compare(binding: Binding, plan: Plan, segments: SegmentTimer, copies: Spans) -> Measurement:
    costs, programs = binding.costs, binding.program.programs
    spans = [segments.spans[identifier(name)] for name in plan.segments]
    # A copy for the next forward that this one issued is the last of its name; the one that this forward used is that before it.
    used = [copies[load.name][-2 if load.wraps else -1] for load in plan.loads]
    measured = _timeline(plan, spans, used)
    kinds: dict[int, int] = {}
    copy_ms = {bucket.name: bucket.copy_ms for bucket in costs.buckets}
    return Measurement(
        plan=plan,
        segments=tuple(
            SegmentMeasure(
                segment.name,
                kinds.setdefault(id(programs[identifier(segment.name)]), len(kinds)),
                segment.compute_ms,
                time.end_ms - time.start_ms,
            )
            for segment, time in zip(costs.segments, measured.segments, strict=True)
        ),
        loads=tuple(
            LoadMeasure(load.name, load.nbytes, copy_ms[load.bucket], time.end_ms - time.start_ms)
            for load, time in zip(plan.loads, measured.loads, strict=True)
        ),
        predicted=simulate(plan, costs),
        measured=measured,
        costs=segments.refine(costs),
    )


def _timeline(plan: Plan, spans: Sequence[Sequence[tuple[Mark, Mark]]], used: Sequence[tuple[Mark, Mark]]) -> Timeline:
    """The last forward, from the end of the one before. `spans` per segment, forward by forward; `used` per load."""
    first = spans[0][0][0]  # Earlier than all others, so that no difference of two events is negative.
    zero_ms = ms_between(first, spans[-1][-2][1])

    def at_ms(mark: Mark) -> float:
        return ms_between(first, mark) - zero_ms

    segments: list[SegmentTime] = []
    before_ms = 0.0
    for name, span in zip(plan.segments, spans, strict=True):
        start_ms, end_ms = map(at_ms, span[-1])
        segments.append(SegmentTime(name, start_ms, end_ms, start_ms - before_ms))
        before_ms = end_ms
    loads = tuple(LoadTime(load.name, *map(at_ms, pair)) for load, pair in zip(plan.loads, used, strict=True))
    return Timeline(tuple(segments), loads, before_ms)


def _row(names: tuple[str, ...], predicted_ms: float, measured_ms: float) -> tuple[str, ...]:
    ratio = f"{measured_ms / predicted_ms:.2f}" if predicted_ms else "-"
    return (*names, f"{predicted_ms:.4f}", f"{measured_ms:.4f}", ratio)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values)
