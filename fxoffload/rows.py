"""Large embeddings and projections, cut by rows, so that no single weight sets the smallest budget.

A row of an embedding is looked up in exactly one piece, and an output feature of a projection depends on one row:

    embedding(ids, W)  =  where(ids in piece k, embedding(ids - first_k, W_k), ...)     over the pieces k
    linear(x, W, b)    =  cat_k linear(x, W_k, b_k)

Both select or concatenate values and add none, so the embedding is exact, and the projection as exact as its kernel is for
another number of rows. An index outside the table is still an error of the first or the last piece. Other readers of a weight
(a convolution, an embedding with `max_norm`, which writes to its table) keep it whole.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, lcm
from typing import Any

import torch
import torch.fx as fx

from fxoffload.buckets import ALIGNMENT
from fxoffload.counts import without_values
from fxoffload.layout import overlapping
from fxoffload.wrappers import Path, at

_WIDTHS = (128, 8)
"""Columns of a tile, and of 16 bytes in 16 bits: matrix units are far slower at widths that are no multiple of the latter."""
_PARTS = 16
"""A piece has at least so many of these widths, so that to round up makes it at most a sixteenth larger."""


@dataclass(frozen=True, slots=True)
class Source:
    """The argument of a call that a weight comes from: all of it, or `rows` (first, end) of it, or the tensor at `path` in it."""

    position: int
    rows: tuple[int, int] | None = None
    path: Path = ()

    @property
    def whole(self) -> Source:
        """The tensor that the model has, whose rows these may be."""
        return Source(self.position, None, self.path)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = at(tensor, self.path)
        return whole if self.rows is None else whole[self.rows[0] : self.rows[1]]


def split_rows(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    limit_nbytes: int,
    is_weight: Callable[[fx.Node, Any], bool],
    whole_nbytes: int = 0,
) -> tuple[list[Any], list[Source]]:
    """Cut every weight above the limit whose readers allow it, but none of at most `whole_nbytes`.

    Changes `gm`; returns its inputs and where each comes from.
    """
    inputs: list[Any] = []
    sources: list[Source] = []
    placeholders = gm.graph.find_nodes(op="placeholder")
    weights = {node: real for node, real in zip(placeholders, example_inputs, strict=True) if is_weight(node, real)}
    large = _large(weights, limit_nbytes, max(limit_nbytes, whole_nbytes))
    for position, (node, real) in enumerate(zip(placeholders, example_inputs, strict=True)):
        if node in large:
            bounds = _row_bounds(real, limit_nbytes)
            inputs.extend(real.detach()[a:b] for a, b in bounds)
            sources.extend(Source(position, rows) for rows in bounds)
            _replace(gm, node, bounds)
        else:
            inputs.append(real)
            sources.append(Source(position))
    if large:
        gm.graph.lint()
        gm.recompile()
    return inputs, sources


def _large(weights: dict[fx.Node, torch.Tensor], limit_nbytes: int, whole_nbytes: int) -> set[fx.Node]:
    """The weights to cut. Of several that share memory either all are cut, if they are the same matrix, or none is."""
    by_id: dict[int, list[fx.Node]] = {}
    for node, real in weights.items():
        by_id.setdefault(id(real), []).append(node)
    large: set[fx.Node] = set()
    for group in overlapping([("", real) for real in {id(r): r for r in weights.values()}.values()]):
        nodes = [node for _, real in group for node in by_id[id(real)]]
        layouts = {(real.data_ptr(), real.dtype, real.shape) for _, real in group}
        if len(layouts) == 1 and all(_can_split(node, weights[node], limit_nbytes, whole_nbytes) for node in nodes):
            large.update(nodes)
    return large


def _can_split(node: fx.Node, real: torch.Tensor, limit_nbytes: int, whole_nbytes: int) -> bool:
    large = real.dim() == 2 and real.is_contiguous() and real.numel() * real.element_size() > whole_nbytes
    return (
        large
        and len(_row_bounds(real, limit_nbytes)) > 1
        and bool(node.users)
        and all(_reads_by_row(user, node) for user in node.users)
    )


def _reads_by_row(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is torch.nn.functional.embedding:
        arguments = dict(zip(("input", "weight", "padding_idx", "max_norm"), user.args, strict=False)) | user.kwargs
        return arguments["weight"] is weight and arguments["input"] is not weight and arguments.get("max_norm") is None
    if user.target is torch.nn.functional.linear:
        arguments = dict(zip(("input", "weight", "bias"), user.args, strict=False)) | user.kwargs
        return arguments["weight"] is weight and weight not in (arguments["input"], arguments.get("bias"))
    return False


def _row_bounds(real: torch.Tensor, limit_nbytes: int) -> list[tuple[int, int]]:
    """Equal pieces of at most the limit, each starting at an aligned byte, and where that hardly matters to their size at a row
    that begins a tile of a matrix unit, or at least one of its loads: the product with a piece is as wide as it has rows.
    """
    rows, row_nbytes = real.shape[0], real.shape[1] * real.element_size()
    aligned = ALIGNMENT // gcd(row_nbytes, ALIGNMENT)
    least = -(-rows // -(-rows * row_nbytes // limit_nbytes))
    steps = [step for width in _WIDTHS if (step := lcm(aligned, width)) * _PARTS <= least]
    fitting = (n for step in [*steps, aligned] if (n := -(-least // step) * step) * row_nbytes <= limit_nbytes)
    per_piece = next(fitting, max(limit_nbytes // row_nbytes // aligned, 1) * aligned)
    return [(first, min(first + per_piece, rows)) for first in range(0, rows, per_piece)]


def _replace(gm: fx.GraphModule, weight: fx.Node, bounds: list[tuple[int, int]]) -> None:
    pieces: list[fx.Node] = []
    with gm.graph.inserting_before(weight):
        for k, (first, end) in enumerate(bounds):
            piece = gm.graph.placeholder(f"{weight.name}_rows{k}")
            piece.meta = {**without_values(weight.meta), "example_value": weight.meta["example_value"][first:end]}
            pieces.append(piece)
    for user in list(weight.users):
        with gm.graph.inserting_before(user):
            result = (
                _embedding(gm.graph, user, pieces, bounds)
                if user.target is torch.nn.functional.embedding
                else _linear(gm.graph, user, pieces, bounds)
            )
        user.replace_all_uses_with(result)
        gm.graph.erase_node(user)
    gm.graph.erase_node(weight)


def _embedding(graph: fx.Graph, user: fx.Node, pieces: list[fx.Node], bounds: list[tuple[int, int]]) -> fx.Node:
    call = _caller(graph, user)
    ids = user.args[0] if user.args else user.kwargs["input"]
    result: fx.Node | None = None
    for k, (piece, (first, end)) in enumerate(zip(pieces, bounds, strict=True)):
        local = call(torch.sub, ids, first)
        # The first piece takes what is too small and the last what is too large, as the whole table would: with an error.
        inside = call(torch.lt, local, end - first) if k == 0 else call(torch.ge, local, 0)
        if 0 < k < len(pieces) - 1:
            inside = call(torch.logical_and, inside, call(torch.lt, local, end - first))
        rows = call(torch.nn.functional.embedding, call(torch.where, inside, local, 0), piece)
        result = rows if result is None else call(torch.where, call(torch.unsqueeze, inside, -1), rows, result)
    assert result is not None
    return result


def _linear(graph: fx.Graph, user: fx.Node, pieces: list[fx.Node], bounds: list[tuple[int, int]]) -> fx.Node:
    call = _caller(graph, user)
    arguments = dict(zip(("input", "weight", "bias"), user.args, strict=False)) | user.kwargs
    bias = arguments.get("bias")
    parts: list[fx.Node] = []
    for piece, (first, end) in zip(pieces, bounds, strict=True):
        piece_bias = call(torch.narrow, bias, 0, first, end - first) if bias is not None else None
        if piece_bias is not None and isinstance(bias, fx.Node) and "example_value" in bias.meta:
            piece_bias.meta["example_value"] = bias.meta["example_value"][first:end]
        parts.append(call(torch.nn.functional.linear, arguments["input"], piece, piece_bias))
    return call(torch.cat, parts, -1)


def _caller(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    """Makes nodes that belong to the same module as `like`."""

    def call(target: Callable[..., Any], *args: Any) -> fx.Node:
        node = graph.call_function(target, args)
        node.meta = without_values(like.meta)
        return node

    return call
