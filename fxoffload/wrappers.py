"""Weights that consist of others: tensor subclasses such as quantized ones, which wrap plain tensors, and what lies beside bytes.

A wrapper holds no bytes itself. `__tensor_flatten__` names its inner tensors, which may be wrappers in turn; these are what is
packed, priced and streamed, each under its own name (`blocks.0.up.weight.qdata`). The wrapper stays the object that it was, and
its inner tensors stay the objects that they were: only the memory behind them moves, as with any other weight.

Nothing may hold a wrapper weakly: `model.to(...)` swaps it with another one, which torch refuses where there are weak references.
"""

# Private names of torch: the making of a wrapper, and the mark of a class that has no `__torch_dispatch__`. Checked on torch 2.11
# and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxoffload.errors import WeightError

Path = tuple[str, ...]

PARTS = "fxoffload_parts"
"""Metadata of a node that makes a weight from placeholders: their names."""


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor that consists of others, which `inner_tensors` names."""
    return is_traceable_wrapper_subclass(value)


def inner_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[Path, torch.Tensor]]:
    """The plain tensors that a weight consists of, by the attributes that lead to them; a plain weight is its own, at `()`.

    Raises WeightError, naming the weight, for a subclass that does not say what it consists of.
    """
    if not is_wrapper(tensor):
        _refuse_opaque(name, tensor)
        yield (), tensor
        return
    for attribute in flatten(tensor)[0]:
        inner = getattr(tensor, attribute)
        if not isinstance(inner, torch.Tensor):
            continue
        if getattr(tensor, attribute) is not inner:
            raise WeightError(
                f"weights: {name}: {type(tensor).__name__}.{attribute} is another tensor at every look, so its memory cannot be "
                f"moved; {_REMEDY}"
            )
        yield from (((attribute, *path), plain) for path, plain in inner_tensors(f"{name}.{attribute}", inner))


def flatten(wrapper: Any) -> tuple[list[str], Any]:
    """The attributes of a wrapper that make it up, tensors and others, and what else its class needs to make one like it."""
    attributes, context = wrapper.__tensor_flatten__()
    return list(attributes), context


def at(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The inner tensor at a path; the tensor itself at `()`."""
    return attrgetter(".".join(path))(tensor) if path else tensor


def inner_name(name: str, path: Path) -> str:
    return ".".join((name, *path))


def move_label(wrapper: torch.Tensor, device: torch.device) -> None:
    """Let a wrapper, whose inner tensors were moved, say that it is on that device.

    Only the size, dtype and device that the wrapper itself carries are taken from a new one, which has no inner tensors.
    """
    for attribute in flatten(wrapper)[0]:
        if is_wrapper(inner := getattr(wrapper, attribute)):
            move_label(inner, device)
    if wrapper.device == device:
        return
    layout: Any = {"strides": wrapper.stride(), "storage_offset": wrapper.storage_offset(), "dtype": wrapper.dtype}
    bare = torch.Tensor._make_wrapper_subclass(type(wrapper), wrapper.shape, device=device, **layout)
    with torch._C.DisableTorchFunctionSubclass():
        wrapper.data = bare


def on_device(context: Any, device: torch.device, host: torch.device) -> Any:
    """What a class needs to make a wrapper, with `device` wherever it names the host."""
    if isinstance(context, torch.device):
        return device if context == host else context
    if isinstance(context, dict):
        return {key: on_device(value, device, host) for key, value in context.items()}
    if type(context) in (list, tuple):
        return type(context)(on_device(value, device, host) for value in context)
    if dataclasses.is_dataclass(context) and not isinstance(context, type):
        now = {f.name: getattr(context, f.name) for f in dataclasses.fields(context) if f.init}
        then = {name: on_device(value, device, host) for name, value in now.items()}
        return dataclasses.replace(context, **then) if any(then[name] is not now[name] for name in now) else context
    return context


_REMEDY = "leave that module out of the model, or load it unquantized"


def _refuse_opaque(name: str, tensor: torch.Tensor) -> None:
    kind: Any = type(tensor)
    if kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise WeightError(
            f"weights: {name}: {kind.__name__} is a tensor subclass without __tensor_flatten__ and __tensor_unflatten__, so what "
            f"it consists of is unknown; give the class these two methods, or {_REMEDY}"
        )
