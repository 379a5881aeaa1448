"""Measure a model of real size (random weights, bf16) through the backend, over budgets, in one process.

    python tests/bench/sweep.py flux --batch 1 --out tests/bench/results/flux-b1.json

Every row is the same compiled program under another plan (`set_memory_budget`; what is compiled meanwhile is counted). Its output
is compared bit for bit with the row in which everything is resident. Plans are made with the static cost model: `predicted_ms` is
theirs.

`bound_ms` is the windowed bound with the segment times of a resident forward (scaled to the resident step), the link of the row
and the activations of the plan; `naive_bound_ms` is max(compute, streamed bytes / link). A device under load lowers its clocks:
the resident step is measured at the start, in the middle and at the end of the sweep, and is the median of all these steps.
The link of a row (`link_gb_s`): before and behind its steps, all that its plan streams is copied from where it lies, back to
back, while nothing computes. Not all memory of a host is read equally fast, and not at all times.
`kinds` has the predicted and the measured time of each kind of segment.
The file is written anew behind every row, so that a run that is cut short leaves what it has.

Budget `smallest` is the least that is not slow, by the plan (`fxoffload.smallest_budget`), `least` the least that runs at all.

`--baseline` also measures packing and pinning alone, and, behind the sweep, compares the resident program with per-block
`torch.compile` of a second copy of the model and with a third copy whose blocks are not cut: rounds of a few steps each that
take turns, so that all see the same clocks.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import fxoffload
from fxoffload import api, timing
from fxoffload.calibrate import machine_of
from fxoffload.cost import Costs, SegmentCost
from fxoffload.hardware import driver
from fxoffload.store import HostStore
from fxoffload.timeline import windowed_bound
from fxoffload.workloads import WORKLOADS, find_workload, make_inputs, make_model, show, weight_nbytes

GIB = 2**30
DEVICE = torch.device("cuda", 0)
BUDGETS = "all,smallest,1.5GiB,2GiB,3GiB,4GiB,6GiB,8GiB,12GiB,16GiB,least"
ROUNDS = 8
ROUND_STEPS = 5
CAPTURED = 6
"""Forwards after which one is captured under a new plan."""
PACKED_NBYTES = 112 << 20
LINK_NBYTES = 4 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--budgets", default=BUDGETS)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=2, help="steps before those that are timed")
    parser.add_argument("--max-bucket-bytes", default="auto")
    parser.add_argument("--cuda-graph", action="store_true", help="replay forwards as one captured graph")
    parser.add_argument("--baseline", action="store_true", help="also packing alone, per-block torch.compile and whole blocks")
    parser.add_argument("--lock", type=Path, help="runs on one host that give the same file time steps in turn")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--costs", type=Path, help="also write the costs that plans are made from, and those measured")
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    workload = find_workload(args.workload)
    model = make_model(workload, torch.device("cpu"), onload=DEVICE)
    kwargs = make_inputs(workload, model, DEVICE, batch=args.batch)
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF")
    head: dict[str, Any] = {
        "command": (f"PYTORCH_CUDA_ALLOC_CONF={allocator} " if allocator else "") + "python " + " ".join(sys.argv),
        "machine": {
            "device": torch.cuda.get_device_name(),
            "driver": driver(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "calibrated": dataclasses.asdict(machine_of(DEVICE)),
        },
        "model": show(workload, weight_nbytes(model), args.batch),
    }
    torch.cuda.empty_cache()
    if args.baseline:
        head["setup_alone_s"] = pack_alone(model)
    sweep = Sweep(model, kwargs, args)

    def write() -> None:
        if args.out is not None:
            args.out.write_text(json.dumps(head | sweep.report(), indent=1) + "\n")

    for entry in sweep.run():
        print(json.dumps(entry), flush=True)
        write()
    if args.costs is not None:
        args.costs.write_text(json.dumps(sweep.costs_of_both()) + "\n")
    if args.baseline:
        head["per_block_compile"] = sweep.compare()
        write()
    print(json.dumps({k: v for k, v in (head | sweep.report()).items() if k != "rows"}), flush=True)


def pack_alone(model: torch.nn.Module) -> float:
    """Seconds to pack and pin all weights while nothing else runs. They are unpinned again."""
    store = HostStore(DEVICE)
    start = time.perf_counter()
    pending: list[tuple[str, torch.Tensor]] = []
    for name, parameter in model.named_parameters():
        pending.append((name, parameter))
        if sum(p.nbytes for _, p in pending) >= PACKED_NBYTES:
            store.pack(name, pending)
            pending.clear()
    if pending:
        store.pack("rest", pending)
    seconds = time.perf_counter() - start
    store.close()
    return seconds


class Sweep:
    """One model, compiled once: a row a budget, then the comparison of resident programs."""

    def __init__(self, model: torch.nn.Module, kwargs: dict[str, Any], args: argparse.Namespace) -> None:
        self.model = model
        self.kwargs = kwargs
        self.args = args
        options: dict[str, Any] = {"memory_budget": "100GiB", "max_bucket_bytes": args.max_bucket_bytes}
        if args.cuda_graph:
            options["cuda_graph"] = "strict"
            args.warmup = max(args.warmup, CAPTURED)
        self.compiled: Any = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, options=options)
        self.resident: torch.Tensor | None = None
        """The output with everything resident, which all others must equal."""
        self.counted: dict[str, int] = {}
        """What was compiled until the last row: the comparison compiles other models."""
        self.rows: list[dict[str, Any]] = []

    def call(self) -> torch.Tensor:
        return self.compiled(**self.kwargs)[0]

    def run(self) -> Iterator[dict[str, Any]]:
        start = time.perf_counter()
        self.call()
        torch.cuda.synchronize()
        self.first_call_s = time.perf_counter() - start
        (self.binding,) = api.bindings_of(self.model)
        with timing.turn(self.args.lock):
            for _ in range(3):
                self.call()
            torch.cuda.synchronize()
            self.measured = api.profile(self.model, self.call)
        self.compiled_before = compilations()
        budgets = self.args.budgets.split(",")
        middle = (len(budgets) + 1) // 2
        for budget in (*budgets[:middle], "all", *budgets[middle:], "all"):
            self.rows.append(self.row(budget))
            self.counted = {
                "graphs_compiled": torch._dynamo.utils.counters["stats"]["unique_graphs"],
                "compiled_by_new_budgets": compilations() - self.compiled_before,
            }
            yield self.rows[-1]

    def report(self) -> dict[str, Any]:
        """What is known so far."""
        program = self.binding.program
        resident = [row["steps_ms"] for row in self.rows if row["budget"] == "all"]
        rows = [dict(row) for i, row in enumerate(self.rows) if i == 0 or row["budget"] != "all"]
        rows[0] |= spread([t for times in resident for t in times])
        del rows[0]["steps_ms"]
        add_bounds(rows, self.measured)
        links = [row["link_gb_s"] for row in rows if "error" not in row]
        return {
            "link_gb_s": statistics.median(links),
            "link_min_gb_s": min(links),
            "link_max_gb_s": max(links),
            "first_call_s": self.first_call_s,
            "stages_s": dict(program.seconds),
            "setup_s": api.engine_of(self.model).store.seconds,
            "segments": len(program.blocks.segments),
            "distinct_segments": program.distinct,
            "activation_estimate_gib": max(p.cost.activation_nbytes for p in program.prices) / GIB,
            "activation_gib": self.binding.activation_nbytes / GIB,
            "predicted_ms": sum(p.cost.compute_ms for p in program.prices),
            "measured_compute_ms": sum(s.compute_ms for s in self.measured.segments),
            "kinds": kinds([p.cost for p in program.prices], self.measured.segments),
            "resident_ms": [statistics.median(times) for times in resident],
            "rows": rows,
            **self.counted,
        }

    def settle(self) -> None:
        for _ in range(self.args.warmup):
            self.call()
        timing.settle(lambda: self.binding.settled, self.call, DEVICE)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def row(self, budget: str) -> dict[str, Any]:
        """One budget: plan, warm up, time, compare. The first must be `all`."""
        smallest, least = (api.smallest_budget(self.model, overlap=overlap) for overlap in (True, False))
        start = time.perf_counter()
        try:
            fxoffload.set_memory_budget(self.model, {"all": "100GiB", "smallest": smallest, "least": least}.get(budget, budget))
        except fxoffload.BudgetError as error:
            return {"budget": budget, "error": str(error)}
        plan_s = time.perf_counter() - start
        with timing.turn(self.args.lock):
            self.call()
            before = link_gb_s(self.model)
            self.settle()
            steps, out = timing.time_steps(self.call, self.args.steps, DEVICE)
            reserved, allocated = torch.cuda.max_memory_reserved(), torch.cuda.max_memory_allocated()
            links = before, link_gb_s(self.model)
        out = out.cpu()
        if self.resident is None:
            assert bool(torch.isfinite(out).all()), "outputs that are not numbers compare nothing"
            self.resident = out
        plan, stats = fxoffload.get_plan(self.model), fxoffload.stats(self.model)
        return {
            "budget": budget,
            "budget_gib": plan.budget_nbytes / GIB,
            **spread(steps.times_ms),
            **({"steps_ms": steps.times_ms} if budget == "all" else {}),
            "host_ms": steps.host_ms,
            "weight_nbytes": plan.budget_nbytes - plan.activation_nbytes,
            "predicted_ms": plan.step_ms,
            "reserved_gib": reserved / GIB,
            "allocated_gib": allocated / GIB,
            "under_budget": reserved <= plan.budget_nbytes,
            "equal_to_resident": torch.equal(out, self.resident),
            "streamed_gib": stats.nbytes_copied / GIB,
            "resident_gib": plan.resident_nbytes / GIB,
            "arena_gib": plan.arena_nbytes / GIB,
            "loads": len(plan.loads),
            **({"captured_ms": self.binding.captures_ms} if self.args.cuda_graph else {}),
            "plan_s": plan_s,
            "link_gb_s": statistics.harmonic_mean(links),
        }

    def costs_of_both(self) -> dict[str, Any]:
        return {"planned": dataclasses.asdict(self.binding.costs), "measured": dataclasses.asdict(self.measured)}

    def compare(self) -> dict[str, Any]:
        """The resident program beside two other copies of the model, all on the device, taking turns."""
        fxoffload.set_memory_budget(self.model, "100GiB")
        ours = self.call().cpu()
        torch.cuda.empty_cache()
        calls: dict[str, Callable[[], torch.Tensor]] = {"resident": self.call}
        before = torch.cuda.memory_reserved()
        twin = self.copy()
        calls["per_block"] = lambda: twin(**self.kwargs)[0]
        compile_per_block(twin)
        theirs = calls["per_block"]().cpu()
        self.settle()
        host_ms = timing.time_steps(calls["per_block"], 2, DEVICE)[0].host_ms
        reserved_gib = (torch.cuda.max_memory_reserved() - before) / GIB
        options = {"memory_budget": "100GiB", "max_bucket_bytes": "100GiB"}
        whole: Any = torch.compile(self.copy(), backend=fxoffload.layerwise, fullgraph=True, options=options)
        calls["whole_blocks"] = lambda: whole(**self.kwargs)[0]
        for call in calls.values():
            for _ in range(4):
                call()
        rounds: list[dict[str, float]] = []
        with timing.turn(self.args.lock):
            for _ in range(ROUNDS):
                entry: dict[str, float] = {}
                for name, call in calls.items():
                    call()
                    entry[name] = timing.time_steps(call, ROUND_STEPS, DEVICE)[0].median_ms
                rounds.append(entry)
        medians = {name: statistics.median(r[name] for r in rounds) for name in calls}
        return {
            "step_ms": medians["per_block"],
            "step_min_ms": min(r["per_block"] for r in rounds),
            "step_max_ms": max(r["per_block"] for r in rounds),
            "host_ms": host_ms,
            "reserved_gib": reserved_gib,
            "resident_step_ms": medians["resident"],
            "whole_blocks_step_ms": medians["whole_blocks"],
            "resident_over_per_block": statistics.median(r["resident"] / r["per_block"] for r in rounds),
            "resident_over_whole_blocks": statistics.median(r["resident"] / r["whole_blocks"] for r in rounds),
            "relative_difference": float((ours.float() - theirs.float()).norm() / theirs.float().norm()),
            "rounds": rounds,
        }

    def copy(self) -> torch.nn.Module:
        """The same model again, on the device."""
        return make_model(find_workload(self.args.workload), DEVICE)


def kinds(planned: Sequence[SegmentCost], measured: Sequence[SegmentCost]) -> list[dict[str, Any]]:
    """Predicted beside measured times of each kind of segment: those whose prediction and program are the same."""
    found: dict[tuple[float, float], list[str]] = {}
    for plan, real in zip(planned, measured, strict=True):
        found.setdefault((plan.compute_ms, real.compute_ms), []).append(plan.name)
    return [
        {"first": names[0], "count": len(names), "predicted_ms": predicted, "measured_ms": ms}
        for (predicted, ms), names in found.items()
    ]


def link_gb_s(model: torch.nn.Module) -> float:
    """The link's rate now for what a forward streams, from where that lies on the host; for some GiB where nothing streams."""
    store = api.engine_of(model).store
    buckets = [store.buckets[load.bucket] for load in fxoffload.get_plan(model).loads]
    if not buckets:
        buckets = list(store.buckets.values())
        buckets = buckets[:: max(1, sum(b.nbytes for b in buckets) // LINK_NBYTES)]
    torch.cuda.synchronize()
    there = torch.empty(max(b.nbytes for b in buckets), dtype=torch.uint8, device=DEVICE)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for bucket in buckets:
        there[: bucket.nbytes].copy_(bucket.flat, non_blocking=True)
    end.record()
    end.synchronize()
    del there
    torch.cuda.empty_cache()
    return sum(b.nbytes for b in buckets) / start.elapsed_time(end) / 1e6


def compile_per_block(model: torch.nn.Module) -> None:
    if hasattr(model, "compile_repeated_blocks"):
        model.compile_repeated_blocks()
    else:
        for layer in model.model.layers:
            layer.compile()


def compilations() -> int:
    """How much was compiled so far: Dynamo graphs, and calls of Inductor."""
    counters = torch._dynamo.utils.counters
    return counters["stats"]["unique_graphs"] + sum(n for name, n in counters["inductor"].items() if name.startswith("fxgraph"))


def spread(times: Sequence[float]) -> dict[str, float]:
    return {"step_ms": statistics.median(times), "step_min_ms": min(times), "step_max_ms": max(times)}


def add_bounds(rows: Sequence[dict[str, Any]], costs: Costs) -> None:
    """Both bounds of every row, with its own link; the first row is the resident one."""
    resident_ms = rows[0]["step_ms"]
    scale = resident_ms / sum(s.compute_ms for s in costs.segments)
    segments = tuple(dataclasses.replace(s, compute_ms=s.compute_ms * scale) for s in costs.segments)
    costs = dataclasses.replace(costs, segments=segments)
    for entry in rows:
        if "error" in entry:
            continue
        weight_nbytes, link_bytes_per_ms = entry["weight_nbytes"], entry["link_gb_s"] * 1e6
        streamed_ms = max(sum(b.nbytes for b in costs.buckets) - weight_nbytes, 0) / link_bytes_per_ms
        entry["bound_ms"] = windowed_bound(dataclasses.replace(costs, link_bytes_per_ms=link_bytes_per_ms), weight_nbytes)
        entry["naive_bound_ms"] = max(resident_ms, streamed_ms)
        entry["ratio"] = entry["step_ms"] / entry["bound_ms"]


if __name__ == "__main__":
    main()
