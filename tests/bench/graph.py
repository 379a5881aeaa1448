"""Measure captured forwards (`cuda_graph`) against uncaptured ones: the same compiled program, plan and kernels, in one process.

    python -m tests.bench.graph flux --out tests/bench/results/graphs/flux.json

For each budget a pair of rows. `host_ms` is the time that the host takes to issue one forward from an idle device, all that the
caller waits for included: Dynamo's guards, the look at every weight, the launch. `host_unguarded_ms` is that without the guards
(`torch.compiler.set_stance(skip_guard_eval_unsafe=True)`), which grow with the number of modules. `bound_ms` is the windowed
bound, from the segment times of a resident forward, scaled to the faster of the two resident steps. Both results are compared
bit for bit with the resident, uncaptured one. `captured_ms` are the steps of the captures that were timed when they were new
(`fxoffload.pace`), the last of which was kept. `host_costs_us` says where the host's time goes in a forward: the median of each
kind of call, and how many there are; `calls_us` what single calls of torch cost on idle streams. `copies` is from a trace of
forwards that are issued one behind the other: for which share of the time the link is busy, the time from the end of one copy
to the start of the next, and the rates of single copies, also for each quarter of a forward, and on how many streams all ran.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

import fxoffload
from fxoffload import api, timing
from fxoffload.binding import Binding
from fxoffload.capture import CaptureTransfer
from fxoffload.captured import Capture
from fxoffload.dispatch import Dispatch
from fxoffload.edits import EditWatch
from fxoffload.hardware import driver
from fxoffload.workloads import WORKLOADS, find_workload, make_inputs, make_model, show, weight_nbytes
from tests.bench.sweep import DEVICE, GIB, add_bounds, link_gb_s, spread

WARM = 3
HOST = 5
TRACED = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--budgets", default="all,smallest,4GiB,8GiB", help="the first must be `all`")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--lock", type=Path, help="runs on one host that give the same file time steps in turn")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    workload = find_workload(args.workload)
    model = make_model(workload, torch.device("cpu"), onload=DEVICE)
    kwargs = make_inputs(workload, model, DEVICE)
    report = {
        "command": "python -m tests.bench.graph " + " ".join(sys.argv[1:]),
        "machine": {
            "device": torch.cuda.get_device_name(),
            "driver": driver(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": show(workload, weight_nbytes(model), 1),
        "calls_us": call_costs(),
    }
    torch.cuda.empty_cache()
    bench = Bench(model, kwargs)
    with timing.turn(args.lock):
        report |= bench.run(args.budgets.split(","), args.steps)
    for row in report["rows"]:
        print(json.dumps(row), flush=True)
    print(json.dumps({k: v for k, v in report.items() if k != "rows"}), flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


class Bench:
    """A model, compiled once with captures; they are taken away for the rows without."""

    def __init__(self, model: torch.nn.Module, kwargs: dict[str, Any]) -> None:
        self.model = model
        options = {"memory_budget": "100GiB", "cuda_graph": True}
        compiled = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, options=options)
        self.call: Callable[[], torch.Tensor] = lambda: compiled(**kwargs)[0]
        for _ in range(2 * WARM):
            self.call()
        torch.cuda.synchronize()
        (self.binding,) = api.bindings_of(model)
        self.graphs = self.binding._graphs
        self.resident: torch.Tensor | None = None

    def run(self, budgets: list[str], steps: int) -> dict[str, Any]:
        self.capture(False)
        costs = api.profile(self.model, self.call)
        rows = [row for budget in budgets for row in self.pair(budget, steps)]
        # Last: what traces may slow what is timed later.
        for row in rows:
            if row["loads"]:
                row["copies"] = self.copies(row)
        add_bounds([min(rows[:2], key=lambda row: row["step_ms"]), *rows], costs)
        compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return {"segments": len(costs.segments), "weights": len(self.binding._packed), "graphs_compiled": compiled, "rows": rows}

    def capture(self, on: bool) -> None:
        """Captures or none, from the next call on."""
        if self.binding._graphs is not None:
            self.binding._graphs.release()
        self.binding._graphs = self.graphs if on else None
        torch.cuda.synchronize()
        torch.cuda.empty_cache()

    def settle(self) -> None:
        timing.settle(lambda: self.binding.settled, self.call, DEVICE)

    def pair(self, budget: str, steps: int) -> list[dict[str, Any]]:
        named = {"all": "100GiB", "smallest": api.smallest_budget(self.model)}
        fxoffload.set_memory_budget(self.model, named.get(budget, budget))
        return [self.row(budget, steps, on) for on in (False, True)]

    def copies(self, row: dict[str, Any]) -> dict[str, Any]:
        """How the copies of a row follow each other."""
        fxoffload.set_memory_budget(self.model, round(row["budget_gib"] * GIB))
        self.capture(row["cuda_graph"])
        for _ in range(WARM + 1):
            self.call()
        self.settle()
        return traced_copies(self.call, row["loads"])

    def row(self, budget: str, count: int, on: bool) -> dict[str, Any]:
        self.capture(on)
        # The first forward under another budget begins with the arena of the last one.
        self.call()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM):
            self.call()
        self.settle()
        before = fxoffload.stats(self.model).replays
        steps, _ = timing.time_steps(self.call, count, DEVICE)
        out = self.call().cpu()
        if self.resident is None:
            self.resident = out
        plan, stats = fxoffload.get_plan(self.model), fxoffload.stats(self.model)
        peak = torch.cuda.max_memory_reserved()
        host_ms = host_times(self.call)
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            unguarded_ms = host_times(self.call)
        link = link_gb_s(self.model)
        return {
            "budget": budget,
            "cuda_graph": on,
            **({"captured_ms": self.binding.captures_ms} if on else {}),
            "budget_gib": plan.budget_nbytes / GIB,
            **spread(steps.times_ms),
            "host_ms": statistics.median(host_ms),
            "host_min_ms": min(host_ms),
            "host_unguarded_ms": statistics.median(unguarded_ms),
            "weight_nbytes": plan.budget_nbytes - plan.activation_nbytes,
            "predicted_ms": plan.step_ms,
            "reserved_gib": peak / GIB,
            "captured_gib": api.engine_of(self.model).captured_nbytes / GIB,
            "under_budget": peak <= plan.budget_nbytes,
            "equal_to_resident": torch.equal(out, self.resident),
            "streamed_gib": stats.nbytes_copied / GIB,
            "loads": len(plan.loads),
            "link_gb_s": link,
            "wraps": sum(load.wraps for load in plan.loads),
            "replays": stats.replays - before,
            "host_costs_us": host_costs(self.model, self.call),
        }


def traced_copies(call: Callable[[], torch.Tensor], loads: int) -> dict[str, Any]:
    """Of a few forwards, one behind the other. `loads`: copies of a forward."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(TRACED):
            call()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found = [event for event in events if event.get("cat") == "gpu_memcpy" and "HtoD" in event["name"]]
    # Inputs are far smaller than weights.
    copies = sorted(found, key=lambda event: event["args"]["bytes"])[-TRACED * loads :]
    copies.sort(key=lambda event: event["ts"])
    streams = len({event["args"]["stream"] for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")})
    return {"streams": streams} | summary([(event["ts"], event["dur"], event["args"]["bytes"]) for event in copies], loads)


def summary(copies: Sequence[tuple[float, float, int]], loads: int) -> dict[str, Any]:
    """Of copies by start (microseconds), duration (microseconds) and bytes, `loads` of them a forward."""
    gaps_us = [after[0] - before[0] - before[1] for before, after in pairwise(copies)]
    rates = [nbytes / us / 1e3 for _, us, nbytes in copies]
    quarters: list[list[float]] = [[] for _ in range(4)]
    for i, rate in enumerate(rates):
        quarters[i % loads * 4 // loads].append(rate)
    tenths = statistics.quantiles(rates, n=10)
    return {
        "busy": sum(us for _, us, _ in copies) / (copies[-1][0] + copies[-1][1] - copies[0][0]),
        "gap_us": statistics.median(gaps_us),
        "gap_max_us": max(gaps_us),
        "gb_s": {"least": min(rates), "tenth": tenths[0], "median": statistics.median(rates), "most": max(rates)},
        "quarters_gb_s": [statistics.mean(quarter) for quarter in quarters],
    }


def host_times(call: Callable[[], torch.Tensor]) -> list[float]:
    """Time (ms) to issue one forward, each from an idle device: when queues are full, the host waits."""
    times: list[float] = []
    for _ in range(HOST):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    torch.cuda.synchronize()
    return times


def host_costs(model: Any, call: Callable[[], torch.Tensor]) -> dict[str, tuple[float, int]]:
    """By what the host does: median time (microseconds) of one, and how many in one forward. Nested times count twice."""
    engine = api.engine_of(model)
    binding = api.bindings_of(model)[-1]
    spans: dict[str, list[float]] = {}

    def timed(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            result = function(*args, **kwargs)
            spans.setdefault(name, []).append((time.perf_counter() - start) * 1e6)
            return result

        return run

    places: list[tuple[type, str]] = [(Dispatch, "__call__"), (Binding, "run"), (Binding, "_see_edits"), (Binding, "_stage")]
    places += [(EditWatch, "moved"), (EditWatch, "written"), (Capture, "replay"), (CaptureTransfer, "launch")]
    before = {(owner, name): getattr(owner, name) for owner, name in places}
    for (owner, name), function in before.items():
        setattr(owner, name, timed(f"{owner.__name__}.{name}", function))
    transfer: Any = engine.transfer
    names = ("prefetch", "wait", "evict", "copy") if binding.staged is not None else ()
    if not binding.captured:
        binding.release()
        for name in names:
            setattr(transfer, name, timed(f"transfer.{name}", getattr(transfer, name)))
    try:
        call()
        torch.cuda.synchronize()
        spans.clear()
        call()
        torch.cuda.synchronize()
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)
        if not binding.captured:
            for name in names:
                if name != "copy":
                    delattr(transfer, name)
            from fxoffload.transfer import copy_without_blocking

            transfer.copy = copy_without_blocking
            binding.release()
    return {name: (round(statistics.median(times), 2), len(times)) for name, times in spans.items()}


def call_costs() -> dict[str, float]:
    """Microseconds of single calls, behind nothing on their streams."""
    stream, generic = torch.cuda.Stream(), torch.Stream(DEVICE)
    cuda, event = torch.cuda.Event(), torch.Event(DEVICE)
    host = torch.empty(1024, dtype=torch.uint8).pin_memory()
    there = torch.empty(1024, dtype=torch.uint8, device=DEVICE)
    side = torch.cuda.stream(stream)

    def within_generic() -> None:
        with generic:
            pass

    def within() -> None:
        with side:
            pass

    calls: dict[str, Callable[[], object]] = {
        "record": lambda: event.record(generic),
        "wait_event": lambda: generic.wait_event(event),
        "query": event.query,
        "with stream": within_generic,
        "copy": lambda: there.copy_(host, non_blocking=True),
        "cuda record": lambda: cuda.record(stream),
        "cuda wait": lambda: cuda.wait(stream),
        "with cuda stream": within,
        "kernel": there.zero_,
        "current_stream": lambda: torch.accelerator.current_stream(DEVICE),
    }
    return {name: cost_us(call) for name, call in calls.items()}


def cost_us(call: Callable[[], object], repeats: int = 100) -> float:
    """Median time (microseconds) of a call of the host."""
    times: list[float] = []
    call()
    torch.cuda.synchronize()
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e6)
    torch.cuda.synchronize()
    return round(statistics.median(times), 2)


if __name__ == "__main__":
    main()
