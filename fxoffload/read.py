"""Reading the facts of a Dynamo graph.

Dynamo hands a backend real tensors and a fake mode of its own (`fakes`); `read_facts` runs the graph once in that mode, counts
what every node takes and which storages it writes (`counts`), and sees from the values

    weights  = the tensors of the model, and which of them the graph writes
    reads    = storages that a node reads
    alloc    = bytes of every storage that it creates
"""

# Private names of torch: Dynamo's guard of the random state, the Python dispatcher, pytrees. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._dispatch.python import enable_python_dispatcher
from torch.utils._pytree import tree_leaves

from fxoffload.counts import CountingInterpreter, Counts, rate_of
from fxoffload.errors import GradientError, WeightError
from fxoffload.facts import Facts, NodeFacts, Weight
from fxoffload.fakes import fake_inputs, fake_mode, find_hints, find_symbols, settle, span_expr
from fxoffload.hostalias import is_weight, placeholder_source
from fxoffload.names import dotted_name
from fxoffload.storages import plain_tensors, storage_of


def _refuse(name: str, real: torch.Tensor, *, allow_meta: bool) -> None:
    if real.device.type == "meta" and not allow_meta:
        raise WeightError(f"facts: {name}: the weight is on the meta device and has no bytes; load it before the first call")
    if real.layout != torch.strided:
        raise WeightError(f"facts: {name}: layout {real.layout} cannot be streamed; convert it to a strided tensor")


def _kind(node: fx.Node, flops: sympy.Expr, allocates: bool) -> str:
    if node.op == "get_attr" or node.target is operator.getitem:
        return "view"
    if not plain_tensors(node.meta.get("val")):
        return "other"
    if flops != 0:
        return "extern"
    return "fused" if allocates else "view"


def _module_path(node: fx.Node) -> tuple[tuple[str, str, str], ...]:
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((key, dotted_name(path), getattr(cls, "__name__", str(cls))) for key, (path, cls) in stack.items())


@dataclass(frozen=True, slots=True)
class _Read:
    """A graph that was run on fake tensors: those of its placeholders, and which of these are weights."""

    reader: CountingInterpreter
    placeholders: list[fx.Node]
    fakes: list[Any]
    weights: set[str]

    def is_written(self, value: Any) -> bool:
        return not self.reader.written.isdisjoint(map(storage_of, plain_tensors(value)))


def find_written(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    onload: torch.device,
    names: Mapping[int, str],
    *,
    allow_meta: bool = False,
) -> frozenset[str]:
    """Names of the nodes, placeholders among them, whose memory the graph writes to. Takes and raises what `read_facts` does."""
    read = _run(gm, example_inputs, onload, names, allow_meta=allow_meta)
    if not read.reader.written:
        return frozenset()
    return frozenset(node.name for node in gm.graph.nodes if node.op != "output" and read.is_written(node.meta["val"]))


def read_facts(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    onload: torch.device,
    names: Mapping[int, str],
    *,
    allow_meta: bool = False,
) -> Facts:
    """Read the facts of a Dynamo graph, and leave a fake value in every node's `meta["val"]`.

    `names` gives the qualified name of a module's tensor by its `id`; what is not in it is named by its Dynamo source.
    `allow_meta`: weights may be on the meta device, for a graph that is not to run.
    A node that `find_written` has run, of which this graph has a copy, keeps its value.
    Raises WeightError for a weight that cannot be streamed, GradientError when the graph would record gradients.
    """
    read = _run(gm, example_inputs, onload, names, allow_meta=allow_meta)
    placeholders, fakes, weight_names = read.placeholders, read.fakes, read.weights
    storage_of_weight = {storage_of(f): n.name for n, f in zip(placeholders, fakes, strict=True) if n.name in weight_names}
    weights = tuple(
        _weight(node, real, names, mutated=read.is_written(fake))
        for node, real, fake in zip(placeholders, example_inputs, fakes, strict=True)
        if node.name in weight_names
    )
    inputs = tuple(
        (node.name, storage_of(plain), span_expr(plain))
        for node, fake in zip(placeholders, fakes, strict=True)
        if node.name not in weight_names
        for plain in plain_tensors(fake)
    )
    seen = set(storage_of_weight) | {storage for _, storage, _ in inputs}
    nodes = tuple(
        _node_facts(node, read.reader.counts[node.name], storage_of_weight, seen)
        for node in gm.graph.nodes
        if node.op not in ("placeholder", "output")
    )
    outputs = _outputs(gm)
    facts = Facts(
        weights=weights,
        inputs=inputs,
        nodes=nodes,
        outputs=tuple(sorted({storage_of(t) for t in plain_tensors(outputs)} - set(storage_of_weight))),
        output_weights=_output_weights(outputs, storage_of_weight, weights),
        symbols=find_symbols(placeholders, example_inputs, fakes),
        hints=find_hints(),
        written_inputs=tuple(
            n.name for n, fake in zip(placeholders, fakes, strict=True) if n.name not in weight_names and read.is_written(fake)
        ),
    )
    return settle(facts)


def _run(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    onload: torch.device,
    names: Mapping[int, str],
    *,
    allow_meta: bool,
) -> _Read:
    _refuse_gradients(gm)
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, real in zip(placeholders, example_inputs, strict=True):
        if is_weight(node, real):
            _refuse(name_of(node, real, names), real, allow_meta=allow_meta)
    # Inference tensors have no version counters, which are asked for behind higher-order operators.
    with torch.inference_mode(False):
        fakes, weights = fake_inputs(gm, example_inputs, onload)
        reader = CountingInterpreter(gm)
        with torch._dynamo.utils.preserve_rng_state(), torch.no_grad(), fake_mode(), enable_python_dispatcher():
            reader.run(*fakes)
    return _Read(reader, placeholders, fakes, weights)


def _output_weights(
    outputs: Sequence[Any], storage_of_weight: Mapping[int, str], weights: Sequence[Weight]
) -> tuple[tuple[int, str, bool], ...]:
    by_name = {w.placeholder: w for w in weights}
    found: list[tuple[int, str, bool]] = []
    for i, value in enumerate(outputs):
        weights_of = [by_name[storage_of_weight[s]] for t in plain_tensors(value) if (s := storage_of(t)) in storage_of_weight]
        if weights_of:
            weight = weights_of[0]
            layout = (tuple(value.shape), tuple(value.stride()), value.storage_offset(), str(value.dtype).removeprefix("torch."))
            found.append((i, weight.placeholder, weight.mutated and layout == (weight.shape, weight.stride, 0, weight.dtype)))
    return tuple(found)


def _refuse_gradients(gm: fx.GraphModule) -> None:
    for value in tree_leaves(fx.map_arg(gm.graph.output_node().args, lambda n: n.meta.get("example_value"))):
        if isinstance(value, torch.Tensor) and value.requires_grad:
            raise GradientError(
                "facts: the outputs of this model require gradients, and weights are streamed for inference only; "
                "call the model under torch.no_grad() or torch.inference_mode()"
            )


def _outputs(gm: fx.GraphModule) -> list[Any]:
    """The values that the graph returns, once it has run."""
    returned: Any = gm.graph.output_node().args[0]
    return [n.meta["val"] if isinstance(n, fx.Node) else n for n in returned]


def _weight(node: fx.Node, real: torch.Tensor, names: Mapping[int, str], *, mutated: bool) -> Weight:
    return Weight(
        placeholder=node.name,
        name=name_of(node, real, names),
        nbytes=span_nbytes(real),
        dtype=str(real.dtype).removeprefix("torch."),
        shape=tuple(real.shape),
        stride=tuple(real.stride()),
        mutated=mutated,
    )


def name_of(node: fx.Node, real: torch.Tensor, names: Mapping[int, str]) -> str:
    """The qualified name of a weight, or where Dynamo found it."""
    source = placeholder_source(node)
    return names.get(id(real)) or (dotted_name(source.name) if source is not None else node.name)


def span_nbytes(tensor: torch.Tensor) -> int:
    """Bytes from the first to the last element of a strided tensor."""
    return int(span_expr(tensor))


def _node_facts(node: fx.Node, counts: Counts, storage_of_weight: dict[int, str], seen: set[int]) -> NodeFacts:
    read_tensors = [t for n in node.all_input_nodes for t in plain_tensors(n.meta.get("val"))]
    reads = {storage_of(t) for t in read_tensors}
    own = {storage_of(t): t for t in plain_tensors(node.meta["val"])}
    allocates = tuple((storage, span_expr(t)) for storage, t in own.items() if storage not in seen)
    seen.update(own)
    # No node reads it, so it is there while this one runs. Storages of tensors have positive numbers.
    scratch = ((-1 - len(seen), counts[2]),) if counts[2] else ()
    seen.update(storage for storage, _ in scratch)
    dtypes = [t.dtype for t in read_tensors if t.dtype.is_floating_point] or [t.dtype for t in own.values()]
    dtype = counts[3] or next(iter(dtypes), None)
    return NodeFacts(
        name=node.name,
        target=torch.typename(node.target) if callable(node.target) else str(node.target),
        path=_module_path(node),
        weights=tuple(sorted(storage_of_weight[s] for s in reads if s in storage_of_weight)),
        reads=tuple(sorted(reads - set(storage_of_weight))),
        allocates=(*allocates, *scratch),
        flops=counts[0],
        touched_nbytes=counts[1],
        rate=rate_of(node, "" if dtype is None else str(dtype).removeprefix("torch.")),
        kind=_kind(node, counts[0], bool(allocates)),
    )
