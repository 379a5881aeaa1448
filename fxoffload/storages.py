"""Which storage a tensor lies in, and which tensors a value is: two tensors alias when their storage is the same."""

# Private names of torch: storage identity, pytrees, and what `torch.func` wraps. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch._C._functorch import TransformType, get_interpreter_stack, get_unwrapped, is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

from fxoffload.wrappers import flatten, is_wrapper


def storage_of(tensor: torch.Tensor) -> int:
    """A number for the storage of a tensor, good while the storage lives; of fake tensors too."""
    return tensor.untyped_storage()._cdata


def is_mapped(tensor: torch.Tensor) -> bool:
    """Whether `vmap` runs, and hides a dimension of the tensor. It has no storage; what is below it has."""
    return is_functorch_wrapped_tensor(tensor)


def is_differentiated() -> bool:
    """Whether a transform of torch.func other than `vmap` runs, such as `grad` or `jvp`: every new tensor is one of its own."""
    return any(transform.key() != TransformType.Vmap for transform in get_interpreter_stack() or ())


def plain_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in a value of a node, with the inner tensors of wrappers in their place."""
    return [plain for t in tree_leaves(value) if isinstance(t, torch.Tensor) for plain in _plain(t)]


def nbytes_of(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the elements of some tensors; a wrapper has those of its inner tensors."""
    return sum(plain.numel() * plain.element_size() for tensor in tensors for plain in _plain(tensor))


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    while is_mapped(tensor):
        tensor = get_unwrapped(tensor)
    if not is_wrapper(tensor):
        yield tensor
        return
    for attribute in flatten(tensor)[0]:
        inner = getattr(tensor, attribute)
        if isinstance(inner, torch.Tensor):
            yield from _plain(inner)
