"""Attention masks that are constants, replaced by what kernels know without a mask.

Only kernels without one skip what is masked. A model that is traced may write its mask out all the same, as transformers does,
which leaves a causal mask to the kernel where it sees that nothing is padded, but does not look while it is traced:

    m = le(keys, queries); a = attention(q, k, v, attn_mask=m)   ->   a = attention(q, k, v, attn_mask=None, is_causal=True)

A mask that depends on constants alone is evaluated, once and on the CPU. The lower triangle over as many queries as keys becomes
`is_causal`, a mask that allows everything becomes none, and what nothing reads any more is erased. Others stay: windows, padding,
prefixes, and more keys than queries, which `is_causal` would align at the other end.
"""

# Private names of torch: leaving a fake mode, dispatch modes, the schema of an operator. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import functools
from collections.abc import Sequence, Set
from typing import Any, Literal

import torch
import torch.fx as fx
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode

from fxoffload.debug import logger
from fxoffload.storages import plain_tensors

_ARGUMENTS = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_LARGEST_NBYTES = 1 << 30
"""Of a tensor that is evaluated: a mask of 32768 queries by as many keys."""

_Pattern = Literal["everything", "triangle"] | None


def attention_arguments(node: fx.Node) -> dict[str, Any]:
    """The arguments by name if the node is attention, else none."""
    if node.target is not torch.nn.functional.scaled_dot_product_attention:
        return {}
    return {**dict(zip(_ARGUMENTS, node.args, strict=False)), **node.kwargs}


def drop_masks(gm: fx.GraphModule, written: Set[str]) -> None:
    """Replace every constant mask of attention by `is_causal`, or by none, where that says the same. Changes `gm`.

    `written`: names of nodes whose memory the graph writes to, so that their values are not what made them.
    """
    unread: set[fx.Node] = set()

    @functools.cache
    def pattern_of(mask: fx.Node) -> _Pattern:
        nodes = _producers(mask)
        if not all(map(_may_be_constant, nodes)) or any(node.name in written for node in nodes):
            return None
        pattern = _pattern(nodes)
        unread.update(nodes if pattern is not None else ())
        return pattern

    for node in gm.graph.nodes:
        given = attention_arguments(node)
        mask = given.get("attn_mask")
        if not isinstance(mask, fx.Node) or given.get("is_causal", False) is not False or (pattern := pattern_of(mask)) is None:
            continue
        given.update(attn_mask=None, is_causal=pattern == "triangle")
        node.args, node.kwargs = tuple(given.pop(name) for name in _ARGUMENTS[:3]), given
    for node in reversed(list(gm.graph.nodes)):
        if node in unread and not node.users:
            gm.graph.erase_node(node)


def _producers(mask: fx.Node) -> list[fx.Node]:
    """All that a mask depends on, in the order of the graph, and the mask itself."""
    found, new = {mask}, [mask]
    while new:
        new = list({source for node in new for source in node.all_input_nodes} - found)
        found.update(new)
    return [node for node in mask.graph.nodes if node in found]


def _may_be_constant(node: fx.Node) -> bool:
    """Whether it is a call of torch that is small enough to be evaluated; `_Pure` sees what it does."""
    module = str(getattr(node.target, "__module__", "")).split(".")
    # What is mapped (torch.vmap) has no storage to be asked for.
    is_torch = module[0] in ("torch", "_operator") and "_functorch" not in module
    if node.op != "call_method" and not (node.op == "call_function" and is_torch):
        return False
    sizes: list[Any] = [t.untyped_storage().nbytes() for t in plain_tensors(node.meta.get("example_value"))]
    return all(isinstance(nbytes, int) and nbytes <= _LARGEST_NBYTES for nbytes in sizes)


def _pattern(nodes: Sequence[fx.Node]) -> _Pattern:
    """What the mask allows that these nodes make, the last of them."""
    try:
        with unset_fake_temporarily(), torch.no_grad(), torch.device("cpu"):
            allowed = _allowed(_evaluate(nodes))
            if bool(allowed.all()):
                return "everything"
            # A square mask is over as many queries as keys: none is broadcast but along dimensions of 1.
            is_square = allowed.shape[-1] == allowed.shape[-2]
            return "triangle" if is_square and torch.equal(allowed, torch.ones_like(allowed).tril()) else None
    except Exception as error:
        # Whatever an operator raises that does not run on the CPU, or must not run here.
        logger.debug("causal: %s: the mask cannot be evaluated, so it stays: %s", nodes[-1].name, str(error).partition("\n")[0])
        return None


def _evaluate(nodes: Sequence[fx.Node]) -> torch.Tensor:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
        _put_on_cpu(copies[node])
    graph.output(copies[nodes[-1]])
    with _Pure():
        return fx.Interpreter(torch.nn.Module(), graph=graph).run()


def _put_on_cpu(node: fx.Node) -> None:
    def on_cpu(value: Any) -> Any:
        is_device = isinstance(value, torch.device) or (node.target == "to" and isinstance(value, str))
        return "cpu" if is_device else value

    node.args = map_aggregate(node.args, on_cpu)
    node.kwargs = {key: value if key != "device" or value is None else "cpu" for key, value in node.kwargs.items()}


def _allowed(mask: torch.Tensor) -> torch.Tensor:
    """Where a mask lets queries see keys, once for what is expanded; nowhere for a mask that adds anything but 0 and -inf."""
    for dim in range(mask.dim() - 2):
        mask = mask.narrow(dim, 0, 1) if mask.stride(dim) == 0 else mask
    if mask.dtype == torch.bool:
        return mask
    allowed = mask == 0
    return allowed if bool((allowed | (mask == -torch.inf)).all()) else torch.zeros_like(allowed)


class _Pure(TorchDispatchMode):
    """Refuses operators whose results depend on more than their arguments, and those that write to them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_random = torch.Tag.nondeterministic_seeded in func.tags or "empty" in func.name()
        if func.namespace != "aten" or func._schema.is_mutable or is_random:
            raise NotImplementedError(f"{func.name()} is not known to be a function of its arguments alone")
        return func(*args, **(kwargs or {}))
