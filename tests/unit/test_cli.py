"""The command line, and the pieces of the demo on tiny models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import calibrate, cli, demo, draw
from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.errors import OffloadError
from fxoffload.machine import Machine
from fxoffload.planner import make_plan
from fxoffload.timeline import simulate

CPU = torch.device("cpu")
PNG = b"\x89PNG"
ACCEPTED = "give the config.json of a model, its folder, or a file that Plan.save wrote"


@pytest.fixture
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def costs(segments: int = 6) -> Costs:
    """Equal segments, each with its bucket of 1 MiB: copies take twice as long as computation."""
    return Costs(
        tuple(SegmentCost(f"blocks.{i}", 1.0, 1 << 20) for i in range(segments)),
        tuple(BucketCost(f"blocks.{i}", 1 << 20, 2.0, (i,)) for i in range(segments)),
        (1 << 20) / 2.0,
    )


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is printed for an error that a user can act on."""
    assert cli.main(argv) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removesuffix("\n")


# -- commands ------------------------------------------------------------------------------------------------------


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--version"])
    assert stopped.value.code == 0
    assert capsys.readouterr().out == f"fxoffload {fxoffload.__version__}\n"


def test_what_nobody_reads_is_no_traceback() -> None:
    """As with `fxoffload bench --list | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        argv = [sys.executable, "-m", "fxoffload", "bench", "--list"]
        ran = subprocess.run(argv, stdout=writing, stderr=subprocess.PIPE, text=True, check=False)
    finally:
        os.close(writing)
    assert (ran.returncode, ran.stderr) == (141, "")


@pytest.mark.parametrize("argv", [[], ["bogus"], ["plan"], ["demo", "--device", "tpu"], ["calibrate", "--bogus"]])
def test_usage_errors(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2
    assert capsys.readouterr().err.startswith("usage: fxoffload")


def test_python_m() -> None:
    ran = subprocess.run([sys.executable, "-m", "fxoffload", "--version"], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (0, f"fxoffload {fxoffload.__version__}\n")


def test_plan_prints_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(costs(), 4 << 20)
    plan.save(tmp_path / "plan.json")
    assert cli.main(["plan", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out == f"{plan}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *((text, f"cli: PATH: this is neither the config of a model nor a saved plan; {ACCEPTED}") for text in ("", "{}", "[]")),
        ('{"format": 99}', "plan: PATH: format 99, this version reads 1; plan the model again"),
        (
            '{"format": 1}',
            r"plan: PATH: this is no saved plan \(the plan has no 'segments', .*\); give a file that Plan.save wrote",
        ),
    ],
)
def test_plan_of_another_file(text: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    line = refused(["plan", str(path)], capsys)
    assert re.fullmatch(f"fxoffload: {message.replace('PATH', str(path))}", line)


def test_a_saved_plan_that_cannot_print(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    make_plan(costs(), 4 << 20).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "arena_nbytes": None}))
    assert "no saved plan (arena_nbytes is null, not a whole number)" in refused(["plan", str(path)], capsys)


@pytest.mark.parametrize(
    ("argv", "options", "which"),
    [
        (["--budget", "1KiB"], "--budget", "it"),
        (["--out", "OUT"], "--out", "it"),
        (["--machine", "bogus", "--dtype", "float16", "--batch", "2"], "--machine, --batch, --dtype", "them"),
    ],
)
def test_options_that_say_nothing_of_a_saved_plan(
    argv: list[str], options: str, which: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    make_plan(costs(), 4 << 20).save(path)
    line = refused(["plan", str(path), *argv], capsys)
    what = f"{path} is a saved plan, which is printed as it is; leave {which} out, or give a config.json"
    assert line == f"fxoffload: cli: {options}: {what}"


def test_plan_of_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.json"
    expected = f"fxoffload: cli: {missing}: No such file or directory; {ACCEPTED}"
    assert refused(["plan", str(missing)], capsys) == expected
    line = refused(["plan", str(tmp_path)], capsys)
    assert line == f"fxoffload: cli: {tmp_path}: there is no config.json in this folder; {ACCEPTED}"


def test_calibrate_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--device", "cpu"]) == 0
    expected = f"{Machine.nominal('cpu')}\nnominal constants, the same everywhere: on the CPU device nothing is measured\n"
    assert capsys.readouterr().out == expected


def test_calibrate_measures_once_or_when_forced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "machine.json"
    measured: list[Machine] = []

    def measure(device: torch.device) -> Machine:
        measured.append(Machine.nominal(f"measured {len(measured) + 1}"))
        return measured[-1]

    monkeypatch.setattr(cli, "choose_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(calibrate, "cache_path", lambda device: path)
    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "link_gb_s", lambda device: Machine.nominal("cpu").link_gb_s)
    calibrate.machine_of.cache_clear()
    for argv, count in ((["calibrate"], 1), (["calibrate"], 1), (["calibrate", "--force"], 2)):
        assert cli.main(argv) == 0
        assert len(measured) == count
        assert capsys.readouterr().out == f"{measured[-1]}\nkept in {path}\n"
    assert Machine.load(path) == measured[-1]
    calibrate.machine_of.cache_clear()


@pytest.mark.usefixtures("no_accelerator")
@pytest.mark.parametrize("command", ["demo", "calibrate"])
def test_a_device_that_is_not_there(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused([command, "--device", "cuda"], capsys)
    expected = "'cuda' is not available, this machine has no accelerator; give --device auto"
    assert line == f"fxoffload: cli: --device: {expected}"


@pytest.mark.usefixtures("no_accelerator")
def test_auto_without_an_accelerator() -> None:
    assert cli.choose_device("auto") == CPU


def test_auto_with_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("xpu"))
    assert cli.choose_device("auto") == torch.device("xpu")
    assert cli.choose_device("cpu") == CPU
    with pytest.raises(OffloadError, match="this machine has 'xpu'"):
        cli.choose_device("cuda")


# -- demo ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("equal", "code"), [(True, 0), (False, 1)])
def test_exit_code_of_the_demo(equal: bool, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "run", lambda device, out: equal)
    assert cli.main(["demo", "--device", "cpu"]) == code


def test_a_package_that_the_demo_lacks(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(demo, "PACKAGES", ("torch", "no_such_package"))
    line = refused(["demo", "--device", "cpu"], capsys)
    assert line == "fxoffload: demo: no_such_package is not installed; run: pip install 'fxoffload[demo]'"


def test_a_file_where_the_folder_should_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "PACKAGES", ())
    (tmp_path / "out").write_text("")
    line = refused(["demo", "--device", "cpu", "--out", str(tmp_path / "out")], capsys)
    assert line == f"fxoffload: demo: {tmp_path / 'out'}: File exists; give a folder for the pictures with --out"


def test_similarities() -> None:
    embeddings = torch.tensor([[1.0, 0.0], [-0.001, 1.0]])
    assert demo.similarity_table(["one", "the other"], embeddings) == (
        "similarity     1     2\none         1.00  0.00\nthe other   0.00  1.00"
    )


class Batch(dict[str, Any]):
    def to(self, device: torch.device) -> Batch:
        return Batch({name: tensor.to(device) for name, tensor in self.items()})


def letters(sentences: list[str], **kwargs: Any) -> Batch:
    """A tokenizer: a number a letter, padded with 0."""
    longest = max(map(len, sentences))
    ids = torch.tensor([[ord(c) % 64 + 1 for c in s] + [0] * (longest - len(s)) for s in sentences])
    return Batch(input_ids=ids, attention_mask=(ids > 0).long())


def tiny_encoder() -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=65,
        hidden_size=64,
        num_hidden_layers=8,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=64,
    )
    return transformers.BertModel(config).eval().requires_grad_(False)


def test_embedding_in_a_third_of_the_weights(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_encoder()
    assert demo.embed(model, letters, ["a cat", "a dog"], device=CPU, segment_compiler="eager")
    printed = capsys.readouterr().out
    plan = fxoffload.get_plan(model)
    assert plan.budget_nbytes == demo.weight_nbytes(model) // 3
    assert 0 < fxoffload.stats(model).nbytes_copied == plan.streamed_nbytes
    assert str(plan) in printed
    assert "   as planned: yes\n   equal to the resident result, bit for bit: yes\n" in printed


def test_a_third_that_is_too_little(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_encoder()
    assert demo.embed(model, letters, ["a" * 64, "b"] * 64, device=CPU, segment_compiler="eager")
    assert (
        fxoffload.get_plan(model).budget_nbytes
        == fxoffload.smallest_budget(model, overlap=False)
        > demo.weight_nbytes(model) // 3
    )
    assert "is too little; the smallest budget is" in capsys.readouterr().out


def test_a_result_that_differs(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch, "equal", lambda a, b: False)
    assert not demo.embed(tiny_encoder(), letters, ["a cat"], device=CPU, segment_compiler="eager")
    assert "bit for bit: NO\n" in capsys.readouterr().out


def test_a_demo_that_streams_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_encoder()
    options: dict[str, Any] = {"memory_budget": "1GiB", "onload_device": "cpu", "segment_compiler": "eager"}
    torch.compile(model, backend="layerwise", options=options)(**letters(["a cat"]))
    assert not demo.report(model, [True])
    assert "   as planned: NO, 0 B were planned\n" in capsys.readouterr().out


def test_denoising_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diffusers = pytest.importorskip("diffusers")
    pytest.importorskip("matplotlib")
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    model.eval().requires_grad_(False)
    assert demo.denoise(model, device=CPU, out=tmp_path, side=4, steps=3, segment_compiler="eager")
    assert (tmp_path / "timeline.png").read_bytes().startswith(PNG)
    names = {event["name"] for event in json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]}
    plan = fxoffload.get_plan(model)
    assert {*plan.segments, *(load.name for load in plan.loads)} <= names
    assert cli.main(["plan", str(tmp_path / "plan.json")]) == 0
    assert capsys.readouterr().out.endswith(f"\n{plan}\n")
    assert draw.timeline_of(model).step_ms == pytest.approx(plan.step_ms)


# -- picture -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("segments", "budget_mib"), [(6, 3), (6, 5), (6, 64), (120, 9)], ids=["smallest", "some stay", "all stay", "many"]
)
def test_a_picture(segments: int, budget_mib: int, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plan = make_plan(costs(segments), budget_mib << 20)
    figure = draw.picture(plan, simulate(plan, costs(segments)))
    assert f"bound of {plan.bound_ms:.3g} ms" in figure.get_suptitle()
    engines, arena = figure.axes
    assert len(engines.collections) >= len(plan.loads) + segments
    assert len(arena.collections) >= len(plan.loads) + len(plan.residents)
    assert arena.get_xlim() == (0, pytest.approx(plan.step_ms))
    figure.savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(PNG)


def test_names_of_several_kinds_of_blocks_stay_apart() -> None:
    pytest.importorskip("matplotlib")
    kinds = Costs(
        tuple(SegmentCost(name, 1.0, 0) for name in ("double_blocks.0", "single_blocks.0", "head")),
        tuple(BucketCost(name, 1 << 20, 1.0, (i,)) for i, name in enumerate(("double_blocks.0", "single_blocks.0", "head"))),
        1 << 20,
    )
    plan = make_plan(kinds, 64 << 20)
    engines, _ = draw.picture(plan, simulate(plan, kinds)).axes
    assert [text.get_text() for text in engines.texts] == ["db.0", "sb.0", "head"]


def test_a_picture_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    plan = make_plan(costs(), 4 << 20)
    with pytest.raises(OffloadError) as refusal:
        draw.picture(plan, simulate(plan, costs()))
    assert str(refusal.value) == "draw: matplotlib is not installed; run: pip install 'fxoffload[demo]'"
