"""What a pass is, and how passes find their places in a graph."""

from __future__ import annotations

from typing import ClassVar, Protocol

import torch.fx as fx

from fxoffload.errors import PlanError
from fxoffload.names import identifier
from fxoffload.plan import Plan


class Pass(Protocol):
    """A frozen dataclass with options as fields.

    It may change `gm` in place and returns it; lint, recompile and checks are the runner's.
    """

    name: ClassVar[str]

    def __call__(self, gm: fx.GraphModule, plan: Plan) -> fx.GraphModule: ...


def segment_calls(gm: fx.GraphModule, plan: Plan) -> list[fx.Node]:
    """The call of every segment of the plan, in the plan's order. Raises PlanError when graph and plan do not belong together."""
    calls = {node.target: node for node in gm.graph.find_nodes(op="call_module")}
    wanted = [identifier(name) for name in plan.segments]
    if list(calls) != wanted:
        missing = sorted(set(wanted) ^ {str(target) for target in calls}) or "another order"
        raise PlanError(
            f"passes: the plan is for another graph: it has {len(wanted)} segments, the graph {len(calls)} "
            f"(differs: {missing}); plan this graph"
        )
    return [calls[name] for name in wanted]


def node_name(op: str, load: str) -> str:
    """`prefetch`, `blocks.3` -> `prefetch_blocks_3`."""
    return f"{op}_{identifier(load)}"


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A graph of the same nodes, names and metadata."""
    copy = fx.Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy
