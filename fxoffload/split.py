"""The traced graph as a top level of segments, and which segments are equal.

`torch.fx.passes.split_module` does the cutting. Equal blocks must come out as equal segments, so outputs are tuples in the
order in which they are produced (their consumers differ from block to block), and the key of a segment covers its ops,
constants, the layout of its inputs and what wrappers among them are made with, but no names and no storage offsets.
"""

# Private names of torch: the names of a graph. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import hashlib
import operator
from typing import Any

import torch
import torch.fx as fx
from torch.fx.passes.split_module import split_module

from fxoffload.blocks import Blocks
from fxoffload.facts import Facts
from fxoffload.storages import plain_tensors, storage_of
from fxoffload.wrappers import flatten, is_wrapper

RESERVED = frozenset(dir(fx.GraphModule({}, fx.Graph())))
"""Names that no segment can have, which is an attribute of the top level."""


def split_graph(gm: fx.GraphModule, blocks: Blocks) -> fx.GraphModule:
    """A graph module whose children are the segments, called in order under their identifiers; every child returns a tuple."""
    segment_of = {name: i for i, s in enumerate(blocks.segments) for name in s.nodes}
    top = split_module(gm, gm, lambda node: segment_of[node.name], keep_original_order=True)
    for node in list(top.graph.nodes):
        if node.op != "call_module":
            continue
        child = segment_module(top, node.target)
        _return_tuple(top, node, child)
        _order_outputs(node, child)
    _name_segments(top, blocks)
    top.graph.lint()
    top.recompile()
    return top


def segment_module(top: fx.GraphModule, target: str) -> fx.GraphModule:
    """The segment that a call at the top level runs."""
    child = top.get_submodule(target)
    assert isinstance(child, fx.GraphModule)
    return child


def _name_segments(top: fx.GraphModule, blocks: Blocks) -> None:
    calls = [(node, top.get_submodule(node.target)) for node in top.graph.find_nodes(op="call_module")]
    for node, _ in calls:
        top.delete_submodule(node.target)
    for node, child in calls:
        name = blocks.segments[int(node.target.removeprefix("submod_"))].identifier
        top.add_submodule(name, child)
        node.target = name
        # The graph has names already, such as `output`.
        node._rename(name)


def _return_tuple(top: fx.GraphModule, node: fx.Node, child: fx.GraphModule) -> None:
    """`split_module` returns a lone output bare; AOTAutograd wants a tuple."""
    output = child.graph.output_node()
    if isinstance(output.args[0], (tuple, list)):
        return
    output.args = ((output.args[0],),)
    child.recompile()
    with top.graph.inserting_after(node):
        item = top.graph.call_function(operator.getitem, (node, 0))
    item.meta = dict(node.meta)
    node.replace_all_uses_with(item, delete_user_cb=lambda user: user is not item)


def _order_outputs(node: fx.Node, child: fx.GraphModule) -> None:
    position = {n: i for i, n in enumerate(child.graph.nodes)}
    output = child.graph.output_node()
    returned: Any = output.args[0]
    old = list(returned)
    order = sorted(range(len(old)), key=lambda i: position.get(old[i], -1))
    if order == list(range(len(old))):
        return
    output.args = (tuple(old[i] for i in order),)
    child.recompile()
    new_index = {before: after for after, before in enumerate(order)}
    for user in list(node.users):
        index: Any = user.args[1]
        user.args = (node, new_index[index])


def crossing_weights(gm: fx.GraphModule, blocks: Blocks, facts: Facts) -> frozenset[str]:
    """Placeholders of weights of which a segment hands a view to another segment: they must not move in between."""
    segment_of = {name: i for i, s in enumerate(blocks.segments) for name in s.nodes}
    weights = {w.placeholder for w in facts.weights}
    storages = {storage_of(n.meta["val"]): n.name for n in gm.graph.find_nodes(op="placeholder") if n.name in weights}
    crossing: set[str] = set()
    for node in gm.graph.nodes:
        if node.name not in segment_of:
            continue
        owners = {storages[s] for t in plain_tensors(node.meta["val"]) if (s := storage_of(t)) in storages}
        if any(user.op != "output" and segment_of[user.name] != segment_of[node.name] for user in node.users):
            crossing |= owners
    return frozenset(crossing)


def segment_inputs(child: fx.GraphModule) -> list[Any]:
    """The fake inputs that a segment was traced with."""
    return [n.meta["val"] for n in child.graph.find_nodes(op="placeholder")]


def segment_key(child: fx.GraphModule) -> str:
    """Equal for two segments exactly when one compiled program serves both."""
    index: dict[fx.Node, int] = {}
    digest = hashlib.sha256()
    storages: dict[int, int] = {}
    for k, node in enumerate(child.graph.nodes):
        index[node] = k
        if node.op == "placeholder":
            item: tuple[Any, ...] = ("in", _value_key(node.meta["val"], storages))
        elif node.op == "get_attr":
            item = ("attr", _attribute_key(_attribute(child, node.target)))
        else:
            item = (node.op, _target_key(node.target), repr(_numbered(node.args, index)), repr(_numbered(node.kwargs, index)))
        digest.update(repr(item).encode())
    return digest.hexdigest()


def _numbered(args: Any, index: dict[fx.Node, int]) -> Any:
    return fx.map_arg(args, lambda n: f"%{index[n]}")


def _target_key(target: Any) -> str:
    return target if isinstance(target, str) else f"{torch.typename(target)}.{getattr(target, '__qualname__', target)}"


def _attribute(child: fx.GraphModule, target: str) -> Any:
    return operator.attrgetter(target)(child)


def _value_key(value: Any, storages: dict[int, int]) -> tuple[Any, ...]:
    if not isinstance(value, torch.Tensor):
        return (repr(value),)
    # Inputs that share a storage may alias when one is written: the pattern of sharing belongs to the key.
    shared = tuple(storages.setdefault(storage_of(plain), len(storages)) for plain in plain_tensors(value))
    layout = (str(value.dtype), str(value.device), tuple(map(str, value.shape)), tuple(map(str, value.stride())))
    return (*layout, value.requires_grad, type(value).__name__, shared, *_parts_key(value, storages))


def _parts_key(value: torch.Tensor, storages: dict[int, int]) -> tuple[Any, ...]:
    """What a wrapper consists of and is made with: two of one shape may be placed over ranks in other ways."""
    if not is_wrapper(value):
        return ()
    attributes, context = flatten(value)
    return (repr(context), *(_value_key(getattr(value, attribute), storages) for attribute in attributes))


def _attribute_key(value: Any) -> Any:
    if isinstance(value, fx.GraphModule):
        return segment_code_key(value)
    if isinstance(value, torch.Tensor):
        data: Any = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
        return (str(value.dtype), tuple(value.shape), hashlib.sha256(data).hexdigest())
    return repr(value)


def segment_code_key(gm: fx.GraphModule) -> tuple[Any, ...]:
    """Code and constants of a graph module that is an operand, as of a higher-order operator."""
    constants = [_attribute_key(_attribute(gm, n.target)) for n in gm.graph.find_nodes(op="get_attr")]
    return (gm.code, *constants)
