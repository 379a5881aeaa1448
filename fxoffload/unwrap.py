"""Weights of tensor subclasses, replaced in a graph by the plain tensors that they consist of.

    y = linear(x, w)   ->   w = rebuild_Int8Tensor_0(w_qdata, w_scale); y = linear(x, w)

Each reader gets a wrapper of its own right in front of it, in the segment that it falls into: what is streamed are the inner
tensors, as few bytes as they have, and dequantization stays with its matrix product. A segment's inputs are plain, and where the
segment is compiled the wrapper is taken apart again while it is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx as fx

from fxoffload.hostalias import part_meta
from fxoffload.rows import Source
from fxoffload.wrappers import flatten, inner_name, inner_tensors, is_wrapper, on_device, refuse_mesh


@dataclass(eq=False)
class Rebuild:
    """The target of a node that makes a wrapper from its inner tensors.

    `parts`: the attributes that make it up, with their values where these are no tensors.
    """

    kind: Any
    parts: tuple[tuple[str, Any], ...]
    context: Any
    size: torch.Size
    stride: tuple[int, ...]
    number: int = 0

    def __post_init__(self) -> None:
        # FX writes a call by the name and the module of its target, and equal segments are told by it.
        self.__name__ = self.__qualname__ = f"rebuild_{self.kind.__name__}_{self.number}"
        self.__module__ = __name__

    def __call__(self, *inner: torch.Tensor) -> torch.Tensor:
        tensors = iter(inner)
        parts = {name: next(tensors) if value is None else value for name, value in self.parts}
        return self.kind.__tensor_unflatten__(parts, self.context, self.size, self.stride)

    def is_like(self, other: Rebuild) -> bool:
        """Whether both make the same of the same tensors, compared as Dynamo's guards do; what cannot be compared is not."""
        mine, others = ((r.kind, r.parts, r.context, r.size, r.stride) for r in (self, other))
        try:
            return bool(mine == others)
        except (RuntimeError, ValueError):
            return False


@dataclass(frozen=True, slots=True, eq=False)
class _Wrapper:
    """How a weight is made: from placeholders and other wrappers. `traced`: its fake value."""

    target: Rebuild
    inner: tuple[fx.Node | _Wrapper, ...]
    traced: torch.Tensor


def unwrap(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    onload: torch.device,
    *,
    is_weight: Callable[[fx.Node, Any], bool],
    name_of: Callable[[fx.Node, torch.Tensor], str],
) -> tuple[list[Any], list[Source], dict[int, str]]:
    """Replace every weight that is a wrapper. Changes `gm`; returns its inputs, their sources, and the weights' names by `id`.

    `name_of` gives the qualified name of a weight. Raises WeightError for one whose class does not say what it consists of.
    """
    inputs: list[Any] = []
    sources: list[Source] = []
    names: dict[int, str] = {}
    made: list[Rebuild] = []
    for position, (node, real) in enumerate(zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True)):
        if not is_weight(node, real):
            inputs.append(real)
            sources.append(Source(position))
            continue
        name = name_of(node, real)
        for path, plain in inner_tensors(name, real):
            inputs.append(plain)
            sources.append(Source(position, path=path))
            names.setdefault(id(plain), inner_name(name, path))
        if is_wrapper(real):
            refuse_mesh(name, real, onload)
            _replace(gm.graph, node, real, onload, made)
    if made:
        gm.graph.lint()
        gm.recompile()
    return inputs, sources, names


def _replace(graph: fx.Graph, weight: fx.Node, real: torch.Tensor, onload: torch.device, made: list[Rebuild]) -> None:
    with graph.inserting_before(weight):
        wrapper = _take_apart(graph, weight, weight.name, real, weight.meta["example_value"], onload, made)
    for user in list(weight.users):
        with graph.inserting_before(user):
            user.replace_input_with(weight, _rebuilt(graph, wrapper, user))
    graph.erase_node(weight)
    # It refers to the weight weakly, and lives until the garbage collector runs.
    weight.meta.clear()


def _take_apart(
    graph: fx.Graph, weight: fx.Node, name: str, real: torch.Tensor, traced: Any, onload: torch.device, made: list[Rebuild]
) -> _Wrapper:
    """Placeholders for the inner tensors of a wrapper, in the order of `inner_tensors`."""
    attributes, context = flatten(real)
    parts: list[tuple[str, Any]] = []
    inner: list[fx.Node | _Wrapper] = []
    for attribute in attributes:
        value, fake, part = getattr(real, attribute), getattr(traced, attribute), f"{name}_{attribute}"
        parts.append((attribute, None if isinstance(value, torch.Tensor) else value))
        if is_wrapper(value):
            inner.append(_take_apart(graph, weight, part, value, fake, onload, made))
        elif isinstance(value, torch.Tensor):
            placeholder = graph.placeholder(part)
            placeholder.meta = part_meta(weight, fake)
            inner.append(placeholder)
    context = on_device(context, onload, real.device)
    target = Rebuild(type(real), tuple(parts), context, real.shape, real.stride(), number=len(made))
    known = next((r for r in made if r.is_like(target)), None)
    if known is None:
        made.append(target)
    return _Wrapper(known or target, tuple(inner), traced)


def _rebuilt(graph: fx.Graph, wrapper: _Wrapper, user: fx.Node) -> fx.Node:
    """A node that makes the wrapper, in the module of its reader."""
    inner = tuple(part if isinstance(part, fx.Node) else _rebuilt(graph, part, user) for part in wrapper.inner)
    node = graph.call_function(wrapper.target, inner)
    stack = {key: value for key, value in user.meta.items() if key == "nn_module_stack"}
    node.meta = {**stack, "example_value": wrapper.traced}
    return node
