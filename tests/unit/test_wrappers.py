"""What weights consist of: inner tensors, what is beside packed bytes, and the device that a wrapper says it is on."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.errors import WeightError
from fxoffload.owner import tensor_names
from fxoffload.select import nbytes_below, tensors_below
from fxoffload.storages import nbytes_of, plain_tensors
from fxoffload.wrappers import at, find_parts, held_by, inner_tensors, label, on_device, refuse_mesh, refuse_opaque
from tests.models import Toy, seeded
from tests.wrapped import KINDS, Bytes, Opaque, Packed, Scaled, Shifted, State, requantized

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MATRIX = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))


def names(model: nn.Module) -> set[str]:
    return {name for name, _ in tensors_below(model)}


def test_inner_tensors_are_found_at_every_depth() -> None:
    wrapper = Shifted.of(MATRIX)
    found = dict(inner_tensors("w", wrapper))
    assert list(found) == [("data_", "data_"), ("data_", "scale"), ("scale",)]
    assert all(at(wrapper, path) is tensor for path, tensor in found.items())
    assert list(found.values()) == plain_tensors(wrapper)
    assert nbytes_of([wrapper]) == 16 + 16 + 16
    assert [path for path, _ in inner_tensors("w", MATRIX)] == [()]
    assert at(MATRIX, ()) is MATRIX


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("nested", {"inp.weight.data_.data_", "inp.weight.data_.scale", "inp.weight.scale"}),
        ("bytes", {"inp.weight"}),
        (
            "packed",
            {"inp.weight"} | {f"inp.weight.quant_state.{name}" for name in ("absmax", "code", "state2.absmax", "state2.code")},
        ),
    ],
)
def test_names_of_what_a_model_has(kind: str, found: set[str]) -> None:
    model = KINDS[kind][0]()
    assert {name for name in names(model) if name.startswith("inp.weight")} == found
    assert nbytes_below(model) == sum(t.numel() * t.element_size() for _, t in tensors_below(model))
    if kind != "packed":
        known = tensor_names(model)
        assert {known[id(t)] for _, t in tensors_below(model)} == names(model)


def test_a_quant_state_of_a_module_counts_once() -> None:
    layer = nn.Linear(4, 4, bias=False)
    layer.weight = Packed.of(MATRIX)
    layer.quant_state = layer.weight.quant_state
    layer.extra_state = State(torch.ones(2))
    assert len(names(layer)) == 5
    layer.weight = nn.Parameter(MATRIX)
    assert names(layer) == {"weight", *(f"quant_state.{name}" for name in ("absmax", "code", "state2.absmax", "state2.code"))}


def test_parts_are_found_again() -> None:
    model: Any = requantized(seeded(lambda: Toy(1, 4)), Shifted.of)
    model.out.weight = model.inp.weight
    parts = find_parts(model, CPU)
    assert len(parts) == 3 * 3
    assert all(id(part.tensor) == key and part.wrapped for key, part in parts.items())
    kept = model.inp.weight.scale
    part = parts[id(kept)]
    assert (part.name, part.path) == ("inp.weight.scale", ("scale",))
    model.inp.weight.scale = torch.ones(1)
    assert part.tensor is model.inp.weight.scale is not kept
    model.inp.weight = None
    assert part.tensor is None
    assert find_parts(seeded(lambda: Toy(1, 4)), CPU) == {}


def test_tensors_by_the_wrappers_that_they_are_in() -> None:
    places = [("a", ("x", "y")), ("b", ()), ("a", ("x", "z")), ("a", ("w",))]
    assert held_by(places) == {("a", ()): [0, 2, 3], ("a", ("x",)): [0, 2]}


def test_a_wrapper_says_where_its_inner_tensors_are() -> None:
    """A wrapper of another device can be made on every machine: it has no bytes."""
    weight = nn.Parameter(Scaled.of(MATRIX), requires_grad=False)
    before = (type(weight), weight.shape, weight.stride(), weight.dtype, vars(weight).copy(), weight._version)
    label(weight, CUDA)
    assert weight.device == CUDA
    assert weight.is_cuda
    label(weight, CPU)
    assert weight.device == CPU
    assert (type(weight), weight.shape, weight.stride(), weight.dtype, vars(weight), weight._version) == before
    assert isinstance(weight, nn.Parameter)
    torch.testing.assert_close(weight @ MATRIX, weight.value() @ MATRIX)


@dataclass(frozen=True)
class Meta:
    device: torch.device
    block: tuple[int, ...] = (1, 2)


def test_what_a_wrapper_is_made_with_names_the_device() -> None:
    context = {"meta": Meta(CPU), "list": [CPU, 3], "other": torch.device("meta"), "kind": Meta}
    wanted = {"meta": Meta(CUDA), "list": [CUDA, 3], "other": torch.device("meta"), "kind": Meta}
    assert on_device(context, CUDA, CPU) == wanted
    assert on_device(context, CPU, CPU) is context


def test_a_mesh_of_another_device_is_refused() -> None:
    weight: Any = Scaled.of(MATRIX)
    weight.device_mesh = type("Mesh", (), {"device_type": "cpu"})()
    refuse_mesh("inp.weight", weight, CPU)
    with pytest.raises(WeightError) as refused:
        refuse_mesh("inp.weight", weight, CUDA)
    assert str(refused.value) == (
        "weights: inp.weight: a Scaled on a mesh of 'cpu' cannot compute on 'cuda:0'; make its mesh of 'cuda'"
    )


def test_plain_subclasses_are_no_wrappers() -> None:
    for tensor in (MATRIX, nn.Parameter(MATRIX), nn.Buffer(MATRIX), Bytes.of(MATRIX), Packed.of(MATRIX), Scaled.of(MATRIX)):
        refuse_opaque("w", tensor)
    with pytest.raises(WeightError, match=r"^weights: w: Opaque is a tensor subclass without"):
        refuse_opaque("w", Opaque.of(MATRIX))
