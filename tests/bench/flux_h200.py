"""Measure a FLUX.1-dev-sized transformer (random weights, bf16, 1024x1024) through the backend, over budgets, in one process.

    python tests/bench/flux_h200.py --batch 1 --out tests/bench/results/flux-b1-h200.json

Every row is the same compiled program under another plan (`set_memory_budget`), and its output is compared bit for bit with the
row in which everything is resident. Plans are made with the static cost model. `bound_ms` is the windowed bound with the segment
times of a resident forward (scaled to the resident step), the link and the activations as measured in this run. Budget `smallest`
is the least with which copies overlap compute, `least` the least that runs at all. The baseline is per-block `torch.compile`.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import platform
import statistics
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import fxoffload
from fxoffload import api
from fxoffload.calibrate import machine_of
from fxoffload.cost import Costs
from fxoffload.timeline import windowed_bound

GIB = 2**30
DEVICE = torch.device("cuda", 0)


def flux(layers: int, single_layers: int) -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    torch.set_default_dtype(torch.bfloat16)
    with DEVICE:
        model = FluxTransformer2DModel(
            patch_size=1, in_channels=64, num_layers=layers, num_single_layers=single_layers, attention_head_dim=128,
            num_attention_heads=24,
            joint_attention_dim=4096, pooled_projection_dim=768, guidance_embeds=True,
        )  # fmt: skip
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02, generator=generator)
    return model.eval().requires_grad_(False)


def inputs(batch: int) -> dict[str, Any]:
    generator = torch.Generator(DEVICE).manual_seed(1)
    ids = torch.zeros(4096, 3, device=DEVICE)
    ids[:, 1] = torch.arange(4096, device=DEVICE) // 64
    ids[:, 2] = torch.arange(4096, device=DEVICE) % 64

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=DEVICE, generator=generator)

    return {
        "hidden_states": randn(batch, 4096, 64),
        "encoder_hidden_states": randn(batch, 512, 4096),
        "pooled_projections": randn(batch, 768),
        "timestep": torch.full((batch,), 0.5, device=DEVICE),
        "guidance": torch.full((batch,), 3.5, device=DEVICE),
        "img_ids": ids,
        "txt_ids": torch.zeros(512, 3, device=DEVICE),
        "return_dict": False,
    }


def time_steps(call: Any, steps: int) -> dict[str, float]:
    """Median and spread of the step (device time between events) and of the host's time to issue one."""
    call()
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    host: list[float] = []
    events[0].record()
    for k in range(steps):
        start = time.perf_counter()
        call()
        host.append((time.perf_counter() - start) * 1e3)
        events[k + 1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    # The host runs ahead until queues fill; an issue time is honest only from an idle device.
    start = time.perf_counter()
    call()
    idle = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    return {
        "step_ms": statistics.median(times),
        "step_min_ms": min(times),
        "step_max_ms": max(times),
        "host_ms": idle,
        "host_busy_ms": statistics.median(host),
    }


def per_block_baseline(model: torch.nn.Module, call: Any, steps: int) -> dict[str, float]:
    model.compile_repeated_blocks()
    call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row = time_steps(call, steps)
    row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    for module in model.modules():
        module._compiled_call_impl = None
    torch._dynamo.reset()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budgets", default="all,smallest,4GiB,8GiB,16GiB,least")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-bucket-bytes", default="auto")
    parser.add_argument("--layers", type=int, default=19)
    parser.add_argument("--single-layers", type=int, default=38)
    parser.add_argument("--no-baseline", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    model = flux(args.layers, args.single_layers)
    kwargs = inputs(args.batch)
    weight_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": {
            "device": torch.cuda.get_device_name(),
            "driver": driver(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": f"FLUX.1-dev size, {weight_nbytes / GIB:.2f} GiB bf16, 1024x1024, batch {args.batch}",
    }
    if not args.no_baseline:
        report["per_block_compile"] = per_block_baseline(model, lambda: model(**kwargs), args.steps)
        print(json.dumps(report["per_block_compile"]), flush=True)
    model.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    machine = machine_of(DEVICE)
    report["link_gb_s"] = machine.link_gb_s
    compiled = torch.compile(
        model,
        backend=fxoffload.layerwise,
        fullgraph=True,
        options={"memory_budget": "100GiB", "max_bucket_bytes": args.max_bucket_bytes},
    )
    start = time.perf_counter()
    compiled(**kwargs)
    torch.cuda.synchronize()
    report["first_call_s"] = time.perf_counter() - start
    print(torch._dynamo.utils.compile_times(), file=sys.stderr)
    report["stages_s"] = dict(api.bindings_of(model)[-1].program.seconds)
    report["setup_s"] = api.engine_of(model).store.seconds
    for _ in range(2):
        compiled(**kwargs)
    torch.cuda.synchronize()
    binding = api.bindings_of(model)[-1]
    report["segments"] = len(binding.program.blocks.segments)
    report["distinct_segments"] = binding.program.distinct
    report["activation_estimate_gib"] = max(p.cost.activation_nbytes for p in binding.program.prices) / GIB
    report["activation_gib"] = binding.activation_nbytes / GIB
    report["predicted_ms"] = sum(p.cost.compute_ms for p in binding.program.prices)
    costs = api.profile(model, lambda: compiled(**kwargs))
    report["measured_compute_ms"] = sum(s.compute_ms for s in costs.segments)
    report["rows"] = [row(model, compiled, kwargs, budget, args.steps) for budget in args.budgets.split(",")]
    add_bounds(report["rows"], costs)
    for entry in report["rows"]:
        print(json.dumps(entry), flush=True)
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def add_bounds(rows: list[dict[str, Any]], costs: Costs) -> None:
    """The windowed bound of every row; the first row is the resident one."""
    scale = rows[0]["step_ms"] / sum(s.compute_ms for s in costs.segments)
    segments = tuple(dataclasses.replace(s, compute_ms=s.compute_ms * scale) for s in costs.segments)
    costs = dataclasses.replace(costs, segments=segments)
    for entry in rows:
        entry["bound_ms"] = windowed_bound(costs, entry.pop("weight_nbytes"))
        entry["ratio"] = entry["step_ms"] / entry["bound_ms"]


_resident: list[torch.Tensor] = []


def row(model: torch.nn.Module, compiled: Any, kwargs: dict[str, Any], budget: str, steps: int) -> dict[str, Any]:
    """One budget: plan, warm up, time, compare. The first row must be the resident one."""
    named = {"all": "100GiB", "smallest": api.smallest_budget(model), "least": api.smallest_budget(model, overlap=False)}
    nbytes = named.get(budget, budget)
    start = time.perf_counter()
    fxoffload.set_memory_budget(model, nbytes)
    plan_s = time.perf_counter() - start
    for _ in range(2):
        out = compiled(**kwargs)[0]
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    timed = time_steps(lambda: compiled(**kwargs), steps)
    out = compiled(**kwargs)[0].cpu()
    peak = torch.cuda.max_memory_reserved()
    if not _resident:
        _resident.append(out)
    plan, stats = fxoffload.get_plan(model), fxoffload.stats(model)
    return {
        "budget": budget,
        "budget_gib": plan.budget_nbytes / GIB,
        **timed,
        "weight_nbytes": plan.budget_nbytes - plan.activation_nbytes,
        "predicted_ms": plan.step_ms,
        "reserved_gib": peak / GIB,
        "under_budget": peak <= plan.budget_nbytes,
        "equal_to_resident": torch.equal(out, _resident[0]),
        "streamed_gib": stats.nbytes_copied / GIB,
        "resident_gib": plan.resident_nbytes / GIB,
        "arena_gib": plan.arena_nbytes / GIB,
        "loads": len(plan.loads),
        "plan_s": plan_s,
    }


def driver() -> str:
    found = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=False
    )
    return found.stdout.strip().splitlines()[0] if found.returncode == 0 else "unknown"


if __name__ == "__main__":
    main()
