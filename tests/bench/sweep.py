"""Measure a model of real size (random weights, bf16) through the backend, over budgets, in one process.

    python tests/bench/sweep.py flux --batch 1 --out tests/bench/results/flux-b1.json

Every row is the same compiled program under another plan (`set_memory_budget`; recompiles are counted). Its output is compared
bit for bit with the row in which everything is resident. Plans are made with the static cost model: `predicted_ms` is theirs.

`bound_ms` is the windowed bound with the segment times of a resident forward (scaled to the resident step), the link and the
activations as measured in this run; `naive_bound_ms` is max(compute, streamed bytes / link). Budget `smallest` is the least with
which copies overlap compute, `least` the least that runs at all. The baseline is per-block `torch.compile`, all resident.
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
from collections.abc import Callable
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


def randomise(model: torch.nn.Module) -> torch.nn.Module:
    """Values that matter: no zero gates, no unit norms."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    for parameter in model.parameters():
        parameter.normal_(0, 0.02, generator=generator)
    return model.eval().requires_grad_(False)


def randn(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(seed + sum(shape)))


def flux(batch: int) -> tuple[torch.nn.Module, dict[str, Any], str]:
    """FLUX.1-dev, 1024x1024: 4096 image and 512 text tokens."""
    from diffusers import FluxTransformer2DModel

    with DEVICE:
        model = FluxTransformer2DModel(guidance_embeds=True)
    ids = torch.zeros(4096, 3, device=DEVICE)
    ids[:, 1] = torch.arange(4096, device=DEVICE) // 64
    ids[:, 2] = torch.arange(4096, device=DEVICE) % 64
    return (
        model,
        {
            "hidden_states": randn(batch, 4096, 64),
            "encoder_hidden_states": randn(batch, 512, 4096),
            "pooled_projections": randn(batch, 768),
            "timestep": torch.full((batch,), 0.5, device=DEVICE),
            "guidance": torch.full((batch,), 3.5, device=DEVICE),
            "img_ids": ids,
            "txt_ids": torch.zeros(512, 3, device=DEVICE),
            "return_dict": False,
        },
        "FLUX.1-dev size, 1024x1024",
    )


def wan(batch: int) -> tuple[torch.nn.Module, dict[str, Any], str]:
    """Wan 2.x 14B, 81 frames of 480x832: 21 x 30 x 52 tokens."""
    from diffusers import WanTransformer3DModel

    with DEVICE:
        model = WanTransformer3DModel()
    given = {
        "hidden_states": randn(batch, 16, 21, 60, 104),
        "timestep": torch.full((batch,), 500, device=DEVICE),
        "encoder_hidden_states": randn(batch, 512, 4096),
        "return_dict": False,
    }
    return model, given, "Wan 14B size, 480x832, 81 frames"


def qwen_image(batch: int) -> tuple[torch.nn.Module, dict[str, Any], str]:
    """Qwen-Image, 1328x1328: 83 x 83 image and 256 text tokens."""
    from diffusers import QwenImageTransformer2DModel

    with DEVICE:
        model = QwenImageTransformer2DModel()
    given = {
        "hidden_states": randn(batch, 83 * 83, 64),
        "encoder_hidden_states": randn(batch, 256, 3584),
        "encoder_hidden_states_mask": torch.ones(batch, 256, dtype=torch.long, device=DEVICE),
        "timestep": torch.full((batch,), 0.5, device=DEVICE),
        "img_shapes": [(1, 83, 83)] * batch,
        "return_dict": False,
    }
    return model, given, "Qwen-Image size, 1328x1328"


def llama(batch: int, tokens: int) -> tuple[torch.nn.Module, dict[str, Any], str]:
    """Llama 3.1 8B, one forward of so many tokens, logits of the last."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=16384, tie_word_embeddings=False,
    )  # fmt: skip
    with DEVICE:
        model = LlamaForCausalLM(config)
    ids = torch.randint(0, 128256, (batch, tokens), device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(1))
    return (
        model,
        {"input_ids": ids, "use_cache": False, "logits_to_keep": 1, "return_dict": False},
        f"Llama 8B shape, {tokens} tokens",
    )


WORKLOADS: dict[str, Callable[[int], tuple[torch.nn.Module, dict[str, Any], str]]] = {
    "flux": flux,
    "wan": wan,
    "qwen-image": qwen_image,
    "llama-prefill": lambda batch: llama(batch, 8192),
    "llama-decode": lambda batch: llama(batch, 1),
}


def time_steps(call: Callable[[], torch.Tensor], steps: int) -> tuple[dict[str, float], torch.Tensor]:
    """Median and spread of the step (device time between events), the host's time to issue one, and the last result."""
    torch.cuda.synchronize()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    events[0].record()
    for event in events[1:]:
        call()
        event.record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in pairwise(events)]
    # The host runs ahead until queues fill; an issue time is honest only from an idle device.
    start = time.perf_counter()
    result = call()
    host_ms = (time.perf_counter() - start) * 1e3
    torch.cuda.synchronize()
    return {"step_ms": statistics.median(times), "step_min_ms": min(times), "step_max_ms": max(times), "host_ms": host_ms}, result


def per_block_baseline(model: torch.nn.Module, call: Any, steps: int) -> dict[str, float]:
    if hasattr(model, "compile_repeated_blocks"):
        model.compile_repeated_blocks()
    else:
        for layer in model.model.layers:
            layer.compile()
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    row, _ = time_steps(call, steps)
    row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
    for module in model.modules():
        module._compiled_call_impl = None
    torch._dynamo.reset()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budgets", default="all,smallest,4GiB,8GiB,16GiB,least")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--max-bucket-bytes", default="auto")
    parser.add_argument("--baseline", action="store_true", help="also measure per-block torch.compile, all resident")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    model, kwargs, what = WORKLOADS[args.workload](args.batch)
    randomise(model)
    weight_nbytes = sum(p.numel() * p.element_size() for p in model.parameters())
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": {
            "device": torch.cuda.get_device_name(),
            "driver": driver(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": f"{what}, batch {args.batch}, {weight_nbytes / GIB:.2f} GiB bf16",
    }
    model.cpu()
    gc.collect()
    torch.cuda.empty_cache()
    sweep(model, kwargs, args, report)
    if args.baseline:
        # Behind the sweep, whose first call would not be a cold one otherwise.
        api.engine_of(model).give_up_arena()
        torch._dynamo.reset()
        model.to(DEVICE)
        report["per_block_compile"] = per_block_baseline(model, lambda: model(**kwargs)[0], args.steps)
    for entry in report["rows"]:
        print(json.dumps(entry), flush=True)
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


def sweep(model: torch.nn.Module, kwargs: dict[str, Any], args: argparse.Namespace, report: dict[str, Any]) -> None:
    """Compile once, then a row a budget."""
    report["link_gb_s"] = machine_of(DEVICE).link_gb_s
    options = {"memory_budget": "100GiB", "max_bucket_bytes": args.max_bucket_bytes}
    compiled = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, options=options)
    start = time.perf_counter()
    compiled(**kwargs)
    torch.cuda.synchronize()
    report["first_call_s"] = time.perf_counter() - start
    print(torch._dynamo.utils.compile_times(), file=sys.stderr)
    for _ in range(3):
        compiled(**kwargs)
    torch.cuda.synchronize()
    (binding,) = api.bindings_of(model)
    program = binding.program
    costs = api.profile(model, lambda: compiled(**kwargs))
    report |= {
        "stages_s": dict(program.seconds),
        "setup_s": api.engine_of(model).store.seconds,
        "segments": len(program.blocks.segments),
        "distinct_segments": program.distinct,
        "activation_estimate_gib": max(p.cost.activation_nbytes for p in program.prices) / GIB,
        "activation_gib": binding.activation_nbytes / GIB,
        "predicted_ms": sum(p.cost.compute_ms for p in program.prices),
        "measured_compute_ms": sum(s.compute_ms for s in costs.segments),
    }
    report["rows"] = [row(model, compiled, kwargs, budget, args.steps) for budget in args.budgets.split(",")]
    add_bounds(report["rows"], costs)
    report["graphs_compiled"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]


def add_bounds(rows: list[dict[str, Any]], costs: Costs) -> None:
    """The windowed bound of every row; the first row is the resident one."""
    scale = rows[0]["step_ms"] / sum(s.compute_ms for s in costs.segments)
    segments = tuple(dataclasses.replace(s, compute_ms=s.compute_ms * scale) for s in costs.segments)
    costs = dataclasses.replace(costs, segments=segments)
    for entry in rows:
        if "error" in entry:
            continue
        weight_nbytes = entry.pop("weight_nbytes")
        streamed_ms = max(sum(b.nbytes for b in costs.buckets) - weight_nbytes, 0) / costs.link_bytes_per_ms
        entry["bound_ms"] = windowed_bound(costs, weight_nbytes)
        entry["naive_bound_ms"] = max(rows[0]["step_ms"], streamed_ms)
        entry["ratio"] = entry["step_ms"] / entry["bound_ms"]


_resident: list[torch.Tensor] = []


def row(model: torch.nn.Module, compiled: Any, kwargs: dict[str, Any], budget: str, steps: int) -> dict[str, Any]:
    """One budget: plan, warm up, time, compare. The first row must be the resident one."""
    named = {"all": "100GiB", "smallest": api.smallest_budget(model), "least": api.smallest_budget(model, overlap=False)}
    nbytes = named.get(budget, budget)
    start = time.perf_counter()
    try:
        fxoffload.set_memory_budget(model, nbytes)
    except fxoffload.BudgetError as error:
        return {"budget": budget, "error": str(error)}
    plan_s = time.perf_counter() - start
    for _ in range(2):
        compiled(**kwargs)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    timed, out = time_steps(lambda: compiled(**kwargs)[0], steps)
    out = out.cpu()
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
