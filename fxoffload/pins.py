"""Pinning: telling the driver to hold host memory in place, so that copies from it run beside compute.

Pinned memory is memory that nothing else can have. So no more than nine tenths are pinned of what the machine has, or of what a
container may use: the rest stays pageable, and a warning says so.
"""

from __future__ import annotations

import warnings
import weakref
from typing import Any

import torch

from fxoffload.errors import OffloadWarning
from fxoffload.hostmemory import host_memory
from fxoffload.regions import Region
from fxoffload.sizes import show_size

_MOST = 0.9
_REST = "the rest stays pageable host memory, whose copies are slower and block the host"

_all_pins: weakref.WeakSet[Pins] = weakref.WeakSet()


class Pins:
    """What one store has pinned. Once some of it cannot be pinned, no more is tried."""

    def __init__(self, *, enabled: bool) -> None:
        self.nbytes = 0
        self._enabled = enabled
        _all_pins.add(self)

    def add(self, region: Region, name: str) -> None:
        """Pin a region, for what is called `name` in a warning."""
        if not self._enabled or region.pinned:
            return
        memory = host_memory()
        pinned = sum(pins.nbytes for pins in _all_pins)
        if pinned + region.nbytes > _MOST * memory.total_nbytes:
            self._stop(
                f"pins: {name}: {show_size(pinned)} are pinned, and no more than nine tenths may be of {memory.name}, "
                f"{show_size(memory.total_nbytes)}; {_REST}; add host memory, or raise the limit"
            )
            return
        runtime: Any = torch.cuda.cudart()
        status = int(runtime.cudaHostRegister(region.address, len(region.memory), 0))
        if status:
            self._stop(
                f"pins: {name}: the driver refused to pin {show_size(region.nbytes)} of host memory (error {status}) after "
                f"{show_size(self.nbytes)}; {_REST}; raise the limit on locked memory (ulimit -l) or free host memory"
            )
            return
        region.pinned = True
        self.nbytes += region.nbytes

    def remove(self, region: Region) -> None:
        """Unpin a region. No copy may read it any more."""
        if region.pinned:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(region.address)
            region.pinned = False
            self.nbytes -= region.nbytes

    def after_fork(self) -> None:
        self.nbytes = 0
        self._enabled = False

    def _stop(self, message: str) -> None:
        self._enabled = False
        warnings.warn(message, OffloadWarning, stacklevel=2)
