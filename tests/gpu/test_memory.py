"""On a GPU: where slots lie, what is allocated and pinned, and whether the peak stays within the budget."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import pieces
from tests.checks import assert_state, assert_streams, snapshot
from tests.gpu.helpers import DEVICE, ON_GPU, given, late_copies, offload, peak_in, settle, slots, toy, use_budget
from tests.models import Toy, seeded

pytestmark = ON_GPU


@torch.no_grad()
def test_slots_stay_where_they_are_and_nothing_is_allocated() -> None:
    model = toy(9)
    compiled = offload(model)
    settle(compiled, given(0))
    use_budget(model, "half")
    x = given(1)
    settle(compiled, x)
    assert_streams(model)

    def state() -> tuple[Any, ...]:
        counts = torch.cuda.memory_stats(DEVICE)
        addresses = {name: (s.device.data_ptr(), s.host.data_ptr()) for name, s in slots(model).items()}
        return addresses, counts["num_device_alloc"], counts["num_device_free"], counts["num_alloc_retries"]

    before = state()
    allocated = torch.cuda.memory_allocated(DEVICE)
    for _ in range(100):
        compiled(x)
    torch.cuda.synchronize()
    assert state() == before
    assert torch.cuda.memory_allocated(DEVICE) == allocated


@pytest.mark.parametrize("mebibytes", [160, 224, 288, 512])
@torch.no_grad()
def test_the_peak_stays_under_the_budget(mebibytes: int) -> None:
    budget = mebibytes << 20
    model, peak = peak_in(budget, offload)
    plan = fxoffload.get_plan(model)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert 280 << 20 < nbytes < 320 << 20
    assert plan.peak_nbytes <= budget
    assert peak <= budget, f"{peak >> 20} MiB of {mebibytes}"
    if budget < nbytes:
        assert_streams(model)
        assert peak > budget // 2, "the budget is used"
    else:
        assert plan.streamed_nbytes == 0


@torch.no_grad()
def test_models_in_turn_stay_under_their_budget_and_keep_what_is_to_spare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", 32 << 20)
    budget, d = 640 << 20, 1024
    shared = fxoffload.Budget(budget)
    models = [seeded(lambda: Toy(36, d).bfloat16(), seed) for seed in range(2)]
    x = given(0, d=d, n=512)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    runs = [offload(model, memory_budget=shared) for model in models]
    expected: list[torch.Tensor] = []
    for run in runs:
        settle(run, x)
        expected.append(run(x).clone())
    torch.cuda.reset_peak_memory_stats(DEVICE)
    for _ in range(4):
        for model, run, wanted in zip(models, runs, expected, strict=True):
            assert torch.equal(run(x), wanted)
            stats, plan = fxoffload.stats(model), fxoffload.get_plan(model)
            assert plan.streamed_nbytes == 0
            assert 0 < stats.nbytes_copied < plan.resident_nbytes
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_reserved(DEVICE) - before
    assert peak <= budget, f"{peak >> 20} MiB of {budget >> 20}"


TUNED = {
    "mode": "max-autotune-no-cudagraphs",
    # A few of the many matrix products that there are: what they are tried with is as large.
    "inductor": {"force_disable_caches": True, "test_configs.max_mm_configs": 4},
}


@pytest.mark.parametrize("settings", [{}, {"profile": True}, TUNED], ids=["compiled", "profiled", "tuned"])
@torch.no_grad()
def test_compiling_a_model_that_is_larger_than_the_device(settings: dict[str, Any]) -> None:
    """Case 19. The cap, which stands for the device, is a little above the budget: no allocation comes near it."""
    budget, cap, d = 384 << 20, 416 << 20, 1024
    model = seeded(lambda: Toy(72, d).bfloat16())
    assert sum(p.nbytes for p in model.parameters()) > 560 << 20
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    torch.cuda.set_per_process_memory_fraction((before + cap) / total, DEVICE)
    try:
        with pytest.raises(torch.OutOfMemoryError):
            model.to(DEVICE)
        model.cpu()
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(DEVICE)
        tries = allocator_tries()
        compiled = offload(model, memory_budget=budget, segment_compiler="inductor", **settings)
        result = compiled(given(0, d=d, n=512))
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_reserved(DEVICE) - before
        assert peak <= budget, f"{peak >> 20} MiB of {budget >> 20}"
        assert allocator_tries() == tries, "the allocator ran into the cap"
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, DEVICE)
    fxoffload.set_memory_budget(model, "2GiB")
    assert torch.equal(compiled(given(0, d=d, n=512)), result)
    assert fxoffload.get_plan(model).streamed_nbytes == 0


def allocator_tries() -> tuple[int, int]:
    """How often memory was short: solved by giving back what was cached, and not solved."""
    counts = torch.cuda.memory_stats(DEVICE)
    return counts["num_alloc_retries"], counts["num_ooms"]


class Rows(nn.Module):
    """100 weights of 1.1 x a power of two bytes."""

    def __init__(self, n: int = 100, d: int = 512, rows: int = 1126) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(d, rows, bias=False, dtype=torch.bfloat16) for _ in range(n))
        self.d = d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)[..., : self.d] * 0.1
        return x


@torch.no_grad()
def test_pinned_bytes_are_hardly_more_than_the_weights() -> None:
    """Case 61."""
    model = seeded(Rows)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert 1.05 * 2**20 * 100 < nbytes < 1.15 * 2**20 * 100
    offload(model)(given(0, d=512))
    stats = fxoffload.stats(model)
    assert nbytes <= stats.nbytes_pinned <= 1.05 * nbytes
    assert stats.nbytes_pinned == stats.nbytes_host
    assert all(p.is_pinned() for p in model.parameters())


@pytest.mark.parametrize("blocks", [slice(None), slice(2, 5)], ids=["all", "some"])
@torch.no_grad()
def test_weights_that_start_on_the_device_are_taken_over(blocks: slice) -> None:
    model = toy(6, 512)
    before = snapshot(model)
    wanted = copy.deepcopy(model).to(DEVICE)(given(1, d=512)).clone()
    model.blocks[blocks].to(DEVICE)
    if blocks == slice(None):
        model.to(DEVICE)
    nbytes = sum(p.nbytes for p in model.parameters())
    compiled = offload(model)
    settle(compiled, given(0, d=512))
    assert_state(model, before)
    expected = compiled(given(1, d=512)).clone()
    torch.testing.assert_close(expected, wanted, rtol=2e-2, atol=2e-2)
    allocated = torch.cuda.memory_allocated(DEVICE)
    use_budget(model, "quarter")
    for _ in range(3):
        late_copies(model)
        assert torch.equal(compiled(given(1, d=512)), expected)
    assert_streams(model)
    assert torch.cuda.memory_allocated(DEVICE) < allocated - nbytes // 4
