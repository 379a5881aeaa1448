"""Which weights are offloaded: chosen by name or by filter, or all; the others stay resident."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import ConfigError, OffloadConfig
from fxoffload.select import selected_weights
from tests.checks import assert_streams, budgets, delay_copies, offload
from tests.models import rows, toy


def chosen(model: nn.Module | None, **options: Any) -> set[str] | None:
    """Names of the parameters and buffers that are selected."""
    found = selected_weights(OffloadConfig(onload_device="cpu", **options), model)
    if found is None:
        return None
    assert model is not None
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name for name, tensor in named if id(tensor) in found}


def names_below(model: nn.Module, *prefixes: str) -> set[str]:
    return {name for name in model.state_dict() if name.startswith(prefixes)}


def test_nothing_said_is_all() -> None:
    assert chosen(toy(2)) is None
    assert chosen(None) is None


def test_names_choose_modules_with_all_below() -> None:
    model = toy(3)
    assert chosen(model, module_names="blocks.1") == names_below(model, "blocks.1.")
    assert chosen(model, module_names=["blocks.1.up", "out"]) == names_below(model, "blocks.1.up.", "out.")
    assert chosen(model, module_names="") == set(model.state_dict())


def test_buffers_are_chosen_too() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4))
    assert chosen(model, module_names="0") == names_below(model, "0.")


def test_a_filter_sees_every_module_and_its_name() -> None:
    model = toy(2)
    seen: list[tuple[str, type]] = []

    def keep(name: str, module: nn.Module) -> bool:
        seen.append((name, type(module)))
        return isinstance(module, nn.LayerNorm)

    assert chosen(model, module_filter=keep) == names_below(model, "blocks.0.norm.", "blocks.1.norm.")
    assert seen == [(name, type(module)) for name, module in model.named_modules()]


def test_a_tied_weight_is_chosen_by_either_name() -> None:
    model = toy(2)
    model.out.weight = model.inp.weight
    assert chosen(model, module_names="out") == {"inp.weight", "out.bias"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("block.1", "did you mean 'blocks.1' or 'blocks.0' or 'blocks.1.up'?"),
        ("blocks.9", "did you mean 'blocks.1' or 'blocks.0' or 'blocks'?"),
    ],
)
def test_an_unknown_name_is_an_error_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(AttributeError) as error:
        chosen(toy(2), module_names=["inp", name])
    assert str(error.value) == f"select: module_names: Toy has no module {name!r}; {hint}"


def test_names_of_a_function_without_a_module_are_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^select: module_names: the compiled function belongs to no module"):
        chosen(None, module_names="blocks")


@pytest.mark.parametrize(
    "options",
    [{"module_filter": lambda name, module: False}, {"module_filter": lambda name, module: isinstance(module, nn.ReLU)}],
)
def test_nothing_chosen_is_an_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as error:
        chosen(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), **options)
    assert str(error.value) == "select: module_filter: no module with weights is chosen; choose at least one, or leave it out"


def test_module_names_that_choose_nothing_are_named() -> None:
    with pytest.raises(ConfigError, match=r"^select: module_names: "):
        chosen(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), module_names="1")


@torch.no_grad()
def test_what_is_not_chosen_stays_resident() -> None:
    model = toy(6)
    compiled = offload(model, module_names=["blocks.1", "blocks.3", "blocks.4"])
    expected = [compiled(rows(k)).clone() for k in range(3)]
    delay_copies(model)
    fxoffload.set_memory_budget(model, budgets(model)["smallest"])
    for k in (*range(3), *range(3)):
        assert torch.equal(compiled(rows(k)), expected[k])
    assert_streams(model)
    plan = fxoffload.get_plan(model)
    assert {load.bucket for load in plan.loads} <= {"blocks.1", "blocks.3", "blocks.4"}
    assert len(plan.loads) >= 2


@torch.no_grad()
@pytest.mark.parametrize("fullgraph", [True, False])
def test_errors_reach_the_caller_as_they_are(fullgraph: bool) -> None:
    compiled = offload(toy(2), fullgraph=fullgraph, module_names="blocks.7")
    with pytest.raises(AttributeError, match=r"^select: module_names: Toy has no module 'blocks.7'"):
        compiled(rows(0))
