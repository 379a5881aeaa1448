"""Many forwards of a streamed model: what the device, the host and Python hold after 10, 100 and 1000 of them.

Ways: `uncaptured` and `captured` are the compiled program without and with `cuda_graph`, `hooks` is `layerwise_offload` without a
compiler. Every forward gets inputs of its own, and at each mark its result is compared bit for bit with the resident one.

A row is a mark. `allocated` and `reserved` are the device's at that moment, `reserved_peak` is the most since the marks began;
`anon` is the host's resident memory without mapped files, pinned weights in it. `tensors`, `events` and `objects` are what
Python's garbage collector knows after a collection (tensors of Python, events of devices and threads, everything). `flat` says
for each way how much every number grew from the first mark to the last.

The default workload is FLUX.1-dev's with fewer blocks and pixels, so that a thousand forwards take less than a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import torch

import fxoffload
from fxoffload import timing
from fxoffload.devices import available_device
from fxoffload.profile import synchronize
from fxoffload.workloads import Workload, find_workload, make_inputs, make_model, show, weight_nbytes
from tests.bench.rowfile import EVERYTHING, MIB, Row, RowFile, budget_for, host_nbytes, pinned_nbytes

WAYS = ("uncaptured", "captured", "hooks")
FEWER: dict[str, dict[str, Any]] = {
    "flux": {
        "what": "FLUX.1-dev with 2 double and 4 single blocks, 512x512",
        "config": {"guidance_embeds": True, "num_layers": 2, "num_single_layers": 4},
        "sizes": {"height": 512, "width": 512},
    }
}
SETTLED = 12
"""Forwards after which the warm-up is over."""
EXACT = ("allocated_nbytes", "reserved_nbytes", "reserved_peak_nbytes", "pinned_nbytes", "tensors", "events", "threads")
"""What may not grow at all."""
ANON_NBYTES = 16 * MIB
"""What the host's memory may grow by: its allocator keeps what it had, in pieces."""


class WatchedEvent(torch.Event):
    """An event that Python's garbage collector knows."""


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ways", default="uncaptured,captured", help=f"of {', '.join(WAYS)}")
    parser.add_argument("--marks", default="10,100,1000")
    parser.add_argument("--budget", default="half", help="a size, or half: activations and half of the weights")
    parser.add_argument("--compiler", default="inductor", help="what compiles segments")


def run(args: argparse.Namespace, command: str) -> RowFile:
    workload, device = find_workload(args.workload), available_device(torch.device(args.device))
    workload = dataclasses.replace(workload, **FEWER.get(workload.name, {}))
    rows = RowFile(args.out, command, device, model="", compiler=args.compiler, flat={})
    for way in args.ways.split(","):
        if way not in WAYS or (way == "captured" and device.type != "cuda"):
            rows.add({"way": way, "error": "only CUDA captures" if way == "captured" else f"not one of {', '.join(WAYS)}"})
            continue
        plain_event, torch.Event = torch.Event, WatchedEvent
        try:
            measure(rows, way, workload, args)
        finally:
            torch.Event = plain_event
        torch._dynamo.reset()
        gc.collect()
        if device.type != "cpu":
            torch.accelerator.empty_cache()
    return rows


def measure(rows: RowFile, way: str, workload: Workload, args: argparse.Namespace) -> None:
    """Rows of one way, on a model of its own."""
    device = available_device(torch.device(args.device))
    # Libraries keep workspaces that the ways before this one made them take.
    others_nbytes = held(device)["reserved_nbytes"] or 0
    model: Any = make_model(workload, torch.device("cpu"), onload=device)
    rows.data["model"] = show(workload, weight_nbytes(model), 1)
    inputs = make_inputs(workload, model, device)
    call = caller(way, model, inputs, args.compiler, device)
    expected = [call().clone() for _ in range(SETTLED)][-1].cpu()
    fxoffload.set_memory_budget(model, budget_for(model, args.budget))
    for _ in range(SETTLED):
        call()
    timing.reset_peaks(device)
    call()
    synchronize(device)
    before, replays, done, seconds = len(rows.rows), fxoffload.stats(model).replays, 0, 0.0
    for mark in map(int, args.marks.split(",")):
        start = time.perf_counter()
        output = call()
        for _ in range(mark - done - 1):
            output = call()
        synchronize(device)
        seconds += time.perf_counter() - start
        done = mark
        equal = torch.equal(output.cpu(), expected)
        del output
        rows.add({"way": way, "forwards": mark, "seconds": seconds, "equal_to_resident": equal, **held(device)})
    plan, stats = fxoffload.get_plan(model), fxoffload.stats(model)
    first, last = rows.rows[before], rows.rows[-1]
    grew = {name: last[name] - first[name] for name in (*EXACT, "anon_nbytes", "objects")}
    rows.data["flat"][way] = {
        "flat": all(grew[name] <= 0 for name in EXACT) and grew["anon_nbytes"] <= ANON_NBYTES,
        "grew": grew,
        "step_ms": (last["seconds"] - first["seconds"]) / max(last["forwards"] - first["forwards"], 1) * 1e3,
        "budget_nbytes": plan.budget_nbytes,
        "streamed_nbytes": stats.nbytes_copied,
        "replays": stats.replays - replays,
        "under_budget": last["reserved_peak_nbytes"] - others_nbytes <= plan.budget_nbytes,
    }
    print(json.dumps({way: rows.data["flat"][way]}), flush=True)
    rows.write()


def caller(way: str, model: Any, inputs: dict[str, Any], compiler: str, device: torch.device) -> Callable[[], torch.Tensor]:
    """One forward, with tensors that no other forward had."""
    run = model
    if way == "hooks":
        fxoffload.layerwise_offload(model, onload_device=device, memory_budget=EVERYTHING)
    else:
        options: dict[str, Any] = {"onload_device": device, "memory_budget": EVERYTHING, "segment_compiler": compiler}
        options |= {"cuda_graph": "strict"} if way == "captured" else {}
        run = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, dynamic=False, options=options)

    def call() -> torch.Tensor:
        return run(**{name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in inputs.items()})[0]

    return call


def held(device: torch.device) -> Row:
    """What the device, the host and Python hold now."""
    gc.collect()
    objects = gc.get_objects()
    kinds = [type(o) for o in objects]
    on_device = {"allocated_nbytes": 0, "reserved_nbytes": 0, "reserved_peak_nbytes": 0}
    if device.type != "cpu":
        on_device = {
            "allocated_nbytes": torch.accelerator.memory_allocated(device),
            "reserved_nbytes": torch.accelerator.memory_reserved(device),
            "reserved_peak_nbytes": torch.accelerator.max_memory_reserved(device),
        }
    return {
        **on_device,
        "anon_nbytes": host_nbytes().get("anon", 0),
        "pinned_nbytes": pinned_nbytes(),
        "tensors": sum(issubclass(kind, torch.Tensor) for kind in kinds),
        "events": sum(issubclass(kind, (torch.Event, torch.cuda.Event, threading.Event)) for kind in kinds),
        "objects": len(objects),
        "threads": threading.active_count(),
    }
