"""What a benchmark reads off a device and its host: steps, the host's part of them, peaks of memory.

Steps are times between events of the device, so that the host may run ahead of it as it does in use; on the CPU device they are
times of the host. Peaks count from the last `reset_peaks`.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch

from fxoffload.pace import TIMED, TRIES
from fxoffload.profile import synchronize

T = TypeVar("T")

_BURST, _BURSTS = TIMED + 3, 2 * TRIES + 2
"""Enough for a capture to be timed, and for as many captures as there can be (`pace`)."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Consecutive steps (ms), and how long the host took to issue one to an idle device (ms)."""

    times_ms: tuple[float, ...]
    host_ms: float

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


@dataclass(frozen=True, slots=True)
class Peaks:
    """Peaks since the last reset, in bytes; None where nobody counts. `host_nbytes` is all of the process, weights included."""

    reserved_nbytes: int | None
    allocated_nbytes: int | None
    host_nbytes: int | None
    pinned_nbytes: int | None
    """What torch's allocator of pinned memory held; memory that was pinned in place is not in it."""


@contextmanager
def turn(lock: Path | None) -> Generator[None]:
    """Alone among all who give the same file, on this host; None: at once.

    Devices of one host share its memory and, for a part of the way, its links: what streams beside a step that is timed slows it.
    """
    if lock is None:
        yield
        return
    import fcntl  # Not on Windows.

    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def timed(call: Callable[[], T], device: torch.device) -> tuple[T, float]:
    """The result of one call, and the seconds until the device has it."""
    synchronize(device)
    start = time.perf_counter()
    result = call()
    synchronize(device)
    return result, time.perf_counter() - start


def settle(settled: Callable[[], bool], call: Callable[[], object], device: torch.device) -> None:
    """Call, many queued as in use, until `settled`. Raises RuntimeError where that does not come."""
    synchronize(device)
    for _ in range(_BURSTS):
        if settled():
            return
        for _ in range(_BURST):
            call()
        synchronize(device)
    if not settled():
        raise RuntimeError(f"timing: not settled after {_BURSTS * _BURST} more forwards")


def time_steps(call: Callable[[], Any], count: int, device: torch.device) -> tuple[Steps, Any]:
    """Time `count` calls in a row, then the issue of one more; returns that one's result, too."""
    synchronize(device)
    times_ms = _host_times(call, count) if device.type == "cpu" else _device_times(call, count, device)
    # The host runs ahead until queues are full: an issue time is honest only from an idle device.
    start = time.perf_counter()
    result = call()
    host_ms = (time.perf_counter() - start) * 1e3
    synchronize(device)
    return Steps(tuple(times_ms), host_ms), result


def _host_times(call: Callable[[], Any], count: int) -> list[float]:
    marks = [time.perf_counter()]
    for _ in range(count):
        call()
        marks.append(time.perf_counter())
    return [(b - a) * 1e3 for a, b in pairwise(marks)]


def _device_times(call: Callable[[], Any], count: int, device: torch.device) -> list[float]:
    marks = [torch.Event(device, enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    synchronize(device)
    return [a.elapsed_time(b) for a, b in pairwise(marks)]


def reset_peaks(device: torch.device) -> None:
    """Peaks count from here on. What the allocator holds and nobody uses goes back to the device first."""
    synchronize(device)
    if device.type != "cpu":
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)


def reset_host_peak() -> None:
    """The host's peak counts from here on, where the system allows it (Linux); elsewhere from the start of the process."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peaks(device: torch.device) -> Peaks:
    """The peaks since the last resets."""
    if device.type == "cpu":
        return Peaks(None, None, host_peak_nbytes(), None)
    pinned: int | None = None
    if device.type == "cuda":
        pinned = torch.cuda.host_memory_stats().get("allocated_bytes.peak")
    return Peaks(
        torch.accelerator.max_memory_reserved(device),
        torch.accelerator.max_memory_allocated(device),
        host_peak_nbytes(),
        pinned,
    )


def host_peak_nbytes() -> int | None:
    """The most memory that this process had resident on the host."""
    try:
        found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    except OSError:
        return None
    return int(found[1]) * 1024 if found else None
