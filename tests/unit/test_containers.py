"""Tensors move, and what holds them keeps its type."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from transformers.modeling_outputs import BaseModelOutput

from fxoffload.containers import tensors_in, to_device

META = torch.device("meta")
CPU = torch.device("cpu")
X = torch.arange(3.0)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass
class Result:
    sample: Any
    note: str = "n"


@dataclass(frozen=True)
class Frozen:
    sample: Any


VALUES: dict[str, Any] = {
    "tensor": X,
    "list": [X, 1],
    "tuple": (X, "a", None),
    "named tuple": Pair(X, [X]),
    "dict": {"a": X, "b": {"c": (X,)}},
    "ordered": OrderedDict(b=X, a=2),
    "user dict": UserDict(a=X),
    "dataclass": Result(X),
    "frozen": Frozen((X,)),
    "model output": BaseModelOutput(last_hidden_state=X),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", VALUES)
def test_types_are_kept(name: str) -> None:
    value = VALUES[name]
    moved = to_device(value, META)
    assert type(moved) is type(value)
    assert {t.device for t in tensors_in(moved)} == {META}
    assert len([*tensors_in(moved)]) == len([*tensors_in(value)]) > 0
    # What came in is not written to, and what is right already is not copied.
    assert {t.device for t in tensors_in(value)} == {CPU}
    assert to_device(value, CPU) is value


def test_read_only_mappings_and_what_holds_no_tensor() -> None:
    view = MappingProxyType({"a": X})
    moved = to_device(view, META)
    assert type(moved) is MappingProxyType
    assert moved["a"].device == META
    for value in (None, 3, "text", [1, (2,)], {"a": None}, Result("x")):
        assert to_device(value, META) is value
