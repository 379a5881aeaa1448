"""Units of a model that runs without a compiler: chosen, declared, discovered; and what stays resident."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload import ConfigError, OffloadConfig
from fxoffload.units import Units, block_names, declared_paths, find_units
from tests.models import CASES, Block, Towers, Toy, seeded, toy

KIB = 1024


def units_of(model: nn.Module, *, limit_nbytes: int | None = None, **options: Any) -> Units:
    found = find_units(model, OffloadConfig(onload_device="cpu", **options), limit_nbytes=limit_nbytes)
    assert_covers(model, found)
    return found


def names(units: Units) -> list[str]:
    return [unit.name for unit in units.units]


def rest(units: Units) -> list[str]:
    return [name for name, _ in units.rest]


def assert_covers(model: nn.Module, units: Units) -> None:
    """Every tensor of the model is in a unit or in the rest, under its own name; no unit is inside another."""
    managed = {id(t): t for unit in units.units for _, t in unit.tensors} | {id(t): t for _, t in units.rest}
    wanted = [*model.named_parameters(), *model.named_buffers()]
    assert [name for name, t in wanted if id(t) not in managed] == []
    for name, tensor in [*(pair for unit in units.units for pair in unit.tensors), *units.rest]:
        module, _, key = name.rpartition(".")
        assert getattr(model.get_submodule(module), key) is tensor, name
    heads = [unit.module for unit in units.units]
    for head in heads:
        assert not {id(m) for m in head.modules() if m is not head} & set(map(id, heads))
    for unit in units.units:
        assert model.get_submodule(unit.name) is unit.module
        assert any(t.numel() for _, t in unit.tensors)


# -- discovery ---------------------------------------------------------------------------------------------------------


def test_members_of_a_container_are_units_and_small_modules_outside_are_not() -> None:
    units = units_of(toy(3))
    assert names(units) == ["blocks.0", "blocks.1", "blocks.2"]
    assert [name for name, _ in units.units[1].tensors] == [
        f"blocks.1.{name}" for name in ("norm.weight", "norm.bias", "up.weight", "up.bias", "down.weight", "down.bias")
    ]
    assert rest(units) == ["inp.weight", "inp.bias", "out.weight", "out.bias"]


def test_one_of_a_class_is_no_block() -> None:
    assert names(units_of(toy(1))) == []
    assert names(units_of(nn.Sequential(nn.Linear(4, 4), Block(4), nn.Linear(4, 4)))) == ["0", "2"]


class Layer(nn.Module):
    """A block with a container of its own, and a parameter of its own."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.parts = nn.Sequential(nn.Linear(d, d), nn.ReLU(), nn.Linear(d, d))
        self.gate = nn.Parameter(torch.ones(d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.parts(x) * self.gate


class Layers(nn.Module):
    """`n` layers, a table on the root, a buffer, a plain tensor."""

    def __init__(self, n: int = 3, d: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(d) for _ in range(n))
        self.table = nn.Parameter(torch.ones(d))
        self.register_buffer("shift", torch.ones(d), persistent=False)
        self.scale = torch.full((d,), 2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.table * self.scale + self.shift


def test_the_outermost_container_wins() -> None:
    units = units_of(seeded(Layers))
    assert names(units) == ["layers.0", "layers.1", "layers.2"]
    assert rest(units) == ["table", "shift", "scale"]


def test_plain_tensors_belong_to_their_unit() -> None:
    model = seeded(Layers)
    model.layers[1].offset = torch.ones(16)
    assert "layers.1.offset" in dict(units_of(model).units[1].tensors)


def test_a_module_dict_holds_blocks_too() -> None:
    model = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4), "c": nn.LayerNorm(4)})
    units = units_of(model)
    assert names(units) == ["a", "b"]
    assert rest(units) == ["c.weight", "c.bias"]


def test_members_without_weights_are_no_units() -> None:
    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.nothing = nn.Parameter(torch.empty(0))

    model = nn.Sequential(nn.Identity(), Empty(), nn.Linear(4, 4), nn.Linear(4, 4), Empty(), nn.Identity())
    units = units_of(model)
    assert names(units) == ["2", "3"]
    assert rest(units) == ["1.nothing", "4.nothing"]


def test_a_container_under_two_names_is_found_once() -> None:
    class Twice(Toy):
        def __init__(self) -> None:
            super().__init__(3)
            self.again = self.blocks

        @property
        def layers(self) -> nn.ModuleList:
            return self.blocks

    assert names(units_of(seeded(Twice))) == ["blocks.0", "blocks.1", "blocks.2"]
    assert names(units_of(seeded(Twice), module_names="again.1")) == ["blocks.1"]
    assert names(units_of(seeded(Twice), module_names="layers")) == ["blocks.0", "blocks.1", "blocks.2"]


# -- outside blocks ----------------------------------------------------------------------------------------------------


class Large(Toy):
    """An embedding of 1 MiB, one a little smaller, and a head of 1 MiB."""

    def __init__(self) -> None:
        super().__init__(2)
        self.embed = nn.Embedding(16 * KIB, 16)
        self.less = nn.Embedding(16 * KIB - 1, 16)
        self.head = nn.Linear(16, 16 * KIB, bias=False)


def test_large_leaves_are_units_of_their_own() -> None:
    units = units_of(seeded(Large))
    assert names(units) == ["blocks.0", "blocks.1", "embed", "head"]
    assert "less.weight" in rest(units)


def test_a_tied_weight_belongs_to_each_unit_that_has_it() -> None:
    model = seeded(Large)
    model.head.weight = model.embed.weight
    model.less.weight = model.blocks[0].up.weight
    units = units_of(model)
    tensors = {unit.name: dict(unit.tensors) for unit in units.units}
    assert tensors["embed"]["embed.weight"] is tensors["head"]["head.weight"]
    # A module outside all units reads it too.
    assert dict(units.rest)["less.weight"] is tensors["blocks.0"]["blocks.0.up.weight"]


def test_a_module_shared_by_two_blocks_is_in_both() -> None:
    model = seeded(Layers)
    model.layers[2].parts = model.layers[0].parts
    tensors = {unit.name: dict(unit.tensors) for unit in units_of(model).units}
    assert tensors["layers.0"]["layers.0.parts.0.weight"] is tensors["layers.2"]["layers.2.parts.0.weight"]


def test_a_large_module_that_a_block_holds_too_stays_resident() -> None:
    model = seeded(Large)
    model.blocks[1].extra = model.embed
    units = units_of(model)
    assert names(units) == ["blocks.0", "blocks.1", "head"]
    assert "embed.weight" in rest(units)


# -- chosen ------------------------------------------------------------------------------------------------------------


def test_chosen_names_are_the_units_and_all_else_stays() -> None:
    units = units_of(toy(3), module_names=["out", "blocks.1"])
    assert names(units) == ["blocks.1", "out"]
    assert {name.split(".")[0] for name in rest(units)} == {"inp", "blocks"}


def test_the_outermost_of_nested_choices_wins() -> None:
    assert names(units_of(toy(2), module_names=["blocks.0.up", "blocks.0", "blocks.1.up"])) == ["blocks.0", "blocks.1.up"]


def test_the_root_can_be_one_unit() -> None:
    model = toy(2)
    units = units_of(model, module_names="")
    assert names(units) == [""]
    assert [name for name, _ in units.units[0].tensors] == list(model.state_dict())
    assert rest(units) == []


def test_the_root_is_split_where_it_is_too_large() -> None:
    units = units_of(toy(1), module_names="", limit_nbytes=1)
    assert names(units) == ["inp", "blocks.0.norm", "blocks.0.up", "blocks.0.down", "out"]


def test_a_chosen_container_stands_for_its_members() -> None:
    assert names(units_of(toy(1), module_names="blocks")) == ["blocks.0"]
    assert names(units_of(seeded(Towers), module_names="towers")) == ["towers.0.0", "towers.0.1", "towers.1.0", "towers.1.1"]


def test_a_filter_chooses() -> None:
    units = units_of(toy(2), module_filter=lambda name, module: isinstance(module, nn.Linear))
    assert names(units) == ["inp", "blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "out"]


def test_an_unknown_name_is_an_error_with_the_nearest() -> None:
    with pytest.raises(AttributeError) as error:
        units_of(toy(2), module_names="block.1")
    assert str(error.value).startswith("select: module_names: Toy has no module 'block.1'; did you mean 'blocks.1'")


def test_nothing_chosen_is_an_error() -> None:
    with pytest.raises(ConfigError) as error:
        units_of(toy(2), module_filter=lambda name, module: False)
    assert str(error.value) == "select: module_filter: no module with weights is chosen; choose at least one, or leave it out"


# -- declared ----------------------------------------------------------------------------------------------------------


def declaring(attributes: object, base: Callable[[], nn.Module] = lambda: Toy(2), **attribute: object) -> nn.Module:
    """A model whose class declares blocks."""
    model = seeded(base)
    members = {"_layerwise_offload_blocks_attrs": attributes, **attribute}
    model.__class__ = type(f"Declaring{type(model).__name__}", (type(model),), members)
    return model


def test_one_declared_container() -> None:
    assert names(units_of(declaring(["blocks"], lambda: Toy(1)))) == ["blocks.0"]
    assert names(units_of(declaring("blocks", lambda: Toy(1)))) == ["blocks.0"]


def test_several_declared_containers() -> None:
    class Two(Toy):
        def __init__(self) -> None:
            super().__init__(2)
            self.singles = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
            self.refiners = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    units = units_of(declaring(["singles", "blocks"], Two))
    assert names(units) == ["blocks.0", "blocks.1", "singles.0", "singles.1"]
    assert "refiners.0.weight" in rest(units)


def test_nested_paths_and_containers_in_containers() -> None:
    assert names(units_of(declaring(["towers.1"], Towers))) == ["towers.1.0", "towers.1.1"]
    assert names(units_of(declaring(["towers"], Towers))) == ["towers.0.0", "towers.0.1", "towers.1.0", "towers.1.1"]


def test_a_wrapped_model_declares_for_itself() -> None:
    wrapped = nn.Module()
    wrapped.dit, wrapped.encoder, wrapped.lone = declaring(["blocks"], lambda: Toy(1)), toy(2), toy(1)
    assert names(units_of(wrapped)) == ["dit.blocks.0", "encoder.blocks.0", "encoder.blocks.1"]


def test_blocks_may_stand_in_a_list_a_dict_or_behind_a_property() -> None:
    both = property(lambda self: [self.inp, self.out])
    by_name = property(lambda self: {"first": self.blocks[0]})
    assert names(units_of(declaring(["both"], both=both))) == ["inp", "out"]
    assert names(units_of(declaring(["by_name"], by_name=by_name))) == ["blocks.0"]
    model = declaring(["blocks"], lambda: Toy(1))
    model.blocks = nn.ModuleDict({"only": Block(16)})
    assert names(units_of(model)) == ["blocks.only"]


@pytest.mark.parametrize(
    ("attribute", "text"),
    [
        ("block", "DeclaringToy has no attribute 'block'; did you mean 'blocks'?"),
        ("blocks.0.ups", "DeclaringToy has no attribute 'blocks.0.ups'; did you mean 'up'?"),
        ("out.x", "DeclaringToy has no attribute 'out.x'; it ends before 'x'"),
    ],
)
def test_a_missing_attribute_is_an_error(attribute: str, text: str) -> None:
    with pytest.raises(AttributeError) as error:
        units_of(declaring([attribute]))
    assert str(error.value) == f"units: _layerwise_offload_blocks_attrs: {text}"


@pytest.mark.parametrize(
    ("attribute", "kind"), [("out", "Linear"), ("count", "int"), ("words", "list"), ("out.weight", "Parameter")]
)
def test_an_attribute_that_holds_no_modules_is_an_error(attribute: str, kind: str) -> None:
    with pytest.raises(TypeError) as error:
        units_of(declaring([attribute], count=3, words=["a"]))
    assert str(error.value) == (
        f"units: _layerwise_offload_blocks_attrs: {attribute!r} of DeclaringToy is of type {kind}; "
        "name attributes that hold several modules, such as a ModuleList"
    )


def test_repeated_blocks_are_named_by_class() -> None:
    model = seeded(lambda: Toy(1))
    model.__class__ = type("Named", (Toy,), {"_repeated_blocks": ["Block", "Other"]})
    assert names(units_of(model)) == ["blocks.0"]
    assert declared_paths(model) == {"blocks.0"}
    model.__class__ = type("Stale", (Toy,), {"_repeated_blocks": ["Gone"]})
    assert declared_paths(model) == frozenset()
    model.__class__ = type("Both", (Toy,), {"_repeated_blocks": ["Linear"], "_layerwise_offload_blocks_attrs": ["blocks"]})
    assert names(units_of(model)) == ["blocks.0"]


def test_declared_paths_have_every_name() -> None:
    model = declaring(["blocks"], lambda: Toy(1))
    model.again = model.blocks
    assert declared_paths(model) == {"blocks.0", "again.0"}
    assert declared_paths(toy(2)) == frozenset()
    assert declared_paths(declaring(["towers"], Towers)) == {f"towers.{i}.{k}" for i in range(2) for k in range(2)}


# -- models ------------------------------------------------------------------------------------------------------------

CONTAINERS = {
    "toy": {"blocks": 5},
    "towers": {"towers.0": 2, "towers.1": 2},
    "flux": {"transformer_blocks": 2, "single_transformer_blocks": 3},
    "flux2": {"transformer_blocks": 2, "single_transformer_blocks": 3},
    "wan": {"blocks": 3},
    "qwen_image": {"transformer_blocks": 3},
    "sd3": {"transformer_blocks": 3},
    "t5": {"encoder.block": 3},
    "llama": {"model.layers": 3},
    "qwen3_tied": {"model.layers": 3},
}


@pytest.mark.parametrize("name", CASES)
def test_blocks_of_models(name: str) -> None:
    model = CASES[name].build()
    blocks = [f"{container}.{i}" for container, n in CONTAINERS[name].items() for i in range(n)]
    assert names(units_of(model)) == blocks
    assert list(block_names(model)) == blocks
    units_of(model, limit_nbytes=1)


def test_the_table() -> None:
    assert (
        str(units_of(toy(2)))
        == """\
units  2 units  2176 bytes in 4 tensors outside
unit             bytes  tensors
blocks.0-1 (x2)   4416        6"""
    )
