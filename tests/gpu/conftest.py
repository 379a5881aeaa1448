"""Poison on every device, and a clean device after every test."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Evicted bytes read as NaN. The machine is measured before the test counts memory."""
    import torch

    from fxoffload.calibrate import machine_of
    from tests.gpu.helpers import DEVICE

    machine_of(DEVICE)
    monkeypatch.setenv("FXOFFLOAD_POISON", "1")
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
