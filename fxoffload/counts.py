"""Running a Dynamo graph once on fake tensors (no data, no device work), and counting what every node takes:

flops    = sum of torch's flop formulas over the ATen calls of the node           (torch.utils.flop_counter);
           half of it for causal attention, whose kernels skip what is masked
touched  = bytes of all tensors that those calls read or write, views excluded
scratch  = bytes of the largest tensor that is made and dropped on the way, as a weight that is dequantized
rate     = the dtype of the first operand of the last of those calls that have a formula: a wrapper's product may run in another
           one than the tensors that the node reads
"""

# Private names of torch: dispatch modes, operators, pytrees. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from typing import Any

import sympy
import torch
import torch.fx as fx
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop

from fxoffload.causal import attention_arguments
from fxoffload.fakes import size_expr, span_expr
from fxoffload.machine import ATTENTION, MASKED_ATTENTION
from fxoffload.memo import Memo
from fxoffload.storages import plain_tensors, storage_of
from fxoffload.wrappers import is_wrapper

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

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # The wrapper's own code comes next, and what it calls comes here.
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        if isinstance(func, HigherOrderOperator):
            return out
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

    def scratch(self, value: Any) -> sympy.Expr:
        """Bytes of the largest tensor of static size that was made but is not part of the result."""
        kept = {storage_of(t) for t in plain_tensors(value)}
        sizes = [span_expr(t) for t in self.made if storage_of(t) not in kept]
        return max((size for size in sizes if size.is_Integer), default=sympy.Integer(0))


class CountingInterpreter(fx.Interpreter):
    """Runs the graph on fake tensors; leaves each node's value in `meta["val"]` and its counts in `counts`."""

    def __init__(self, gm: fx.GraphModule) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self.counts: dict[str, Counts] = {}
        self._memo = Memo()

    def run_node(self, n: fx.Node) -> Any:
        operands = [self.env[source] for source in n.all_input_nodes]

        def run() -> tuple[Any, Counts]:
            with _Counter() as counter:
                value = super(CountingInterpreter, self).run_node(n)
            flops = counter.flops / 2 if _is_causal(n) else counter.flops
            unwraps = n.op != "output" and any(map(is_wrapper, operands))
            return value, (flops, counter.touched, counter.scratch(value) if unwraps else sympy.Integer(0), counter.dtype)

        value, self.counts[n.name] = self._memo.run(n, operands, run)
        n.meta["val"] = value
        return value


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
