"""An operator that writes to an argument, which only its schema tells."""

from __future__ import annotations

import torch


@torch.library.custom_op("fxoffload_tests::bump", mutates_args=("total",))
def bump(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    total.add_(x.mean())
    return x * 2


@bump.register_fake
def _(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)
