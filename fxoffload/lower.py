"""Lowering: one compiled program a distinct segment, and Python source for the top level.

The top level is a program of our own and not ops inside one Inductor graph: there prefetches are hoisted, slots cloned, and
evictions run before compute. It is straight-line Python in the plan's own names, with every weight a view of the arena that is
bound once, so a node costs a call and no look-up:

    def forward(hidden_states):
        prefetch_blocks_1()
        wait_blocks_0()
        blocks_0_out0, = blocks_0([hidden_states, blocks_0_norm_weight])
        evict_blocks_0()
        ...
        arguments = [blocks_0_out0, blocks_1_norm_weight]
        del blocks_0_out0
        blocks_1_out0, = blocks_1(arguments)

A segment takes its arguments in a list and empties it. So what nobody reads later is held by the segment alone, which frees it
behind its last use in there: the queries of an attention while its output is projected, say.
"""

# Private names of torch: the entry points of Dynamo's aot_eager and of Inductor, and Inductor's options of a mode. Checked on
# torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import linecache
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.fx as fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from fxoffload.config import OffloadConfig
from fxoffload.debug import logger
from fxoffload.errors import ConfigError
from fxoffload.names import identifier
from fxoffload.profile import Compiled
from fxoffload.split import segment_inputs, segment_key, segment_module
from fxoffload.wrappers import is_wrapper

_ARGUMENTS = "arguments"
CONTIGUOUS: Final = "contiguous"
Strides = tuple[int, ...] | Literal["contiguous"]
"""Those of a result, or that it is contiguous, whatever its sizes."""


def compile_segments(top: fx.GraphModule, config: OffloadConfig) -> tuple[dict[str, Compiled], int]:
    """Compile every segment, equal ones once. Returns the programs by segment identifier, and how many are distinct."""
    compile_one = _compiler(config)
    by_key: dict[str, Compiled] = {}
    programs: dict[str, Compiled] = {}
    for node in top.graph.find_nodes(op="call_module"):
        child = segment_module(top, node.target)
        key = segment_key(child)
        if key not in by_key:
            program = boxed(compile_one(child, segment_inputs(child)))
            is_inductor = config.segment_compiler == "inductor"
            by_key[key] = with_strides(program, _output_strides(child)) if is_inductor else program
        programs[node.target] = by_key[key]
    return programs, len(by_key)


def boxed(program: Callable[..., Any]) -> Compiled:
    """A program that takes its arguments in a list and empties it.

    What AOTAutograd returns takes them one by one, and holds all of them while it runs what is in it, which takes a list.
    """
    inside: Any = program
    while inside is not None:
        found = inspect.getclosurevars(inside).nonlocals if inspect.isfunction(inside) else {}
        if "compiled_fn" in found and not found.get("params_buffers_flat", True):
            return found["compiled_fn"]
        inside = getattr(inside, "__wrapped__", None)
    if hasattr(program, "__wrapped__"):
        logger.warning("lower: by this version of torch, segments hold their arguments while they run, which takes more memory")

    def run(arguments: list[Any]) -> Any:
        given = tuple(arguments)
        arguments.clear()
        return program(*given)

    return run


def with_strides(program: Compiled, strides: Sequence[Strides | None]) -> Compiled:
    """`program`, whose results have `strides` (None: any).

    What Inductor compiles checks the strides of its arguments, but returns others than were traced: on CUDA it pads an odd width
    of a product to one that matrix units like, and the result is a slice. Of fixed sizes it does so each time or never, so these
    are looked at in the first call. One that differs leaves as a copy.
    """
    differing: dict[int, Strides] | None = None

    def run(arguments: list[Any]) -> Any:
        nonlocal differing
        results = program(arguments)
        if differing is None:
            both = enumerate(zip(results, strides, strict=True))
            differing = {i: wanted for i, (result, wanted) in both if wanted is not None and _may_differ(result, wanted)}
        if not differing:
            return results
        copies = list(results)
        for i, wanted in differing.items():
            copies[i] = _laid_out(copies[i], wanted)
        return tuple(copies)

    return run


def _output_strides(child: fx.GraphModule) -> list[Strides | None]:
    """Of each result as it was traced; None where they are not known, or are those of the tensors inside a wrapper."""
    returned: Any = child.graph.output_node().args[0]
    return [_strides(node.meta.get("val") if isinstance(node, fx.Node) else None) for node in returned]


def _strides(value: Any) -> Strides | None:
    if not isinstance(value, torch.Tensor) or is_wrapper(value):
        return None
    if all(type(stride) is int for stride in value.stride()):
        return value.stride()
    expected: int | torch.SymInt = 1
    for size, stride in zip(reversed(value.shape), reversed(value.stride()), strict=True):
        if not statically_known_true(stride == expected):
            return None
        expected = expected * size
    return CONTIGUOUS


def _may_differ(result: torch.Tensor, strides: Strides) -> bool:
    """A dimension with one element has any stride: of sizes that change, one call says nothing about the next."""
    if isinstance(strides, str):
        return True
    both = zip(result.shape, result.stride(), strides, strict=True)
    return result.numel() > 0 and any(found != wanted for size, found, wanted in both if size > 1)


def _laid_out(result: torch.Tensor, strides: Strides) -> torch.Tensor:
    """With these strides, a copy if need be. What a dimension of stride 0 has is one element, seen many times."""
    if isinstance(strides, str):
        return result.contiguous()
    seen = result
    for dim, stride in enumerate(strides):
        if stride == 0 and seen.shape[dim] > 1:
            seen = seen.narrow(dim, 0, 1)
    return seen.new_empty_strided(seen.shape, strides).copy_(seen).expand(result.shape)


def _compiler(config: OffloadConfig) -> Callable[[fx.GraphModule, list[Any]], Callable[..., Any]]:
    if config.segment_compiler == "eager":
        return lambda child, _: child.forward
    if config.segment_compiler == "aot_eager":
        from torch._dynamo.backends.debugging import aot_eager

        return aot_eager
    from torch._inductor import config as settings
    from torch._inductor import list_mode_options
    from torch._inductor.compile_fx import compile_fx

    # `list_options` leaves out those that stand for others, such as `force_disable_caches`.
    known: Mapping[str, Any] = settings._config  # pyright: ignore[reportAttributeAccessIssue]
    unknown = sorted(set(config.inductor or {}).difference(known))
    if unknown:
        raise ConfigError(f"config: inductor: Inductor has no option {unknown[0]!r}; see torch._inductor.list_options()")
    patches = {**(list_mode_options(config.mode) if config.mode else {}), **(config.inductor or {}), "triton.cudagraphs": False}

    def inductor(child: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(child, inputs, config_patches=patches)

    return inductor


@dataclass(frozen=True, slots=True)
class TopLevel:
    """The generated program. `forward` takes the graph's inputs that are no weights, in order."""

    source: str
    forward: Callable[..., Any]


def generate(
    gm: fx.GraphModule,
    *,
    programs: Mapping[str, Compiled],
    weights: frozenset[str],
    weight: Callable[[str, str], tuple[str, torch.Tensor]],
    inputs: Mapping[str, str],
    operations: Mapping[Callable[..., Any], Callable[..., Callable[[], None]]],
    output_weights: Mapping[int, str | None],
    device: torch.device,
) -> TopLevel:
    """Source and function of the top level `gm` (after the passes).

    `inputs` gives the parameter names of the placeholders that are passed in; `weight(placeholder, segment)` name and view of
    one of the placeholders `weights` for one segment; `operations` makes a no-argument call for each of `ops.prefetch`,
    `ops.wait` and `ops.evict`.
    Outputs at the positions `output_weights` alias a weight: they leave as copies, on `device`, or as the tensor that was passed
    in for the placeholder given there, which the model has written to.
    """
    writer = _Writer(gm, programs, weights, weight, inputs, operations, output_weights, device)
    source = writer.source()
    filename = f"<fxoffload {id(writer):x}>"
    # The top level shows in tracebacks as any other source does.
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    exec(compile(source, filename, "exec"), writer.namespace)
    # Popped: a function that its own globals hold would keep the arena's views alive until the garbage collector runs.
    return TopLevel(source, writer.namespace.pop("forward"))


class _Writer:
    def __init__(
        self,
        gm: fx.GraphModule,
        programs: Mapping[str, Compiled],
        weights: frozenset[str],
        weight: Callable[[str, str], tuple[str, torch.Tensor]],
        inputs: Mapping[str, str],
        operations: Mapping[Callable[..., Any], Callable[..., Callable[[], None]]],
        output_weights: Mapping[int, str | None],
        device: torch.device,
    ) -> None:
        self.gm = gm
        self.namespace: dict[str, Any] = {}
        self._programs = programs
        self._weights = weights
        self._weight = weight
        self._inputs = inputs
        self._operations = operations
        self._output_weights = output_weights
        self._device = device
        self._names: dict[fx.Node, str] = {}
        # A name that is assigned to anywhere is local everywhere, and must not be the name of something in the namespace.
        self._locals = {
            "_",
            "forward",
            _ARGUMENTS,
            *inputs.values(),
            *(_result_name(n) for n in gm.graph.nodes if n.target is operator.getitem),
        }
        self._last_reader = {used: node for node in gm.graph.nodes for used in node.all_input_nodes}

    def source(self) -> str:
        lines: list[str] = []
        for node in self.gm.graph.nodes:
            lines.extend(f"    {line}" for line in self._lines(node))
        parameters = ", ".join(self._names[n] for n in self.gm.graph.find_nodes(op="placeholder") if n in self._names)
        return "\n".join([f"def forward({parameters}):", *lines, ""])

    def _bind(self, name: str, value: Any) -> str:
        """Put a value into the namespace under `name`, or under a free name like it."""
        unique, k = name, 2
        while unique in self._locals or (unique in self.namespace and self.namespace[unique] is not value):
            unique, k = f"{name}_{k}", k + 1
        self.namespace[unique] = value
        return unique

    def _lines(self, node: fx.Node) -> list[str]:
        if node.op == "placeholder":
            if node.name in self._inputs:
                self._names[node] = self._inputs[node.name]
            return []
        if node.op == "get_attr":
            self._names[node] = self._bind(identifier(str(node.target)), operator.attrgetter(str(node.target))(self.gm))
            return []
        if node.op == "call_module":
            return self._segment(node)
        target: Any = node.target
        if node.op == "output":
            returned: Any = node.args[0]
            return [f"return ({''.join(f'{self._output(i, value)}, ' for i, value in enumerate(returned))})"]
        if target in self._operations:
            return [f"{self._bind(node.name, self._operations[target](*node.args))}()"]
        assert target is operator.getitem, f"{node.format_node()} at the top level"
        return []

    def _segment(self, node: fx.Node) -> list[str]:
        segment = str(node.target)
        results = {_item(user)[1]: user for user in node.users if user.target is operator.getitem}
        returned: Any = segment_module(self.gm, segment).graph.output_node().args[0]
        for user in results.values():
            self._names[user] = _result_name(user)
        targets = "".join(f"{self._names[results[i]] if i in results else '_'}, " for i in range(len(returned)))
        arguments = f"[{', '.join(self._argument(a, segment) for a in node.args)}]"
        program = self._bind(segment, self._programs[segment])
        dead = self._last_read(node)
        call = f"{program}({_ARGUMENTS if dead else arguments})"
        before = [f"{_ARGUMENTS} = {arguments}", f"del {', '.join(dead)}"] if dead else []
        return [*before, f"{targets}= {call}" if results else call]

    def _argument(self, value: Any, segment: str) -> str:
        if not isinstance(value, fx.Node):
            return repr(value)
        if value in self._names and value.name not in self._weights:
            return self._names[value]
        name, view = self._weight(value.name, segment)
        return self._bind(name, view)

    def _last_read(self, node: fx.Node) -> list[str]:
        """Values that nobody reads after this segment."""
        return [
            self._names[used]
            for used in node.all_input_nodes
            if used.target is operator.getitem and self._last_reader[used] is node
        ]

    def _output(self, index: int, value: Any) -> str:
        if not isinstance(value, fx.Node):
            return repr(value)
        itself = self._output_weights.get(index)
        if itself is not None:
            return self._inputs[itself]
        text = self._names[value]
        if index not in self._output_weights:
            return text
        # The arena is overwritten by later forwards, so a weight or a view of one leaves as a copy.
        return f"{text}.to({str(self._device)!r}, copy=True)" if value.op == "placeholder" else f"{text}.clone()"


def _item(item: fx.Node) -> tuple[str, int]:
    """The segment, and the position in what it returns, of a `getitem`."""
    args: Any = item.args
    call, index = args
    return str(call.target), int(index)


def _result_name(item: fx.Node) -> str:
    """`blocks_0_out1` for item 1 of what segment `blocks_0` returns."""
    segment, index = _item(item)
    return f"{segment}_out{index}"
