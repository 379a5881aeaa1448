"""Blocks of a graph, cut into segments.

A block is the outermost module around a node that is declared to be one. Where none is, it is the outermost module whose path
ends in an index and whose container holds two or more of its class that ran. Nodes outside blocks form groups of their own where
they read weights; weightless glue between blocks (residual adds, slicing) rides with the group before it. Each group is cut into
segments whose weights stay under a limit, where a cut costs the least fusion.

The cost of a cut between two nodes is the memory traffic that fusing across it would have saved: for every storage
that is alive across the cut,

    2 * nbytes   written by a fused kernel and read by fused kernels only: without the cut it would stay in registers
    1 * nbytes   in memory anyway (an extern kernel writes or reads it), but fused kernels on both sides read it
    0            otherwise, as between a matrix product and the next

and a segment more costs `SEGMENT_NBYTES`, the traffic that its launch overhead is worth. Dynamic programming over the cuts
of one group minimises the sum. No cut parts a view of a weight, or a wrapper made of its parts, from what reads it, nor what
`vmap` runs at once.

A segment holds its weights while it runs. So a node that reads none and takes long, such as attention over many tokens, becomes
a segment of its own where the cuts before and behind it cost no fusion.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fxoffload.facts import Facts, NodeFacts
from fxoffload.names import claim, identifier

SEGMENT_NBYTES = 16 << 20
_LIGHT = 16
"""Of the limit: weights of no more than this part of it may be held while a long kernel runs."""
_NEVER = 1 << 62
_INDEXED = re.compile(r"^(?:(?P<container>.*)\.)?\d+$")


@dataclass(frozen=True, slots=True)
class Segment:
    """A run of consecutive nodes. `block` is the path of its block, `""` outside blocks; `weights` are placeholder names."""

    name: str
    block: str
    nodes: tuple[str, ...]
    weights: tuple[str, ...]

    @property
    def identifier(self) -> str:
        return identifier(self.name)


@dataclass(frozen=True, slots=True)
class Blocks:
    segments: tuple[Segment, ...]

    def __str__(self) -> str:
        from fxoffload.show import table

        rows = [(s.name, s.block or "-", len(s.nodes), len(s.weights)) for s in self.segments]
        return f"blocks  {len({s.block for s in self.segments if s.block})} blocks  {len(self.segments)} segments\n" + table(
            ("segment", "block", "nodes", "weights"), rows
        )


def find_blocks(
    facts: Facts,
    *,
    max_segment_nbytes: int,
    declared: Collection[str] = (),
    long: Collection[str] = (),
    reserved: Collection[str] = (),
) -> Blocks:
    """Cut a graph into segments whose weights are at most `max_segment_nbytes` (one larger weight: a segment alone).

    `declared`: dotted paths of the blocks (`units.declared_paths`); without it, or where none of them ran, they are discovered.
    `long`: names of nodes that read no weights, and during which none should be held. `reserved`: identifiers that none has.
    """
    weight_nbytes = {w.placeholder: w.nbytes for w in facts.weights}
    groups = _groups(facts, declared)
    segments: list[Segment] = []
    taken = set(reserved)
    owned: set[str] = set()
    names_of = {w.placeholder: w.name for w in facts.weights}
    for block, nodes in groups:
        pieces = _cut(facts, nodes, weight_nbytes, max_segment_nbytes, owned, long)
        base = block or _outside_name(nodes, names_of)
        for i, piece in enumerate(pieces):
            name = claim(base if len(pieces) == 1 else f"{base}:{i}", taken, spell=identifier)
            weights = dict.fromkeys(w for node in piece for w in node.weights)
            segments.append(Segment(name, block, tuple(n.name for n in piece), tuple(weights)))
            owned.update(weights)
    return Blocks(tuple(segments))


def _discover(facts: Facts) -> set[str]:
    """Paths of modules that are members of a container, two or more of whose class ran."""
    members: dict[tuple[str, str], set[str]] = {}
    for node in facts.nodes:
        for _, path, class_name in node.path:
            if found := _INDEXED.match(path):
                members.setdefault((found["container"] or "", class_name), set()).add(path)
    return {path for paths in members.values() if len(paths) >= 2 for path in paths}


def _block_of(node: NodeFacts, blocks: set[str]) -> str:
    for key, path, _ in node.path:
        if path in blocks:
            _, _, call = key.partition("@")
            return f"{path}@{call}" if call else path
    return ""


def _groups(facts: Facts, declared: Collection[str]) -> list[tuple[str, list[NodeFacts]]]:
    """Consecutive nodes of one block, or of none; glue without weights rides with the group before it.

    What `vmap` runs stays in the group in which it begins, blocks too.
    """
    blocks = {path for node in facts.nodes for _, path, _ in node.path}.intersection(declared) or _discover(facts)
    groups: list[tuple[str, list[NodeFacts]]] = []
    depth = 0
    for node in facts.nodes:
        block = _block_of(node, blocks)
        is_glue = not block and not node.weights
        is_inside, depth = depth > 0, depth + _nesting(node)
        if groups and (groups[-1][0] == block or is_glue or is_inside):
            groups[-1][1].append(node)
        else:
            groups.append((block, [node]))
    if len(groups) > 1 and not any(n.weights for n in groups[0][1]) and not groups[0][0]:
        groups[1] = (groups[1][0], groups[0][1] + groups[1][1])
        del groups[0]
    return groups


def _outside_name(nodes: Sequence[NodeFacts], names: dict[str, str]) -> str:
    """The module whose weights a group outside blocks reads first, or its first node."""
    for node in nodes:
        for weight in node.weights:
            module, _, _ = names[weight].rpartition(".")
            return module or names[weight]
    return nodes[0].name


def _cut(
    facts: Facts,
    nodes: list[NodeFacts],
    weight_nbytes: dict[str, int],
    limit: int,
    owned: set[str],
    long: Collection[str],
) -> list[list[NodeFacts]]:
    """Split a group at the cheapest places; `owned` weights came with an earlier segment and count nothing here."""
    new_nbytes: list[int] = []
    seen = set(owned)
    for node in nodes:
        fresh = [w for w in node.weights if w not in seen]
        seen.update(fresh)
        new_nbytes.append(sum(weight_nbytes[w] for w in fresh))
    if sum(new_nbytes) <= limit:
        return [nodes]
    inseparable = _inseparable(nodes)
    cut_cost = _cut_costs(facts, nodes, inseparable)
    for start, end in inseparable:
        new_nbytes[start:end] = [sum(new_nbytes[start:end]), *[0] * (end - start - 1)]
    # A cut pays only right before a node that brings a weight: anywhere else the next such node would do as well.
    starts = [i for i, nbytes in enumerate(new_nbytes) if nbytes]
    candidates = sorted({0, len(nodes), *(c for i in starts[1:] for c in _places(cut_cost, i, starts))})
    best: dict[int, tuple[float, int]] = {0: (0.0, 0)}
    for at, end in enumerate(candidates[1:], start=1):
        options: list[tuple[float, int]] = []
        for start in candidates[:at]:
            weights = [n for n in new_nbytes[start:end] if n]
            if start in best and (sum(weights) <= limit or len(weights) <= 1):
                price = best[start][0] + SEGMENT_NBYTES + (cut_cost[start] if start else 0)
                options.append((price, start))
        if options:
            best[end] = min(options)
    bounds = [len(nodes)]
    while bounds[-1]:
        bounds.append(best[bounds[-1]][1])
    bounds.reverse()
    worth = limit // _LIGHT
    return [part for a, b in pairwise(bounds) for part in _part(facts, nodes[a:b], new_nbytes[a:b], worth, long)]


def _part(
    facts: Facts, nodes: list[NodeFacts], new_nbytes: list[int], worth: int, long: Collection[str]
) -> list[list[NodeFacts]]:
    """Cut a segment before and behind its long nodes, where that parts them from weights worth it and costs no fusion."""
    places = [i for i, node in enumerate(nodes) if node.name in long]
    if not places:
        return [nodes]
    cut_cost = _cut_costs(facts, nodes, _inseparable(nodes))
    before = {i for i in places if sum(new_nbytes[:i]) > worth}
    behind = {i + 1 for i in places if sum(new_nbytes[i + 1 :]) > worth}
    cuts = sorted(cut for cut in before | behind if not cut_cost[cut])
    return [nodes[a:b] for a, b in pairwise([0, *cuts, len(nodes)])]


def _inseparable(nodes: Sequence[NodeFacts]) -> list[tuple[int, int]]:
    """Ranges of nodes that no cut parts: a view of a weight and what reads it, and all that `vmap` runs at once.

    A view that crossed to another segment would keep its weight resident. Its reader is the next node that has the weight and is
    no view itself (`sink`).
    """
    ranges: list[tuple[int, int]] = []
    depth = opened = 0
    for i, node in enumerate(nodes):
        if node.kind == "view" and node.weights:
            reader = next((j for j in range(i + 1, len(nodes)) if _reads(nodes[j], node.weights)), i)
            ranges.append((i, reader + 1))
        before, depth = depth, depth + _nesting(node)
        if not before:
            opened = i
        elif not depth:
            ranges.append((opened, i + 1))
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def _nesting(node: NodeFacts) -> int:
    """1 where `vmap`, or another transform of `torch.func`, begins; -1 where it ends."""
    return node.target.endswith("_increment_nesting") - node.target.endswith("_decrement_nesting")


def _reads(node: NodeFacts, weights: Collection[str]) -> bool:
    return node.kind != "view" and not set(node.weights).isdisjoint(weights)


def _places(cut_cost: list[int], start: int, starts: list[int]) -> list[int]:
    """Where to cut before the weight of node `start`: right before it, or at the cheapest place since the weight before."""
    previous = max(i for i in starts if i < start)
    cheapest = min(range(previous + 1, start + 1), key=lambda i: (cut_cost[i], -i))
    return [start, cheapest]


def _cut_costs(facts: Facts, nodes: list[NodeFacts], inseparable: Sequence[tuple[int, int]]) -> list[int]:
    """For every i: the bytes of traffic that a cut between node i-1 and node i adds; `_NEVER` within what is `inseparable`."""
    born: dict[int, tuple[int, int, bool]] = {}
    readers: dict[int, list[tuple[int, bool]]] = {}
    for i, node in enumerate(nodes):
        for storage in node.reads:
            if node.kind != "view":
                readers.setdefault(storage, []).append((i, node.kind == "extern"))
        for storage, nbytes in node.allocates:
            born[storage] = (i, facts.number(nbytes), node.kind == "extern")
    costs = [0] * (len(nodes) + 1)
    for storage, (start, nbytes, by_extern) in born.items():
        uses = readers.get(storage, [])
        fused = [i for i, extern in uses if not extern and i > start]
        if not fused:
            continue
        in_memory = by_extern or any(extern for _, extern in uses)
        for cut in range(start + 1, fused[-1] + 1):
            if not in_memory:
                costs[cut] += 2 * nbytes
            elif any(i < cut for i in fused):
                costs[cut] += nbytes
    for start, end in inseparable:
        costs[start + 1 : end] = [_NEVER] * (end - start - 1)
    return costs
