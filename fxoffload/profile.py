"""Timing on the device: one mark before and behind every segment, and before and behind every copy, while somebody asks for it.

A segment's first mark stands behind its waits in the compute stream, so the time is that of its compute, not of its stalls; a
copy's stands behind the wait for the bytes that it overwrites. Marks are events of the device, or times of the host where the
CPU is the device. Equal segments share one program, and get the median of their times.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from fxoffload.cost import Costs
from fxoffload.names import identifier
from fxoffload.transfer import Slot, Transfer

Compiled = Callable[[list[Any]], Any]
"""A segment's program: takes a list of arguments, and empties it."""
Mark = Any
"""A `torch.Event`, or seconds of the host."""
Spans = dict[str, list[tuple[Mark, Mark]]]
"""By name, the marks before and behind, one pair a forward."""


class SegmentTimer:
    """Times segments: compiled programs (`wrap`), or what runs between `start` and `stop`. `spans` by name of the segment."""

    def __init__(self, device: torch.device) -> None:
        self.spans: Spans = {}
        self._device = device
        self._programs: dict[str, Compiled] = {}

    def wrap(self, programs: Mapping[str, Compiled]) -> dict[str, Compiled]:
        self._programs = dict(programs)
        return {name: self._timed(name, program) for name, program in programs.items()}

    def start(self) -> Mark:
        return mark(self._device)

    def stop(self, name: str, start: Mark) -> None:
        self.spans.setdefault(name, []).append((start, mark(self._device)))

    def times(self) -> dict[str, float]:
        """Milliseconds of every segment that ran, in the last forward."""
        synchronize(self._device)
        return {name: ms_between(*spans[-1]) for name, spans in self.spans.items()}

    def refine(self, costs: Costs) -> Costs:
        """The costs with the compute times that were measured, in the last forward."""
        # By `id`: what AOTAutograd's cache returns has no hash.
        by_program: dict[int, list[float]] = {}
        for name, ms in self.times().items():
            by_program.setdefault(id(self._programs[name]), []).append(ms)
        segments = tuple(
            dataclasses.replace(s, compute_ms=statistics.median(by_program[id(self._programs[identifier(s.name)])]))
            for s in costs.segments
        )
        return dataclasses.replace(costs, segments=segments)

    def _timed(self, name: str, program: Compiled) -> Compiled:
        def run(arguments: list[Any]) -> Any:
            start = self.start()
            result = program(arguments)
            self.stop(name, start)
            return result

        return run


class CopyTimer:
    """Times the copies of a transfer's loads. `spans` by name of the load; those of residents are not kept."""

    def __init__(self, device: torch.device) -> None:
        self.spans: Spans = {}
        self._device = device

    @contextmanager
    def watching(self, transfer: Transfer) -> Generator[None, None, None]:
        copy = transfer.copy

        def timed(slot: Slot) -> None:
            start = mark(self._device)
            copy(slot)
            if slot.load:
                self.spans.setdefault(slot.load, []).append((start, mark(self._device)))

        transfer.copy = timed
        try:
            yield
        finally:
            transfer.copy = copy


def synchronize(device: torch.device) -> None:
    """Wait for everything that was issued to the device."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def ms_between(start: Mark, end: Mark) -> float:
    """Milliseconds from one mark to another; what leads to them has to be done (`synchronize`)."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def mark(device: torch.device) -> Mark:
    """This moment in the device's queue."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event
