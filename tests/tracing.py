"""Graphs for the tests of single stages: what Dynamo hands to a backend, its facts, and facts written by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import sympy
import torch
import torch.fx as fx

from fxoffload.blocks import Blocks, Segment
from fxoffload.facts import Facts, NodeFacts, Weight
from fxoffload.owner import tensor_names
from fxoffload.read import read_facts
from fxoffload.split import split_graph

T = TypeVar("T")
CPU = torch.device("cpu")


def trace(
    model: Callable[..., Any],
    *args: Any,
    look: Callable[[fx.GraphModule, Sequence[Any]], T],
    dynamic: bool = False,
    **kwargs: Any,
) -> T:
    """What `look` says of the one graph of a call, while Dynamo's tracing context is there. What it raises is raised as it is."""
    found: list[T] = []
    raised: list[BaseException] = []

    def backend(gm: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        try:
            found.append(look(gm, list(example_inputs)))
        except BaseException as error:
            raised.append(error)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    if raised:
        raise raised[0]
    (seen,) = found
    return seen


@dataclass(frozen=True)
class Traced:
    """One graph, its real inputs, and its facts."""

    gm: fx.GraphModule
    inputs: list[Any]
    facts: Facts

    def node(self, target: str) -> NodeFacts:
        """The one node whose target's name ends like this."""
        (found,) = (n for n in self.facts.nodes if n.target.endswith(target))
        return found

    def weight(self, name: str) -> Weight:
        (found,) = (w for w in self.facts.weights if w.name == name)
        return found

    def split(self, *sizes: int) -> tuple[fx.GraphModule, Blocks]:
        """The graph cut into segments `s0`, `s1`, ... of so many nodes; the last takes the rest."""
        blocks = cut(self.facts, *sizes)
        return split_graph(self.gm, blocks), blocks


def read(model: Any, *args: Any, dynamic: bool = False, **kwargs: Any) -> Traced:
    """The facts of a call of a model on the CPU."""
    names = tensor_names(model if isinstance(model, torch.nn.Module) else None)

    def look(gm: fx.GraphModule, inputs: Sequence[Any]) -> Traced:
        return Traced(gm, list(inputs), read_facts(gm, inputs, CPU, names))

    with torch.no_grad():
        return trace(model, *args, look=look, dynamic=dynamic, **kwargs)


def cut(facts: Facts, *sizes: int) -> Blocks:
    """Segments `s0`, `s1`, ... of so many nodes; the last takes the rest."""
    segments: list[Segment] = []
    nodes = list(facts.nodes)
    for i, size in enumerate([*sizes, len(nodes) - sum(sizes)]):
        here, nodes = nodes[:size], nodes[size:]
        weights = dict.fromkeys(w for n in here for w in n.weights)
        segments.append(Segment(f"s{i}", "", tuple(n.name for n in here), tuple(weights)))
    return Blocks(tuple(segments))


def weight(name: str, nbytes: int, *, mutated: bool = False) -> Weight:
    """A uint8 weight whose placeholder has its name."""
    return Weight(name, name, nbytes, "uint8", (nbytes,), (1,), mutated)


def node(
    name: str,
    *,
    weights: Sequence[str] = (),
    reads: Sequence[int] = (),
    makes: tuple[int, Any] | None = None,
    kind: str = "fused",
    path: str = "",
    flops: int = 0,
    touched: int = 0,
    rate: str = "float32",
) -> NodeFacts:
    """A node by hand. `makes` is the storage that it creates and its bytes, `path` the module around it."""
    modules = ((path, path, "Block"),) if path else ()
    made = ((makes[0], sympy.sympify(makes[1])),) if makes else ()
    counts = (sympy.Integer(flops), sympy.Integer(touched))
    return NodeFacts(name, name, modules, tuple(weights), tuple(reads), made, *counts, rate, kind)


def facts_of(
    nodes: Sequence[NodeFacts],
    *,
    weights: Sequence[Weight] = (),
    inputs: Sequence[tuple[str, int, Any]] = (),
    outputs: Sequence[int] = (),
    hints: Sequence[tuple[sympy.Symbol, int]] = (),
) -> Facts:
    """A graph by hand."""
    given = tuple((name, storage, sympy.sympify(nbytes)) for name, storage, nbytes in inputs)
    return Facts(
        weights=tuple(weights),
        inputs=given,
        nodes=tuple(nodes),
        outputs=tuple(outputs),
        output_weights=(),
        symbols=(),
        hints=tuple(hints),
    )
