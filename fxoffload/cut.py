"""Cutting a traced graph into blocks of pieces that are copied one by one: how large a piece is, and what the blocks then cost.

    piece = weights / 12, within 4 to 112 MiB
    finer = the bytes that the link brings while everything computes, / 64, not below 48 MiB

The finer one counts where it is the smaller. A weight that is at most a quarter larger than a piece stays whole: cut by rows it
would save a quarter of its staging, and cost a concatenation of what the rows compute. A kernel that reads no weights and takes
as long as an eighth of a piece takes to be copied runs apart from them (`blocks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.blocks import Blocks, find_blocks
from fxoffload.config import OffloadConfig
from fxoffload.facts import Facts
from fxoffload.hostalias import is_weight
from fxoffload.machine import Machine
from fxoffload.passes.base import copy_graph
from fxoffload.price import SegmentPrice, price, refuse_unknown_sizes
from fxoffload.read import read_facts
from fxoffload.rows import Source, split_rows
from fxoffload.sink import sink_views
from fxoffload.split import RESERVED

_LARGEST_BUCKET_NBYTES = 112 << 20
_LEAST_BUCKET_NBYTES = 4 << 20
_PIECES = 12
_LEAST_FINER_NBYTES = 48 << 20
_FINER_PIECES = 64
_WHOLE = 1.25
"""Times a piece, and a weight is not cut for it."""
_LONG = 0.125
"""Of the time in which a piece is copied: a kernel that takes longer is worth a segment of its own."""


@dataclasses.dataclass(frozen=True, slots=True)
class Traced:
    """A graph before it is cut: its inputs without wrappers, where they come from, names of weights by `id`, and declared blocks.

    `runs`: it is to run, so that its weights must have bytes. `written`: names of nodes whose memory it writes to.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    sources: Sequence[Source]
    names: Mapping[int, str]
    declared: set[str]
    onload: torch.device
    machine: Machine
    runs: bool
    written: frozenset[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """The graph with its large weights cut by rows, where these come from, its blocks, and what they cost."""

    gm: fx.GraphModule
    sources: list[Source]
    facts: Facts
    blocks: Blocks
    prices: tuple[SegmentPrice, ...]


def cut_finely(traced: Traced, config: OffloadConfig, weight_nbytes: int, lap: Callable[[str], None]) -> Cut:
    """Cut into pieces of the usual size, and into smaller ones where that pays. `lap` is told when a stage is over."""
    limit_nbytes = _bucket_limit(config, weight_nbytes)
    holds = config.segment_compiler == "eager"
    if config.max_bucket_bytes != "auto":
        return _cut(traced, limit_nbytes, lap, holds=holds)
    found = _cut(traced, limit_nbytes, lap, holds=holds, whole=_WHOLE)
    finer_nbytes = _finer_limit(traced.machine, found.prices)
    return _cut(traced, finer_nbytes, lap, holds=holds, whole=_WHOLE) if finer_nbytes < limit_nbytes else found


def _cut(traced: Traced, limit_nbytes: int, lap: Callable[[str], None], *, holds: bool, whole: float = 1.0) -> Cut:
    gm = fx.GraphModule(traced.gm, copy_graph(traced.gm.graph))
    inputs, cuts = split_rows(gm, traced.inputs, limit_nbytes, is_weight, int(whole * limit_nbytes))
    weights = {n for n, t in zip(gm.graph.find_nodes(op="placeholder"), inputs, strict=True) if is_weight(n, t)}
    sink_views(gm, weights, traced.written)
    facts = read_facts(gm, inputs, traced.onload, traced.names, allow_meta=not traced.runs)
    refuse_unknown_sizes(facts)
    lap("facts")
    long = _long_kernels(facts, traced.machine, limit_nbytes)
    blocks = find_blocks(facts, max_segment_nbytes=limit_nbytes, declared=traced.declared, long=long, reserved=RESERVED)
    lap("blocks")
    prices = price(facts, blocks, traced.machine, holds=holds)
    lap("price")
    return Cut(gm, [dataclasses.replace(traced.sources[c.position], rows=c.rows) for c in cuts], facts, blocks, prices)


def _long_kernels(facts: Facts, machine: Machine, limit_nbytes: int) -> set[str]:
    """Names of the library kernels without weights that take long, at the sizes that were traced."""
    least_ms = _LONG * machine.copy_ms(limit_nbytes)
    kernels = [node for node in facts.nodes if node.kind == "extern" and not node.weights]
    return {n.name for n in kernels if facts.value(machine.compute_ms(n.flops, n.touched_nbytes, n.rate)) >= least_ms}


def _bucket_limit(config: OffloadConfig, total_nbytes: int) -> int:
    """A twelfth of the weights, within 4 to 112 MiB: copies of some MiB already run at the speed of the link."""
    if config.max_bucket_bytes != "auto":
        return config.max_bucket_bytes
    return max(_LEAST_BUCKET_NBYTES, min(_LARGEST_BUCKET_NBYTES, total_nbytes // _PIECES))


def _finer_limit(machine: Machine, prices: Sequence[SegmentPrice]) -> int:
    """A 64th of what the link brings while everything computes, but not below 48 MiB.

    Two buckets of staging are bytes that cannot stay. Where copies take far longer than compute, as in the decoding of single
    tokens, they are most of what separates a step from its bound, and more segments cost nothing that copies do not hide.
    """
    compute_ms = sum(p.cost.compute_ms for p in prices)
    return max(_LEAST_FINER_NBYTES, int(machine.link_bytes_per_ms * compute_ms / _FINER_PIECES))
