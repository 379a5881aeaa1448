"""The first forwards of a graph on an accelerator: how much memory a forward takes besides the arena, and how long segments run.

The estimate of the activations comes from liveness; what a forward really takes also has the library's workspaces, what
fusion saves, and the allocator's fragmentation. So the first `FORWARDS` forwards run with the least staging that works: one warms
kernels up, the others show what the allocator comes to hold,

    activations = reserved - arenas - what others had allocated before, the graph's inputs left out - pools of others' captures

and the plan is made with that: memory that is reserved around the tensors of others, and of no use to them, counts here. The next
`WATCHED` forwards are watched: should they take more, the plan is made again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from fxoffload.arena import nbytes_of_arenas
from fxoffload.debug import logger
from fxoffload.profile import SegmentTimer
from fxoffload.sizes import show_size

FORWARDS = 3
WATCHED = 6
SLACK_NBYTES = 48 << 20
"""The allocator holds pieces of 20 MiB, which fall otherwise at other addresses."""
MORE_SLACK_NBYTES = 24 << 20
"""One piece more where there are many, as activations of half a GiB are in: so much was seen of Qwen-Image."""
SHARED_SLACK_NBYTES = 80 << 20
"""Beside other models under one budget: what lives on of their results holds pieces too, others in every turn."""
AMPLE_NBYTES = 256 << 20
"""What kernels may take while they are tuned, beyond twice the activations."""


class Warmup:
    """Counts forwards. `timer` is set while segments are to be timed. `idle`: bytes of others' captures that are in no tensor."""

    def __init__(
        self, device: torch.device, *, known: bool, profile: bool, shares: bool, idle: Callable[[], int] = lambda: 0
    ) -> None:
        """`shares`: other models run under the same budget."""
        self._device = device
        self._idle = idle
        self._measures = device.type != "cpu" and not known
        self._forwards = FORWARDS if self._measures else int(profile)
        self._watched = WATCHED if self._measures else 0
        self._profile = profile
        self._slack_nbytes = SLACK_NBYTES + (SHARED_SLACK_NBYTES if shares else 0)
        self._foreign_nbytes = 0
        self.timer: SegmentTimer | None = SegmentTimer(device) if profile and self._forwards == 1 else None

    @property
    def done(self) -> bool:
        """Whether the plan may use the whole budget."""
        return self._forwards == 0

    def begin(self, inputs: Iterable[Any]) -> None:
        """Before the first forward of the graph, with its inputs on the device."""
        if self._measures:
            given = sum(t.untyped_storage().nbytes() for t in inputs if isinstance(t, torch.Tensor))
            self._settle()
            self._foreign_nbytes = torch.accelerator.memory_allocated(self._device) - nbytes_of_arenas(self._device) - given

    def after_forward(self) -> bool:
        """True when the last of the first forwards is over: `activations` and `timer` have their results."""
        self._forwards -= 1
        if self._forwards == FORWARDS - 1 and self._measures:
            self._settle()
        if self._forwards == 1 and self._profile:
            self.timer = SegmentTimer(self._device)
        return self.done

    def activations(self, estimate_nbytes: int) -> int:
        """Bytes that a forward takes besides the arena, as measured; the estimate where nothing is measured."""
        if not self._measures:
            return estimate_nbytes
        measured = self._held_nbytes()
        logger.info("warmup: a forward takes %s besides the arena, estimated %s", show_size(measured), show_size(estimate_nbytes))
        slack = self._slack_nbytes + max(measured // 64, min(measured // 16, MORE_SLACK_NBYTES))
        # Below a few of the allocator's pieces the measure tells little.
        return max(measured + slack, min(estimate_nbytes, 3 * SLACK_NBYTES))

    def watch(self) -> None:
        """Watch the next forwards again: they have other sizes."""
        self._watched = WATCHED if self._measures else 0

    def excess(self, activation_nbytes: int) -> int:
        """Bytes that the forward just issued came to hold beyond `activation_nbytes`; 0 once enough forwards were watched."""
        if not self._watched:
            return 0
        self._watched -= 1
        return max(self._held_nbytes() - activation_nbytes, 0)

    def _held_nbytes(self) -> int:
        held = torch.accelerator.memory_reserved(self._device) - nbytes_of_arenas(self._device) - self._foreign_nbytes
        return held - self._idle()

    def _settle(self) -> None:
        """Let the allocator give back what it can."""
        torch.accelerator.synchronize(self._device)
        torch.accelerator.empty_cache()
