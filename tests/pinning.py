"""A driver that pins host memory where there is none, so that a store on the CPU device pins as one of CUDA does."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fxoffload import store
from fxoffload.pins import Pins


class Driver:
    """Pins the first `nbytes` bytes that it is asked for, and refuses from then on."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.pinned: dict[int, int] = {}
        """Bytes by their address."""

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.left -= nbytes
        if self.left < 0:
            return 2
        self.pinned[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        return 0


@contextlib.contextmanager
def pinning(nbytes: int) -> Iterator[Driver]:
    """Stores pin by a driver of so many bytes, whatever their device. Models that were made meanwhile have to go meanwhile."""
    driver = Driver(nbytes)

    def make(**_: Any) -> Pins:
        return Pins(enabled=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "cudart", lambda: driver)
        patch.setattr(store, "Pins", make)
        yield driver
        torch._dynamo.reset()
        gc.collect()
        assert driver.pinned == {}
