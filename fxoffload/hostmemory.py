"""How much host memory this process may take: what the machine has, or less where a container limits it.

A container's limit is not in what the machine tells of itself. It is read from the control groups that the process is in, and
from all above them: `memory.max` of version 2, `memory.limit_in_bytes` of version 1. What a group uses includes files that the
kernel has in memory and drops when the space is needed; those count as free.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_NO_LIMIT_NBYTES = 1 << 60
"""Version 1 has no word for no limit, but a number beyond any machine."""


@dataclass(frozen=True, slots=True)
class HostMemory:
    """`total_nbytes` may be used, and `free_nbytes` of it are free now. `limited_by`: the file that limits, or `""`."""

    total_nbytes: int
    free_nbytes: int
    limited_by: str = ""

    @property
    def name(self) -> str:
        return f"the container's limit ({self.limited_by})" if self.limited_by else "this machine's memory"


def host_memory() -> HostMemory:
    """What this process may use of the host's memory, and what of that is free, now."""
    page = os.sysconf("SC_PAGE_SIZE")
    machine = HostMemory(page * os.sysconf("SC_PHYS_PAGES"), _available_nbytes() or page * os.sysconf("SC_AVPHYS_PAGES"))
    limits = [found for folder in _groups() if (found := _limit(folder)) is not None]
    total = min((machine, *limits), key=lambda m: m.total_nbytes)
    free = min((machine, *limits), key=lambda m: m.free_nbytes)
    return HostMemory(total.total_nbytes, free.free_nbytes, free.limited_by or total.limited_by)


def _available_nbytes() -> int:
    """What the kernel says is free or can be freed; 0 where it does not say."""
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)


def _groups() -> Iterator[Path]:
    """Folders of the groups that this process is in, and of all above. Inside a container the path may be the host's, or `/`."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            base = GROUPS
        elif "memory" in controllers.split(","):
            base = GROUPS / "memory"
        else:
            continue
        folder = base / path.lstrip("/")
        yield from (f for f in (folder, *folder.parents) if f == base or base in f.parents)


def _limit(folder: Path) -> HostMemory | None:
    """What one group may use; None where it has no limit."""
    for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
        try:
            text = (folder / limit).read_text().strip()
            used = int((folder / usage).read_text())
            stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except OSError:
            continue
        if text == "max" or int(text) >= _NO_LIMIT_NBYTES:
            return None
        droppable = sum(int(stat.get(f"total_{key}") or stat.get(key) or 0) for key in ("inactive_file", "active_file"))
        return HostMemory(int(text), max(int(text) - used + droppable, 0), str(folder / limit))
    return None
