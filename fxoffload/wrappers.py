"""Weights that consist of several tensors.

A *wrapper* is a tensor subclass that holds no bytes itself, as quantized weights are. `__tensor_flatten__` names its inner
tensors, which may be wrappers in turn; these are what is packed, priced and streamed, each under a name of its own
(`blocks.0.up.weight.qdata`). The wrapper stays the object that it was, and its inner tensors stay the objects that they were:
only the memory behind them moves, as with any other weight.

Other weights hold packed bytes themselves, and have what is needed to read them *beside*, as attributes of the parameter or of an
object there (`weight.quant_state.absmax`). That moves with them.

Nothing may hold a wrapper weakly: `model.to(...)` swaps it with another one, which torch refuses where there are weak references.
"""

# Private names of torch: the making of a wrapper, and the mark of a class that has no `__torch_dispatch__`. Checked on torch 2.11
# and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, TypeVar

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from fxoffload.errors import WeightError

Owner = TypeVar("Owner", bound=Hashable)
Path = tuple[str, ...]

_STATE = "quant_state"
"""What layers of packed weights call the object that is needed to read them."""
_ORDINARY = (torch.Tensor, torch.nn.Parameter)
_DEPTH = 4
"""How deep objects beside a weight are looked into."""
_REMEDY = "leave that module out of the model, or load it unquantized"


def is_wrapper(value: object) -> bool:
    """Whether a value is a tensor that consists of others, which `inner_tensors` names."""
    return is_traceable_wrapper_subclass(value)


def inner_tensors(name: str, tensor: torch.Tensor) -> Iterator[tuple[Path, torch.Tensor]]:
    """The plain tensors that a weight consists of, by the attributes that lead to them; a plain weight is its own, at `()`.

    Raises WeightError, naming the weight, for a subclass that does not say what it consists of.
    """
    if not is_wrapper(tensor):
        refuse_opaque(name, tensor)
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


def _below(name: str, path: Path, value: Any, seen: set[int]) -> Iterator[tuple[Path, torch.Tensor]]:
    """Tensors that are attributes of a value, or of objects there, by the attributes that lead to them."""
    for key, item in getattr(value, "__dict__", {}).items():
        if id(item) in seen or callable(item):
            continue
        seen.add(id(item))
        here = (*path, key)
        if isinstance(item, torch.Tensor):
            yield from (((*here, *inner), plain) for inner, plain in inner_tensors(inner_name(name, here), item))
        elif isinstance(item, (list, tuple, dict)):
            if type(value) in _ORDINARY:
                # Notes of somebody's own: nothing that reads a plain weight needs them.
                continue
            if any(isinstance(member, torch.Tensor) for member in (item.values() if isinstance(item, dict) else item)):
                raise WeightError(
                    f"weights: {inner_name(name, here)}: tensors in a {type(item).__name__} do not move with the weight; "
                    f"make them attributes of their own, or {_REMEDY}"
                )
        elif len(here) < _DEPTH:
            yield from _below(name, here, item, seen)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """A tensor of a module, at `path` from its attribute `key`: at `()` a plain weight, else part of one, or beside it."""

    module: weakref.ref[torch.nn.Module]
    name: str
    key: str
    path: Path
    wrapped: bool = False

    @property
    def tensor(self) -> Any:
        """The tensor that is there now, or None."""
        try:
            return attrgetter(".".join((self.key, *self.path)))(self.module())
        except AttributeError:
            return None


def find_parts(root: torch.nn.Module, device: torch.device) -> dict[int, Part]:
    """Every tensor of a model that is part of a weight, or beside one, by `id`; nothing where all weights are plain.

    Raises WeightError for a weight that cannot compute on `device`.
    """
    found: dict[int, Part] = {}
    for path, module in root.named_modules():
        for part, plain in own_parts(module, path):
            if part.path:
                refuse_mesh(part.name, getattr(module, part.key), device)
                found.setdefault(id(plain), part)
    return found


def own_parts(module: torch.nn.Module, path: str = "") -> Iterator[tuple[Part, torch.Tensor]]:
    """What parameters, buffers and tensor attributes of a module itself, whose name is `path`, consist of, and what is beside.

    Raises WeightError, with the name, for a weight whose parts are unknown, or cannot be moved.
    """
    plain = ((key, value) for key, value in vars(module).items() if isinstance(value, torch.Tensor))
    where = weakref.ref(module)
    for key, weight in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False), *plain):
        name, wrapped = f"{path}.{key}" if path else key, is_wrapper(weight)
        beside = () if wrapped else _below(name, (), weight, {id(weight)})
        for inner, tensor in (*inner_tensors(name, weight), *beside):
            yield Part(where, inner_name(name, inner), key, inner, wrapped), tensor
    state = vars(module).get(_STATE)
    if state is not None and not isinstance(state, torch.Tensor):
        name = f"{path}.{_STATE}" if path else _STATE
        for inner, tensor in _below(name, (), state, set()):
            yield Part(where, inner_name(name, inner), _STATE, inner), tensor


def flatten(wrapper: Any) -> tuple[list[str], Any]:
    """The attributes of a wrapper that make it up, tensors and others, and what else its class needs to make one like it."""
    attributes, context = wrapper.__tensor_flatten__()
    return list(attributes), context


def at(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """The inner tensor at a path; the tensor itself at `()`."""
    return attrgetter(".".join(path))(tensor) if path else tensor


def inner_name(name: str, path: Path) -> str:
    return ".".join((name, *path))


def held_by(places: Iterable[tuple[Owner, Path]]) -> dict[tuple[Owner, Path], list[int]]:
    """The wrappers that tensors are in, with the indices of these. Places are paths from what holds the outermost wrapper."""
    held: dict[tuple[Owner, Path], list[int]] = {}
    for k, (owner, path) in enumerate(places):
        for depth in range(len(path)):
            held.setdefault((owner, path[:depth]), []).append(k)
    return held


def label(wrapper: torch.Tensor, device: torch.device) -> None:
    """Let a wrapper, whose inner tensors were moved, say that it is on that device."""
    # Neither its class nor a mode is asked: who looks for reads of weights must not take these for any.
    with torch._C.DisableTorchFunction():
        if wrapper.device != device:
            # What a tensor itself carries is copied: size, dtype, device. Its attributes stay.
            wrapper.data = _bare(type(wrapper), wrapper.shape, wrapper.stride(), wrapper.storage_offset(), wrapper.dtype, device)


@functools.lru_cache(maxsize=256)
def _bare(
    kind: type, size: torch.Size, stride: tuple[int, ...], offset: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """A wrapper without inner tensors."""
    return torch.Tensor._make_wrapper_subclass(kind, size, strides=stride, storage_offset=offset, dtype=dtype, device=device)


def on_device(context: Any, device: torch.device, host: torch.device) -> Any:
    """What a class needs to make a wrapper, with `device` wherever it names the host."""
    if device == host:
        return context
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


def refuse_opaque(name: str, tensor: torch.Tensor) -> None:
    """Raise WeightError for a tensor subclass that acts as a wrapper does, but does not say what it consists of."""
    kind: Any = type(tensor)
    if not is_wrapper(tensor) and kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl:
        raise WeightError(
            f"weights: {name}: {kind.__name__} is a tensor subclass without __tensor_flatten__ and __tensor_unflatten__, so what "
            f"it consists of is unknown; give the class these two methods, or {_REMEDY}"
        )


def refuse_mesh(name: str, weight: Any, device: torch.device) -> None:
    """Raise WeightError for a distributed weight that is to compute on another kind of device than its mesh is of."""
    kind = getattr(getattr(weight, "device_mesh", None), "device_type", device.type)
    if kind != device.type:
        raise WeightError(
            f"weights: {name}: a {type(weight).__name__} on a mesh of {kind!r} cannot compute on {str(device)!r}; "
            f"make its mesh of {device.type!r}"
        )
