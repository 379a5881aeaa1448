"""Reading the facts of a Dynamo graph.

Dynamo hands a backend real tensors and a fake mode of its own; `read_facts` runs the graph once in that mode (no data, no
device work) and counts, per node,

    flops    = sum of torch's flop formulas over the ATen calls of the node           (torch.utils.flop_counter);
               half of it for causal attention, whose kernels skip what is masked
    touched  = bytes of all tensors that those calls read or write, views excluded
    alloc    = bytes of every storage that the node creates
    scratch  = bytes of the largest tensor that is made and dropped on the way, as a weight that is dequantized
"""

# Private names of torch: the tracing context and its fake mode, Dynamo's guard of the random state, dispatch modes, the overload
# packet of an operator, pytrees, storage identity, version counters. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import TracingContext
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

from fxoffload.causal import attention_arguments
from fxoffload.errors import GradientError, WeightError
from fxoffload.facts import Facts, NodeFacts, Weight
from fxoffload.hostalias import is_weight, placeholder_source
from fxoffload.machine import ATTENTION, MASKED_ATTENTION
from fxoffload.memo import Memo
from fxoffload.names import dotted_name
from fxoffload.storages import plain_tensors, storage_of
from fxoffload.wrappers import PARTS, is_wrapper

_SDPA = ("aten::_scaled_dot_product", "aten::scaled_dot_product")
_BATCH_NORM = (torch.nn.functional.batch_norm, torch.batch_norm)


def _expr(size: Any) -> sympy.Expr:
    return size.node.expr if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _nbytes(tensor: torch.Tensor) -> sympy.Expr:
    """Bytes from the first to the last element: 1 + sum (size - 1) * stride elements."""
    sizes: Any = tensor.shape  # of int and SymInt; a SymInt is not compared, which would guard on it
    if any(isinstance(size, int) and size == 0 for size in sizes):
        return sympy.Integer(0)
    last = sum(((_expr(n) - 1) * _expr(s) for n, s in zip(tensor.shape, tensor.stride(), strict=True)), sympy.Integer(0))
    return (last + 1) * tensor.element_size()


Counts = tuple[sympy.Expr, sympy.Expr, sympy.Expr]
"""Flops, bytes touched, and bytes of scratch."""


class _Counter(TorchDispatchMode):
    # A higher-order operator (cond, flex_attention) goes through uncounted: its body is a graph of its own.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops: sympy.Expr = sympy.Integer(0)
        self.touched: sympy.Expr = sympy.Integer(0)
        self.made: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # The wrapper's own code comes next, and what it calls comes here.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return out
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += _expr(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
        elif func.name().startswith(_SDPA):
            self.flops += _expr(sdpa_flop(args[0].shape, args[1].shape, args[2].shape))
        # Dynamo asks fake tensors for their device and layout through operators of their own.
        if not func.is_view and func.namespace != "prim":
            tensors = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
            self.touched += sum((_nbytes(t) for t in tensors.values()), sympy.Integer(0))
            self.made.extend(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out

    def scratch(self, value: Any) -> sympy.Expr:
        """Bytes of the largest tensor of static size that was made but is not part of the result."""
        kept = {storage_of(t) for t in plain_tensors(value)}
        sizes = [_nbytes(t) for t in self.made if storage_of(t) not in kept]
        return max((size for size in sizes if size.is_Integer), default=sympy.Integer(0))


class _Reader(fx.Interpreter):
    """Runs the graph on fake tensors; leaves each node's value in `meta["val"]` and its counts in `counts`."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.counts: dict[str, Counts] = {}
        self._memo = Memo()

    def run_node(self, n: fx.Node) -> Any:
        operands = [self.env[source] for source in n.all_input_nodes]

        def run() -> tuple[Any, Counts]:
            with _Counter() as counter:
                value = super(_Reader, self).run_node(n)
            flops = counter.flops / 2 if _is_causal(n) else counter.flops
            unwraps = n.op != "output" and any(map(is_wrapper, operands))
            return value, (flops, counter.touched, counter.scratch(value) if unwraps else sympy.Integer(0))

        value, self.counts[n.name] = self._memo.run(n, operands, run)
        n.meta["val"] = value
        return value


def _is_causal(node: fx.Node) -> bool:
    """Whether the node is attention under the causal mask, of as many queries as keys."""
    given = attention_arguments(node)
    if given.get("is_causal") is not True:
        return False
    queries, keys = (_expr(given[name].meta["val"].shape[-2]) for name in ("query", "key"))
    return queries == keys


def _rate(node: fx.Node, dtype: str) -> str:
    given = attention_arguments(node)
    if not given:
        return dtype
    return dtype + (ATTENTION if given.get("attn_mask") is None else MASKED_ATTENTION)


def _refuse(name: str, real: torch.Tensor, *, allow_meta: bool) -> None:
    if real.device.type == "meta" and not allow_meta:
        raise WeightError(f"facts: {name}: the weight is on the meta device and has no bytes; load it before the first call")
    if real.layout != torch.strided:
        raise WeightError(f"facts: {name}: layout {real.layout} cannot be streamed; convert it to a strided tensor")


def _fake_mode() -> FakeTensorMode:
    """The mode that Dynamo traces this graph in, and AOTAutograd will use."""
    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    return fake_mode


def _fake_inputs(
    gm: fx.GraphModule, example_inputs: Sequence[Any], onload: torch.device, names: Mapping[int, str], *, allow_meta: bool
) -> tuple[list[Any], set[str]]:
    """One fake a placeholder, in the mode that AOTAutograd will use; weights get storages of their own, on the onload device."""
    fake_mode = _fake_mode()
    weights: set[str] = set()
    fakes: list[Any] = []
    for node, real in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
        if is_weight(node, real):
            _refuse(name_of(node, real, names), real, allow_meta=allow_meta)
            traced = node.meta["example_value"]
            with fake_mode:
                fakes.append(torch.empty_strided(traced.shape, traced.stride(), dtype=real.dtype, device=onload))
            weights.add(node.name)
        elif isinstance(real, torch.Tensor):
            fakes.append(_fake_input(fake_mode, real))
        else:
            fakes.append(real)
    return fakes, weights


def _fake_input(fake_mode: FakeTensorMode, real: torch.Tensor) -> torch.Tensor:
    """As AOTAutograd would: with the symbols that Dynamo gave the tensor, where it did."""
    context = TracingContext.get().tensor_to_context.get(real)
    if context is None:
        return fake_mode.from_tensor(real)
    return fake_mode.from_tensor(real, symbolic_context=context, source=getattr(context, "tensor_source", None))


def _mutates_statistics(node: fx.Node) -> bool:
    """Batch norm in training mode writes its running statistics, which no version counter of a fake tensor shows."""
    if node.target not in _BATCH_NORM:
        return False
    return bool(node.kwargs.get("training", node.args[5] if len(node.args) > 5 else False))


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


def _symbols(
    placeholders: Sequence[fx.Node], example_inputs: Sequence[Any], fakes: Sequence[Any]
) -> tuple[tuple[sympy.Symbol, str, int | None], ...]:
    """Every dynamic dimension once: as an input of its own if there is one, else where it is a size of a tensor."""
    found: dict[sympy.Symbol, tuple[str, int | None]] = {}
    for node, real in zip(placeholders, example_inputs, strict=True):
        if isinstance(real, torch.SymInt) and isinstance(symbol := _expr(real), sympy.Symbol):
            found.setdefault(symbol, (node.name, None))
    for node, fake in zip(placeholders, fakes, strict=True):
        for dim, size in enumerate(fake.shape if isinstance(fake, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and isinstance(symbol := _expr(size), sympy.Symbol):
                found.setdefault(symbol, (node.name, dim))
    return tuple((symbol, name, dim) for symbol, (name, dim) in found.items())


def _hints() -> tuple[tuple[sympy.Symbol, int], ...]:
    env: Any = _fake_mode().shape_env
    if env is None:
        return ()
    known = env.backed_var_to_val if hasattr(env, "backed_var_to_val") else env.var_to_val
    return tuple(sorted(((symbol, int(value)) for symbol, value in known.items()), key=lambda pair: pair[0].name))


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
    Raises WeightError for a weight that cannot be streamed, GradientError when the graph would record gradients.
    """
    _refuse_gradients(gm)
    # Inference tensors have no version counters, and those of the fakes tell which weights are written.
    with torch.inference_mode(False):
        return _read_facts(gm, example_inputs, onload, names, allow_meta=allow_meta)


def _read_facts(
    gm: fx.GraphModule, example_inputs: Sequence[Any], onload: torch.device, names: Mapping[int, str], *, allow_meta: bool
) -> Facts:
    fakes, weight_names = _fake_inputs(gm, example_inputs, onload, names, allow_meta=allow_meta)
    placeholders = gm.graph.find_nodes(op="placeholder")
    versions = {n.name: f._version for n, f in zip(placeholders, fakes, strict=True) if isinstance(f, torch.Tensor)}
    reader = _Reader(gm)
    with torch._dynamo.utils.preserve_rng_state(), torch.no_grad(), _fake_mode(), enable_python_dispatcher():
        reader.run(*fakes)

    storage_of_weight = {storage_of(f): n.name for n, f in zip(placeholders, fakes, strict=True) if n.name in weight_names}
    # In-place operators on a wrapper raise its own counter, and not those of its inner tensors.
    written = {part for n in gm.graph.nodes for part in n.meta.get(PARTS, ()) if n.meta["val"]._version}
    statistics = {a.name for n in gm.graph.nodes if _mutates_statistics(n) for a in n.all_input_nodes}
    weights = tuple(
        _weight(
            node,
            real,
            names,
            mutated=fake._version != versions[node.name]
            or node.name in written
            or (node.name in statistics and "_buffers" in str(placeholder_source(node).name)),
        )
        for node, real, fake in zip(placeholders, example_inputs, fakes, strict=True)
        if node.name in weight_names
    )
    inputs = tuple(
        (node.name, storage_of(plain), _nbytes(plain))
        for node, fake in zip(placeholders, fakes, strict=True)
        if node.name not in weight_names
        for plain in plain_tensors(fake)
    )
    seen = set(storage_of_weight) | {storage for _, storage, _ in inputs}
    nodes = tuple(
        _node_facts(node, reader.counts[node.name], storage_of_weight, seen)
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
        symbols=_symbols(placeholders, example_inputs, fakes),
        hints=_hints(),
        written_inputs=tuple(
            node.name
            for node, fake in zip(placeholders, fakes, strict=True)
            if node.name in versions and node.name not in weight_names and fake._version != versions[node.name]
        ),
    )
    return _settled(facts)


def _settled(facts: Facts) -> Facts:
    """The facts without dimensions that later nodes showed to be equal to others."""
    env: Any = _fake_mode().shape_env
    known = {symbol: env.replace(symbol) for symbol in env.replacements} if env is not None else {}
    if not known:
        return facts

    @functools.cache
    def settle(expression: Any) -> Any:
        return expression.xreplace(known)

    nodes = tuple(
        dataclasses.replace(
            node,
            allocates=tuple((storage, settle(nbytes)) for storage, nbytes in node.allocates),
            flops=settle(node.flops),
            touched_nbytes=settle(node.touched_nbytes),
        )
        for node in facts.nodes
    )
    inputs = tuple((name, storage, settle(nbytes)) for name, storage, nbytes in facts.inputs)
    symbols = tuple(place for place in facts.symbols if place[0] not in known)
    return dataclasses.replace(facts, nodes=nodes, inputs=inputs, symbols=symbols)


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
    return int(_nbytes(tensor))


def _node_facts(node: fx.Node, counts: Counts, storage_of_weight: dict[int, str], seen: set[int]) -> NodeFacts:
    read_tensors = [t for n in node.all_input_nodes for t in plain_tensors(n.meta.get("val"))]
    reads = {storage_of(t) for t in read_tensors}
    own = {storage_of(t): t for t in plain_tensors(node.meta["val"])}
    allocates = tuple((storage, _nbytes(t)) for storage, t in own.items() if storage not in seen)
    seen.update(own)
    # No node reads it, so it is there while this one runs. Storages of tensors have positive numbers.
    scratch = ((-1 - len(seen), counts[2]),) if counts[2] else ()
    seen.update(storage for storage, _ in scratch)
    dtypes = [t.dtype for t in read_tensors if t.dtype.is_floating_point] or [t.dtype for t in own.values()]
    return NodeFacts(
        name=node.name,
        target=torch.typename(node.target) if callable(node.target) else str(node.target),
        path=_module_path(node),
        weights=tuple(sorted(storage_of_weight[s] for s in reads if s in storage_of_weight)),
        reads=tuple(sorted(reads - set(storage_of_weight))),
        allocates=(*allocates, *scratch),
        flops=counts[0],
        touched_nbytes=counts[1],
        rate=_rate(node, str(dtypes[0]).removeprefix("torch.") if dtypes else ""),
        kind=_kind(node, counts[0], bool(allocates)),
    )
