"""Blocks that a model class declares, as the compiled path sees them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from tests.checks import check_budgets, offload
from tests.models import Block, Towers, rows, seeded, toy


class Declaring(nn.Module):
    """Blocks of two classes, one of each: nothing that could be discovered."""

    _layerwise_offload_blocks_attrs = ("first.blocks", "second")

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.first = nn.Module()
        self.first.blocks = nn.ModuleList([Block(d)])
        self.second = nn.ModuleList([nn.Sequential(nn.Linear(d, d), nn.ReLU())])
        self.out = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.first.blocks, *self.second):
            x = block(x)
        return self.out(x)


def blocks_of(model: nn.Module) -> list[str]:
    """Blocks of the graph that ran last, in order."""
    segments = api.bindings_of(model)[-1].program.blocks.segments
    return list(dict.fromkeys(s.block for s in segments if s.block))


@torch.no_grad()
def test_declared_blocks_are_the_blocks_of_the_graph() -> None:
    model = seeded(Declaring)
    check_budgets(model, [rows(k) for k in range(3)])
    assert blocks_of(model) == ["first.blocks.0", "second.0"]


@torch.no_grad()
def test_nested_containers_and_class_names() -> None:
    towers = seeded(Towers)
    towers.__class__ = type("Tower", (Towers,), {"_layerwise_offload_blocks_attrs": "towers"})
    offload(towers)(rows(0))
    assert blocks_of(towers) == [f"towers.{i}.{k}" for i in range(2) for k in range(2)]
    model = toy(1)
    model.__class__ = type("Toys", (type(model),), {"_repeated_blocks": ["Block"]})
    offload(model)(rows(0))
    assert blocks_of(model) == ["blocks.0"]


@torch.no_grad()
def test_a_wrapper_around_the_declaring_model() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Declaring()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x) * 2

    model = seeded(Wrapper)
    offload(model)(rows(0))
    assert blocks_of(model) == ["model.first.blocks.0", "model.second.0"]


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:backend. graph break:fxoffload.OffloadWarning")
def test_behind_a_graph_break() -> None:
    class Broken(Declaring):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first.blocks[0](x)
            torch._dynamo.graph_break()
            return self.out(self.second[0](x))

    model = seeded(Broken)
    compiled = offload(model, fullgraph=False)
    assert torch.equal(compiled(rows(0)), model(rows(0)))
    found = [s.block for b in api.bindings_of(model) for s in b.program.blocks.segments if s.block]
    assert sorted(found) == ["first.blocks.0", "second.0"]


@torch.no_grad()
@pytest.mark.parametrize(("attribute", "kind"), [("missing", AttributeError), ("out", TypeError)])
def test_errors_reach_the_caller_as_they_are(attribute: str, kind: type[Exception]) -> None:
    model = toy(2)
    model.__class__ = type("Toys", (type(model),), {"_layerwise_offload_blocks_attrs": [attribute]})
    compiled = offload(model)
    with pytest.raises(kind, match=rf"^units: _layerwise_offload_blocks_attrs: .*{attribute}"):
        compiled(rows(0))


def test_explain_sees_them_too() -> None:
    explanation = fxoffload.explain(
        seeded(Declaring), rows(0), machine=fxoffload.Machine.nominal(), onload_device="cpu", memory_budget="1GiB"
    )
    assert {s.block for s in explanation.blocks.segments} >= {"first.blocks.0", "second.0"}
