"""`fxoffload bench`: which processes run in which order, going on where a run was cut, and the command line."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fxoffload import bench, cli
from fxoffload.benchargs import add_arguments
from fxoffload.contenders import CONTENDERS, CORE, REFERENCE, find_contenders
from fxoffload.errors import ConfigError
from fxoffload.launch import Ended
from fxoffload.results import CPU_NOTE, Results
from fxoffload.sessions import FLAGS
from fxoffload.trial import Task
from fxoffload.workloads import WORKLOADS
from tests.unit.bench_cases import GIB, MACHINE, VERSIONS, row

CPU = torch.device("cpu")


def arguments(*argv: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(argv)


class Fake:
    """Launches nothing; every setting is measured, unless a contender is in `statuses`."""

    def __init__(self, folder: Path, **statuses: str) -> None:
        self.folder = folder
        self.statuses = {name.replace("_", "-"): status for name, status in statuses.items()}
        self.tasks: list[Task] = []
        self.limits: list[float] = []

    def __call__(self, task: Task, limit_s: float) -> Iterator[dict[str, Any]]:
        self.tasks.append(task)
        self.limits.append(limit_s)
        status = self.statuses.get(task.contender, "ok")
        if status == "timeout":
            raise Ended("timeout", "it was ended")
        yield {"machine": MACHINE, "versions": VERSIONS}
        yield {"workload": task.workload, "batch": task.batch, "what": f"{task.workload} model", "weight_nbytes": GIB}
        for setting in task.settings:
            about = task.row(setting)
            made = {**row(task.contender), **about, "status": status, "reason": ""}
            yield {**made, FLAGS: {"persistent_buckets": 5}} if "fitted" in task.contender else made
        if task.contender == REFERENCE:
            task.reference.parent.mkdir(parents=True, exist_ok=True)
            task.reference.write_bytes(b"output")

    @property
    def ran(self) -> list[tuple[int, str]]:
        return [(task.repeat, task.contender) for task in self.tasks]


def measure(folder: Path, *argv: str, fake: Fake | None = None, **more: Any) -> Fake:
    out = folder / "r.json"
    given = arguments("--out", str(out), "--work", str(folder / "work"), *argv)
    fake = fake or Fake(folder)
    bench.measure(bench.plan_run(given, CPU), Results.open(out), fake, **{"limit_s": 60.0, **more})
    return fake


FEW = ("--contenders", "resident-*,fxoffload-eager,two-block-hooks")


def test_the_reference_runs_first_and_each_repeat_starts_with_another(tmp_path: Path) -> None:
    fake = measure(tmp_path, *FEW, "--repeats", "2")
    assert fake.ran == [
        (0, "resident-eager"), (0, "resident-compiled"), (0, "fxoffload-eager"), (0, "two-block-hooks"),
        (1, "fxoffload-eager"), (1, "two-block-hooks"), (1, "resident-eager"), (1, "resident-compiled"),
    ]  # fmt: skip


def test_all_budgets_of_ours_in_one_process_after_everything_resident(tmp_path: Path) -> None:
    fake = measure(tmp_path, "--contenders", "fxoffload-compiled", "--budgets", "2GiB,4GiB")
    assert fake.ran == [(0, REFERENCE), (0, "fxoffload-compiled")]
    assert fake.tasks[1].settings == ({"budget": "all"}, {"budget": "2GiB"}, {"budget": "4GiB"})


def test_published_flags_in_one_process(tmp_path: Path) -> None:
    fake = measure(tmp_path, "--contenders", "cache-dit-published")
    assert [task.settings for task in fake.tasks[1:]] == [CONTENDERS["cache-dit-published"].settings]


def test_flags_that_the_first_repeat_found_serve_the_others(tmp_path: Path) -> None:
    measure(tmp_path, "--contenders", "cache-dit-fitted", "--budgets", "2GiB")
    fake = measure(tmp_path, "--contenders", "cache-dit-fitted", "--budgets", "2GiB", "--repeats", "2")
    (task,) = fake.tasks
    assert (task.repeat, task.settings) == (1, ({"budget": "2GiB", FLAGS: {"persistent_buckets": 5}},))
    rows = Results.open(tmp_path / "r.json").rows
    assert [r["setting"] for r in rows if "fitted" in r["contender"]] == [{"budget": "2GiB"}] * 2


def test_a_run_goes_on_where_it_was(tmp_path: Path) -> None:
    measure(tmp_path, "--contenders", "resident-eager,two-block-hooks")
    fake = measure(tmp_path, *FEW)
    assert fake.ran == [(0, "resident-compiled"), (0, "fxoffload-eager")]
    assert measure(tmp_path, *FEW).ran == []


def test_new_budgets_are_compared_with_everything_resident_in_their_own_process(tmp_path: Path) -> None:
    measure(tmp_path, *FEW, "--budgets", "2GiB")
    fake = measure(tmp_path, *FEW, "--budgets", "2GiB,4GiB")
    (task,) = fake.tasks
    assert task.settings == ({"budget": "all"}, {"budget": "4GiB"})
    rows = [r for r in Results.open(tmp_path / "r.json").rows if r["contender"] == "fxoffload-eager"]
    assert sorted(r["setting"]["budget"] for r in rows) == ["2GiB", "4GiB", "all"]


def test_a_reference_that_is_gone_is_made_again(tmp_path: Path) -> None:
    fake = measure(tmp_path, "--contenders", "two-block-hooks")
    fake.tasks[0].reference.unlink()
    assert measure(tmp_path, *FEW).ran == [(0, REFERENCE), (0, "resident-compiled"), (0, "fxoffload-eager")]


def test_what_failed_is_tried_again_only_when_asked(tmp_path: Path) -> None:
    failing = Fake(tmp_path, two_block_hooks="failed", fxoffload_eager="refused", resident_compiled="timeout")
    measure(tmp_path, *FEW, fake=failing)
    assert measure(tmp_path, *FEW).ran == []
    assert measure(tmp_path, *FEW, "--retry").ran == [(0, "resident-compiled"), (0, "two-block-hooks")]
    assert {r["status"] for r in Results.open(tmp_path / "r.json").rows} == {"ok", "refused"}


def test_a_run_that_is_to_stop_says_what_is_left(tmp_path: Path) -> None:
    fake = Fake(tmp_path)
    chosen = bench.plan_run(arguments(*FEW, "--out", str(tmp_path / "r.json"), "--work", str(tmp_path / "w")), CPU)
    results = Results.open(tmp_path / "r.json")
    assert bench.measure(chosen, results, fake, limit_s=60.0, stop_s=time.monotonic() - 1) == 4
    assert fake.tasks == []
    assert bench.measure(chosen, results, fake, limit_s=60.0, stop_s=time.monotonic() + 1000) == 0
    assert all(limit == 60.0 for limit in fake.limits)


def test_a_process_that_the_end_of_the_run_cuts_short_leaves_no_row(tmp_path: Path) -> None:
    fake = Fake(tmp_path, two_block_hooks="timeout")
    measure(tmp_path, *FEW, fake=fake, limit_s=1000.0, stop_s=time.monotonic() + 500)
    assert "two-block-hooks" not in {r["contender"] for r in Results.open(tmp_path / "r.json").rows}
    assert max(fake.limits) < 500.1


def test_several_workloads_have_a_reference_each(tmp_path: Path) -> None:
    fake = measure(tmp_path, "--workload", "flux-tiny,wan-tiny", "--contenders", "two-block-hooks")
    assert [(task.workload, task.contender) for task in fake.tasks] == [
        ("flux-tiny", REFERENCE), ("flux-tiny", "two-block-hooks"), ("wan-tiny", REFERENCE), ("wan-tiny", "two-block-hooks"),
    ]  # fmt: skip


def test_lines_while_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tmp_path, *FEW, "--budgets", "2GiB", fake=Fake(tmp_path, two_block_hooks="timeout"))
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "[1/4] flux-tiny  resident-eager: 100.0 ms a step (0 s)"
    assert lines[3] == "[3/4] flux-tiny  fxoffload-eager  2GiB: 100.0 ms a step (0 s)"
    assert lines[-1] == "[4/4] flux-tiny  two-block-hooks: timeout: it was ended (0 s)"


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (
            ["--workload", "flux"],
            "bench: flux: models of real size need an accelerator; give flux-tiny to try the harness on the CPU",
        ),
        (["--workload", "fluxx"], "workloads: 'fluxx' is not known; did you mean 'flux' or 'flux2'?"),
        (
            ["--contenders", "fxofload-*"],
            "contenders: 'fxofload-*' matches none; "
            "did you mean 'fxoffload-eager' or 'fxoffload-compiled' or 'fxoffload-captured'?",
        ),
        (["--steps", "0"], "bench: --steps: 0 is not accepted; give a whole number of at least 1"),
        (["--workload", ""], "bench: --workload: '' names none; give at least one, or leave it out"),
        (["--contenders", ","], "bench: --contenders: ',' names none; give at least one, or leave it out"),
        (["--budgets", " "], "bench: --budgets: ' ' names none; give at least one, or leave it out"),
        (["--time-limit", "0"], "bench: --time-limit: 0 is not accepted; give more than 0 seconds"),
        (
            ["--stop-after", "60"],
            "bench: --stop-after: 60 is not accepted, no process is started that has less than 60 seconds; "
            "give more, or leave it out",
        ),
        (
            ["--stop-after", "5", "--time-limit", "10"],
            "bench: --stop-after: 5 is not accepted, no process is started that has less than 10 seconds; "
            "give more, or leave it out",
        ),
    ],
)  # fmt: skip
def test_refused(argv: Sequence[str], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        bench.plan_run(arguments(*argv), CPU)
    assert str(caught.value) == text


@pytest.mark.parametrize("text", ["nope", "10xB", "0%", "-5%", "150%", "nan%", "%", "0", "-1", "0.3B"])
def test_budgets_are_refused_before_anything_runs(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = Fake(tmp_path)
    assert command(monkeypatch, fake, "--out", str(tmp_path / "r.json"), f"--budgets=2GiB,{text}") == 2
    accepted = "'all', 'smallest', 'least', a part of the weights above 0% and at most 100%, or a whole number of bytes > 0, "
    assert capsys.readouterr().err.startswith(f"fxoffload: bench: --budgets: {text!r} is not accepted; give {accepted}")
    assert fake.tasks == []


def test_budgets_that_are_accepted() -> None:
    given = ("all", "smallest", "least", "60%", "100%", "0.5%", "2GiB", "1000")
    assert bench.plan_run(arguments("--budgets", ", ".join(given)), CPU).budgets == given
    for workload in WORKLOADS.values():
        assert bench.plan_run(arguments("--budgets", ",".join(workload.budgets)), CPU).budgets == workload.budgets


def test_a_lock_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    for lock, why in ((tmp_path, "Is a directory"), (tmp_path / "file" / "lock", "Not a directory")):
        fake = Fake(tmp_path)
        assert command(monkeypatch, fake, "--out", str(tmp_path / "r.json"), "--lock", str(lock)) == 2
        line = f"fxoffload: bench: --lock: {lock}: {why}; give a file that can be made and written\n"
        assert capsys.readouterr().err == line
        assert not fake.ran


def test_a_folder_that_cannot_be_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    for folder, why in ((tmp_path / "file", "File exists"), (tmp_path / "file" / "work", "Not a directory")):
        fake = Fake(folder)
        assert command(monkeypatch, fake, "--out", str(tmp_path / "r.json")) == 2
        line = f"fxoffload: bench: --work: {folder}: {why}; give a folder that can be made and written\n"
        assert capsys.readouterr().err == line
        assert fake.tasks == []
    assert not (tmp_path / "r.json").exists()


def command(monkeypatch: pytest.MonkeyPatch, fake: Fake, *argv: str) -> int:
    """The exit code of `fxoffload bench` on the CPU, whose processes are `fake`."""
    monkeypatch.setattr(bench, "Launcher", lambda **_: fake)
    return cli.main(["bench", "--device", "cpu", "--contenders", "two-block-hooks", "--work", str(fake.folder), *argv])


def test_other_options_want_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fake = tmp_path / "r.json", Fake(tmp_path)
    assert command(monkeypatch, fake, "--out", str(out), "--steps", "2") == 0
    before = out.read_text()
    assert json.loads(before)["options"] == {"compiler": "aot_eager", "steps": 2, "warmup": 2}
    for other, words in ((("--steps", "3"), "--steps 2, here 3"), (("--compiler", "eager"), "--compiler aot_eager, here eager")):
        assert command(monkeypatch, fake, "--out", str(out), "--steps", "2", "--repeats", "2", *other) == 2
        assert f"its rows were measured with {words}; give another file with --out" in capsys.readouterr().err
    assert out.read_text() == before
    assert len(fake.tasks) == 2


def test_a_file_that_names_no_options_has_those_of_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fake = tmp_path / "r.json", Fake(tmp_path)
    assert command(monkeypatch, fake, "--out", str(out), "--steps", "2") == 0
    data = json.loads(out.read_text())
    del data["options"]
    out.write_text(json.dumps(data))
    assert command(monkeypatch, fake, "--out", str(out)) == 2
    assert "its rows were measured with --steps 2, here 6" in capsys.readouterr().err
    assert command(monkeypatch, fake, "--out", str(out), "--steps", "2", "--retry") == 0
    assert json.loads(out.read_text())["options"]["steps"] == 2


COMMITTED = sorted((Path(__file__).parents[1] / "bench" / "results" / "contenders").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_results_can_be_gone_on_with(path: Path) -> None:
    results = Results.open(path)
    device = "cpu" if results.data["machine"]["device"] == "cpu" else "cuda"
    (*_, last) = results.data["commands"]
    bench.keep_options(Task("", "", (), device=device, **bench.options_of(last, device)), results)
    assert results.data["options"]["compiler"] == ("aot_eager" if device == "cpu" else "inductor")


@pytest.mark.parametrize("name", ["mine.md", "", "file/r.json"])
def test_where_results_cannot_be_kept_nothing_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    (tmp_path / "file").write_text("")
    fake = Fake(tmp_path)
    assert command(monkeypatch, fake, "--out", str(tmp_path / name)) == 2
    assert capsys.readouterr().err.startswith("fxoffload: bench: ")
    assert fake.tasks == []
    assert [file.name for file in tmp_path.iterdir()] == ["file"]


def test_a_run_that_measures_nothing_has_a_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, fake = tmp_path / "r.json", Fake(tmp_path)
    monkeypatch.setattr(bench, "measure", lambda *_, **__: 2)
    assert command(monkeypatch, fake, "--out", str(out), "--stop-after", "61") == 0
    assert capsys.readouterr().out.endswith("\n2 processes are left; the same command goes on with them\n")


def test_an_interrupt_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    class Interrupted(Fake):
        def __call__(self, task: Task, limit_s: float) -> Iterator[dict[str, Any]]:
            yield from super().__call__(task, limit_s)
            raise KeyboardInterrupt

    out = tmp_path / "r.json"
    assert command(monkeypatch, Interrupted(tmp_path), "--out", str(out)) == 130
    assert capsys.readouterr().err == "fxoffload: interrupted; the same command goes on where this one was\n"
    fake = Fake(tmp_path)
    assert command(monkeypatch, fake, "--out", str(out)) == 0
    assert fake.ran == [(0, "two-block-hooks")]


def test_patterns() -> None:
    assert [c.name for c in find_contenders(["two-*", "fxoffload-eager"])] == [
        "fxoffload-eager", "two-block-hooks", "two-block-hooks-compiled",
    ]  # fmt: skip
    assert len(find_contenders(["*"])) == len(CONTENDERS)
    assert tuple(c.name for c in find_contenders(["core"])) == CORE


def test_defaults_on_the_cpu() -> None:
    chosen = bench.plan_run(arguments(), CPU)
    assert [w.name for w in chosen.workloads] == ["flux-tiny"]
    assert (chosen.repeats, chosen.base.compiler, len(chosen.contenders)) == (1, "aot_eager", len(CONTENDERS))


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bench", "--list"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in (*CONTENDERS, "qwen-image", "llama-decode-tiny"))


def test_render_needs_no_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    measure(tmp_path, *FEW)
    capsys.readouterr()
    assert cli.main(["bench", "--render", str(tmp_path / "r.json")]) == 0
    assert "## flux-tiny model" in capsys.readouterr().out
    assert (tmp_path / "r.md").is_file()


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "r.json"
    argv = ["bench", "--workload", "llama-decode-tiny", "--out", str(out), "--work", str(tmp_path / "work"), "--steps", "2"]
    assert cli.main([*argv, "--contenders", "fxoffload-compiled,two-block-hooks,cache-dit-sync"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(CPU_NOTE)
    assert "CPU times" not in CPU_NOTE
    assert "say nothing about a GPU" in printed
    data = json.loads(out.read_text())
    assert data["note"] == CPU_NOTE
    assert data["commands"][0].startswith("fxoffload ")
    assert data["machine"]["device"] == "cpu"
    rows = {(r["contender"], r["setting"].get("budget")): r for r in data["rows"]}
    assert [(key, r["status"]) for key, r in rows.items()] == [
        (("resident-eager", None), "ok"),
        (("fxoffload-compiled", "all"), "ok"),
        (("fxoffload-compiled", "smallest"), "ok"),
        (("fxoffload-compiled", "60%"), "ok"),
        (("cache-dit-sync", None), rows["cache-dit-sync", None]["status"]),
        (("two-block-hooks", None), "ok"),
    ]
    assert rows["fxoffload-compiled", "smallest"]["copied_nbytes"] > 0
    assert rows["two-block-hooks", None]["equal_to_reference"]
    assert sorted(file.name for file in tmp_path.glob("r*")) == [
        "r-llama-decode-tiny-b1-first-calls.png", "r-llama-decode-tiny-b1-steps.png", "r.json", "r.md",
    ]  # fmt: skip
