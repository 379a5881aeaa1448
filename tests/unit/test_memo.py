"""Repeated nodes are read once, and read the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxoffload import memo
from fxoffload.facts import Facts
from tests.models import CASES
from tests.tracing import read


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
