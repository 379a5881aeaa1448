"""Price: what every segment costs on a machine, as expressions of the dynamic dimensions and as numbers.

    compute_ms(segment)    = sum over its extern kernels of machine.compute_ms(flops, touched)
                           + machine.compute_ms(0, bytes of the storages that its fused nodes read or write)
    activations(segment)   = max over its nodes of the bytes of all storages alive there
    copy_ms(bucket)        = machine.copy_ms(nbytes)

A storage is alive from the node that creates it to its last reader; one that crosses segments, to the end of the segment
that reads it last, because the caller holds it there. The graph's inputs live throughout, its outputs to the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import sympy

from fxoffload.blocks import Blocks, Segment
from fxoffload.cost import SegmentCost
from fxoffload.facts import Facts, NodeFacts
from fxoffload.machine import Machine


@dataclass(frozen=True, slots=True)
class SegmentPrice:
    """`flops` and `activation_nbytes` are sympy expressions of the traced symbols; `cost` has their value at the traced sizes."""

    flops: sympy.Expr
    activation_nbytes: sympy.Expr
    cost: SegmentCost


def price(facts: Facts, blocks: Blocks, machine: Machine) -> tuple[SegmentPrice, ...]:
    """Price every segment of a graph."""
    nodes = {n.name: n for n in facts.nodes}
    live = _live_nbytes(facts, blocks)
    prices: list[SegmentPrice] = []
    for segment in blocks.segments:
        members = [nodes[name] for name in segment.nodes]
        peak = max((live[name] for name in segment.nodes), key=facts.number)
        flops = sum((n.flops for n in members), sympy.Integer(0))
        cost = SegmentCost(segment.name, _compute_ms(facts, members, machine), facts.number(peak))
        prices.append(SegmentPrice(flops, peak, cost))
    return tuple(prices)


def _compute_ms(facts: Facts, members: list[NodeFacts], machine: Machine) -> float:
    total = 0.0
    sizes: dict[int, int] = {}
    touched_by_fused: set[int] = set()
    for node in members:
        sizes.update((storage, facts.number(nbytes)) for storage, nbytes in node.allocates)
        if node.kind == "extern":
            total += machine.compute_ms(facts.number(node.flops), facts.number(node.touched_nbytes), node.dtype)
        elif node.kind == "fused":
            touched_by_fused.update(node.reads, (storage for storage, _ in node.allocates))
    traffic = sum(sizes.get(storage, 0) for storage in touched_by_fused)
    return total + (machine.compute_ms(0, traffic, "") if touched_by_fused else 0.0)


def _live_nbytes(facts: Facts, blocks: Blocks) -> dict[str, sympy.Expr]:
    """Bytes of all activations alive while each node runs."""
    segment_of = {name: i for i, s in enumerate(blocks.segments) for name in s.nodes}
    end_of = _segment_ends(facts, blocks.segments)
    position = {n.name: i for i, n in enumerate(facts.nodes)}
    last_node = len(facts.nodes) - 1
    last: dict[int, int] = {}
    born: dict[int, tuple[int, sympy.Expr]] = {}
    for node in facts.nodes:
        here = segment_of[node.name]
        for storage in node.reads:
            crosses = storage in born and segment_of[facts.nodes[born[storage][0]].name] != here
            last[storage] = max(last.get(storage, 0), end_of[here] if crosses else position[node.name])
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


def _segment_ends(facts: Facts, segments: tuple[Segment, ...]) -> list[int]:
    position = {n.name: i for i, n in enumerate(facts.nodes)}
    return [max(position[name] for name in segment.nodes) for segment in segments]
