"""What the host pays for a forward, apart from what the device's own library takes.

- For a node of the generated top level: segments, prefetches, waits and evictions that do nothing. The time of one round over
  `nodes` (in the benchmark's extra info) is the cost of a node.
- For a call that replays a captured forward, with a graph that does nothing: what Dynamo takes before we are called, and what we
  take. `weights` and `loads` are in the extra info.
- For the look at every weight in such a call, by the part of the weights that the device keeps.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import ops, passes
from fxoffload.dispatch import Dispatch
from fxoffload.edits import EditWatch
from fxoffload.lower import TopLevel, generate
from tests.bench.graphs import SIZES, plan_of, top_level
from tests.capturing import captures
from tests.checks import budgets, offload
from tests.models import rows, toy

__all__ = ["captures"]
pytestmark = pytest.mark.benchmark(group="host cost")


def nothing() -> None:
    """A prefetch, a wait or an eviction."""


def segment(arguments: list[Any]) -> tuple[Any]:
    value, _ = arguments
    arguments.clear()
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


BLOCKS = SIZES[0]
WEIGHTS = 1160
"""Of FLUX.1-dev."""


@pytest.mark.parametrize("inside", [False, True], ids=["with Dynamo", "without Dynamo"])
@pytest.mark.parametrize("label", ["smallest", "half", "all"])
@torch.no_grad()
def test_replay(benchmark, captures: dict[str, Any], monkeypatch: pytest.MonkeyPatch, label: str, inside: bool) -> None:
    captures["idle"] = True
    model = toy(BLOCKS)
    compiled, x = offload(model, cuda_graph=True), rows(0)
    calls: list[tuple[Any, ...]] = []
    dispatched = Dispatch.__call__

    def called(*args: Any) -> Any:
        calls[:] = [args]
        return dispatched(*args)

    with monkeypatch.context() as patch:
        patch.setattr(Dispatch, "__call__", called)
        compiled(x)
        fxoffload.set_memory_budget(model, budgets(model)[label])
        compiled(x), compiled(x)
    ((dispatch, *args),) = calls
    before = fxoffload.stats(model).replays
    benchmark.extra_info["weights"] = sum(1 for _ in model.parameters())
    benchmark.extra_info["loads"] = len(fxoffload.get_plan(model).loads)
    benchmark(lambda: dispatch(*args) if inside else compiled(x))
    assert fxoffload.stats(model).replays > before


@pytest.mark.parametrize("kept", [0.05, 0.4, 1.0])
@torch.no_grad()
def test_looks_for_edits(benchmark, kept: float) -> None:
    tensors = tuple(torch.nn.Parameter(torch.rand(64, 64), requires_grad=False) for _ in range(WEIGHTS))
    watch = EditWatch(tensors, tensors)
    watch.keep(range(int(WEIGHTS * kept)))
    assert benchmark(lambda: (watch.moved(tensors), watch.written(tensors))) == ([], [])
