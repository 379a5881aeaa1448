"""The `torch.compile` backend `"layerwise"`: traces, cuts, prices and compiles a graph, and binds it to the model's weights."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx

from fxoffload.binding import Dispatch
from fxoffload.blocks import find_blocks
from fxoffload.buckets import pack_buckets
from fxoffload.calibrate import machine_of
from fxoffload.config import OffloadConfig
from fxoffload.debug import logger, start_logging, switches
from fxoffload.errors import ConfigError, OffloadError, OffloadWarning
from fxoffload.facts import Facts, read_facts
from fxoffload.hostalias import register_alias
from fxoffload.lower import compile_segments
from fxoffload.owner import owner_of, tensor_names
from fxoffload.price import price
from fxoffload.program import Program, input_names
from fxoffload.sizes import show_size
from fxoffload.split import split_graph

BACKEND = "layerwise"
_LARGEST_BUCKET_NBYTES = 112 << 20
_LEAST_BUCKET_NBYTES = 4 << 20
_PIECES = 12

_warned_breaks: set[str] = set()


def layerwise(
    gm: fx.GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, object] | None = None
) -> Callable[..., Any]:
    """Compile a Dynamo graph to run from host memory. Called by `torch.compile(model, backend="layerwise", options=...)`.

    `options` are the fields of `OffloadConfig`. Errors that a user can act on (OffloadError, and TypeError for an option of a wrong
    type) are raised by the call of the model, unwrapped.
    """
    start_logging(switches())
    try:
        config = OffloadConfig.from_options(options, mode=mode)
        program = build(gm, example_inputs, config)
        dispatch = Dispatch(program)
        dispatch.bind([example_inputs[i] for i in program.weight_positions])
    except (OffloadError, TypeError) as error:
        if not isinstance(error, OffloadError) and not str(error).startswith("config: "):
            raise
        return _refusal(error)
    return dispatch


layerwise.compiler_name = BACKEND  # type: ignore[attr-defined]  # torch.compile reads it where the function itself is passed


def build(gm: fx.GraphModule, example_inputs: Sequence[Any], config: OffloadConfig) -> Program:
    """All stages up to compiled segments. Raises OffloadError for what cannot be offloaded."""
    watch = _Watch()
    onload = _available(config.onload_device)
    reals = [t for t in example_inputs if isinstance(t, torch.Tensor)]
    root = next((owner for t in reals if isinstance(t, torch.nn.Parameter) and (owner := owner_of(t)) is not None), None)
    facts = read_facts(gm, example_inputs, onload, tensor_names(root))
    _warn_of_break(gm, facts)
    watch.lap("facts")
    blocks = find_blocks(facts, max_segment_nbytes=_bucket_limit(config, facts))
    watch.lap("blocks")
    machine = machine_of(onload)
    watch.lap("machine")
    prices = price(facts, blocks, machine)
    watch.lap("price")
    top = split_graph(gm, blocks)
    watch.lap("split")
    programs, distinct = compile_segments(top, config)
    watch.lap("compile")
    placeholders = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    weights = {w.placeholder for w in facts.weights}
    returned = {n.name for n in gm.graph.output_node().all_input_nodes if n.name in weights}
    passed = [(i, p) for i, p in enumerate(placeholders) if p not in weights or p in returned]
    names = input_names([p for _, p in passed])
    logger.info("backend: %d segments, %d distinct", len(blocks.segments), distinct)
    return Program(
        facts=facts,
        blocks=blocks,
        buckets=pack_buckets(facts, blocks),
        prices=prices,
        machine=machine,
        top=top,
        programs=programs,
        distinct=distinct,
        config=config,
        onload=onload,
        weight_positions=tuple(i for i, p in enumerate(placeholders) if p in weights),
        inputs=tuple((i, p, name) for (i, p), name in zip(passed, names, strict=True)),
        seconds=tuple(watch.laps),
    )


class _Watch:
    """Seconds a stage took, in order."""

    def __init__(self) -> None:
        self.laps: list[tuple[str, float]] = []
        self._last = time.perf_counter()

    def lap(self, stage: str) -> None:
        now = time.perf_counter()
        self.laps.append((stage, now - self._last))
        self._last = now


def _refusal(error: Exception) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise error

    return refuse


def _available(device: torch.device) -> torch.device:
    """The device with its index. Raises ConfigError where it is not there."""
    if device.type == "cpu":
        return device
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != device.type:
        there = "no accelerator" if current is None else f"{current.type!r}"
        raise ConfigError(f"backend: onload_device: {str(device)!r} is not available, this machine has {there}; pass onload_device='cpu' to run here")
    return torch.device(device.type, torch.accelerator.current_device_index() if device.index is None else device.index)


def _alias_device(kwargs: Mapping[str, Any]) -> torch.device:
    """The onload device while tracing. Bad options are not reported here, inside Dynamo, but by `layerwise`."""
    options = kwargs.get("options") or {}
    try:
        return _available(torch.device(options.get("onload_device", "cuda")))
    except (RuntimeError, TypeError):
        return torch.device("cpu")


def _bucket_limit(config: OffloadConfig, facts: Facts) -> int:
    """A twelfth of the weights, in 4 to 112 MiB: copies of some MiB already run at the speed of the link, and less is held back."""
    if config.max_bucket_bytes != "auto":
        return config.max_bucket_bytes
    total = sum(w.nbytes for w in facts.weights)
    return max(_LEAST_BUCKET_NBYTES, min(_LARGEST_BUCKET_NBYTES, total // _PIECES))


def _warn_of_break(gm: fx.GraphModule, facts: Facts) -> None:
    """One warning a place where Dynamo broke the graph."""
    reason = getattr(gm, "compile_subgraph_reason", None)
    if reason is None or not getattr(reason, "graph_break", False):
        return
    frame = reason.user_stack[-1] if reason.user_stack else None
    where = f"{frame.filename}:{frame.lineno}" if frame is not None else "an unknown line"
    if where in _warned_breaks:
        return
    _warned_breaks.add(where)
    cause = str(reason.reason).strip().splitlines()[0]
    nbytes = sum(w.nbytes for w in facts.weights)
    warnings.warn(
        f"backend: graph break at {where} ({cause}): the graphs on both sides are planned apart, so nothing is prefetched across the break and "
        f"the {show_size(nbytes)} of weights before it are copied again at every call; remove the break (fullgraph=True finds it)",
        OffloadWarning,
        stacklevel=2,
    )


register_alias(BACKEND, _alias_device)
