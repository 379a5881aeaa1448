"""Weights and buffers that every block writes, in ways that names and version counters do not tell: all reaches the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.checks import Trio, assert_streams
from tests.models import rows, seeded
from tests.writing import bump

D = 16


class CustomOp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return bump(self.total, x) + self.total


class RunningStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(3, track_running_stats=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean: Any = self.norm.running_mean
        return self.norm(x[None])[0] + mean.sum()


class Foreach(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("first", torch.zeros(D))
        self.register_buffer("second", torch.zeros(D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch._foreach_add_([self.first, self.second], [x[0], x[1]])
        return x * self.first + self.second


class MaxNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, D, max_norm=0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.table(torch.tensor([1, 2, 3]))


class Data(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.data.mul_(0.9)
        return x @ self.weight


class InPlaceByKeyword(nn.Module):
    """What the writing node returns is no view to be taken again in front of every reader."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.randn(3, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.state.sum()
        now = F.leaky_relu(self.state, 0.5, inplace=True)
        return x + before + now * now.sum()


class Writing(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.writers = nn.ModuleList(kind() for _ in range(4))
        self.layers = nn.ModuleList(nn.Linear(D, D) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for writer, layer in zip(self.writers, self.layers, strict=True):
            x = layer(writer(x)).tanh()
        return x


KINDS = [CustomOp, RunningStatistics, Foreach, MaxNorm, Data, InPlaceByKeyword]


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_every_block_writes(kind: type[nn.Module], compiler: str) -> None:
    make: Callable[[], nn.Module] = lambda: seeded(lambda: Writing(kind)).train()  # noqa: E731
    trio = Trio(make, rows(0), segment_compiler=compiler)
    trio.check_state()
    for k in range(1, 4):
        trio.check(rows(k))
        trio.check_state()
    assert_streams(trio.streamed)
