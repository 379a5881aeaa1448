"""Seeing which weights a forward reads while their unit does not run, as `F.linear(x, self.embedding.weight)` does."""

# Private names of torch: version counters. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_METADATA = frozenset(
    {
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor._version.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.stride,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_inference,
    }
)
"""Questions about a weight that the host's copy answers as well as the device's."""


class Look(TorchFunctionMode):
    """Calls `see` with every tensor that some function is about to read."""

    def __init__(self, see: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What another compiler compiles reads the weights of units that run.
        if not torch.compiler.is_dynamo_compiling() and func not in _METADATA:
            for value in (*args, *(kwargs or {}).values()):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, torch.Tensor):
                        self._see(item)
        return func(*args, **(kwargs or {}))
