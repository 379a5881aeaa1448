"""Models that call `torch.vmap`: while it runs, tensors have no storage, and no segment may end."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxoffload import api
from tests.checks import check_budgets
from tests.models import Block, rows, seeded


class Scales(nn.Module):
    """Between blocks a row is scaled by what `vmap` makes of it, without weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) * torch.vmap(lambda row: row.square().mean())(x)[:, None]
        return x


class Mapped(Scales):
    """`vmap` runs two blocks at once, for row by row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.blocks
        return d(torch.vmap(lambda row: c(b(row)))(a(x)))


class Within(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.vmap(lambda row: self.down(self.up(row).relu()))(self.norm(x))


def within() -> nn.Module:
    return nn.Sequential(*(Within(16) for _ in range(4)))


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize(("make", "segments"), [(Scales, 8), (Mapped, 5), (within, 8)])
def test_vmap(make: type[nn.Module], segments: int, compiler: str) -> None:
    model = seeded(make)
    # A block is cut in two, but not where `vmap` runs it: there its norm alone may be apart.
    check_budgets(model, [rows(k) for k in range(3)], segment_compiler=compiler, max_bucket_bytes="2.5KiB")
    assert len(api.last_binding(model).costs.segments) == segments
