"""Offload without a compiler on a GPU: weights that are late, and hosts that run ahead, change no result."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.config import OffloadConfig
from fxoffload.eager import attach
from tests.gpu.helpers import DEVICE, LATE, ON_GPU, given, late_compute, late_copies, toy

pytestmark = ON_GPU


def leaf(_: str, module: nn.Module) -> bool:
    return next(module.children(), None) is None


def attached(model: nn.Module, **settings: Any) -> Any:
    """Attached and past its first forwards, with half of its weights streamed."""
    attachment = attach(model, OffloadConfig(**settings))
    for k in range(4):
        model(given(k))
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    activations = api.planned_of(model)[-1].activation_nbytes
    fxoffload.set_memory_budget(model, activations + weights // 2)
    for k in range(2):
        model(given(k))
    assert 0 < fxoffload.stats(model).nbytes_copied == fxoffload.get_plan(model).streamed_nbytes
    return attachment


@pytest.mark.parametrize("late", [late_copies, late_compute], ids=["late copies", "late compute"])
@pytest.mark.parametrize(
    "settings", [{}, {"module_filter": leaf}, {"async_transfer": False}], ids=["blocks", "leaves", "in turn"]
)
@torch.no_grad()
def test_streamed_equals_the_plain_model(settings: dict[str, Any], late: Callable[[Any], None]) -> None:
    model = toy()
    plain = copy.deepcopy(model).to(DEVICE)
    attachment = attached(model, **settings)
    for k in range(5):
        late(model)
        assert torch.equal(model(given(k)), plain(given(k)))
    assert all(p.device.type == "cpu" for p in model.parameters())
    attachment.detach(DEVICE)
    assert torch.equal(model(given(1)), plain(given(1)))


@torch.no_grad()
def test_inputs_on_the_host_are_moved() -> None:
    model = toy()
    plain = copy.deepcopy(model).to(DEVICE)
    attached(model)
    for k in range(3):
        assert torch.equal(model(given(k).cpu()), plain(given(k)))


@pytest.mark.parametrize("blocks", [slice(None), slice(1, 3)], ids=["all blocks", "some"])
@torch.no_grad()
def test_weights_that_start_on_the_device_come_to_the_host(blocks: slice) -> None:
    model = toy()
    plain = copy.deepcopy(model).to(DEVICE)
    model.blocks[blocks].to(DEVICE)  # type: ignore[index,union-attr]
    attached(model)
    for k in range(3):
        assert torch.equal(model(given(k)), plain(given(k)))
    assert {p.device.type for p in model.parameters()} == {"cpu"}


@torch.no_grad()
def test_the_host_does_not_wait() -> None:
    model = toy()
    plain = copy.deepcopy(model).to(DEVICE)
    attached(model)
    inputs = [given(k) for k in range(8)]
    wanted = [plain(x) for x in inputs]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100 * LATE)
        outputs = [model(x) for x in inputs]
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, outputs, wanted))


@torch.no_grad()
def test_inputs_come_from_the_host_and_results_go_where_they_are_wanted() -> None:
    model = toy()
    plain = copy.deepcopy(model).to(DEVICE)
    with torch.no_grad():
        attachment = attach(model, OffloadConfig(output_device=torch.device("cpu")))
        got = model(given(0).cpu())
        assert got.device.type == "cpu"
        assert torch.equal(got, plain(given(0)).cpu())
        # A block alone, from either side.
        block, reference = model.blocks[1], plain.blocks[1]  # type: ignore[index]
        assert torch.equal(block(given(1).cpu()), reference(given(1)))
        assert torch.equal(block(given(1)), reference(given(1)))
        attachment.detach()


class Outside(nn.Module):
    """Reads a weight of a block outside its call, and asks where its first parameter lies."""

    def __init__(self, toy: nn.Module) -> None:
        super().__init__()
        self.toy = toy

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(next(self.parameters()).device)
        return self.toy(x) * self.toy.blocks[2].up.weight.abs().mean()  # type: ignore[union-attr,index]


@torch.no_grad()
def test_weights_read_outside_their_units_are_on_the_device() -> None:
    model = Outside(toy())
    plain = copy.deepcopy(model).to(DEVICE)
    attached(model)
    for k in range(3):
        assert torch.equal(model(given(k)), plain(given(k)))


@torch.no_grad()
def test_edits_and_compiled_calls_in_turn() -> None:
    model = toy()
    plain = copy.deepcopy(model).to(DEVICE)
    attached(model)
    fxoffload.set_memory_budget(model, "1GiB")
    compiled = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, options={"segment_compiler": "eager"})
    for k in range(4):
        for m in (model, plain):
            m.blocks[k].up.weight.data.mul_(1.1)  # type: ignore[union-attr,index]
        assert torch.equal(model(given(k)), plain(given(k)))
        assert torch.equal(compiled(given(k)), plain(given(k)))


@torch.no_grad()
def test_the_peak_stays_under_the_budget() -> None:
    model = toy(24, d=1024)
    budget = 232 << 20
    attachment = attach(model, OffloadConfig(memory_budget=budget))
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    for k in range(8):
        model(given(k, d=1024))
    peak = torch.cuda.max_memory_reserved() - before
    assert budget // 2 < peak <= budget
    assert fxoffload.stats(model).nbytes_copied > 0
    attachment.detach()


class Gated(nn.Module):
    """A block that returns a view of its weight beside its result."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x).tanh(), self.linear.weight[1]


class Gates(nn.Module):
    """Returns a view of its weight, and that weight."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Gated(d) for _ in range(8))
        self.table = nn.Parameter(torch.randn(4, d))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        for block in self.blocks:
            y, gate = block(x)
            x = x + y * gate
        return x, self.table[1:3], self.table


@pytest.mark.parametrize("late", [late_copies, late_compute], ids=["late copies", "late compute"])
@torch.no_grad()
def test_weights_that_modules_return_are_kept_on_the_device(late: Callable[[Any], None]) -> None:
    width = given(0).shape[-1]
    torch.manual_seed(0)
    model = Gates(width).bfloat16().eval().requires_grad_(False)
    plain = copy.deepcopy(model).to(DEVICE)
    attachment = attached(model)
    late(model)
    results = [(model(given(k)), plain(given(k))) for k in range(4)]
    assert model.table.device.type == "cpu"
    for got, wanted in results:
        assert {t.device for t in got} == {t.device for t in wanted}
        assert all(map(torch.equal, got, wanted))
    attachment.detach()
