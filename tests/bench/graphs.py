"""Graphs and plans for benchmarks: `n` segments in a row, each with a weight of its own, in half of what all weights take."""

from __future__ import annotations

import operator

import torch.fx as fx
from torch import nn

from fxoffload.cost import Costs
from fxoffload.plan import Plan
from fxoffload.planner import Knobs, make_plan
from tests.unit.planner_cases import uneven_chain

SIZES = (57, 200)
"""The blocks of FLUX.1-dev, and about as many pieces as its blocks are cut into."""
KNOBS = Knobs()


def costs_of(n: int) -> Costs:
    return uneven_chain(seed=n, n=n)


def half(costs: Costs) -> int:
    """A budget of half the weights."""
    return sum(bucket.nbytes for bucket in costs.buckets) // 2


def plan_of(n: int) -> Plan:
    costs = costs_of(n)
    return make_plan(costs, half(costs), KNOBS)


def top_level(n: int) -> fx.GraphModule:
    """`blocks_0`, `blocks_1`, ...: each takes the value of the one before and its weight."""
    root, graph = nn.Module(), fx.Graph()
    value = graph.placeholder("x")
    weights = [graph.placeholder(f"w{i}") for i in range(n)]
    for i, weight in enumerate(weights):
        root.add_module(f"blocks_{i}", _segment())
        call = graph.call_module(f"blocks_{i}", (value, weight))
        value = graph.call_function(operator.getitem, (call, 0))
    graph.output((value,))
    return fx.GraphModule(root, graph)


def _segment() -> fx.GraphModule:
    graph = fx.Graph()
    value, _ = graph.placeholder("value"), graph.placeholder("weight")
    graph.output((value,))
    return fx.GraphModule(nn.Module(), graph)
