"""Quantized weights on a GPU: streamed by their inner tensors, with wrappers that say where these are."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.config import OffloadConfig
from fxoffload.eager import attach
from fxoffload.select import tensors_below
from fxoffload.storages import plain_tensors
from tests.checks import assert_streams
from tests.gpu.helpers import DEVICE, ON_GPU, late_compute, late_copies, offload, settle, use_budget
from tests.wrapped import KINDS, rows

pytestmark = ON_GPU
ON_DEVICE = ["int8", "float8", "nf4", "scaled", "nested", "packed", "bytes"]
"""Those that need no matrix product of their own, whose operands have least sizes."""


def pair(kind: str) -> tuple[Any, nn.Module]:
    """A model on the host, and one like it on the device."""
    make, _ = KINDS[kind]
    reference = make().to(DEVICE)
    for _, tensor in tensors_below(reference):
        # Those beside a weight are unknown to `to`.
        tensor.data = tensor.data.to(DEVICE)
    return make(), reference


def given(model: nn.Module, k: int) -> torch.Tensor:
    return rows(model, k).to(DEVICE)


@pytest.mark.parametrize("late", [late_copies, late_compute], ids=["late copies", "late compute"])
@pytest.mark.parametrize("kind", ON_DEVICE)
@torch.no_grad()
def test_compiled(kind: str, late: Callable[[Any], None]) -> None:
    model, reference = pair(kind)
    compiled = offload(model, segment_compiler="inductor" if kind in ("int8", "float8") else "aot_eager")
    settle(compiled, given(model, 0))
    expected = [compiled(given(model, k)).clone() for k in range(3)]
    for k, wanted in enumerate(expected):
        torch.testing.assert_close(wanted, reference(given(model, k)), rtol=2e-2, atol=2e-2)
    for label in ("smallest", "half"):
        use_budget(model, label)
        for k, wanted in enumerate(expected):
            late(model)
            assert torch.equal(compiled(given(model, k)), wanted), (label, k)
    assert_streams(model)
    assert all(t.device.type == "cpu" for p in model.parameters() for t in (p, *plain_tensors(p)))


@pytest.mark.parametrize("kind", ON_DEVICE)
@torch.no_grad()
def test_without_a_compiler(kind: str) -> None:
    model, reference = pair(kind)
    seen: list[str] = []

    def look(module: nn.Module, _: Any) -> None:
        seen.extend(t.device.type for t in (module.weight, *plain_tensors(module.weight)))

    model.blocks[1].up.register_forward_pre_hook(look)
    attachment = attach(model, OffloadConfig())
    for k in range(4):
        model(given(model, k))
    weights = sum(t.numel() * t.element_size() for _, t in tensors_below(model))
    fxoffload.set_memory_budget(model, api.planned_of(model)[-1].activation_nbytes + weights * 2 // 3)
    for k in range(4):
        late_copies(model)
        assert torch.equal(model(given(model, k)), reference(given(model, k)))
    assert fxoffload.stats(model).nbytes_copied > 0
    assert set(seen) == {"cuda"}
    assert all(t.device.type == "cpu" for p in model.parameters() for t in (p, *plain_tensors(p)))
    attachment.detach()
