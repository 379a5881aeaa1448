"""Passes: a plan in, a changed graph out. `run` is the only runner; it copies, runs, checks and dumps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch.fx as fx

from fxoffload import ops
from fxoffload.errors import PlanError
from fxoffload.passes.base import Pass, copy_graph, segment_calls
from fxoffload.passes.insert_evictions import InsertEvictions
from fxoffload.passes.insert_prefetches import InsertPrefetches
from fxoffload.passes.insert_waits import InsertWaits
from fxoffload.plan import Plan

__all__ = ["PIPELINE", "InsertEvictions", "InsertPrefetches", "InsertWaits", "Pass", "run"]

PIPELINE: tuple[Pass, ...] = (InsertPrefetches(), InsertWaits(), InsertEvictions())


def run(
    top: fx.GraphModule, plan: Plan, *, pipeline: Sequence[Pass] = PIPELINE, dump: Path | None = None, code: bool = True
) -> fx.GraphModule:
    """Write the plan into a copy of the top level; the segments themselves are shared with `top`.

    `dump`: a directory for the numbered graph after every pass. `code`: whether the result's `code` and `forward` are wanted;
    its graph is right without. Raises PlanError when the plan is for another graph, or when what the passes wrote is not what the
    plan says.
    """
    gm = fx.GraphModule(top, copy_graph(top.graph))
    for number, step in enumerate(pipeline, start=1):
        gm = step(gm, plan)
        gm.graph.lint()
        if dump is not None:
            gm.recompile()
            dump.mkdir(parents=True, exist_ok=True)
            (dump / f"{number:02d}-{step.name}.txt").write_text(gm.code)
    if tuple(pipeline) == PIPELINE:
        _check(gm, plan)
    if code and dump is None:
        gm.recompile()
    return gm


def _check(gm: fx.GraphModule, plan: Plan) -> None:
    """Every load is prefetched, waited for and evicted exactly once, each on the right side of its readers."""
    nodes = list(gm.graph.nodes)
    order = {node: i for i, node in enumerate(nodes)}
    calls = [order[call] for call in segment_calls(gm, plan)]
    places: dict[tuple[str, str], list[int]] = {}
    for node in gm.graph.find_nodes(op="call_function", target=ops.prefetch):
        places.setdefault(("prefetch", str(node.args[0])), []).append(order[node])
    for node in gm.graph.find_nodes(op="call_function", target=ops.wait):
        places.setdefault(("wait", str(node.args[0])), []).append(order[node])
    for node in gm.graph.find_nodes(op="call_function", target=ops.evict):
        places.setdefault(("evict", str(node.args[0])), []).append(order[node])
    for load in plan.loads:
        found = [places.pop((op, load.name), []) for op in ("prefetch", "wait", "evict")]
        if any(len(where) != 1 for where in found):
            raise PlanError(
                f"passes: {load.name}: prefetch, wait and evict must stand once each, but stand {[len(w) for w in found]} times"
            )
        (prefetch,), (wait,), (evict,) = found
        if not (wait < calls[load.wait_before] and calls[load.evict_after] < evict and (load.wraps or prefetch < wait)):
            raise PlanError(f"passes: {load.name}: prefetch, wait and evict stand in the wrong order around its segments")
        if nodes[prefetch].args != (load.name, load.after):
            raise PlanError(f"passes: {load.name}: its prefetch is {nodes[prefetch].args}, planned {(load.name, load.after)}")
        at = load.prefetch_before
        if not (at == 0 or calls[at - 1] < prefetch) or not prefetch < calls[at]:
            raise PlanError(f"passes: {load.name}: its prefetch does not stand right before segment {plan.segments[at]}")
    if places:
        raise PlanError(f"passes: {sorted(places)[0]}: the plan has no such load")
