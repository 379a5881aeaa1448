"""Repeated nodes are read once.

A transformer repeats its blocks, and most of a trace is the same operators on tensors of the same layout. Running one under a
fake mode costs several dispatches; a node that equals an earlier one in target, constants and operand layouts (sharing of
storages included) gets results of the same layout, which alias its own operands where the earlier ones aliased theirs.

Not for nodes that write to a tensor, for symbolic sizes, or for results that are no plain tensors: those are run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from fxoffload.storages import is_mapped, storage_of
from fxoffload.wrappers import is_wrapper


@dataclass(frozen=True, slots=True)
class _Result:
    """A tensor of a node's value: a view of operand `source` at `offset`, or new where that is None."""

    source: int | None
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, slots=True)
class _Known:
    results: tuple[_Result, ...]
    spec: TreeSpec
    counts: Any


_Found = tuple[Any, Any, frozenset[int]]


class Memo:
    """Layouts of the values of nodes that were run, with what was counted for them."""

    def __init__(self) -> None:
        self._known: dict[Any, _Known] = {}

    def run(self, node: fx.Node, operands: Sequence[Any], run: Callable[[], _Found]) -> _Found:
        """The value of a node on its operands (the values of `node.all_input_nodes`), its counts, and the storages of operands
        that it wrote to: known, or from `run`. Whatever wrote to any is run.
        """
        key = _key(node, operands)
        known = self._known.get(key) if key is not None else None
        if known is not None:
            return tree_unflatten([_make(result, operands) for result in known.results], known.spec), known.counts, frozenset()
        value, counts, written = run()
        if key is not None and not written:
            leaves, spec = tree_flatten(value)
            results = _results(leaves, operands)
            if results is not None:
                self._known[key] = _Known(results, spec, counts)
        return value, counts, written


def _key(node: fx.Node, operands: Sequence[Any]) -> Any:
    """Equal for nodes with equal values up to storages, or None where that is not known."""
    if node.op not in ("call_function", "call_method") or node.target is operator.getitem or not operands:
        return None
    storages: dict[int, int] = {}
    layouts: list[Any] = []
    for value in operands:
        if not _is_plain(value):
            return None
        shared = storages.setdefault(storage_of(value), len(storages))
        layouts.append((tuple(value.shape), tuple(value.stride()), value.storage_offset(), value.dtype, value.device, shared))
    place = {n: i for i, n in enumerate(node.all_input_nodes)}
    constants = repr(fx.map_arg((node.args, node.kwargs), lambda n: f"%{place[n]}"))
    return node.target, constants, tuple(layouts)


def _is_plain(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_wrapper(value) or is_mapped(value) or value.is_complex():
        return False
    return all(isinstance(n, int) for n in (*value.shape, *value.stride(), value.storage_offset()))


def _results(leaves: Sequence[Any], operands: Sequence[Any]) -> tuple[_Result, ...] | None:
    source_of = {storage_of(value): i for i, value in reversed(list(enumerate(operands)))}
    fresh: set[int] = set()
    results: list[_Result] = []
    for leaf in leaves:
        if not _is_plain(leaf):
            return None
        source = source_of.get(storage_of(leaf))
        if source is None:
            if storage_of(leaf) in fresh or leaf.storage_offset():
                return None
            fresh.add(storage_of(leaf))
        elif operands[source].dtype != leaf.dtype:
            return None
        layout = (tuple(leaf.shape), tuple(leaf.stride()), int(leaf.storage_offset()))
        results.append(_Result(source, *layout, leaf.dtype, leaf.device))
    return tuple(results)


def _make(result: _Result, operands: Sequence[Any]) -> torch.Tensor:
    if result.source is None:
        return torch.empty_strided(result.size, result.stride, dtype=result.dtype, device=result.device)
    return operands[result.source].as_strided(result.size, result.stride, result.offset)
