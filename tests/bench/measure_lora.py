"""Adapters of a compiled, streamed model, swapped for others of the same shapes: seconds, compilations, and the results.

A LoRA adapter lies on every attention projection. Ways: `peft` uses what diffusers does (`enable_lora_hotswap`, then
`load_lora_adapter(..., hotswap=True)`); `plain` has layers of this file instead, whose values are written in place, and needs no
PEFT. By default `peft` where it is installed.

A row is a swap: `swap_s` is that of the swap alone, `next_ms` the first forward behind it, which copies what was edited, and
`step_ms` forwards after that. `compiled_by` counts Dynamo's graphs and Inductor's in the swap and in the next forward.
`equal_to_resident` compares bit for bit with the same program when everything is resident. `relative_difference` is that to a
second model, neither compiled nor offloaded, whose adapter was loaded rather than swapped in: compare it with `changed`, which
is what the swap changed of the result.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import fxoffload
from fxoffload import timing
from fxoffload.devices import available_device
from fxoffload.workloads import Workload, empty_model, find_workload, make_inputs, make_model, show, weight_nbytes
from tests.bench.rowfile import EVERYTHING, GIB, Row, RowFile, budget_for
from tests.bench.sweep import compilations

WAYS = ("peft", "plain")
PROJECTIONS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
SPREAD = 0.1
"""Standard deviation of the adapters' values: they change the results visibly."""
NAME, PREFIX = "default", "transformer"
State = dict[str, torch.Tensor]


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--way", choices=WAYS)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--budget", default="4GiB", help="a size, or half: activations and half of the weights")
    parser.add_argument("--compiler", default="inductor", help="what compiles segments")


def run(args: argparse.Namespace, command: str) -> RowFile:
    workload, device = find_workload(args.workload), available_device(torch.device(args.device))
    way = args.way or ("peft" if importlib.util.find_spec("peft") is not None else "plain")
    adapters = [adapter(workload, args.rank, k) for k in range(args.swaps + 1)]
    model: Any = make_model(workload, torch.device("cpu"), onload=device)
    load(way, model, adapters[0])
    head = {"model": show(workload, weight_nbytes(model), 1), "way": way, "rank": args.rank, "projections": len(adapters[0]) // 2}
    found = {str(p.dtype).removeprefix("torch.") for name, p in model.named_parameters() if "lora" in name}
    rows = RowFile(args.out, command, device, **head, dtypes=sorted(found), compiler=args.compiler)
    inputs = make_inputs(workload, model, device)
    options = {"onload_device": device, "memory_budget": EVERYTHING, "segment_compiler": args.compiler}
    model.compile(backend=fxoffload.layerwise, fullgraph=True, dynamic=False, options=options)

    def call() -> torch.Tensor:
        return model(**inputs)[0]

    _, rows.data["first_call_s"] = timing.timed(call, device)
    for _ in range(3):
        call()
    fxoffload.set_memory_budget(model, budget_for(model, args.budget))
    for _ in range(3):
        before = call()
    outputs: list[torch.Tensor] = []
    for k, state in enumerate(adapters[1:], 1):
        row, output = swap_and_run(way, model, state, call, args.steps, device)
        outputs.append(output.cpu())
        plan = fxoffload.get_plan(model)
        rows.add({"swap": k, **row, "changed": relative(output, before), "budget_gib": plan.budget_nbytes / GIB})
        before = output
    # The same program, resident, and a model of its own: after all swaps, since both take memory.
    fxoffload.set_memory_budget(model, EVERYTHING)
    for state, row, output in zip(adapters[1:], rows.rows, outputs, strict=True):
        swap(way, model, state)
        row["equal_to_resident"] = torch.equal(call().cpu(), output)
    twin: Any = make_model(workload, device)
    load(way, twin, adapters[-1])
    rows.rows[-1]["relative_difference"] = relative(twin(**inputs)[0].cpu(), outputs[-1])
    rows.write()
    return rows


def swap_and_run(
    way: str, model: Any, state: State, call: Callable[[], torch.Tensor], steps: int, device: torch.device
) -> tuple[Row, torch.Tensor]:
    """One swap and the forwards behind it: its row, and the result of the first."""
    before = compilations()
    # A swap waits for the device first: copies of the forward before still read the old values.
    _, swap_s = timing.timed(lambda: swap(way, model, state), device)
    at_swap = compilations()
    output, next_s = timing.timed(call, device)
    compiled = {"compiled_by_swap": at_swap - before, "compiled_by_next": compilations() - at_swap}
    timed, again = timing.time_steps(call, steps, device)
    return {
        "swap_s": swap_s,
        "next_ms": next_s * 1e3,
        "step_ms": statistics.median(timed.times_ms),
        **compiled,
        "streamed_gib": fxoffload.stats(model).nbytes_copied / GIB,
        "equal_to_next": torch.equal(output, again),
    }, output


def relative(mine: torch.Tensor, other: torch.Tensor) -> float:
    return float((mine.float() - other.float()).norm() / other.float().norm())


def adapter(workload: Workload, rank: int, seed: int) -> State:
    """Random values for every attention projection, in the format that diffusers loads, on the host."""
    generator = torch.Generator().manual_seed(seed)
    state: State = {}
    for name, module in empty_model(workload, torch.device("cpu")).named_modules():
        if isinstance(module, nn.Linear) and name.endswith(PROJECTIONS):
            for part, shape in (("lora_A", (rank, module.in_features)), ("lora_B", (module.out_features, rank))):
                values = torch.randn(shape, generator=generator) * SPREAD
                state[f"{PREFIX}.{name}.{part}.weight"] = values.to(workload.dtype)
    return state


def load(way: str, model: Any, state: State) -> None:
    """Put adapters on a model that has none."""
    if way == "peft":
        model.enable_lora_hotswap(target_rank=next(iter(state.values())).shape[0])
        model.load_lora_adapter(dict(state), adapter_name=NAME, prefix=PREFIX)
    else:
        for name in paths(state):
            parent, _, last = name.rpartition(".")
            a, b = (state[f"{PREFIX}.{name}.{part}.weight"] for part in ("lora_A", "lora_B"))
            setattr(model.get_submodule(parent), last, Adapted(model.get_submodule(name), a, b))
    model.requires_grad_(False)


def swap(way: str, model: Any, state: State) -> None:
    """Other values for the adapters that are there."""
    if way == "peft":
        model.load_lora_adapter(dict(state), adapter_name=NAME, prefix=PREFIX, hotswap=True)
        return
    for name in paths(state):
        layer = model.get_submodule(name)
        for part in ("lora_A", "lora_B"):
            getattr(layer, part).weight.copy_(state[f"{PREFIX}.{name}.{part}.weight"])


def paths(state: State) -> list[str]:
    """The layers that have adapters."""
    return [key.removeprefix(f"{PREFIX}.").removesuffix(".lora_A.weight") for key in state if key.endswith(".lora_A.weight")]


class Adapted(nn.Module):
    """A layer with an adapter: `base(x) + B(A(x))`."""

    def __init__(self, base: nn.Module, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Linear(a.shape[1], a.shape[0], bias=False, device="meta")
        self.lora_B = nn.Linear(b.shape[1], b.shape[0], bias=False, device="meta")
        where = next(base.parameters()).device
        for layer, values in ((self.lora_A, a), (self.lora_B, b)):
            layer.weight = nn.Parameter(values.to(where, copy=True), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.lora_B(self.lora_A(x))
