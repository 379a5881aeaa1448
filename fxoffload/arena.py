"""The arena: all weight memory on the onload device, as one allocation whose offsets the plan gives."""

from __future__ import annotations

import torch

POISON = 0xFF
"""Evicted bytes read as NaN in every floating dtype of 16 bits and more."""


class Arena:
    """One uint8 tensor. `generation` counts allocations: a view is good for one generation."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.generation = 0
        self.memory = torch.empty(0, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self.memory.numel()

    def fit(self, least_nbytes: int, most_nbytes: int) -> bool:
        """Make the arena at least `least_nbytes` and at most `most_nbytes` long. True if it was allocated anew, with no contents.

        The old allocation is given back before the new one is taken, so the peak is never the sum of both.
        """
        if least_nbytes <= self.nbytes <= most_nbytes:
            return False
        self.release()
        # Inference tensors in the arena would break later calls under no_grad.
        with torch.inference_mode(False):
            self.memory = torch.empty(least_nbytes, dtype=torch.uint8, device=self.device)
        self.generation += 1
        return True

    def release(self) -> None:
        if self.nbytes and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        self.memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
