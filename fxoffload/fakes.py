"""The inputs of a Dynamo graph as fake tensors, in the mode that Dynamo traced it in, and the symbols of their sizes."""

# Private names of torch: the tracing context and its fake mode. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from fxoffload.facts import Facts
from fxoffload.hostalias import is_weight


def size_expr(size: Any) -> sympy.Expr:
    """The symbols that a size was traced with, or the number."""
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def span_expr(tensor: torch.Tensor) -> sympy.Expr:
    """Bytes from the first to the last element: 1 + sum (size - 1) * stride elements."""
    sizes: Any = tensor.shape  # of int and SymInt; a SymInt is not compared, which would guard on it
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return sympy.Integer(0)
    last = sum(((size_expr(n) - 1) * size_expr(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)), sympy.Integer(0))
    return (last + 1) * tensor.element_size()


def fake_mode() -> FakeTensorMode:
    """The mode that Dynamo traces this graph in, and AOTAutograd will use."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    return mode


def fake_inputs(gm: fx.GraphModule, example_inputs: Sequence[Any], onload: torch.device) -> tuple[list[Any], set[str]]:
    """One fake a placeholder, in the mode that AOTAutograd will use; weights get storages of their own, on the onload device.

    A placeholder that has one already, in `meta["val"]`, keeps it.
    """
    mode = fake_mode()
    weights: set[str] = set()
    fakes: list[Any] = []
    for node, real in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if is_weight(node, real):
            weights.add(node.name)
        if "val" in node.meta:
            fakes.append(node.meta["val"])
        elif is_weight(node, real):
            traced = node.meta["example_value"]
            with mode:
                fakes.append(torch.empty_strided(traced.shape, traced.stride(), dtype=real.dtype, device=onload))
        elif isinstance(real, torch.Tensor):
            fakes.append(_fake_input(mode, real))
        else:
            fakes.append(real)
    return fakes, weights


def _fake_input(mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
    """As AOTAutograd would: with the symbols that Dynamo gave the tensor, where it did."""
    context = TracingContext.get().tensor_to_context.get(real)
    if context is None:
        return mode.from_tensor(real)
    return mode.from_tensor(real, symbolic_context=context, source=getattr(context, "tensor_source", None))


def find_symbols(
    placeholders: Sequence[fx.Node], example_inputs: Sequence[Any], fakes: Sequence[Any]
) -> tuple[tuple[sympy.Symbol, str, int | None], ...]:
    """Every dynamic dimension once: as an input of its own if there is one, else where it is a size of a tensor."""
    found: dict[sympy.Symbol, tuple[str, int | None]] = {}
    for node, real in zip(placeholders, example_inputs, strict=True):
        if isinstance(real, torch.SymInt) and isinstance(symbol := size_expr(real), sympy.Symbol):
            found.setdefault(symbol, (node.name, None))
    for node, fake in zip(placeholders, fakes, strict=True):
        for dim, size in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and isinstance(symbol := size_expr(size), sympy.Symbol):
                found.setdefault(symbol, (node.name, dim))
    return tuple((symbol, name, dim) for symbol, (name, dim) in found.items())


def find_hints() -> tuple[tuple[sympy.Symbol, int], ...]:
    """What the dynamic dimensions were when the graph was traced, by their symbols."""
    env: Any = fake_mode().shape_env
    if env is None:
        return ()
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return tuple(sorted(((symbol, int(value)) for symbol, value in known.items()), key=lambda pair: pair[0].name))


def settle(facts: Facts) -> Facts:
    """The facts without dimensions that later nodes showed to be equal to others."""
    env: Any = fake_mode().shape_env
    known = {symbol: env.replace(symbol) for symbol in env.replacements} if env is not None else {}
    if not known:
        return facts

    @functools.cache
    def settled(expression: Any) -> Any:
        return expression.xreplace(known)

    nodes = tuple(
        dataclasses.replace(
            node,
            allocates=tuple((storage, settled(nbytes)) for storage, nbytes in node.allocates),
            flops=settled(node.flops),
            touched_nbytes=settled(node.touched_nbytes),
        )
        for node in facts.nodes
    )
    inputs = tuple((name, storage, settled(nbytes)) for name, storage, nbytes in facts.inputs)
    symbols = tuple(place for place in facts.symbols if place[0] not in known)
    return dataclasses.replace(facts, nodes=nodes, inputs=inputs, symbols=symbols)
