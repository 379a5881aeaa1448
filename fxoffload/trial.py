"""One contender on one workload in a process of its own: `main` measures every setting asked for and sends a row for each.

A row has a `status`:

    ok        measured, and its output is right
    wrong     measured, but the output is further from the reference than the dtype allows, or not bit-equal where it must be
    refused   it says itself that it cannot: a budget too small, a device that it has no support for
    missing   a package that it or the workload needs is not installed
    failed    any other exception, in its own words
    timeout   (written by the runner) the process was ended at its time limit
    died      (written by the runner) the process ended without a word, killed for memory for instance

and a `reason` unless it is `ok`. Times: `setup_s` is what comes before the first call, `first_call_s` that call, compilation and
warm-up measurements inside it included; then come forwards that nobody times, then the steps. Peaks are those of the steps;
`first_reserved_nbytes` is that of set-up and all forwards before.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxoffload import timing
from fxoffload.contenders import CONTENDERS, REFERENCE, Contender
from fxoffload.devices import available_device
from fxoffload.errors import OffloadError
from fxoffload.hardware import machine, versions
from fxoffload.sessions import FLAGS, Scene, Session, Setting
from fxoffload.sizes import parse_size
from fxoffload.workloads import MissingLibraryError, find_workload, make_inputs, make_model, show, weight_nbytes

Row = dict[str, Any]
Send = Callable[[dict[str, Any]], None]

TOLERANCE = {torch.bfloat16: 0.05, torch.float16: 0.01, torch.float32: 1e-3}
"""Most that an output may differ from the reference, as the norm of the difference over the norm of the reference.

Other kernels and fused rounding come to a hundredth in bfloat16 for models this deep; one wrong block comes to about one.
"""
_REASON = 300


@dataclass(frozen=True, slots=True)
class Task:
    """What one process does. `settings` are measured in this order."""

    workload: str
    contender: str
    settings: tuple[Setting, ...]
    batch: int = 1
    repeat: int = 0
    device: str = "cpu"
    compiler: str = "inductor"
    steps: int = 6
    warmup: int = 2
    folder: str = ""
    """Holds the reference's output, compile caches and logs."""
    lock: Path | None = None
    """A file; who gives the same one times steps in turn (`timing.turn`)."""

    @property
    def reference(self) -> Path:
        return Path(self.folder) / f"{self.workload}-b{self.batch}.pt"

    @property
    def cache(self) -> Path:
        return Path(self.folder) / "cache" / f"{self.workload}-{self.contender}"

    @property
    def log(self) -> Path:
        return Path(self.folder) / "logs" / f"{self.workload}-{self.contender}-{self.repeat}.txt"

    def row(self, setting: Setting, **fields: Any) -> Row:
        """A row. Flags that were found for a budget are no part of the setting that it is about."""
        about = {name: value for name, value in setting.items() if name != FLAGS}
        known = {"workload": self.workload, "batch": self.batch, "contender": self.contender, "setting": about}
        return {**known, "repeat": self.repeat, **fields}


def main(task: Task, send: Send) -> None:
    """Run in a new process: its output goes to the task's log, its compile caches are the task's."""
    os.setpgid(0, 0)
    task.log.parent.mkdir(parents=True, exist_ok=True)
    with task.log.open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    was_warm = task.cache.is_dir()
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(task.cache)
    os.environ["TRITON_CACHE_DIR"] = str(task.cache / "triton")
    run(task, lambda record: send({**record, "cache": "warm" if was_warm else "cold"} if "status" in record else record))


def run(task: Task, send: Send) -> None:
    """Send what this machine is, what the workload is, then a row for each setting; where known, the bound."""
    contender = CONTENDERS[task.contender]
    missing = next((name for name in contender.needs if importlib.util.find_spec(name) is None), None)
    if missing is not None:
        for setting in task.settings:
            send(task.row(setting, status="missing", reason=f"{missing} is not installed"))
        return
    device = available_device(torch.device(task.device))
    send({"machine": machine(device), "versions": versions()})
    torch.set_grad_enabled(False)
    if device.type == "cpu":
        # Threads that wait for each other on a busy machine would take most of the time.
        torch.set_num_threads(1)
    logging.getLogger("fxoffload").setLevel(logging.WARNING)
    session: Session | None = None
    for i, setting in enumerate(task.settings):
        try:
            if session is None:
                session = _session(task, contender, device, send)
            _measure_setting(task, session, setting, send, is_first=i == 0)
        except Exception as error:  # noqa: PERF203  a setting that fails is a row, and the next one goes on
            traceback.print_exc(file=sys.stderr)
            send(task.row(setting, **_failure(error)))


def _session(task: Task, contender: Contender, device: torch.device, send: Send) -> Session:
    workload = find_workload(task.workload)
    model = make_model(workload, device if contender.starts_resident else torch.device("cpu"), onload=device)
    nbytes = weight_nbytes(model)
    send({"workload": task.workload, "batch": task.batch, "what": show(workload, nbytes, task.batch), "weight_nbytes": nbytes})
    inputs = make_inputs(workload, model, device, batch=task.batch)
    return contender.session(Scene(workload, model, inputs, device, task.compiler), **contender.options)


def _measure_setting(task: Task, session: Session, setting: Setting, send: Send, *, is_first: bool) -> None:
    tried: list[tuple[Setting, Row]] = []
    while (chosen := session.next_try(setting, [(s, row["reserved_nbytes"]) for s, row in tried])) is not None:
        try:
            row = _measure(task, session, chosen)
        except Exception:
            with suppress(Exception):
                # It may have been set up, and have to make room for the next setting.
                session.undo()
            if not tried:
                raise
            # What was measured before still counts.
            traceback.print_exc(file=sys.stderr)
            break
        if not tried:
            row["first"] = is_first
            with timing.turn(task.lock):
                bounds = session.bounds(row["step_ms"]) if is_first else None
            if bounds is not None:
                send({"workload": task.workload, "batch": task.batch, "bounds": bounds})
        tried.append((chosen, row))
        session.undo()
    row = best(setting, [row for _, row in tried])
    send({**row, **({"tries": len(tried)} if len(tried) > 1 else {})})


def best(setting: Setting, rows: list[Row]) -> Row:
    """Of several tries for one budget: the fastest within it, a right one if there is; where all are over it, the smallest."""
    if len(rows) == 1:
        return rows[0]
    budget_nbytes = parse_size(setting["budget"], what="--budgets")
    within = [row for row in rows if row["reserved_nbytes"] <= budget_nbytes]
    if within:
        return min(within, key=lambda row: (row["status"] != "ok", row["step_ms"]))
    return min(rows, key=lambda row: row["reserved_nbytes"])


def _measure(task: Task, session: Session, setting: Setting) -> Row:
    device = session.scene.device
    timing.reset_host_peak()
    timing.reset_peaks(device)
    start = time.perf_counter()
    _, setup_s = timing.timed(lambda: session.apply(setting), device)
    # To compile takes too long for others to wait.
    with timing.turn(None if session.compiled else task.lock):
        _, first_call_s = timing.timed(session.call, device)
    with timing.turn(task.lock):
        for _ in range(task.warmup + session.warmups):
            session.call()
        timing.settle(session.settled, session.call, device)
        before = timing.peaks(device)
        timing.reset_peaks(device)
        # The allocator takes what it needs anew, which is no part of a step.
        session.call()
        steps, output = timing.time_steps(session.call, task.steps, device)
        peaks = timing.peaks(device)
    row = task.row(
        setting,
        status="ok",
        reason="",
        setup_s=setup_s,
        first_call_s=first_call_s,
        step_ms=steps.median_ms,
        step_min_ms=min(steps.times_ms),
        step_max_ms=max(steps.times_ms),
        host_ms=steps.host_ms,
        first_reserved_nbytes=before.reserved_nbytes,
        reserved_nbytes=peaks.reserved_nbytes,
        allocated_nbytes=peaks.allocated_nbytes,
        host_peak_nbytes=peaks.host_nbytes,
        pinned_nbytes=peaks.pinned_nbytes,
        **({FLAGS: setting[FLAGS]} if FLAGS in setting else {}),
    )
    return {**row, **session.facts(), **_check(task, session, output.float().cpu()), "seconds": time.perf_counter() - start}


def _check(task: Task, session: Session, output: torch.Tensor) -> Row:
    """Fields that say whether the output is right."""
    if task.contender == REFERENCE and not task.reference.is_file():
        task.reference.parent.mkdir(parents=True, exist_ok=True)
        torch.save(output, task.reference)
    reference = torch.load(task.reference) if task.reference.is_file() else None
    if session.first_output is None:
        session.first_output = output
    return compare(output, reference, session.first_output if session.equals_itself else None, session.scene.workload.dtype)


def compare(output: torch.Tensor, reference: torch.Tensor | None, own: torch.Tensor | None, dtype: torch.dtype) -> Row:
    """`error` and `equal_to_reference`, and `equal_to_resident` where the output must equal `own`; a status if it is wrong."""
    found: Row = {"error": None, "equal_to_reference": None}
    wrong: list[str] = []
    if not bool(output.isfinite().all()):
        wrong.append("the output has values that are not finite")
    if reference is not None:
        found["equal_to_reference"] = torch.equal(output, reference)
        found["error"] = float((output - reference).norm() / reference.norm())
        if not found["error"] <= TOLERANCE[dtype]:
            wrong.append(f"the output differs from the reference by {found['error']:.2g}, {TOLERANCE[dtype]} is allowed")
    if own is not None:
        found["equal_to_resident"] = torch.equal(output, own)
        if not found["equal_to_resident"]:
            wrong.append("the output is not bit-equal to that of the same program all resident")
    return {**found, **({"status": "wrong", "reason": "; ".join(wrong)} if wrong else {})}


def _failure(error: Exception) -> Mapping[str, Any]:
    words = " ".join(str(error).split())[:_REASON]
    if isinstance(error, MissingLibraryError):
        return {"status": "missing", "reason": words}
    if isinstance(error, OffloadError):
        return {"status": "refused", "reason": words}
    if isinstance(error, torch.OutOfMemoryError):
        return {"status": "failed", "reason": f"out of device memory: {words}"}
    return {"status": "failed", "reason": f"{type(error).__name__}: {words}"}
