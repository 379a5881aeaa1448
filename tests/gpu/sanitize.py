"""Tiny offloaded models for `compute-sanitizer`: streamed under several budgets, captured, uncaptured and without a compiler.

    compute-sanitizer --tool memcheck --error-exitcode 1 python3 -m tests.gpu.sanitize
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 python3 -m tests.gpu.sanitize

memcheck knows the borders of what the driver hands out. torch's allocator cuts that into pieces, whose borders it does not see;
the second command goes without, so the arena, inputs and results each have borders of their own, and memory that is freed too
early is gone at once. Nothing can be captured there, so that way is left out. racecheck looks at shared memory within one kernel
only, and all kernels are torch's; what streams do to each other shows here as a result that is not the resident one, because
evicted bytes are poisoned and copies are late.

The machine's constants are not measured here: under a sanitizer that alone would take minutes.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

import fxoffload
from fxoffload import api
from fxoffload.calibrate import cache_path, machine_of
from fxoffload.machine import Machine
from fxoffload.transfer import StreamTransfer
from tests.checks import assert_streams, budgets, delay_copies, offload
from tests.models import Toy, rows, toy

WAYS = ("uncaptured", "captured", "hooks")
BLOCKS, WIDTH, CALLS = 6, 64, 3
SETTLED = 12
"""Calls after which the warm-up is over and what can be captured is."""
LATE = 20_000_000
"""Clock cycles, about ten milliseconds."""


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", default=",".join(WAYS), help="how the model runs: uncaptured, captured, hooks")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args(argv)
    os.environ.setdefault("FXOFFLOAD_POISON", "1")
    torch.set_grad_enabled(False)
    available = torch.device(args.device, 0) if args.device == "cuda" else torch.device(args.device)
    with tempfile.TemporaryDirectory() as folder:
        if available.type != "cpu":
            os.environ["XDG_CACHE_HOME"] = folder
            Machine.nominal().save(cache_path(available))
            machine_of(available)
        for way in args.ways.split(","):
            torch._dynamo.reset()
            why = cannot(way, available)
            print(f"{way}: " + (f"left out: {why}" if why else check(way, available)), flush=True)
    return 0


def cannot(way: str, device: torch.device) -> str:
    """Why a way cannot run here, or ''."""
    if way not in WAYS:
        raise SystemExit(f"--ways: {way!r} is none of {', '.join(WAYS)}")
    if way == "captured" and device.type != "cuda":
        return "only CUDA captures"
    if way == "captured" and os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"):
        return "without torch's allocator nothing can be captured"
    return ""


def check(way: str, device: torch.device) -> str:
    """Run one way under all its budgets; every result must be the resident one. Returns what was done, for people."""
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    model: Any = toy(BLOCKS, WIDTH).to(dtype)
    inputs = [rows(k, WIDTH, 8).to(device, dtype) for k in range(CALLS)]
    plain: Any = copy.deepcopy(model)
    changed = copy.deepcopy(plain)
    edit(changed)
    where = {"onload_device": device.type}
    if way == "hooks":
        expected, after = ([m.to(device)(x).clone() for x in inputs] for m in (plain, changed))
        handle = fxoffload.layerwise_offload(model, memory_budget="1GiB", **where)
        run: Callable[[torch.Tensor], torch.Tensor] = model
    else:
        handle = None
        expected, after = ([call(x).clone() for x in inputs] for m in (plain, changed) for call in [settled(m, inputs, **where)])
        run = settled(model, inputs, **where, **({"cuda_graph": "strict"} if way == "captured" else {}))
    for _ in range(SETTLED):
        run(inputs[0])
    chosen = small_budgets(model, way)
    for budget in chosen:
        fxoffload.set_memory_budget(model, budget)
        for _ in range(SETTLED):
            run(inputs[0])
        compare(model, run, inputs, expected)
    edit(model)
    compare(model, run, inputs, after)
    replays = fxoffload.stats(model).replays
    assert (replays > 0) == (way == "captured")
    forwards = fxoffload.stats(model).forwards
    if handle is not None:
        handle.remove()
        assert torch.equal(model.to(device)(inputs[0]), after[0])
    return f"{forwards} forwards, {replays} of them replays, under {len(chosen)} budgets: all equal to the resident model's"


def settled(model: Toy, inputs: list[torch.Tensor], **options: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    compiled = offload(model, **options)
    for _ in range(SETTLED):
        compiled(inputs[0])
    return compiled


def small_budgets(model: Toy, way: str) -> list[int]:
    if way != "hooks":
        found = budgets(model)
        return [found["smallest"], found["half"]]
    smallest = fxoffload.smallest_budget(model)
    return [smallest, smallest + sum(p.nbytes for p in model.parameters()) // 4]


def compare(
    model: Toy,
    run: Callable[[torch.Tensor], torch.Tensor],
    inputs: list[torch.Tensor],
    expected: list[torch.Tensor],
) -> None:
    """Late copies first, then late compute; all calls are issued before the first result is looked at."""
    for late in (late_copies, late_compute):
        late(model)
        got = [run(x) for x in inputs]
        assert_streams(model)
        for k, (mine, wanted) in enumerate(zip(got, expected, strict=True)):
            assert torch.equal(mine, wanted), f"call {k} is not the resident model's"


def late_copies(model: Toy) -> None:
    transfer = api.engine_of(model).transfer
    if isinstance(transfer, StreamTransfer):
        with transfer.copy_stream:
            torch.cuda._sleep(LATE)
    else:
        delay_copies(model)


def late_compute(model: Toy) -> None:
    if isinstance(api.engine_of(model).transfer, StreamTransfer):
        torch.cuda._sleep(LATE)


def edit(model: Toy) -> None:
    """Of a weight that is staged under every budget, and of one of the first and one of the last."""
    for weight in (model.inp.weight, model.blocks[3].up.weight, model.out.bias):
        weight.mul_(0.5)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
