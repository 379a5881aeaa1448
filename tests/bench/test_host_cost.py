"""What the host pays for a node of the generated top level: segments, prefetches, waits and evictions that do nothing.

The time of one round over `nodes` (in the benchmark's extra info) is the cost of a node.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxoffload import ops, passes
from fxoffload.lower import TopLevel, generate
from tests.bench.graphs import SIZES, plan_of, top_level

pytestmark = pytest.mark.benchmark(group="host cost")


def nothing() -> None:
    """A prefetch, a wait or an eviction."""


def segment(value: Any, weight: Any) -> tuple[Any]:
    del weight
    return (value,)


class Generated:
    """A graph with the passes behind it, ready for the generator."""

    def __init__(self, n: int) -> None:
        self.plan = plan_of(n)
        self.gm = passes.run(top_level(n), self.plan)
        self.segments = [node.target for node in self.gm.graph.find_nodes(op="call_module")]
        self.weights = {name: torch.empty(0) for name in (f"w{i}" for i in range(n))}

    @property
    def nodes(self) -> int:
        """Calls in one forward."""
        return len(self.segments) + 3 * len(self.plan.loads)

    def generate(self) -> TopLevel:
        return generate(
            self.gm,
            programs=dict.fromkeys(self.segments, segment),
            weights=frozenset(self.weights),
            weight=lambda placeholder, _: (placeholder, self.weights[placeholder]),
            inputs={"x": "x"},
            operations={operation: lambda *_: nothing for operation in (ops.prefetch, ops.wait, ops.evict)},
            output_weights={},
            device=torch.device("cpu"),
        )


@pytest.mark.parametrize("segments", SIZES)
def test_forward(benchmark, segments: int) -> None:
    made = Generated(segments)
    forward = made.generate().forward
    benchmark.extra_info["nodes"] = made.nodes
    value = object()
    assert benchmark(forward, value) == (value,)
