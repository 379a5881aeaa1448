"""Whose weight it is: the compiled module around the call, or else the outermost module that runs and has it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.owner import calling_line, owner_of, tensor_names
from tests.models import Toy, rows, toy

found: list[nn.Module | None] = []


def backend(gm: Any, example_inputs: Any) -> Callable[..., Any]:
    """Asks for the owner of the first parameter, when compiling and at each call."""
    weight = next(t for t in example_inputs if isinstance(t, nn.Parameter))
    position = next(i for i, t in enumerate(example_inputs) if t is weight)
    found.append(owner_of(weight))

    def run(*args: Any) -> Any:
        found.append(owner_of(args[position]))
        return gm(*args)

    return run


@pytest.fixture(autouse=True)
def nothing_found() -> None:
    found.clear()


@torch.no_grad()
def run(call: Callable[..., Any]) -> list[nn.Module | None]:
    """The owners of the calls after the first, and of compiling."""
    for _ in range(2):
        call(rows(0))
    return list(found)


def test_a_compiled_wrapper() -> None:
    model = toy(2)
    assert run(torch.compile(model, backend=backend)) == [model] * 3


def test_a_module_compiled_in_place() -> None:
    model = toy(2)
    model.compile(backend=backend)
    assert run(model) == [model] * 3


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)


def test_a_compiled_part_of_a_model_that_runs_eagerly_is_the_owner() -> None:
    model = toy(2)
    assert run(Outer(torch.compile(model, backend=backend))) == [model] * 3
    found.clear()
    torch._dynamo.reset()
    model = toy(2)
    model.compile(backend=backend)
    assert run(Outer(model)) == [model] * 3


def test_of_nested_compiled_modules_the_outer_one_traces_and_owns() -> None:
    inner = toy(2)
    outer = Outer(torch.compile(inner, backend=backend))
    owners = run(torch.compile(outer, backend=backend))
    assert set(map(id, owners)) == {id(outer)}


def test_a_compiled_function_finds_the_outermost_module_that_runs() -> None:
    model = toy(2)
    step = torch.compile(lambda x: model.blocks[0](x), backend=backend)

    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return step(x)

    running = Running()
    assert run(running) == [running] * 3


def test_no_module_runs() -> None:
    model = toy(2)
    assert run(torch.compile(lambda x: model.blocks[0](x), backend=backend)) == [None] * 3


def test_a_module_without_the_weight_is_not_its_owner() -> None:
    model = toy(2)
    step = torch.compile(lambda x: model.blocks[0](x), backend=backend)

    class Stranger(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return step(x)

    assert run(Stranger()) == [None] * 3


class Broken(Toy):
    """A graph break in the loop: Dynamo compiles what the frame calls."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return x


def test_parts_behind_a_graph_break_belong_to_the_whole_model() -> None:
    model = Broken(2)
    owners = run(torch.compile(model, backend=backend))
    assert len(owners) >= 4
    assert set(map(id, owners)) == {id(model)}


def test_two_models_that_share_code_are_told_apart() -> None:
    a, b = toy(2, seed=1), toy(2, seed=2)
    run_a, run_b = torch.compile(a, backend=backend), torch.compile(b, backend=backend)
    with torch.no_grad():
        run_a(rows(0)), run_b(rows(0))
    assert found == [a, a, b]


def test_a_replaced_weight_is_found_at_its_model() -> None:
    model = toy(2)
    compiled = torch.compile(model, backend=backend)
    run(compiled)
    model.inp.weight = nn.Parameter(torch.ones(16, 16), requires_grad=False)
    found.clear()
    assert run(compiled) == [model] * 2


def test_names() -> None:
    model = toy(1)
    model.out.weight = model.inp.weight
    model.register_buffer("b", torch.ones(1))
    names = tensor_names(model)
    assert names[id(model.inp.weight)] == "inp.weight"
    assert names[id(model.b)] == "b"
    assert len(names) == len(list(model.parameters())) + 1
    assert tensor_names(None) == {}


def test_the_line_of_the_call() -> None:
    lines: list[str] = []

    class Calling(nn.Module):
        def forward(self) -> None:
            lines.append(calling_line(self))

    Calling()()
    source = Path(__file__).read_text().splitlines()
    line = next(i for i, text in enumerate(source, 1) if "lines.append(calling_line" in text)
    assert lines == [f"{__file__}:{line}"]
    assert calling_line(toy(1)) == "an unknown line"
