"""Plans of a pipeline's components before anything runs, with weights or without.

A compiled component is traced, and planned as it would run. One that runs without a compiler is planned unit by unit, as before
its first forward: a unit then takes the time of reading its weights once, and activations are unknown.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from fxoffload import report, shapes
from fxoffload.buckets import align
from fxoffload.calibrate import machine_of
from fxoffload.config import OffloadConfig, resolve_budget
from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.devices import available_device, device_memory
from fxoffload.errors import BudgetError
from fxoffload.machine import Machine
from fxoffload.planner import knobs_of, make_plan
from fxoffload.show import plan_table
from fxoffload.sizes import show_size
from fxoffload.units import find_units, split_limit
from fxoffload.verify import check_plan


def forecast(name: str, model: torch.nn.Module, settings: Mapping[str, Any], *, compiled: bool, sizes: Mapping[str, Any]) -> str:
    """The plan of one component as text. `settings`: fields of `OffloadConfig`; `sizes`: as for `shapes.example_inputs`.

    Raises BudgetError, naming the component, for a budget that is too small for it.
    """
    try:
        return f"{name}  {_compiled(model, settings, sizes) if compiled else _eager(model, settings)}"
    except BudgetError as error:
        raise BudgetError(f"cli: {name}: {str(error).removeprefix('planner: ')}", error.smallest_nbytes) from error


def _compiled(model: torch.nn.Module, settings: Mapping[str, Any], sizes: Mapping[str, Any]) -> str:
    explanation = report.explain(model, shapes.example_inputs(model, **sizes), **settings)
    return f"{explanation.head}\n{plan_table(explanation.plan, explanation.costs)}"


def _eager(model: torch.nn.Module, settings: Mapping[str, Any]) -> str:
    config = OffloadConfig.from_options(settings)
    device = available_device(config.onload_device)
    budget_nbytes = resolve_budget(config, *device_memory(device))
    limit_nbytes = split_limit(model, config, budget_nbytes)
    costs = unit_costs(model, config, machine_of(device), limit_nbytes=limit_nbytes)
    plan = make_plan(costs, budget_nbytes, knobs_of(config))
    check_plan(plan, costs)
    nbytes = sum(bucket.nbytes for bucket in costs.buckets)
    head = f"{type(model).__name__}  {show_size(nbytes)} of weights, not compiled: times are those of reading the weights once"
    return f"{head}\n{plan_table(plan, costs)}"


def unit_costs(model: torch.nn.Module, config: OffloadConfig, machine: Machine, *, limit_nbytes: int) -> Costs:
    """A segment and a bucket for every unit, in the order of definition, and one bucket for what stays resident."""
    units = find_units(model, config, limit_nbytes=limit_nbytes)
    seen: set[int] = set()
    sizes = [sum(_fresh_nbytes(tensor, seen) for _, tensor in unit.tensors) for unit in units.units]
    rest = sum(_fresh_nbytes(tensor, seen) for _, tensor in units.rest)
    names = [unit.name for unit in units.units]
    segments = [SegmentCost(n, float(machine.compute_ms(0, size, "")), 0) for n, size in zip(names, sizes, strict=True)]
    buckets = [
        BucketCost(n, size, machine.copy_ms(size), (i,)) for i, (n, size) in enumerate(zip(names, sizes, strict=True)) if size
    ]
    if rest:
        buckets.insert(0, BucketCost("rest", rest, machine.copy_ms(rest), (0,), keep=True))
    return Costs(tuple(segments) or (SegmentCost("forward", 0.0, 0),), tuple(buckets), machine.link_bytes_per_ms)


def _fresh_nbytes(tensor: torch.Tensor, seen: set[int]) -> int:
    """Bytes that a tensor takes in its bucket, if it was not seen yet."""
    if id(tensor) in seen:
        return 0
    seen.add(id(tensor))
    return align(tensor.numel() * tensor.element_size())
