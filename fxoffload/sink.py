"""Views of weights, moved to where they are read.

A model may take views early and use them late (`w.t()` of every block before the loop). A view that crosses segments would point
into a place of the arena that may hold something else by then, and would make the segment that takes it a reader of every
weight. A view costs nothing, so each reader gets its own, right in front of it:

    t = w.t(); a = f(x); b = mm(a, t)   ->   a = f(x); t = w.t(); b = mm(a, t)

In-place operations stay where they are: their order is their meaning. The weights whose views still cross
(`split.crossing_weights`) stay resident.
"""

# Private names of torch: storage identity. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import tree_leaves

_IN_PLACE = frozenset(
    getattr(operator, name)
    for name in dir(operator)
    if name.startswith("i") and name not in {"index", "indexOf", "inv", "invert"}
) | {operator.setitem, operator.delitem}


def sink_views(gm: fx.GraphModule, weights: set[fx.Node]) -> None:
    """Give every reader of a view of a weight a view of its own. Changes `gm`; views that the graph returns stay."""
    storages = {_storage(value) for node in weights if isinstance(value := node.meta.get("example_value"), torch.Tensor)}
    views = {node for node in gm.graph.nodes if _is_view(node, storages)}
    for user in list(gm.graph.nodes):
        if user in views or user.op == "output":
            continue
        for source in user.all_input_nodes:
            if source in views:
                user.replace_input_with(source, _copy_before(gm.graph, source, user, views))
    for node in reversed(list(gm.graph.nodes)):
        if node in views and not node.users:
            gm.graph.erase_node(node)


def _is_view(node: fx.Node, storages: set[int]) -> bool:
    if node.op not in ("call_function", "call_method") or not node.users:
        return False
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    if node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return False
    tensors = [t for t in tree_leaves(node.meta.get("example_value")) if isinstance(t, torch.Tensor)]
    return bool(tensors) and all(_storage(t) in storages for t in tensors)


def _copy_before(graph: fx.Graph, view: fx.Node, user: fx.Node, views: set[fx.Node]) -> fx.Node:
    inputs = {source: _copy_before(graph, source, user, views) if source in views else source for source in view.all_input_nodes}
    with graph.inserting_before(user):
        copy = graph.node_copy(view, lambda source: inputs[source])
    # The copy belongs to the module of its reader, so that it falls into the same block.
    stack: Any = user.meta.get("nn_module_stack")
    if stack is not None:
        copy.meta = {**copy.meta, "nn_module_stack": stack}
    return copy


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
