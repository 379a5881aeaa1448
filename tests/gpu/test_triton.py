"""Buffers that a model's own Triton kernels write, which no schema, name or version counter tells."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from tests.gpu.helpers import DEVICE, ON_GPU, given, late_copies, offload

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

pytestmark = ON_GPU

D = 64


@triton.jit
def add_to(total, x, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    tl.store(total + at, tl.load(total + at, mask=inside) + tl.load(x + at, mask=inside), mask=inside)


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(8, D, dtype=torch.bfloat16))
        self.proj = nn.Linear(D, D, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total: Any = self.total
        add_to[(8,)](total, x, x.numel(), BLOCK=D)
        return self.proj(x + total).tanh()


@pytest.mark.parametrize("how", ["eager", "aot_eager", "inductor", "without a compiler"])
@torch.no_grad()
def test_what_a_triton_kernel_writes(how: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Writer() for _ in range(6))).requires_grad_(False)
    plain, resident = copy.deepcopy(model).to(DEVICE), copy.deepcopy(model)
    if how == "without a compiler":
        fxoffload.layerwise_offload(model, memory_budget="1GiB")
        run, reference = model, plain
    else:
        run, reference = (offload(m, segment_compiler=how) for m in (model, resident))
    for k in range(6):
        assert torch.equal(run(given(k)), reference(given(k)))
    fxoffload.set_memory_budget(model, fxoffload.smallest_budget(model, overlap=False))
    for k in range(6, 12):
        late_copies(model)
        assert torch.equal(run(given(k)), reference(given(k)))
    assert fxoffload.stats(model).nbytes_copied > 0
    for (_, got), wanted in zip(model.named_buffers(), (plain if run is model else resident).buffers(), strict=True):
        assert torch.equal(got, wanted.cpu())
