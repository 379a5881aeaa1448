"""What measurement scripts share: a JSON file written anew behind every row, and what a process holds on the host."""

from __future__ import annotations

import json
import re
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from fxoffload import api, timing
from fxoffload.hardware import machine, versions

Row = dict[str, Any]
GIB = 2**30
MIB = 2**20
EVERYTHING = "100GiB"
"""A budget in which all of every model here is resident."""
_SAMPLE_S = 0.005


class RowFile:
    """What is known so far. `add` prints a row and writes the file, so that a run that is cut short leaves what it has."""

    def __init__(self, path: Path | None, command: str, device: torch.device, **head: Any) -> None:
        self._path = path
        self.data: dict[str, Any] = {"command": command, "machine": machine(device), "versions": versions(), **head, "rows": []}

    @property
    def rows(self) -> list[Row]:
        return self.data["rows"]

    def add(self, row: Row) -> None:
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        self.write()

    def write(self) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self.data, indent=1) + "\n")


def budget_for(model: Any, text: str) -> int | str:
    """A budget of a model that has run: `half` is its activations and half of its weights, anything else what it says."""
    if text != "half":
        return text
    planned = api.planned_of(model)[-1]
    return planned.activation_nbytes + sum(bucket.nbytes for bucket in planned.costs.buckets) // 2


def host_nbytes() -> dict[str, int]:
    """What this process has resident, by kind: `anon` (memory pinned in place is in it), `shmem`, and `file` (mapped files)."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return {}
    return {kind.lower(): int(kilobytes) * 1024 for kind, kilobytes in re.findall(r"Rss(\w+):\s+(\d+) kB", status)}


def pinned_nbytes() -> int:
    """What torch's own allocator of pinned memory holds; drivers do not count it as resident."""
    return int(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)) if torch.cuda.is_initialized() else 0


class HostPeak:
    """The most that this process holds while a `with` block of it runs, looked at every few milliseconds.

    `nbytes` is anonymous memory + shared memory + torch's pinned memory, at one moment: all but mapped files, which are the
    kernel's page cache and go when memory is short. `mapped_nbytes` is the most of those. `resident_nbytes` is the kernel's own
    count of the peak (VmHWM), mapped files in it and no moment missed.
    """

    def __init__(self) -> None:
        self.nbytes = self.mapped_nbytes = self.resident_nbytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> HostPeak:
        timing.reset_host_peak()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._ended.set()
        self._thread.join()
        self._look()
        self.resident_nbytes = timing.host_peak_nbytes() or 0

    def _watch(self) -> None:
        while not self._ended.wait(_SAMPLE_S):
            self._look()

    def _look(self) -> None:
        held = host_nbytes()
        self.nbytes = max(self.nbytes, held.get("anon", 0) + held.get("shmem", 0) + pinned_nbytes())
        self.mapped_nbytes = max(self.mapped_nbytes, held.get("file", 0))
