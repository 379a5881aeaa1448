"""Running a Dynamo graph once on fake tensors (no data, no device work), and counting what every node takes:

flops    = sum of torch's flop formulas over the ATen calls of the node           (torch.utils.flop_counter);
           half of it for causal attention, whose kernels skip what is masked
touched  = bytes of all tensors that those calls read or write, views excluded
scratch  = bytes of the largest tensor that is made and dropped on the way, as a weight that is dequantized
rate     = the dtype of the first operand of the last of those calls that have a formula: a wrapper's product may run in another
           one than the tensors that the node reads
written  = storages that those calls write to, by the schemas of the operators: names do not tell, and `weight.data` has a version
           counter of its own; of Triton kernels, by torch's analysis of their code, which takes all arguments where it fails
"""

# Private names of torch: dispatch modes, operators, their schemas, pytrees, version counters. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._higher_order_ops.triton_kernel_wrap import get_mutated_tensors, triton_kernel_wrapper_mutation
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

from fxoffload.causal import attention_arguments
from fxoffload.fakes import size_expr, span_expr
from fxoffload.machine import ATTENTION, MASKED_ATTENTION
from fxoffload.memo import Memo
from fxoffload.storages import plain_tensors, storage_of
from fxoffload.wrappers import is_wrapper

_RAN = "fxoffload_ran"
"""Metadata of a node that has run: what it gave, and for what."""
_UNMARKED = ("aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm")
"""Their schemas do not say that they write running statistics where they train."""
_SDPA = ("aten::_scaled_dot_product", "aten::scaled_dot_product")

Counts = tuple[sympy.Expr, sympy.Expr, sympy.Expr, "torch.dtype | None"]
"""Flops, bytes touched, bytes of scratch, and the dtype that the flops run in; None where there are none."""


class _Counter(TorchDispatchMode):
    # A higher-order operator (cond, flex_attention) goes through uncounted: its body is a graph of its own.
    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()
        self.flops: sympy.Expr = sympy.Integer(0)
        self.touched: sympy.Expr = sympy.Integer(0)
        self.made: list[torch.Tensor] = []
        self.dtype: torch.dtype | None = None
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if isinstance(func, OpOverload):
            # Of a wrapper, all that it consists of: its own code may write to any of it.
            self.written.update(map(storage_of, plain_tensors(list(_targets(func, args, kwargs or {})))))
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # The wrapper's own code comes next, and what it calls comes here.
            return NotImplemented
        if isinstance(func, HigherOrderOperator):
            return self._run_higher_order(func, args, kwargs or {})
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry:
            self.flops += size_expr(flop_registry[packet](*args, **(kwargs or {}), out_val=out))
            self.dtype = args[0].dtype
        elif func.name().startswith(_SDPA):
            self.flops += size_expr(sdpa_flop(args[0].shape, args[1].shape, args[2].shape))
            self.dtype = args[0].dtype
        # Dynamo asks fake tensors for their device and layout through operators of their own.
        if not func.is_view and func.namespace != "prim":
            tensors = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)}
            self.touched += sum((span_expr(t) for t in tensors.values()), sympy.Integer(0))
            self.made.extend(t for t in tree_leaves(out) if isinstance(t, torch.Tensor))
        return out

    def _run_higher_order(self, func: HigherOrderOperator, args: Any, kwargs: Any) -> Any:
        if func is triton_kernel_wrapper_mutation:
            given = kwargs["kwargs"]
            names = get_mutated_tensors(
                kwargs["kernel_idx"], kwargs["constant_args_idx"], given, kwargs["tma_descriptor_metadata"]
            )
            self.written.update(map(storage_of, plain_tensors([given[name] for name in names])))
            return func(*args, **kwargs)
        # Its body is out of sight here, but raises the version counters of what it writes to.
        given = plain_tensors((args, kwargs))
        versions = [t._version for t in given]
        out = func(*args, **kwargs)
        self.written.update(storage_of(t) for t, version in zip(given, versions, strict=True) if t._version != version)
        return out

    def scratch(self, value: Any) -> sympy.Expr:
        """Bytes of the largest tensor of static size that was made but is not part of the result."""
        kept = {storage_of(t) for t in plain_tensors(value)}
        sizes = [span_expr(t) for t in self.made if storage_of(t) not in kept]
        return max((size for size in sizes if size.is_Integer), default=sympy.Integer(0))


def _targets(func: OpOverload, args: Any, kwargs: Any) -> Iterator[Any]:
    """The arguments that an operator writes to: tensors, and lists of them."""
    schema = func._schema
    unmarked = schema.name in _UNMARKED
    if not schema.is_mutable and not unmarked:
        return
    given = {argument.name: value for argument, value in zip(schema.arguments, args, strict=False)} | kwargs
    if unmarked and given.get("training"):
        yield from (given.get("running_mean"), given.get("running_var"))
    yield from (given.get(a.name) for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write)


@dataclass(frozen=True, slots=True)
class _Ran:
    """What a node gave for its operands, its counts, and the storages of operands that it wrote to."""

    operands: tuple[Any, ...]
    value: Any
    counts: Counts
    written: frozenset[int]


class CountingInterpreter(fx.Interpreter):
    """Runs the graph on fake tensors; leaves each node's value in `meta["val"]` and its counts in `counts`.

    `written`: the storages that some node got and wrote to. A node that ran before, in this graph or in one that it was copied
    from, is not run again on the very same values.
    """

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.counts: dict[str, Counts] = {}
        self.written: set[int] = set()
        self._memo = Memo()

    def run_node(self, n: fx.Node) -> Any:
        operands = tuple(self.env[source] for source in n.all_input_nodes)
        ran: _Ran | None = n.meta.get(_RAN)
        if ran is None or len(ran.operands) != len(operands) or any(map(operator.is_not, ran.operands, operands)):
            ran = self._run(n, operands)
            if n.op in ("call_function", "call_method"):
                n.meta[_RAN] = ran
        self.counts[n.name] = ran.counts
        self.written |= ran.written
        n.meta["val"] = ran.value
        return ran.value

    def _run(self, n: fx.Node, operands: tuple[Any, ...]) -> _Ran:
        def run() -> tuple[Any, Counts, frozenset[int]]:
            with _Counter() as counter:
                value = super(CountingInterpreter, self).run_node(n)
            # What is made and dropped on the way has a storage whose number another one may get.
            given = map(storage_of, plain_tensors(operands)) if counter.written else ()
            written = frozenset(counter.written.intersection(given))
            flops = counter.flops / 2 if _is_causal(n) else counter.flops
            unwraps = n.op != "output" and any(map(is_wrapper, operands))
            scratch = counter.scratch(value) if unwraps else sympy.Integer(0)
            return value, (flops, counter.touched, scratch, counter.dtype), written

        return _Ran(operands, *self._memo.run(n, operands, run))


def without_values(meta: dict[str, Any]) -> dict[str, Any]:
    """The metadata of a node for another one, which gives other values."""
    return {key: item for key, item in meta.items() if key not in ("example_value", "val", _RAN)}


def _is_causal(node: fx.Node) -> bool:
    """Whether the node is attention under the causal mask, of as many queries as keys."""
    given = attention_arguments(node)
    if given.get("is_causal") is not True:
        return False
    queries, keys = (size_expr(given[name].meta["val"].shape[-2]) for name in ("query", "key"))
    return queries == keys


def rate_of(node: fx.Node, dtype: str) -> str:
    """The rate of the machine that a node over `dtype` computes at."""
    given = attention_arguments(node)
    if not given:
        return dtype
    return dtype + (ATTENTION if given.get("attn_mask") is None else MASKED_ATTENTION)
