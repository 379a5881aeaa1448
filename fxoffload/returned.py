"""Copies in place of what a module returns from memory that it was lent.

A view of a weight (`self.table[:n]`) lies where other weights come when its module has returned, and who gets it may keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch

from fxoffload.containers import map_tensors
from fxoffload.storages import plain_tensors, storage_of
from fxoffload.wrappers import flatten, is_wrapper, on_device

_HOST = torch.device("cpu")


def copy_lent(result: Any, is_lent: Callable[[torch.Tensor], bool], device: torch.device) -> Any:
    """A result in which every tensor that is lent, or consists of some that are, is a copy on `device`.

    Where there is none it is returned as it is.
    """
    copies: dict[int, torch.Tensor] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not any(map(is_lent, plain_tensors(tensor))):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = _copied(tensor, device)
        return copies[id(tensor)]

    return map_tensors(result, change)


def lies_in(tensor: torch.Tensor, storages: Collection[int]) -> bool:
    """Whether the bytes of a plain tensor are in one of these storages."""
    # Sparse tensors and their like have no storage of their own.
    return tensor.layout == torch.strided and storage_of(tensor) in storages


def _copied(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Bit for bit: some wrappers quantize again when they are cloned."""
    if not is_wrapper(tensor):
        return tensor.to(device, copy=True)
    kind: Any = type(tensor)
    attributes, context = flatten(tensor)
    values = ((name, getattr(tensor, name)) for name in attributes)
    parts = {name: _copied(value, device) if isinstance(value, torch.Tensor) else value for name, value in values}
    return kind.__tensor_unflatten__(parts, on_device(context, device, _HOST), tensor.shape, tensor.stride())
