"""A forward on the CPU as the device: real copies on a thread, evicted bytes poisoned. No time here says anything about a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxoffload
from tests.models import rows, toy

pytestmark = pytest.mark.benchmark(group="CPU device")
DEPTH, WIDTH = 12, 64
OPTIONS: dict[str, Any] = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1MiB"}


def model_and_input() -> tuple[torch.nn.Module, torch.Tensor]:
    return toy(DEPTH, WIDTH), rows(0, WIDTH, 32)


@torch.no_grad()
def test_plain(benchmark) -> None:
    model, x = model_and_input()
    benchmark(model, x)


@pytest.mark.parametrize("budget", ["smallest", "all"])
@torch.no_grad()
def test_compiled(benchmark, budget: str) -> None:
    model, x = model_and_input()
    expected = model(x)
    compiled = torch.compile(model, backend="layerwise", options=OPTIONS)
    compiled(x)
    fxoffload.set_memory_budget(model, fxoffload.smallest_budget(model) if budget == "smallest" else "1GiB")
    compiled(x)
    assert torch.equal(benchmark(compiled, x), expected)
    assert (fxoffload.stats(model).nbytes_copied == 0) == (budget == "all")


@torch.no_grad()
def test_hooks(benchmark) -> None:
    model, x = model_and_input()
    expected = model(x)
    fxoffload.layerwise_offload(model, memory_budget="300KiB", onload_device="cpu")
    for _ in range(4):
        model(x)
    assert torch.equal(benchmark(model, x), expected)
    assert fxoffload.stats(model).nbytes_copied > 0


@torch.no_grad()
def test_another_budget(benchmark) -> None:
    model, x = model_and_input()
    compiled = torch.compile(model, backend="layerwise", options=OPTIONS)
    compiled(x)
    smallest = fxoffload.smallest_budget(model)
    budgets = iter(range(smallest, smallest + 10**9, 4096))
    benchmark(lambda: fxoffload.set_memory_budget(model, next(budgets)))
