"""Views of weights, moved to where they are read.

A model may take views early and use them late (`w.t()` of every block before the loop). A view that crosses segments would point
into a place of the arena that may hold something else by then, and would make the segment that takes it a reader of every
weight. A view costs nothing, so each reader gets its own, right in front of it:

    t = w.t(); a = f(x); b = mm(a, t)   ->   a = f(x); t = w.t(); b = mm(a, t)

A view that the model returns is copied right behind the last reader of its weight, before the weight may move. Weights that the
graph writes to are left alone, with all their views: they stay resident, and the order of what is done to them is its meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Set
from typing import Any

import torch.fx as fx

from fxoffload.storages import plain_tensors, storage_of


def sink_views(gm: fx.GraphModule, weights: set[fx.Node], written: Set[str]) -> None:
    """Give every reader of a view of a weight a view of its own, and the graph's outputs copies. Changes `gm`.

    `written`: names of nodes whose memory the graph writes to. Whatever returns memory of other weights is a view.
    """
    # A weight may come as several inputs, of which one is written.
    storages = _traced_storages(weights) - _traced_storages(n for n in gm.graph.nodes if n.name in written)
    views = {node for node in gm.graph.nodes if _is_view(node, storages)}
    readers = _last_readers(gm, views, storages)
    output = gm.graph.output_node()
    for user in list(gm.graph.nodes):
        if user in views or user is output:
            continue
        for source in user.all_input_nodes:
            if source in views:
                user.replace_input_with(source, _copy_before(gm.graph, source, user, views))
    for source in output.all_input_nodes:
        if source in views:
            output.replace_input_with(source, _returned_copy(gm.graph, source, readers, views))
    for node in reversed(list(gm.graph.nodes)):
        if node in views and not node.users:
            gm.graph.erase_node(node)


def _is_view(node: fx.Node, storages: set[int]) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    found = _traced_storages([node])
    return bool(found) and found <= storages


def _last_readers(gm: fx.GraphModule, views: set[fx.Node], storages: set[int]) -> dict[int, fx.Node]:
    """By storage, the last node that reads a weight or a view of it and is no view itself."""
    last: dict[int, fx.Node] = {}
    for node in gm.graph.nodes:
        if node not in views and node.op != "output":
            last.update((storage, node) for storage in _traced_storages(node.all_input_nodes) & storages)
    return last


def _returned_copy(graph: fx.Graph, view: fx.Node, readers: dict[int, fx.Node], views: set[fx.Node]) -> fx.Node:
    place = readers.get(next(iter(_traced_storages([view]))), view)
    with graph.inserting_after(place):
        copy = graph.call_method("clone", (view,))
    copy.meta = {key: value for key, value in place.meta.items() if key == "nn_module_stack"}
    if place is not view:
        copy.replace_input_with(view, _copy_before(graph, view, copy, views))
    return copy


def _copy_before(graph: fx.Graph, view: fx.Node, user: fx.Node, views: set[fx.Node]) -> fx.Node:
    inputs = {source: _copy_before(graph, source, user, views) if source in views else source for source in view.all_input_nodes}
    with graph.inserting_before(user):
        copy = graph.node_copy(view, lambda source: inputs[source])
    # The copy belongs to the module of its reader, so that it falls into the same block.
    stack: Any = user.meta.get("nn_module_stack")
    if stack is not None:
        copy.meta = {**copy.meta, "nn_module_stack": stack}
    return copy


def _traced_storages(nodes: Iterable[fx.Node]) -> set[int]:
    """The storages of what these nodes gave while Dynamo traced them."""
    return {storage_of(t) for node in nodes for t in plain_tensors(node.meta.get("example_value"))}
