"""Quantized weights of a compiled model, streamed under budgets: bytes a step, the step, its bound, and the result.

Schemes are torchao's, on the linear layers of the blocks:

    none            no quantization
    int8            int8 weights
    float8          float8 weights
    float8-dynamic  float8 weights and activations, whose products run in float8

Every row is the same compiled program under another plan. `equal_to_resident` compares its result bit for bit with the row of the
same scheme in which everything is resident. `bound_ms` and `ratio` are those of `sweep`: the windowed bound with the segment
times of a resident forward, scaled to the resident step, and the link as measured in this run. The resident step is measured
before the other rows and after them. Budget `smallest` is the least that is not slow, by the plan.

Weights are made and quantized on the device, then moved to the host: `quantize_s` is that of the quantization.

int8 on CUDA needs `--compiler aot_eager`: Inductor's kernel for such products takes seconds each at this size (README, Limits).
"""

from __future__ import annotations

import argparse
import gc
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fxoffload
from fxoffload import api, timing
from fxoffload.calibrate import machine_of
from fxoffload.devices import available_device
from fxoffload.workloads import Workload, blocks_of, find_workload, make_inputs, make_model, show
from tests.bench.rowfile import EVERYTHING, GIB, Row, RowFile, budget_for
from tests.bench.sweep import add_bounds, link_gb_s, spread

SCHEMES = ("none", "int8", "float8", "float8-dynamic")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--schemes", default="int8,float8,float8-dynamic", help=f"of {', '.join(SCHEMES)}")
    parser.add_argument("--budgets", default="4GiB,smallest", help="besides all: sizes, smallest, or half of the weights")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--compiler", default="inductor", help="what compiles segments")
    parser.add_argument("--lock", type=Path, help="runs on one host that give the same file time steps in turn")


def run(args: argparse.Namespace, command: str) -> RowFile:
    workload, device = find_workload(args.workload), available_device(torch.device(args.device))
    head = {"model": "", "torchao": version("torchao"), "compiler": args.compiler, "schemes": {}}
    rows = RowFile(args.out, command, device, **head)
    for scheme in args.schemes.split(","):
        try:
            measure(rows, scheme, workload, args)
        except Exception as error:
            traceback.print_exc()
            rows.add({"scheme": scheme, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"})
        torch._dynamo.reset()
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    return rows


def version(package: str) -> str | None:
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def measure(rows: RowFile, scheme: str, workload: Workload, args: argparse.Namespace) -> None:
    """Rows of one scheme, and what is known of it besides."""
    device = available_device(torch.device(args.device))
    (model, quantize_s), setup_s = timing.timed(lambda: quantized(workload, scheme, device), device)
    if not rows.data["model"]:
        plain_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
        rows.data["model"] = show(workload, plain_nbytes, 1)
    inputs = make_inputs(workload, model, device)
    options = {"onload_device": device, "memory_budget": EVERYTHING, "segment_compiler": args.compiler}
    compiled: Any = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, dynamic=False, options=options)

    def call() -> torch.Tensor:
        return compiled(**inputs)[0]

    _, first_call_s = timing.timed(call, device)
    for _ in range(3):
        call()
    with timing.turn(args.lock):
        costs = api.profile(model, call)
    (binding,) = api.bindings_of(model)
    rows.data["schemes"][scheme] = {
        "weights_gib": sum(bucket.nbytes for bucket in costs.buckets) / GIB,
        "quantize_s": quantize_s,
        "setup_s": setup_s,
        "first_call_s": first_call_s,
        "segments": len(costs.segments),
        "distinct_segments": binding.program.distinct,
    }
    mine: list[Row] = []
    resident: list[float] = []
    expected: torch.Tensor | None = None
    for budget in ("all", *args.budgets.split(","), "all"):
        with timing.turn(args.lock):
            row, times, output = one_budget(model, budget, call, args, device)
            link = link_gb_s(model) if device.type == "cuda" else machine_of(device).link_gb_s
        expected = output if expected is None else expected
        if budget == "all":
            resident.extend(times)
        row = {"scheme": scheme, **row, "equal_to_resident": torch.equal(output, expected), "link_gb_s": link}
        if budget == "all" and mine:
            mine[0] |= {**spread(resident), "again_ms": row["step_ms"], "equal_to_resident": row["equal_to_resident"]}
            continue
        mine.append(row)
        rows.add(row)
    # `add` took the same rows, so what is added to them now is written, too.
    rows.data["schemes"][scheme] |= {"finite": bool(torch.isfinite(expected).all())}
    add_bounds(mine, costs)
    for row in mine:
        print({name: row[name] for name in ("scheme", "budget", "step_ms", "bound_ms", "ratio")}, flush=True)
    rows.write()


def one_budget(
    model: Any, budget: str, call: Callable[[], torch.Tensor], args: argparse.Namespace, device: torch.device
) -> tuple[Row, list[float], torch.Tensor]:
    """One budget: its row, its steps (ms), and its result on the host."""
    if budget == "smallest":
        chosen: int | str = api.smallest_budget(model)
    else:
        chosen = EVERYTHING if budget == "all" else budget_for(model, budget)
    fxoffload.set_memory_budget(model, chosen)
    for _ in range(args.warmup):
        call()
    timing.reset_peaks(device)
    call()
    steps, output = timing.time_steps(call, args.steps, device)
    peaks, plan, stats = timing.peaks(device), fxoffload.get_plan(model), fxoffload.stats(model)
    row = {
        "budget": budget,
        "budget_gib": plan.budget_nbytes / GIB,
        **spread(steps.times_ms),
        "host_ms": steps.host_ms,
        "predicted_ms": plan.step_ms,
        "weight_nbytes": plan.budget_nbytes - plan.activation_nbytes,
        "streamed_nbytes": stats.nbytes_copied,
        "streamed_gib": stats.nbytes_copied / GIB,
        "resident_gib": plan.resident_nbytes / GIB,
        "reserved_gib": None if peaks.reserved_nbytes is None else peaks.reserved_nbytes / GIB,
        "under_budget": None if peaks.reserved_nbytes is None else peaks.reserved_nbytes <= plan.budget_nbytes,
    }
    return row, list(steps.times_ms), output.cpu()


def quantized(workload: Workload, scheme: str, device: torch.device) -> tuple[Any, float]:
    """The model on the host, quantized on the device, and how long that took (s)."""
    model: Any = make_model(workload, device)
    _, seconds = timing.timed(lambda: quantize(model, workload, scheme), device)
    return model.cpu(), seconds


def quantize(model: Any, workload: Workload, scheme: str) -> None:
    """Quantize the linear layers of the blocks in place."""
    if scheme == "none":
        return
    from torchao import quantization as ao

    # Inductor tuned as torchao recommends it would compile for minutes: these rows compare plans, not kernels.
    configs: dict[str, Callable[[], Any]] = {
        "int8": lambda: ao.Int8WeightOnlyConfig(version=2, set_inductor_config=False),
        "float8": lambda: ao.Float8WeightOnlyConfig(set_inductor_config=False),
        "float8-dynamic": lambda: ao.Float8DynamicActivationFloat8WeightConfig(
            granularity=ao.PerRow(), set_inductor_config=False
        ),
    }
    if scheme not in configs:
        raise ValueError(f"{scheme!r} is none of {', '.join(SCHEMES)}")
    for _, block in blocks_of(workload, model):
        ao.quantize_(block, configs[scheme](), filter_fn=lambda module, _: isinstance(module, nn.Linear))
