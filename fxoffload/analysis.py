"""The stages before compilation, on a model that is not to run: to plan it without weights, without a device, or before it runs.

A call of the model is traced from a function made for it, so that nothing of the trace stays: no compiled code on the model's own
functions, no count towards their recompile limit. The graph is analysed (`backend.analyse`), and the call ends there: what it
would have computed, or changed on the model, does not happen. Tensors on the meta device trace as if they were on the others'.
"""

# Private names of torch: Dynamo's errors. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import itertools
import linecache
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo.exc import TorchDynamoException
from torch.utils._pytree import tree_leaves

from fxoffload import ops, passes
from fxoffload.backend import analyse
from fxoffload.config import OffloadConfig
from fxoffload.cost import BucketCost, Costs
from fxoffload.errors import OffloadError
from fxoffload.hostalias import register_alias
from fxoffload.lower import generate
from fxoffload.machine import Machine
from fxoffload.names import identifier
from fxoffload.plan import Plan
from fxoffload.program import Program

BACKEND = "layerwise-analysis"

_calls = itertools.count()


class _Stop(Exception):
    """Raised by a graph that was analysed, instead of running."""


def trace(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    config: OffloadConfig,
    *,
    machine: Machine,
    dynamic: bool | None = None,
) -> Program:
    """Trace `model(*args, **kwargs)` and take it through all stages before compilation.

    Nothing runs, and nothing on the model changes. `dynamic` as in `torch.compile`. Raises OffloadError where the call is not one
    graph, or cannot be offloaded.
    """
    backend = _Backend(model, config, machine)
    given = [*tree_leaves((args, kwargs)), *model.parameters(), *model.buffers()]
    call, parameters = _caller(model, args, kwargs)
    options: Any = {"device": _tracing_device(given)}
    compiled = torch.compile(call, backend=backend, fullgraph=True, dynamic=dynamic, options=options)
    try:
        with torch.no_grad():
            compiled(model, *parameters)
    except _Stop:
        pass
    except TorchDynamoException as error:
        found = re.search(r"\bgot (\w+Error\(.*\))$", str(error), re.MULTILINE)
        what = f"{str(error).strip().splitlines()[0]}{': ' + found[1] if found else ''}"
        raise OffloadError(
            f"analysis: {type(model).__name__}: with these inputs it does not trace as one graph ({what}); compile and run it, "
            "then call fxoffload.explain(model) without inputs, which shows every graph"
        ) from error
    if backend.failed is not None:
        raise backend.failed
    assert backend.program is not None
    return backend.program


class _Backend:
    """Keeps the program of the one graph that it is called with, or why there is none."""

    __name__ = BACKEND  # torch.compile passes it on, and `hostalias` knows it by that

    def __init__(self, root: torch.nn.Module, config: OffloadConfig, machine: Machine) -> None:
        self.program: Program | None = None
        self.failed: Exception | None = None
        self._root = root
        self._config = config
        self._machine = machine

    def __call__(self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, options: Mapping[str, Any]) -> Callable[..., Any]:
        # Dynamo would wrap what is raised here.
        try:
            self.program = analyse(
                gm, example_inputs, self._config, machine=self._machine, onload=options["device"], root=self._root
            )
        except Exception as error:
            self.failed = error
        return _stop


def _stop(*_: Any) -> Any:
    raise _Stop


def _tracing_device(values: Sequence[Any]) -> torch.device:
    """Where values that are on a device are; the CPU if all are there or on the meta device."""
    devices = [value.device for value in values if isinstance(value, torch.Tensor)]
    return next((device for device in devices if device.type not in ("cpu", "meta")), torch.device("cpu"))


def _caller(model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Callable[..., Any], list[Any]]:
    """A new function `forward(self, ...)` that calls the model, and its arguments after `self`.

    Its parameters have the names that the model's own have, so that the graph's inputs do, too.
    """
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        raise TypeError(f"analysis: {type(model).__name__}.forward: {error}; give the inputs of one call") from error
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    known = [name for name, parameter in signature.parameters.items() if parameter.kind in kinds]
    names = [known[i] if i < len(known) else f"args_{i}" for i in range(len(args))]
    passed = ", ".join([*names, *(f"{name}={name}" for name in kwargs)])
    source = f"def forward({', '.join(['self', *names, *kwargs])}):\n    return {_callee(model)}({passed})\n"
    filename = f"<fxoffload analysis {next(_calls)}>"
    namespace: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), namespace)
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    return namespace["forward"], [*args, *kwargs.values()]


def _callee(model: torch.nn.Module) -> str:
    # What `model.compile()` put in place is not to be called, nor compiled inside of this.
    return "self.forward" if getattr(model, "_compiled_call_impl", None) is not None else "self"


register_alias(BACKEND, lambda kwargs: kwargs["options"]["device"], meta=True)


def costs_of(program: Program) -> Costs:
    """The prices of a program and of its buckets, as if every weight were packed where this graph reads it first."""
    buckets = [
        BucketCost(bucket.name, bucket.nbytes, program.machine.copy_ms(bucket.nbytes), bucket.uses, bucket.keep)
        for bucket in program.buckets.buckets
    ]
    buckets.sort(key=lambda bucket: (bucket.uses, bucket.name))
    return Costs(tuple(price.cost for price in program.prices), tuple(buckets), program.machine.link_bytes_per_ms)


def graph_code(program: Program, plan: Plan) -> str:
    """The top level as FX code after the passes: segments, prefetches, waits and evictions."""
    return passes.run(program.top, plan).code


def top_level(program: Program, plan: Plan) -> str:
    """The source that would run: `lower.generate` without programs to call and without an arena to view."""
    weights = {w.placeholder: w.name for w in program.facts.weights}
    bucket_of = {placeholder: bucket.name for bucket in program.buckets.buckets for placeholder in bucket.weights}
    loads = {(identifier(plan.segments[i]), load.bucket): load.name for load in plan.loads for i in load.uses}
    places: dict[tuple[str, str], torch.Tensor] = {}

    def weight(placeholder: str, segment: str) -> tuple[str, torch.Tensor]:
        load = loads.get((segment, bucket_of.get(placeholder, "")), "")
        _, mark, number = load.partition("#")
        # One object a place, for the generator tells them apart by identity.
        place = places.setdefault((placeholder, load), torch.empty(0, device="meta"))
        return identifier(f"{weights[placeholder]}{mark}{number}"), place

    return generate(
        passes.run(program.top, plan),
        programs={node.target: _stop for node in program.top.graph.find_nodes(op="call_module")},
        weights=frozenset(weights),
        weight=weight,
        inputs={placeholder: name for _, placeholder, name in program.inputs},
        operations={operation: lambda *_: _stop for operation in (ops.prefetch, ops.wait, ops.evict)},
        output_weights={i: placeholder if itself else None for i, placeholder, itself in program.facts.output_weights},
        device=program.onload,
    ).source
