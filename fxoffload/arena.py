"""The arena: all weight memory on the onload device, as one allocation whose offsets the plan gives."""

from __future__ import annotations

import weakref

import torch

POISON = 0xFF
"""Evicted bytes read as NaN in every floating dtype of 16 bits and more."""


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def nbytes_of_arenas(device: torch.device) -> int:
    """Bytes of all arenas on a device."""
    return sum(arena.nbytes for arena in _arenas if arena.device == device)


class Arena:
    """One uint8 tensor."""

    def __init__(self, device: torch.device) -> None:
        _arenas.add(self)
        self.device = device
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def allocate(self, nbytes: int) -> None:
        """Allocate anew, with no contents. The old memory is given back first, so the peak is never the sum of both.

        No view of the old memory may be left. Raises what the device's allocator raises; the arena is then empty.
        """
        if self.nbytes and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type != "cpu":
            torch.accelerator.empty_cache()
        # Inference tensors in the arena would break later calls under no_grad.
        with torch.inference_mode(False):
            self.memory = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
