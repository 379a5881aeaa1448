"""What the tests on a GPU share: tiny bf16 models, their inputs on the device, and streams that are late."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.cuda import CudaCapturer
from fxoffload.transfer import Slot, StreamTransfer
from tests import checks
from tests.checks import budgets
from tests.models import Toy, seeded

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Not enough SMs"),
]
"""The marks of every test here."""
DEVICE = torch.device("cuda", 0)
LATE = 20_000_000
"""Clock cycles, about ten milliseconds."""
D = 64
SETTLED = 12
"""Calls after which the warm-up is over and no forward is watched any more."""


def offload(model: nn.Module, **options: Any) -> Any:
    return checks.offload(model, **{"onload_device": "cuda", **options})


def given(k: int, *, d: int = D, dtype: torch.dtype = torch.bfloat16, n: int = 8) -> torch.Tensor:
    """The `k`-th input, on the device."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(k)).to(DEVICE, dtype)


def toy(n: int = 6, d: int = D) -> Toy:
    model = seeded(lambda: Toy(n, d).bfloat16())
    assert isinstance(model, Toy)
    return model


def settle(compiled: Callable[..., Any], *args: Any) -> None:
    for _ in range(SETTLED):
        compiled(*args)
    torch.cuda.synchronize()


def results(compiled: Callable[..., Any], calls: int) -> list[torch.Tensor]:
    """Results of the program when everything is resident."""
    settle(compiled, given(0))
    return [compiled(given(k)).clone() for k in range(calls)]


def use_budget(model: Any, label: str) -> None:
    fxoffload.set_memory_budget(model, budgets(model)[label])


def transfer_of(model: Any) -> StreamTransfer:
    found = api.engine_of(model).transfer
    assert isinstance(found, StreamTransfer)
    return found


def late_copies(model: Any) -> None:
    with transfer_of(model)._copy_stream:
        torch.cuda._sleep(LATE)


def late_compute(model: Any) -> None:
    torch.cuda._sleep(LATE)


def slots(model: Any) -> dict[str, Slot]:
    staged = api.bindings_of(model)[-1].staged
    assert staged is not None
    return staged.of_load


def graphed(model: nn.Module, **options: Any) -> Any:
    """Offload with captures: what is not captured fails."""
    return offload(model, **{"cuda_graph": "strict", **options})


def resident(model: nn.Module, calls: int, **options: Any) -> list[torch.Tensor]:
    """Results of a copy of a model under the same backend, uncaptured and resident."""
    other = copy.deepcopy(model)
    compiled = offload(other, **options)
    return results(compiled, calls)


def peak_in(budget_nbytes: int, compile_: Callable[..., Any]) -> tuple[Toy, int]:
    """A model of about 300 MiB that has settled in this budget, with inputs in turn, and the most that was reserved for it."""
    d = 1024
    model = toy(36, d)
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    compiled = compile_(model, memory_budget=budget_nbytes)
    inputs = [given(k, d=d, n=512) for k in range(2)]
    for _ in range(SETTLED):
        for x in inputs:
            compiled(x)
    torch.cuda.synchronize()
    return model, torch.cuda.max_memory_reserved(DEVICE) - before


def capturer_of(model: Any) -> CudaCapturer:
    found = api.engine_of(model).capturer
    assert isinstance(found, CudaCapturer)
    return found


def assert_replayed(model: Any, count: int = 1) -> Callable[[], None]:
    """To be called when `count` more forwards were replays, and steady ones."""
    before = fxoffload.stats(model)

    def check() -> None:
        after = fxoffload.stats(model)
        assert after.replays - before.replays == count
        assert after.restores == before.restores

    return check
