"""One process's work, run here: rows with their fields, statuses with their reasons, tries for a budget, outputs compared."""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fxoffload import trial
from fxoffload.contenders import CONTENDERS, REFERENCE, Contender
from fxoffload.errors import ConfigError
from fxoffload.results import FINAL
from fxoffload.sessions import FLAGS, Scene, Session, Setting
from fxoffload.trial import Task, best, compare, run

FLOAT = torch.float32


@pytest.fixture(autouse=True)
def threads_and_grad() -> Iterator[None]:
    """What a trial sets in its own process."""
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    yield
    torch.set_num_threads(threads)
    torch.set_grad_enabled(grad)


class Shifted(Session):
    """Adds `shift` to what the model returns."""

    def apply(self, setting: Setting) -> None:
        self.shift = setting.get("shift", 0.0)
        if self.shift == "refuse":
            raise ConfigError("peers: this one cannot")
        if self.shift == "raise":
            raise RuntimeError("something\n  broke")
        if self.shift == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    def call(self) -> torch.Tensor:
        return super().call() + self.shift


class Strict(Shifted):
    equals_itself = True


class Fitted(Session):
    """Tries 1, 2 and 3, which reserve 10, 30 and 50 bytes, each faster than the one before."""

    def apply(self, setting: Setting) -> None:
        self.applied = setting[FLAGS]["n"]

    def next_try(self, setting: Setting, tried: Sequence[tuple[Setting, int | None]]) -> Setting | None:
        if FLAGS in setting:
            return None if tried else setting
        return None if len(tried) == 3 else {**setting, FLAGS: {"n": len(tried) + 1}}

    def facts(self) -> dict[str, Any]:
        return {"reserved_nbytes": 20 * self.applied - 10, "step_ms": 9.0 - self.applied}


@pytest.fixture
def task(tmp_path: Path) -> Task:
    return Task("llama-decode-tiny", REFERENCE, ({},), steps=2, warmup=1, compiler="eager", folder=str(tmp_path))


def sent(task: Task) -> list[dict[str, Any]]:
    records: list[dict[str, Any]] = []
    run(task, records.append)
    return records


def rows_of(task: Task, monkeypatch: pytest.MonkeyPatch, session: type[Session], *settings: Setting) -> list[dict[str, Any]]:
    """The rows of a contender that is registered for this test only."""
    sent(task)
    monkeypatch.setitem(CONTENDERS, "fake", Contender("fake", "a fake", session, {}))
    records = sent(dataclasses.replace(task, contender="fake", settings=settings))
    return [record for record in records if "status" in record]


def test_the_reference(task: Task) -> None:
    machine, workload, row = sent(task)
    assert machine["machine"]["device"] == "cpu"
    assert set(machine["versions"]) >= {"python", "torch", "diffusers", "cache-dit"}
    assert workload["what"].startswith("tiny model of the class LlamaForCausalLM, batch 1, ")
    assert workload["weight_nbytes"] > 0
    assert (row["contender"], row["setting"], row["status"], row["reason"]) == (REFERENCE, {}, "ok", "")
    assert (row["error"], row["equal_to_reference"], row["first"]) == (0.0, True, True)
    assert 0 < row["step_min_ms"] <= row["step_ms"] <= row["step_max_ms"]
    assert row["first_call_s"] > 0
    assert row["host_peak_nbytes"] > workload["weight_nbytes"]
    assert (row["reserved_nbytes"], row["allocated_nbytes"]) == (None, None), "nobody counts them on this device"
    assert task.reference.is_file()


@pytest.mark.parametrize("contender", ["fxoffload-compiled", "fxoffload-eager"])
def test_ours_over_budgets(task: Task, contender: str) -> None:
    sent(task)
    # What is refused leaves room for what comes next.
    budgets = ("all", "smallest", "1KiB", "60%")
    records = sent(dataclasses.replace(task, contender=contender, settings=tuple({"budget": b} for b in budgets)))
    everything, smallest, refused, percent = [record for record in records if "status" in record]
    for row in (everything, smallest, percent):
        assert (row["status"], row["equal_to_resident"]) == ("ok", True), row["reason"]
    assert everything["copied_nbytes"] == 0 < percent["copied_nbytes"] <= smallest["copied_nbytes"]
    assert [row["first"] for row in (everything, smallest)] == [True, False]
    assert refused["status"] == "refused"
    assert "raise the budget to at least" in refused["reason"]
    bounds = [record["bounds"] for record in records if "bounds" in record]
    assert len(bounds) == (contender == "fxoffload-compiled")
    for found in bounds:
        assert found["bound_ms"] == sorted(found["bound_ms"], reverse=True)
        assert math.isclose(found["bound_ms"][-1], found["resident_ms"])
        assert math.isclose(found["resident_ms"], everything["step_ms"])


def test_what_cannot_be_captured_is_no_captured_row(task: Task) -> None:
    assert CONTENDERS["fxoffload-captured"].options == {"cuda_graph": "strict"}
    settings = tuple({"budget": budget} for budget in ("all", "smallest"))
    rows = [r for r in sent(dataclasses.replace(task, contender="fxoffload-captured", settings=settings)) if "status" in r]
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("refused", "sessions: llama-decode-tiny: forwards as CUDA graphs: only CUDA captures")
    ] * 2


@pytest.mark.parametrize("contender", ["resident-compiled", "two-block-hooks-compiled", "group-block", "accelerate-sequential"])
def test_peers(task: Task, contender: str) -> None:
    sent(task)
    row = sent(dataclasses.replace(task, contender=contender))[-1]
    assert (row["status"], row["equal_to_reference"]) == ("ok", True), row["reason"]


def test_a_wrong_output(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    right, wrong = rows_of(task, monkeypatch, Shifted, {}, {"shift": 1.0})
    assert (right["status"], right["equal_to_reference"]) == ("ok", True)
    assert wrong["status"] == "wrong"
    assert wrong["reason"].startswith("the output differs from the reference by ")
    assert wrong["reason"].endswith(", 0.001 is allowed")


def test_an_output_that_is_not_bit_equal_where_it_must_be(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = rows_of(task, monkeypatch, Strict, {}, {"shift": 1e-9})
    assert (first["status"], first["equal_to_resident"]) == ("ok", True)
    assert second["error"] < 1e-3
    assert (second["status"], second["reason"]) == (
        "wrong",
        "the output is not bit-equal to that of the same program all resident",
    )


def test_what_fails_is_a_row_and_the_next_setting_goes_on(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of(task, monkeypatch, Shifted, *({"shift": s} for s in ("refuse", "raise", "memory", 0.0)))
    assert [(row["status"], row["reason"]) for row in rows] == [
        ("refused", "peers: this one cannot"),
        ("failed", "RuntimeError: something broke"),
        ("failed", "out of device memory: CUDA out of memory. Tried to allocate"),
        ("ok", ""),
    ]


def test_what_is_not_installed(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CONTENDERS, "fake", Contender("fake", "", Session, {}, needs=("torch", "no_such_package")))
    (row,) = sent(dataclasses.replace(task, contender="fake"))
    assert (row["status"], row["reason"]) == ("missing", "no_such_package is not installed")


def test_a_library_of_the_workload_that_is_not_installed(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.llama.modeling_llama", None)
    row = sent(task)[-1]
    assert (row["status"], row["reason"].split(" cannot be imported")[0]) == (
        "missing",
        "workloads: transformers.models.llama.modeling_llama",
    )
    assert row["status"] not in FINAL, "--retry measures it again"


def test_without_a_reference_outputs_are_not_compared(task: Task) -> None:
    row = sent(dataclasses.replace(task, contender="two-block-hooks"))[-1]
    assert (row["status"], row["error"], row["equal_to_reference"]) == ("ok", None, None)


def test_tries_for_a_budget_make_one_row(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    (row,) = rows_of(task, monkeypatch, Fitted, {"budget": "40B"})
    assert (row["setting"], row["flags"], row["tries"], row["reserved_nbytes"]) == ({"budget": "40B"}, {"n": 2}, 3, 30)
    (again,) = rows_of(task, monkeypatch, Fitted, {"budget": "40B", FLAGS: {"n": 2}})
    assert (again["setting"], again["flags"], "tries" in again) == ({"budget": "40B"}, {"n": 2}, False)


def test_a_try_that_fails_leaves_what_was_measured_before(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(Fitted):
        def apply(self, setting: Setting) -> None:
            super().apply(setting)
            if self.applied == 2:
                raise torch.OutOfMemoryError("no more")

    (row,) = rows_of(task, monkeypatch, Breaks, {"budget": "40B"})
    assert (row["status"], row["flags"], row["reserved_nbytes"]) == ("ok", {"n": 1}, 10)


def test_the_best_try() -> None:
    sizes_and_times = ((50, 1.0, "ok"), (10, 3.0, "ok"), (40, 4.0, "ok"), (30, 2.0, "wrong"))
    rows = [{"reserved_nbytes": nbytes, "step_ms": ms, "status": status} for nbytes, ms, status in sizes_and_times]
    assert best({"budget": "40B"}, rows) is rows[1], "the fastest right one, though others take more of the budget"
    assert best({"budget": "30B"}, rows[2:]) is rows[3]
    assert best({"budget": "5B"}, rows) is rows[1]


@pytest.mark.parametrize(
    ("output", "status"), [(1.0, None), (1.0005, None), (1.1, "wrong"), (math.nan, "wrong"), (math.inf, "wrong")]
)
def test_comparison(output: float, status: str | None) -> None:
    found = compare(torch.tensor([output]), torch.tensor([1.0]), None, FLOAT)
    assert found.get("status") == status


def test_main_is_a_group_of_its_own_with_caches_and_a_log(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[Any] = []
    monkeypatch.setattr(trial.os, "setpgid", lambda *_: did.append("setpgid"))
    monkeypatch.setattr(trial.os, "dup2", lambda *_: did.append("dup2"))
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(trial, "run", lambda task, send: send(task.row({}, status="ok", reason="")))
    rows: list[dict[str, Any]] = []
    trial.main(task, rows.append)
    assert did == ["setpgid", "dup2", "dup2"]
    assert trial.os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(task.cache)
    assert task.log.is_file()
    task.cache.mkdir(parents=True)
    trial.main(task, rows.append)
    assert [row["cache"] for row in rows] == ["cold", "warm"]


@pytest.mark.parametrize("compiled", [False, True])
def test_first_calls_are_in_turn_with_the_steps_of_others_where_nothing_is_compiled(
    task: Task, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, compiled: bool
) -> None:
    now: list[Path | None] = [None]
    calls: list[Path | None] = []

    @contextmanager
    def turn(lock: Path | None) -> Generator[None, None, None]:
        now.append(lock)
        yield
        now.pop()

    class Watched(Session):
        def __init__(self, scene: Scene) -> None:
            super().__init__(scene, compiled=compiled)

        def call(self) -> torch.Tensor:
            calls.append(now[-1])
            return super().call()

    monkeypatch.setattr(trial.timing, "turn", turn)
    lock = tmp_path / "lock"
    rows_of(dataclasses.replace(task, lock=lock), monkeypatch, Watched, {})
    assert calls[0] == (None if compiled else lock)
    assert set(calls[1:]) == {lock}
