"""What tests of the front doors share: a small model, offloaded for the CPU device, and its calls."""

from __future__ import annotations

from typing import Any

import torch

import fxoffload
from fxoffload.transfer import ThreadTransfer
from tests.models import rows

BLOCK = 5120
"""Bytes of a block of `toy(n)` as a bucket."""
REST = 2560
"""Bytes of what is outside its blocks."""
BUDGET = REST + 3 * BLOCK


def offload(model: Any, **settings: Any) -> Any:
    """Offload for the CPU device, with late copies."""
    handle = fxoffload.layerwise_offload(model, **{"onload_device": "cpu", "memory_budget": BUDGET, **settings})
    if isinstance(handle.engine.transfer, ThreadTransfer):
        handle.engine.transfer.delay_s = 0.001
    return handle


@torch.no_grad()
def run(model: Any, calls: int = 3) -> list[torch.Tensor]:
    return [model(rows(k)).clone() for k in range(calls)]


def assert_equal(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    assert all(map(torch.equal, got, wanted))
