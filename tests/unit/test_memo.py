"""Repeated nodes are read once, and read the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.fx as fx

from fxoffload import memo
from fxoffload.facts import Facts
from fxoffload.passes.base import copy_graph
from fxoffload.read import find_written, read_facts
from tests.models import CASES
from tests.tracing import CPU, read, trace
from tests.writing import bump


def canonical(facts: Facts) -> Any:
    """Facts with storages numbered in order of appearance."""
    number: dict[int, int] = {}

    def place(storage: int) -> int:
        return number.setdefault(storage, len(number))

    inputs = [(name, place(s), nbytes) for name, s, nbytes in facts.inputs]
    nodes = [
        (
            n.name,
            n.weights,
            sorted(place(s) for s, _ in n.allocates),
            sorted(map(place, n.reads)),
            n.flops,
            n.touched_nbytes,
            n.kind,
        )
        for n in facts.nodes
    ]
    return inputs, nodes, [place(s) for s in facts.outputs], facts.output_weights, facts.weights


@pytest.mark.parametrize("name", ["flux", "wan", "sd3", "t5", "llama"])
def test_facts_are_those_of_a_reading_without_memo(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, given = CASES[name].build(), CASES[name].given(0)
    with torch.no_grad():
        with_memo = canonical(read(model, **given).facts)
        monkeypatch.setattr(memo, "_key", lambda node, operands: None)
        without = canonical(read(model, **given).facts)
    assert with_memo == without


def test_repeated_nodes_are_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    original = memo.Memo.run

    def run(self: memo.Memo, node: Any, operands: Any, run: Any) -> Any:
        def counted() -> Any:
            ran.append(str(node.target))
            return run()

        return original(self, node, operands, counted)

    monkeypatch.setattr(memo.Memo, "run", run)
    blocks = torch.nn.Sequential(*[torch.nn.Linear(4, 4) for _ in range(6)])
    with torch.no_grad():
        facts = read(blocks, torch.ones(2, 4)).facts
    assert sum("linear" in target for target in ran) == 1
    assert len({n.allocates[0][0] for n in facts.nodes}) == 6


def test_writes_are_run_each_time() -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("n", torch.zeros(3))
            self.register_buffer("m", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.n.add_(1)
            self.m.add_(1)
            return x + self.n + self.m

    with torch.no_grad():
        facts = read(Counting(), torch.ones(3)).facts
    assert [w.mutated for w in facts.weights] == [True, True]


def test_writes_of_equal_operators_are_seen_each_time() -> None:
    def function(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        y = bump(a, x) + bump(b, x)
        torch._foreach_add_([b[0]], [x[0]])
        torch._foreach_add_([c[0]], [x[0]])
        return y

    with torch.no_grad():
        facts = read(function, *(torch.ones(2, 4) for _ in range(4))).facts
    assert facts.written_inputs == tuple(name for name, _, _ in facts.inputs if name != "l_x_")
    assert len(facts.written_inputs) == 3


def test_a_copy_of_a_graph_that_has_run_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    original = memo.Memo.run

    def look(gm: fx.GraphModule, inputs: Any) -> Any:
        written = find_written(gm, inputs, CPU, {})
        copy = fx.GraphModule(gm, copy_graph(gm.graph))
        monkeypatch.setattr(memo.Memo, "run", lambda self, node, *rest: ran.append(node.op) or original(self, node, *rest))
        return written, read_facts(copy, inputs, CPU, {})

    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(1)
        return bump(a, b) + b

    with torch.no_grad():
        written, facts = trace(function, torch.ones(4), torch.ones(4), look=look)
    assert ran == ["placeholder", "placeholder", "output"]
    assert facts.written_inputs == ("l_a_",)
    assert written >= {"l_a_"}
    assert "l_b_" not in written


def test_chunks_of_equal_tensors_alias_their_own() -> None:
    def function(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        first, second = a.chunk(2, -1)
        third, fourth = b.chunk(2, -1)
        return first + second + third + fourth

    with torch.no_grad():
        facts = read(function, torch.ones(2, 4), torch.ones(2, 4)).facts
    storages = {name: storage for name, storage, _ in facts.inputs}
    reads = [n.reads for n in facts.nodes if n.target.endswith("chunk")]
    assert reads == [(storages[name],) for name in storages]
