"""Tensors in the arguments and results of a call, changed inside the containers that they came in, as to another device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any, cast

import torch


def to_device(value: Any, device: torch.device) -> Any:
    """`value` with every tensor in it on `device`."""
    return map_tensors(value, lambda tensor: tensor if tensor.device == device else tensor.to(device))


def map_tensors(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with every tensor in it changed: in tuples, lists, mappings and dataclasses, which keep their types.

    What needs no change is returned as it is; a container that does is copied, never written to.
    """
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        moved = [map_tensors(item, change) for item in value]
        if all(map(_same, moved, value)):
            return value
        return type(value)(*moved) if hasattr(value, "_fields") else type(value)(moved)
    if isinstance(value, Mapping):
        changed = {k: moved for k, item in value.items() if (moved := map_tensors(item, change)) is not item}
        if not changed:
            return value
        mapping: Any = copy.copy(value) if isinstance(value, MutableMapping) else dict(value)
        for key, moved in changed.items():
            mapping[key] = moved
        return mapping if isinstance(value, MutableMapping) else cast("Any", type(value))(mapping)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
        changed = {n: moved for n in names if (moved := map_tensors(getattr(value, n), change)) is not getattr(value, n)}
        if not changed:
            return value
        fresh = copy.copy(value)
        for name, moved in changed.items():
            object.__setattr__(fresh, name, moved)
        return fresh
    return value


def _same(a: Any, b: Any) -> bool:
    return a is b


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in a value, in the containers that `map_tensors` knows."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in([getattr(value, f.name, None) for f in dataclasses.fields(value)])
