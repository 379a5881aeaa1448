"""A task in a process of its own, with a time limit: its records as they come, and a row for every setting that got none.

On the CPU device processes are forked from one that has imported the libraries, so that a tiny workload takes seconds. For an
accelerator each starts from nothing: a driver that an import has touched does not survive a fork.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import resource_tracker
from typing import Any

from fxoffload import trial
from fxoffload.trial import Task

Record = dict[str, Any]
Target = Callable[[Task, Callable[[Record], None]], None]
Launch = Callable[[Task, float], Iterator[Record]]

_LOOK_S = 0.5
_LEAVE_S = 60.0
"""What a process may take to end when it has sent everything."""
_LAST_WORDS = 200


class Ended(Exception):
    """A process ended early. `status` and `reason` are for the rows that it still owes."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(reason)
        self.status = status
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Launcher:
    """Starts processes. `preload`: modules that forked ones have from the start."""

    preload: Sequence[str] = ()
    target: Target = trial.main

    def __call__(self, task: Task, limit_s: float) -> Generator[Record]:
        """What one process sends. Raises Ended where it does not end by itself and in time."""
        context: Any = multiprocessing.get_context("forkserver" if task.device == "cpu" else "spawn")
        if task.device == "cpu":
            context.set_forkserver_preload(["fxoffload.trial", *self.preload])
        receiving, sending = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(self.target, task, sending))
        with _without_interrupts():
            process.start()
        sending.close()
        try:
            yield from _records(process, receiving, limit_s)
        finally:
            _end(process)
            receiving.close()
        if process.exitcode != 0:
            raise Ended("died", _died(task, process.exitcode))


@contextmanager
def _without_interrupts() -> Generator[None]:
    """A process that is started here has no interrupts: the runner gets them, ends the process, and says one line about it."""
    # It would let interrupts through again when it starts.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _child(target: Target, task: Task, sending: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    target(task, sending.send)


def _end_with_parent() -> None:
    """A runner that is killed leaves nothing behind that would hold the device."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)


def _records(process: Any, receiving: Any, limit_s: float) -> Iterator[Record]:
    deadline = time.monotonic() + limit_s
    while True:
        # Looked at before the pipe, which may still hold what the process sent last.
        alive = process.is_alive()
        if receiving.poll(_LOOK_S if alive else 0):
            try:
                yield receiving.recv()
            except EOFError:
                process.join(_LEAVE_S)
                return
        elif not alive:
            return
        if time.monotonic() > deadline and process.is_alive():
            raise Ended("timeout", f"it was ended after {limit_s:.0f} s")


def _end(process: Any) -> None:
    """End the process and all that it started."""
    # Compile workers outlive the process that started them; its group is theirs.
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(process.pid) == process.pid:
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()


def _died(task: Task, exitcode: int | None) -> str:
    words = f"the process ended with exit code {exitcode}"
    if exitcode is not None and exitcode < 0:
        words = (
            f"the process was ended by signal {-exitcode}{', for want of host memory perhaps' * (exitcode == -signal.SIGKILL)}"
        )
    with suppress(OSError):
        lines = task.log.read_text(errors="replace").strip().splitlines()
        if lines:
            words += f"; its last words: {lines[-1][-_LAST_WORDS:]}"
    return words


def rows_of(task: Task, launch: Launch, limit_s: float, *, cut_short: bool = False) -> Iterable[Record]:
    """All records of a task. A setting without a row gets one that says why, unless the limit was `cut_short` by the runner."""
    left = list(task.settings)
    status, reason = "died", "the process ended without a row for it"
    try:
        for record in launch(task, limit_s):
            if "status" in record:
                left = [s for s in left if task.row(s)["setting"] != record["setting"]]
            yield record
    except Ended as ended:
        status, reason = ended.status, ended.reason
    if not (status == "timeout" and cut_short):
        yield from (task.row(setting, status=status, reason=reason) for setting in left)
