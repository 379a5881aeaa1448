"""Processes: what they send arrives, and one that hangs or dies owes rows that say so."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fxoffload.launch import Ended, Launcher, rows_of
from fxoffload.trial import Task

Send = Callable[[dict[str, Any]], None]
TASK = Task("flux-tiny", "two-block-hooks", ({"a": 1}, {"a": 2}, {"a": 3}))


def measured(task: Task, i: int) -> dict[str, Any]:
    return task.row(task.settings[i], status="ok", reason="")


def works(task: Task, send: Send) -> None:
    send({"machine": {}, "versions": {}})
    for i in range(3):
        send(measured(task, i))


def hangs(task: Task, send: Send) -> None:
    send(measured(task, 0))
    multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,)).start()
    time.sleep(60)


def dies(task: Task, send: Send) -> None:
    task.log.parent.mkdir(parents=True)
    task.log.write_text("first\nCUDA error: something\n")
    send(measured(task, 0))
    os._exit(3)


def is_interrupted(task: Task, send: Send) -> None:
    os.kill(os.getpid(), signal.SIGINT)
    works(task, send)


def is_killed(task: Task, send: Send) -> None:
    send(measured(task, 0))
    os.kill(os.getpid(), 9)


def of(target: Any, task: Task = TASK, limit_s: float = 120.0, **more: Any) -> list[dict[str, Any]]:
    return list(rows_of(task, Launcher(target=target), limit_s, **more))


@pytest.mark.slow
def test_a_process_that_works() -> None:
    first, *rows = of(works)
    assert first == {"machine": {}, "versions": {}}
    assert rows == [measured(TASK, i) for i in range(3)]


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_interrupt_of_the_terminal_is_for_the_runner_alone(device: str) -> None:
    assert len(of(is_interrupted, dataclasses.replace(TASK, device=device))) == 4
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


@pytest.mark.slow
def test_a_process_that_hangs() -> None:
    start = time.monotonic()
    first, *others = of(hangs, limit_s=8.0)
    assert time.monotonic() - start < 50, "it sleeps for longer than that"
    assert [(row["setting"], row["status"], row["reason"]) for row in others] == [
        ({"a": 2}, "timeout", "it was ended after 8 s"),
        ({"a": 3}, "timeout", "it was ended after 8 s"),
    ]
    assert first["status"] in ("ok", "timeout"), "a busy machine may take the limit to start a process"


@pytest.mark.slow
def test_a_process_that_dies(tmp_path) -> None:
    task = Task("flux-tiny", "two-block-hooks", TASK.settings, folder=str(tmp_path))
    rows = of(dies, task)
    assert [row["status"] for row in rows] == ["ok", "died", "died"]
    assert rows[1]["reason"] == "the process ended with exit code 3; its last words: CUDA error: something"
    killed = of(is_killed)[1]
    assert killed["reason"] == "the process was ended by signal 9, for want of host memory perhaps"


def ends(status: str) -> Any:
    def launch(task: Task, limit_s: float) -> Iterator[dict[str, Any]]:
        yield measured(task, 1)
        raise Ended(status, "why")

    return launch


def test_settings_without_a_row_get_one() -> None:
    rows = list(rows_of(TASK, ends("died"), 1.0))
    assert [(row["setting"]["a"], row["status"]) for row in rows] == [(2, "ok"), (1, "died"), (3, "died")]


def test_a_limit_that_the_runner_cut_short_says_nothing_about_a_contender() -> None:
    assert [row["status"] for row in rows_of(TASK, ends("timeout"), 1.0, cut_short=True)] == ["ok"]
    assert [row["status"] for row in rows_of(TASK, ends("died"), 1.0, cut_short=True)] == ["ok", "died", "died"]


def test_a_process_that_ends_without_a_word() -> None:
    rows = list(rows_of(TASK, lambda task, limit_s: iter(()), 1.0))
    assert {row["reason"] for row in rows} == {"the process ended without a row for it"}
