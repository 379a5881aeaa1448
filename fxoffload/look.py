"""Seeing which weights a forward reads while their unit does not run, as `F.linear(x, self.embedding.weight)` does.

And which it writes through `weight.data`, which raises no version counter that could be asked later.
"""

# Private names of torch: version counters. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxoffload.edits import elements
from fxoffload.wrappers import is_wrapper

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
_ALIAS = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_WRITES = frozenset({"__setitem__", *(f"__i{name}__" for name in _OPERATORS)})
"""Names of functions that write to their first argument, besides those that end in one `_`."""


class Look(TorchFunctionMode):
    """Calls `see` with every tensor that some function is about to read, which says whether that is a weight.

    Calls `wrote` with each weight whose `data` some function wrote to.
    """

    def __init__(self, see: Callable[[torch.Tensor], bool], wrote: Callable[[torch.Tensor], None]) -> None:
        super().__init__()
        self._see = see
        self._wrote = wrote
        self._aliased: dict[int, tuple[range, torch.Tensor]] = {}
        """Weights whose `data` was asked for, by `id`, with the addresses that it has."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What another compiler compiles reads the weights of units that run.
        if torch.compiler.is_dynamo_compiling() or func in _METADATA:
            return func(*args, **(kwargs or {}))
        given = kwargs or {}
        weights = [item for item in _tensors((*args, *given.values())) if self._see(item)]
        if func == _ALIAS and weights:
            self._aliased[id(weights[0])] = _addresses(weights[0]), weights[0]
        elif self._aliased and (_writes(getattr(func, "__name__", "")) or given.get("inplace") or given.get("out") is not None):
            self._see_written(_tensors((*args[:1], given.get("out"))))
        return func(*args, **given)

    def _see_written(self, targets: Iterable[torch.Tensor]) -> None:
        for target in targets:
            if not is_wrapper(target):
                for addresses, weight in self._aliased.values():
                    if target.data_ptr() in addresses:
                        self._wrote(weight)


def _writes(name: str) -> bool:
    return name in _WRITES or (name.endswith("_") and not name.endswith("__"))


def _tensors(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                yield item


def _addresses(tensor: torch.Tensor) -> range:
    flat = elements(tensor)
    return range(flat.data_ptr(), flat.data_ptr() + flat.numel() * flat.element_size())
