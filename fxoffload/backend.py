"""The `torch.compile` backend `"layerwise"`: traces, cuts, prices and compiles a graph, and binds it to the model's weights."""

from __future__ import annotations

import dataclasses
import functools
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import torch
import torch.fx as fx

from fxoffload.attached import attachment_of, attachment_with, held
from fxoffload.buckets import pack_buckets
from fxoffload.calibrate import machine_of
from fxoffload.causal import drop_masks
from fxoffload.config import OffloadConfig
from fxoffload.cut import Traced, cut_finely
from fxoffload.debug import logger, start_logging, switches
from fxoffload.devices import available_device
from fxoffload.dispatch import Dispatch, place
from fxoffload.errors import OffloadError, OffloadWarning
from fxoffload.facts import Facts
from fxoffload.foreign import refuse_foreign_hooks, refuse_untraceable
from fxoffload.hostalias import is_weight, placeholder_source, register_alias
from fxoffload.lower import compile_segments
from fxoffload.machine import Machine
from fxoffload.names import dotted_name
from fxoffload.owner import calling_line, owner_of, running_roots, tensor_names
from fxoffload.pack import pack_program
from fxoffload.passes.base import copy_graph
from fxoffload.program import Program, input_names
from fxoffload.read import find_written, name_of
from fxoffload.rows import Source
from fxoffload.select import selected_weights
from fxoffload.sizes import show_size
from fxoffload.split import crossing_weights, split_graph
from fxoffload.storages import nbytes_of
from fxoffload.units import declared_paths
from fxoffload.unwrap import unwrap

BACKEND = "layerwise"
_STAGES = ("config: ", "select: ", "units: ")
"""Their errors are for a user, of whatever type they are."""

_warned_breaks: set[str] = set()
_warned_models: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def layerwise(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph to run from host memory. Called by `torch.compile(model, backend="layerwise", options=...)`.

    `options` are the fields of `OffloadConfig`. Errors that a user can act on (OffloadError; TypeError and AttributeError for an
    option) are raised by the call of the model, unwrapped.
    """
    start_logging(switches())
    try:
        weights = [t for n, t in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True) if is_weight(n, t)]
        root = owner_of(weights[0]) if weights else None
        if root is not None:
            refuse_foreign_hooks(root)
        config = OffloadConfig.from_options(options, mode=mode, base=attached_config(root, weights))
        program = analyse(gm, example_inputs, config, root=root)
        with held(weights) as free:
            dispatch = Dispatch(_compile(program, example_inputs, packs=free))
            with suppress(OffloadError):
                # Where host memory does not suffice, or others run the model now, the call tries again, and says so.
                if free:
                    dispatch.bind(example_inputs)
    except (OffloadError, TypeError, AttributeError) as error:
        if not isinstance(error, OffloadError) and not str(error).startswith(_STAGES):
            raise
        return _refusal(error)
    return dispatch


layerwise.compiler_name = BACKEND  # type: ignore[attr-defined]  # torch.compile reads it where the function itself is passed


def analyse(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    config: OffloadConfig,
    *,
    machine: Machine | None = None,
    onload: torch.device | None = None,
    root: torch.nn.Module | None = None,
) -> Program:
    """All stages before compilation. Raises OffloadError for what cannot be offloaded.

    For a program that is not to run: `machine`, where the device is not there to be measured; `onload`, the device that the graph
    was traced on, also with weights on the meta device; and `root`, the module that the graph belongs to.
    """
    runs = onload is None
    onload = available_device(config.onload_device) if onload is None else onload
    output_device = None if _is_broken(gm) else config.output_device
    # Dynamo reads the placeholders of its graph again when it writes the call, so that graph is not ours to change.
    reason, gm = gm, fx.GraphModule(gm, copy_graph(gm.graph))
    watch = _Watch()
    placeholders = gm.graph.find_nodes(op="placeholder")
    reals = {n: t for n, t in zip(placeholders, example_inputs, strict=True) if is_weight(n, t)}
    if root is None and reals:
        root = owner_of(next(iter(reals.values())))
    names = tensor_names(root)
    _warn_of_break(reason, reals, root, names)
    selected = selected_weights(config, root)
    plain, places, inner_names = unwrap(
        gm, example_inputs, onload, is_weight=is_weight, name_of=lambda n, t: name_of(n, t, names)
    )
    names = {**inner_names, **names}
    declared = _declared(root, _part_of(reals, names))
    machine = machine or machine_of(onload)
    watch.lap("machine")
    written = find_written(gm, plain, onload, names, allow_meta=not runs)
    watch.lap("writes")
    drop_masks(gm, written)
    watch.lap("masks")

    traced = Traced(gm, plain, places, names, declared, onload, machine, runs, written)
    found = cut_finely(traced, config, nbytes_of(reals.values()), watch.lap)
    gm, facts, blocks = found.gm, found.facts, found.blocks
    top = split_graph(gm, blocks)
    watch.lap("split")
    passed, weight_sources = _arguments(gm, facts, found.sources)
    rows = frozenset(w.placeholder for w, source in zip(facts.weights, weight_sources, strict=True) if source.rows is not None)
    keep = _kept(facts, weight_sources, example_inputs, selected) | crossing_weights(gm, blocks, facts)
    return Program(
        facts=facts,
        blocks=blocks,
        buckets=pack_buckets(facts, blocks, alone=rows, keep=keep),
        prices=found.prices,
        machine=machine,
        top=top,
        config=config,
        onload=onload,
        places=tuple(dict.fromkeys(source.whole for source in weight_sources)),
        sources=weight_sources,
        inputs=passed,
        output_device=output_device,
        seconds=tuple(watch.laps.items()),
    )


def _compile(program: Program, example_inputs: Sequence[Any], *, packs: bool) -> Program:
    """The program with its segments compiled. Meanwhile a thread packs the weights: both mostly wait for others."""
    watch = _Watch()
    with ThreadPoolExecutor(max_workers=1) as pool:
        packing = pool.submit(pack_program, program, *place(program, example_inputs)) if packs else None
        programs, distinct = compile_segments(program.top, program.config)
        watch.lap("compile")
        with suppress(OffloadError):
            # Tried again when the program is bound.
            if packing is not None:
                packing.result()
        watch.lap("pack, beyond compile")
    logger.info("backend: %d segments, %d distinct", len(program.blocks.segments), distinct)
    return dataclasses.replace(program, programs=programs, distinct=distinct, seconds=(*program.seconds, *watch.laps.items()))


def _arguments(
    gm: fx.GraphModule, facts: Facts, sources: Sequence[Source]
) -> tuple[tuple[tuple[int, str, str], ...], tuple[Source, ...]]:
    """What is passed on to the top level, as (position, placeholder, parameter name), and the sources of the weights."""
    weights = {w.placeholder for w in facts.weights}
    returned = {n.name for n in gm.graph.output_node().all_input_nodes} | {p for _, p, itself in facts.output_weights if itself}
    source_of = {n.name: source for n, source in zip(gm.graph.find_nodes(op="placeholder"), sources, strict=True)}
    passed = [p for p in source_of if p not in weights or p in returned]
    named = zip(passed, input_names(passed), strict=True)
    return tuple((source_of[p].position, p, name) for p, name in named), tuple(source_of[w.placeholder] for w in facts.weights)


def _kept(
    facts: Facts, sources: Sequence[Source], example_inputs: Sequence[Any], selected: frozenset[int] | None
) -> frozenset[str]:
    """Placeholders of the weights that are not selected for offloading."""
    if selected is None:
        return frozenset()
    pairs = zip(facts.weights, sources, strict=True)
    return frozenset(w.placeholder for w, source in pairs if id(source.whole.of(example_inputs[source.position])) not in selected)


class _Watch:
    """Seconds of every stage, in order; those of one that ran twice are added up."""

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps[stage] = self.laps.get(stage, 0.0) + now - self._last
        self._last = now


def _refusal(error: Exception) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise error

    return refuse


def attached_config(root: torch.nn.Module | None, weights: Sequence[torch.Tensor] = ()) -> OffloadConfig | None:
    """The settings of a model that `layerwise_offload` offloads, which a compiled graph of it, or of a part, takes over."""
    attachment = (attachment_of(root) if root is not None else None) or attachment_with(weights)
    return attachment.config if attachment is not None else None


def _alias_device(kwargs: Mapping[str, Any]) -> torch.device:
    """The onload device while tracing. Bad options are not reported here, inside Dynamo, but by `layerwise`."""
    refuse_untraceable(next(running_roots(), None))
    options = kwargs.get("options") or {}
    try:
        chosen = options.get("onload_device")
        if chosen is None:
            attached = next((c for root in running_roots() if (c := attached_config(root)) is not None), None)
            chosen = attached.onload_device if attached is not None else "cuda"
        device = available_device(torch.device(chosen))
    except (RuntimeError, TypeError):
        return torch.device("cpu")
    if device.type != "cpu" and options.get("segment_compiler", "inductor") == "inductor":
        _warm_inductor()
    return device


@functools.cache
def _warm_inductor() -> None:
    """Start Inductor's compile workers, which take seconds to come up, while Dynamo traces (its own backend does so too)."""
    from torch._inductor import async_compile

    async_compile.maybe_warm_pool()


def _declared(root: torch.nn.Module | None, part: str) -> set[str]:
    """Paths of the blocks that the model's classes declare, as seen from its submodule `part`, whose call was traced."""
    if root is None:
        return set()
    prefix = f"{part}." if part else ""
    return {path.removeprefix(prefix) for path in declared_paths(root) if path.startswith(prefix)}


def _is_broken(gm: fx.GraphModule) -> bool:
    """Whether the graph ends where Dynamo broke it, and code of the model goes on with its results."""
    return bool(getattr(getattr(gm, "compile_subgraph_reason", None), "graph_break", False))


def _warn_of_break(
    gm: fx.GraphModule, weights: Mapping[fx.Node, torch.Tensor], root: torch.nn.Module | None, names: Mapping[int, str]
) -> None:
    """One warning a place where Dynamo broke the graph."""
    if _is_broken(gm):
        reason: Any = gm.compile_subgraph_reason
        frame = reason.user_stack[-1] if reason.user_stack else None
        where = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown line"
        what = f"graph break at {where} ({str(reason.reason).strip().splitlines()[0]})"
    elif root is not None and (found := _part_of(weights, names)):
        # Behind a break inside a loop Dynamo gives the whole frame up and compiles what that frame calls.
        where = calling_line(root)
        what = f"graph break around {where} (only {found} is compiled there, not {type(root).__name__})"
    else:
        return
    if where in _warned_breaks:
        return
    if root is not None and not _is_broken(gm) and root in _warned_models:
        # The other side of a break that was named already.
        return
    _warned_breaks.add(where)
    if root is not None:
        _warned_models.add(root)
    nbytes = nbytes_of(weights.values())
    warnings.warn(
        f"backend: {what}: the graphs on both sides are planned apart, so nothing is prefetched across the break, and their "
        f"weights ({show_size(nbytes)} in this one) are copied again at every call; remove the break (fullgraph=True finds it)",
        OffloadWarning,
        stacklevel=2,
    )


def _part_of(weights: Mapping[fx.Node, torch.Tensor], names: Mapping[int, str]) -> str:
    """The path of the submodule whose call was traced, or `""` where it was the root's."""
    for node, tensor in weights.items():
        source, name = placeholder_source(node), names.get(id(tensor))
        if source is not None and name is not None:
            traced = dotted_name(source.name)
            if name != traced and name.endswith(f".{traced}"):
                return name.removesuffix(f".{traced}")
            return ""
    return ""


register_alias(BACKEND, _alias_device)
