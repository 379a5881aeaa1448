"""Whether a capture runs as fast as planned: its first replays are timed, and where they are slow the forward is captured again.

How the driver lays a graph on the queues of a device is its own business, and not always the same for the same graph. Of eleven
captures of one forward of FLUX.1-dev, in one process on an H200, two copied 5 % slower than the others, in every replay that
had others queued behind it. Nothing that a graph consists of tells which; the time of a replay does, and the next capture is
most often a fast one. Where copies bound the step its prediction is good to 1 %, so it says what is slow. If it is wrong, and
all captures are as slow as each other, one that is as fast as any is kept.
"""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from fxoffload.plan import Plan

TIMED = 3
"""Replays whose median counts; the one before them brings the graph to the device."""
SLOW = 1.01
"""Times the planned step: what takes longer is captured again."""
TRIES = 4
"""Captures after which the fastest is good enough; after twice as many, whatever comes."""
ALIKE = 1.005
"""Times the fastest capture: what is within it counts as fast as any."""
MARGIN = 1.1
"""Times the compute time: a step that is planned longer is bound by copies, whatever is wrong with predictions of compute."""
LEAST_MS = 10.0
"""Steps that are planned shorter are not timed: there the launch counts, too."""


class Clocks(Protocol):
    """What a device offers to time with: a part of `capture.Capturer`."""

    def caller(self) -> Any:
        """The stream that replays are launched on now."""
        ...

    def clock(self) -> Any:
        """A timed event, with `record(stream)`, `query()` and `elapsed_time(later)` in ms."""
        ...


def is_bound_by_copies(plan: Plan) -> bool:
    """Whether slow copies show in the step. Without overlap there is one row of nodes, which the driver cannot lay out badly."""
    return plan.async_transfer and plan.step_ms >= LEAST_MS and plan.step_ms >= MARGIN * plan.compute_ms


def is_good(times_ms: Sequence[float], planned_ms: float) -> bool:
    """Whether the last of these captures is kept, by the times of their replays."""
    tries, last = len(times_ms), times_ms[-1]
    return last <= SLOW * planned_ms or (tries >= TRIES and last <= ALIKE * min(times_ms)) or tries >= 2 * TRIES


class Pace:
    """Times the first replays of one capture, without waiting for any."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        self._spans: list[tuple[Any, Any]] = []
        self._skip = False

    def skip(self) -> None:
        """The next replay does not count."""
        self._skip = True

    @contextmanager
    def timed(self) -> Generator[None]:
        """A replay is launched in here."""
        if self._skip or len(self._spans) > TIMED:
            self._skip = False
            yield
            return
        start, end = self._clocks.clock(), self._clocks.clock()
        start.record(self._clocks.caller())
        yield
        end.record(self._clocks.caller())
        self._spans.append((start, end))

    def step_ms(self) -> float | None:
        """The median time of a replay; None until it is known."""
        if len(self._spans) <= TIMED or not self._spans[-1][1].query():
            return None
        return statistics.median(start.elapsed_time(end) for start, end in self._spans[1:])
