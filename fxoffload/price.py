"""Price: what every segment costs on a machine, as expressions of the dynamic dimensions and as numbers.

    compute_ms(segment)    = sum over its extern kernels of machine.compute_ms(flops, touched)
                           + machine.compute_ms(0, bytes of the storages that its fused nodes read or write)
    activations(segment)   = max over its nodes of the bytes of all storages alive there
    copy_ms(bucket)        = machine.copy_ms(nbytes)

A storage is alive from the node that creates it to its last reader. Where segments run as plain Python, one that crosses segments
is alive to the end of the segment that reads it last, because that holds its arguments; compiled ones free them (`lower`). The
graph's inputs live throughout, its outputs to the end.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import sympy

from fxoffload.blocks import Blocks
from fxoffload.cost import SegmentCost
from fxoffload.errors import OffloadError
from fxoffload.facts import Facts, NodeFacts
from fxoffload.machine import Machine


@dataclass(frozen=True, slots=True)
class SegmentPrice:
    """What one segment computes and holds, as sympy expressions of the traced symbols: numbers where shapes are static.

    `cost` has their value at the sizes that were traced.
    """

    flops: sympy.Expr
    compute_ms: sympy.Expr
    activation_nbytes: sympy.Expr
    cost: SegmentCost


def price(facts: Facts, blocks: Blocks, machine: Machine, *, holds: bool = False) -> tuple[SegmentPrice, ...]:
    """Price every segment of a graph, whose sizes are known. `holds`: a segment holds its arguments while it runs."""
    nodes = {n.name: n for n in facts.nodes}
    live = _live_nbytes(facts, blocks, holds=holds)
    sizes = {storage: nbytes for _, storage, nbytes in facts.inputs} | {s: b for n in facts.nodes for s, b in n.allocates}
    prices: list[SegmentPrice] = []
    for segment in blocks.segments:
        members = [nodes[name] for name in segment.nodes]
        peak = _peak(facts, [live[name] for name in segment.nodes])
        flops = sum((n.flops for n in members), sympy.Integer(0))
        compute_ms = _compute_ms(members, sizes, machine)
        cost = SegmentCost(segment.name, facts.value(compute_ms), facts.number(peak))
        prices.append(SegmentPrice(flops, compute_ms, peak, cost))
    return tuple(prices)


def refuse_unknown_sizes(facts: Facts) -> None:
    """Raises OffloadError where a size is known only once values are computed (`nonzero`)."""
    known = {symbol for symbol, _ in facts.hints}
    for node in facts.nodes:
        sizes = (node.flops, node.touched_nbytes, *(nbytes for _, nbytes in node.allocates))
        if any(size.free_symbols - known for size in sizes):
            raise OffloadError(
                f"price: {node.name} ({node.target}): how large its result is depends on values, so no memory can be planned; "
                "leave torch._dynamo.config.capture_dynamic_output_shape_ops off, and Dynamo breaks the graph there"
            )


def _peak(facts: Facts, live: list[sympy.Expr]) -> sympy.Expr:
    """The largest of some expressions, at every size where shapes are dynamic."""
    return _largest(tuple(dict.fromkeys(live))) if facts.hints else max(live)


@functools.lru_cache(maxsize=256)
def _largest(expressions: tuple[sympy.Expr, ...]) -> sympy.Expr:
    """The maximum, without those that others are at least as large as everywhere. Equal blocks ask for the same one."""
    kept: dict[sympy.Expr, Mapping[Any, Any]] = {}
    for expression in expressions:
        terms: Mapping[Any, Any] = cast("Any", expression).expand().as_coefficients_dict()
        if not any(_covers(other, terms) for other in kept.values()):
            kept = {e: other for e, other in kept.items() if not _covers(terms, other)} | {expression: terms}
    return sympy.Max(*kept)


def _covers(large: Mapping[Any, Any], small: Mapping[Any, Any]) -> bool:
    """Whether a sum of terms is nowhere below another: no coefficient is, and the terms in which it is above are not negative."""
    more = ((term, large.get(term, 0) - small.get(term, 0)) for term in {**large, **small})
    return all(n == 0 or (n > 0 and term.is_nonnegative) for term, n in more)


def _compute_ms(members: list[NodeFacts], sizes: Mapping[int, sympy.Expr], machine: Machine) -> sympy.Expr:
    total: sympy.Expr = sympy.Integer(0)
    touched_by_fused: set[int] = set()
    for node in members:
        if node.kind == "extern":
            total += machine.compute_ms(node.flops, node.touched_nbytes, node.rate)
        elif node.kind == "fused":
            touched_by_fused.update(node.reads, (storage for storage, _ in node.allocates))
    traffic = sum((sizes.get(storage, sympy.Integer(0)) for storage in sorted(touched_by_fused)), sympy.Integer(0))
    return total + (machine.compute_ms(0, traffic, "") if touched_by_fused else 0)


def _live_nbytes(facts: Facts, blocks: Blocks, *, holds: bool) -> dict[str, sympy.Expr]:
    """Bytes of all activations alive while each node runs."""
    segment_of = {name: i for i, s in enumerate(blocks.segments) for name in s.nodes}
    position = {n.name: i for i, n in enumerate(facts.nodes)}
    end_of = [max(position[name] for name in segment.nodes) for segment in blocks.segments]
    last_node = len(facts.nodes) - 1
    last: dict[int, int] = {}
    born: dict[int, tuple[int, sympy.Expr]] = {}
    for node in facts.nodes:
        here = segment_of[node.name]
        for storage in node.reads:
            held = holds and storage in born and segment_of[facts.nodes[born[storage][0]].name] != here
            last[storage] = max(last.get(storage, 0), end_of[here] if held else position[node.name])
        for storage, nbytes in node.allocates:
            born[storage] = (position[node.name], nbytes)
            last[storage] = position[node.name]
    for storage in facts.outputs:
        last[storage] = last_node
    base = sum((nbytes for _, _, nbytes in facts.inputs), sympy.Integer(0))
    change: list[sympy.Expr] = [sympy.Integer(0)] * (len(facts.nodes) + 1)
    for storage, (start, nbytes) in born.items():
        change[start] += nbytes
        change[last[storage] + 1] -= nbytes
    live: dict[str, sympy.Expr] = {}
    running = base
    for node, delta in zip(facts.nodes, change, strict=False):
        running = running + delta
        live[node.name] = running
    return live
