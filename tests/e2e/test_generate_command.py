"""`fxoffload generate` on tiny pipelines, from prompt to file: the same with and without offload, eager and compiled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from fxoffload import cli, generate, media
from fxoffload.presets import PRESETS, makes_of
from fxoffload.tiny import TINY, tiny_pipeline

diffusers = pytest.importorskip("diffusers")
np = pytest.importorskip("numpy")
Image = pytest.importorskip("PIL.Image")

COMPILED = ["--compile", "--segment-compiler", "eager"]
STREAMING = {"flux": "400KiB", "flux2": "300KiB", "wan": "130KiB", "qwen-image": "750KiB", "sd3": "400KiB", "ltx": "250KiB"}
"""By preset: a budget in which its transformer does not fit, and each of its pieces does."""
STREAMING_COMPILED = {"flux": "1200KiB", "wan": "360KiB"}

Handles = dict[str, Any]


def run(preset: str, path: Path, *argv: str) -> None:
    """Generate with a tiny pipeline on the CPU as the device."""
    assert cli.main(["generate", "--tiny", preset, "--device", "cpu", "--output", str(path), *argv]) == 0


def frames(path: Path) -> Any:
    """Pixels of an image or of a video, as `[frame, row, column, color]`."""
    with Image.open(path) as file:
        found = []
        for k in range(getattr(file, "n_frames", 1)):
            file.seek(k)
            found.append(np.asarray(file.convert("RGB")))
    return np.stack(found)


def file_for(preset: str, folder: Path) -> Path:
    return folder / ("x.png" if makes_of(getattr(diffusers, PRESETS[preset].pipeline)) == "image" else "x.gif")


@pytest.fixture(scope="module")
def resident(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """What is generated with all weights on the device: a function of the preset and of more arguments."""

    @cache
    def generated(preset: str, *argv: str) -> Any:
        path = file_for(preset, tmp_path_factory.mktemp("resident"))
        run(preset, path, *argv)
        return frames(path)

    return generated


@pytest.fixture
def handles(monkeypatch: pytest.MonkeyPatch) -> Handles:
    """Handles of the components that were offloaded in a run, by name."""
    found: Handles = {}
    summary: Callable[..., str] = generate.summary

    def look(times: Any, components: Any, offloaded: Mapping[str, Any], **others: Any) -> str:
        found.update(offloaded)
        return summary(times, components, offloaded, **others)

    monkeypatch.setattr(generate, "summary", look)
    return found


def assert_streams(handles: Handles) -> None:
    """Every denoiser copied what its plan says in its last forward, and that was not nothing."""
    denoisers = [handle for name, handle in handles.items() if name.startswith("transformer")]
    assert denoisers
    for handle in denoisers:
        assert 0 < handle.stats().nbytes_copied == handle.plan.streamed_nbytes


@pytest.mark.parametrize("preset", TINY)
def test_offloaded(
    preset: str, resident: Callable[..., Any], handles: Handles, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = file_for(preset, tmp_path)
    expected = resident(preset)
    capsys.readouterr()
    run(preset, path, "--memory-budget", STREAMING[preset])
    assert np.array_equal(frames(path), expected)
    assert_streams(handles)
    assert set(handles) == {n for n, c in tiny_pipeline(preset).components.items() if isinstance(c, torch.nn.Module)}
    times, memory, _, head, *rows, _, written = capsys.readouterr().out.splitlines()
    number = r"[\d.e+-]+"
    stages = [
        f"load {number} s",
        f"prompt {number} s",
        f"first step {number} s",
        rf"step {number} s \(x3\)",
        f"decode {number} s",
    ]
    assert re.fullmatch(f"time    {'  '.join(stages)}  total {number} s", times)
    assert re.fullmatch(rf"memory  host {number} .iB  budget {number} .iB  \(peaks\)", memory)
    assert head.split() == ["component", "class", "weights", "resident", "streamed", "a", "forward", "forwards"]
    assert [row.split()[0] for row in rows] == list(handles)
    assert written == f"written to {path}"


@pytest.mark.parametrize("preset", STREAMING_COMPILED)
def test_compiled(preset: str, resident: Callable[..., Any], handles: Handles, tmp_path: Path) -> None:
    path = file_for(preset, tmp_path)
    run(preset, path, "--memory-budget", STREAMING_COMPILED[preset], *COMPILED)
    assert np.array_equal(frames(path), resident(preset))
    assert_streams(handles)


def test_compiled_resident(resident: Callable[..., Any], tmp_path: Path) -> None:
    run("flux", tmp_path / "x.png", *COMPILED)
    assert np.array_equal(frames(tmp_path / "x.png"), resident("flux"))


def test_settings_of_text_encoders(resident: Callable[..., Any], handles: Handles, tmp_path: Path) -> None:
    argv = [
        "--layerwise-persistent-buckets",
        "2",
        "--layerwise-text-persistent-buckets",
        "1",
        "--no-layerwise-text-async-transfer",
    ]
    run("flux", tmp_path / "x.png", "--layerwise-offload", *argv)
    assert np.array_equal(frames(tmp_path / "x.png"), resident("flux"))
    found = {name: (handle.config.persistent_buckets, handle.config.async_transfer) for name, handle in handles.items()}
    text = (1, False)
    assert found == {"vae": (2, True), "text_encoder": text, "text_encoder_2": text, "transformer": (2, True)}


def test_what_is_asked_for_shows(resident: Callable[..., Any]) -> None:
    first = resident("flux")
    for argv in (["--prompt", "a dog"], ["--seed", "1"], ["--num-inference-steps", "3"], ["--guidance-scale", "9"]):
        assert not np.array_equal(resident("flux", *argv), first), argv
    assert resident("flux", "--height", "48", "--width", "32").shape == (1, 48, 32, 3)
    assert resident("wan", "--num-frames", "9").shape == (9, 64, 64, 3)
    assert not np.array_equal(resident("flux", "--negative-prompt", "a dog", "--true-cfg-scale", "4"), first)


@pytest.mark.parametrize("preset", ["flux", "wan"])
def test_a_local_folder(preset: str, resident: Callable[..., Any], tmp_path: Path, handles: Handles) -> None:
    tiny_pipeline(preset).save_pretrained(tmp_path / "model")
    path = file_for(preset, tmp_path)
    sizes = [word for name, n in PRESETS[preset].tiny.items() for word in (f"--{name.replace('_', '-')}", str(n))]
    argv = ["--model", str(tmp_path / "model"), "--dtype", "float32", "--memory-budget", STREAMING[preset], *sizes]
    assert cli.main(["generate", preset, *argv, "--device", "cpu", "--output", str(path)]) == 0
    assert np.array_equal(frames(path), resident(preset))
    assert_streams(handles)


def test_a_folder_in_bfloat16(tmp_path: Path) -> None:
    """All but what loses too much in it; planned as it is loaded."""
    tiny_pipeline("wan").save_pretrained(tmp_path)
    source = generate.find_source("wan", str(tmp_path), tiny=False)
    loaded, planned = source.load("bfloat16").components, source.components("bfloat16")
    assert {name for name, module in loaded.items() if isinstance(module, torch.nn.Module)} == set(planned)
    for name, module in planned.items():
        assert isinstance(module, torch.nn.Module)
        dtypes = {key: parameter.dtype for key, parameter in module.named_parameters() if parameter.is_meta}
        assert dtypes == {key: parameter.dtype for key, parameter in loaded[name].named_parameters()}
        most = torch.float32 if name == "vae" else torch.bfloat16
        assert most in dtypes.values()


@pytest.mark.parametrize("argv", [[], COMPILED])
def test_plans(argv: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a folder without weights, and of a tiny pipeline: the same."""
    tiny_pipeline("flux").save_pretrained(tmp_path)
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    argv = ["--memory-budget", "1200KiB", "--plan-only", "--device", "cpu", "--height", "64", "--width", "64", *argv]
    capsys.readouterr()
    assert cli.main(["generate", "--tiny", "flux", *argv]) == 0
    tiny = capsys.readouterr().out
    assert cli.main(["generate", "flux", "--model", str(tmp_path), "--dtype", "float32", *argv]) == 0
    folder = capsys.readouterr().out
    heads = [text.split("  ")[0] for text in folder.split("\n\n") if text.strip()]
    assert sorted(heads) == ["text_encoder", "text_encoder_2", "transformer", "vae"]
    assert sorted(folder.split("\n\n")) == sorted(tiny.split("\n\n"))
    assert folder.count("\nplan  budget 1.17 MiB") == 4
    assert folder.count("not compiled") == (3 if "--compile" in argv else 4)


def test_a_component_that_is_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny_pipeline("flux").save_pretrained(tmp_path)
    (tmp_path / "vae" / "config.json").write_text('{"_class_name": "NewVAE"}')
    capsys.readouterr()
    argv = ["--memory-budget", "1200KiB", "--plan-only", "--device", "cpu", "--dtype", "float32"]
    assert cli.main(["generate", "flux", "--model", str(tmp_path), *argv]) == 0
    printed = capsys.readouterr().out
    what = f"cli: {tmp_path}/vae/config.json: diffusers {diffusers.__version__} has no class 'NewVAE'; "
    assert f"vae  no plan: {what}" in printed
    assert printed.count("\nplan  budget") == 3


@pytest.mark.parametrize("argv", [["--plan-only"], []])
def test_a_budget_that_is_too_small(argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ["--memory-budget", "1KiB", "--device", "cpu", "--output", str(tmp_path / "x.png"), *argv]
    assert cli.main(["generate", "--tiny", "flux", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    error = printed.err.splitlines()[-1]
    assert re.fullmatch(r"fxoffload: \w+: \w+: budget 1\.00 KiB: .* raise the budget to at least [\d.]+\wiB", error)


def test_a_video_where_nothing_encodes(
    resident: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(media, "_ENCODER", ("no_such_encoder",))
    monkeypatch.chdir(tmp_path)
    assert cli.main(["generate", "--tiny", "wan", "--device", "cpu"]) == 0
    assert np.array_equal(frames(tmp_path / "wan.gif"), resident("wan"))
    assert "\nwritten to wan.gif: a GIF, because nothing here encodes MP4" in capsys.readouterr().out
