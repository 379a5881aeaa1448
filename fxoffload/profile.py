"""Timing segments on the device: one forward with an event before and behind every segment.

A segment's first event stands behind its waits in the compute stream, so the time is that of its compute, not of its stalls.
Equal segments share one program, and get the median of their times.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fxoffload.cost import Costs
from fxoffload.names import identifier

Compiled = Callable[..., Any]


class SegmentTimer:
    """Wraps the segments' programs for one forward."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: dict[str, tuple[Any, Any]] = {}
        self._programs: dict[str, Compiled] = {}

    def wrap(self, programs: Mapping[str, Compiled]) -> dict[str, Compiled]:
        self._programs = dict(programs)
        return {name: self._timed(name, program) for name, program in programs.items()}

    def refine(self, costs: Costs) -> Costs:
        """The costs with the compute times that were measured."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        by_program: dict[Compiled, list[float]] = {}
        for name, (start, end) in self._marks.items():
            by_program.setdefault(self._programs[name], []).append(_ms(start, end))
        segments = tuple(
            dataclasses.replace(s, compute_ms=statistics.median(by_program[self._programs[identifier(s.name)]]))
            for s in costs.segments
        )
        return dataclasses.replace(costs, segments=segments)

    def _timed(self, name: str, program: Compiled) -> Compiled:
        def run(*args: Any) -> Any:
            start = self._mark()
            result = program(*args)
            self._marks[name] = (start, self._mark())
            return result

        return run

    def _mark(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self._device, enable_timing=True)
        event.record()
        return event


def _ms(start: Any, end: Any) -> float:
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)
