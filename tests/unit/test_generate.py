"""`fxoffload generate`: every flag has its effect, every error its text. Runs of real pipelines are in `tests/e2e`."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxoffload import cli, flags, generate
from fxoffload.presets import PRESETS

pytest.importorskip("diffusers")
Image = pytest.importorskip("PIL.Image")

ON = ["--layerwise-offload"]
OFF = "add --layerwise-offload or --memory-budget SIZE"
NEGATIVE = "--negative-prompt: WanPipeline ignores it where the guidance is 1; give --guidance-scale above 1, too"


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    generate.add_arguments(made)
    return made


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line on stderr, without what every such line begins with."""
    assert cli.main(["generate", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err.removesuffix("\n").removeprefix("fxoffload: ").removeprefix("cli: ")


# -- a pipeline that takes down what it is asked for -------------------------------------------------------------------


class Pipeline:
    """A pipeline that makes videos, and has every argument that the command line knows."""

    asked: dict[str, Any]

    def __init__(self, asked: dict[str, Any]) -> None:
        self.asked = asked
        self.components = {"transformer": torch.nn.Linear(2, 2), "text_encoder": torch.nn.Linear(2, 2), "scheduler": None}

    def to(self, device: torch.device) -> None:
        self.asked["moved to"] = str(device)

    def set_progress_bar_config(self, **config: Any) -> None:
        assert config == {"disable": None}

    def progress_bar(self, total: int) -> None:
        pass

    def __call__(
        self,
        prompt: str,
        negative_prompt: str = "",
        height: int = 32,
        width: int = 32,
        num_frames: int = 9,
        num_inference_steps: int = 2,
        guidance_scale: float = 5.0,
        generator: Any = None,
        output_type: str = "np",
        callback_on_step_end: Callable[..., Any] | None = None,
    ) -> Any:
        self.asked.update({name: value for name, value in locals().items() if name not in {"self", "generator"}})
        self.asked["seed"] = generator.initial_seed()
        self.progress_bar(total=num_inference_steps)
        assert callback_on_step_end is not None
        callback_on_step_end(self, 0, 0, {})
        return SimpleNamespace(frames=[[Image.new("RGB", (width, height))] * num_frames])


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What a run of `generate` comes down to."""
    found: dict[str, Any] = {}

    class Source:
        kind = Pipeline
        preset = PRESETS["wan"]

        def load(self, dtype: str) -> Pipeline:
            found["dtype"] = dtype
            return Pipeline(found)

        def components(self, dtype: str) -> Mapping[str, torch.nn.Module]:
            return {"text_encoder": torch.nn.Linear(2, 2)}

    def find_source(name: str, model: str | None, *, tiny: bool) -> Source:
        found.update({"preset": name, "model": model, "tiny": tiny})
        return Source()

    def offload_pipeline(pipeline: Any, settings: Mapping[str, Any], own: Mapping[str, Mapping[str, Any]]) -> Any:
        found.update({"offloaded": True, "settings": dict(settings), "own": own})
        return SimpleNamespace(root_names=(), handles=())

    def choose_device(name: str) -> torch.device:
        found["device"] = name
        return torch.device("cpu")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generate, "find_source", find_source)
    monkeypatch.setattr(generate, "offload_pipeline", offload_pipeline)
    monkeypatch.setattr(generate, "forecast", lambda name, model, settings, **_: found.update(planned=settings) or name)
    monkeypatch.setattr(cli, "choose_device", choose_device)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, backend: found.update(backend=backend))
    return found


def got(asked: Mapping[str, Any], path: str) -> Any:
    value: Any = asked
    for step in path.split("/"):
        value = value.get(step, "(not there)") if isinstance(value, Mapping) else "(not there)"
    return value


# By option: what else is given, its value, where the effect shows, and what shows there.
EFFECTS: dict[str, tuple[list[str], list[str], str, Any]] = {
    "--model": ([], ["some/pipeline"], "model", "some/pipeline"),
    "--tiny": ([], [], "tiny", True),
    "--dtype": ([], ["float16"], "dtype", "float16"),
    "--compile": ([], [], "backend", "inductor"),
    "--segment-compiler": (["--compile"], ["eager"], "backend", "eager"),
    "--plan-only": (ON, [], "planned/onload_device", torch.device("cpu")),
    "--prompt": ([], ["a dog"], "prompt", "a dog"),
    "--negative-prompt": ([], ["a cat"], "negative_prompt", "a cat"),
    "--height": ([], ["48"], "height", 48),
    "--width": ([], ["64"], "width", 64),
    "--num-frames": ([], ["5"], "num_frames", 5),
    "--num-inference-steps": ([], ["7"], "num_inference_steps", 7),
    "--guidance-scale": ([], ["2.5"], "guidance_scale", 2.5),
    "--seed": ([], ["3"], "seed", 3),
    "--layerwise-offload": ([], [], "offloaded", True),
    "--memory-budget": ([], ["8GiB"], "settings/memory_budget", 8 << 30),
    "--layerwise-async-transfer": (ON, [], "settings/async_transfer", True),
    "--no-layerwise-async-transfer": (ON, [], "settings/async_transfer", False),
    "--layerwise-text-async-transfer": (ON, [], "own/text_encoder/async_transfer", True),
    "--no-layerwise-text-async-transfer": (ON, [], "own/text_encoder/async_transfer", False),
    "--layerwise-transfer-buckets": (ON, ["4"], "settings/transfer_buckets", 4),
    "--layerwise-text-transfer-buckets": (ON, ["1"], "own/text_encoder/transfer_buckets", 1),
    "--layerwise-persistent-buckets": (ON, ["0"], "settings/persistent_buckets", 0),
    "--layerwise-text-persistent-buckets": (ON, ["none"], "own/text_encoder/persistent_buckets", None),
    "--layerwise-persistent-bins": (ON, ["4"], "settings/persistent_bins", 4),
    "--layerwise-text-persistent-bins": (ON, ["2"], "own/text_encoder/persistent_bins", 2),
    "--layerwise-prefetch-limit": (ON, [], "settings/prefetch_limit", True),
    "--no-layerwise-prefetch-limit": (ON, [], "settings/prefetch_limit", False),
    "--layerwise-text-prefetch-limit": (ON, [], "own/text_encoder/prefetch_limit", True),
    "--no-layerwise-text-prefetch-limit": (ON, [], "own/text_encoder/prefetch_limit", False),
    "--layerwise-max-copy-streams": (ON, ["4"], "settings/max_copy_streams", 4),
    "--layerwise-text-max-copy-streams": (ON, ["2"], "own/text_encoder/max_copy_streams", 2),
    "--layerwise-max-inflight-prefetch-bytes": (ON, ["8gib"], "settings/max_inflight_prefetch_bytes", 8 << 30),
    "--layerwise-text-max-inflight-prefetch-bytes": (ON, ["none"], "own/text_encoder/max_inflight_prefetch_bytes", None),
    "--device": ([], ["cpu"], "device", "cpu"),
}


@pytest.mark.parametrize("option", EFFECTS)
def test_every_option_has_an_effect(option: str, asked: dict[str, Any]) -> None:
    others, value, path, expected = EFFECTS[option]
    assert cli.main(["generate", "wan", *others]) == 0
    assert got(asked, path) != expected
    asked.clear()
    assert cli.main(["generate", "wan", *others, option, *value]) == 0
    assert got(asked, path) == expected


def test_no_option_is_left_out() -> None:
    options = {option for action in parser()._actions for option in action.option_strings} - {"-h", "--help"}
    elsewhere = {"--output", "--true-cfg-scale"}
    assert options == {*EFFECTS, *elsewhere} - {"--device"}


def test_output(asked: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["generate", "wan", "--output", "videos/boat.gif"]) == 0
    with Image.open(tmp_path / "videos" / "boat.gif") as video:
        assert video.size == (32, 32)
    assert capsys.readouterr().out.endswith("\nwritten to videos/boat.gif\n")


def test_the_command_of_cache_dit(asked: dict[str, Any]) -> None:
    command = (
        "generate flux --layerwise-offload --layerwise-async-transfer --layerwise-transfer-buckets 4 "
        "--layerwise-persistent-buckets 32 --layerwise-persistent-bins 4 --layerwise-prefetch-limit "
        "--layerwise-max-inflight-prefetch-bytes 8gib --layerwise-text-transfer-buckets 1 "
        "--layerwise-text-persistent-buckets 4 --layerwise-text-persistent-bins 1 "
        "--layerwise-text-max-inflight-prefetch-bytes 2gib --compile"
    )
    assert cli.main(command.split()) == 0
    assert asked["settings"] == {
        "async_transfer": True,
        "transfer_buckets": 4,
        "persistent_buckets": 32,
        "persistent_bins": 4,
        "prefetch_limit": True,
        "max_inflight_prefetch_bytes": 8 << 30,
        "onload_device": torch.device("cpu"),
    }
    text = {"transfer_buckets": 1, "persistent_buckets": 4, "persistent_bins": 1, "max_inflight_prefetch_bytes": 2 << 30}
    assert asked["own"] == {"text_encoder": text}
    assert asked["backend"] == "layerwise"


@pytest.mark.parametrize(
    ("text", "budget"), [("auto", "auto"), ("0.5", 0.5), (".25", 0.25), ("1.0", 1.0), ("512 MiB", 512 << 20), ("1024", 1024)]
)
def test_budgets(text: str, budget: object) -> None:
    assert flags.parse_budget("--memory-budget", text) == budget


def test_without_offload_the_pipeline_moves(asked: dict[str, Any]) -> None:
    assert cli.main(["generate", "wan"]) == 0
    assert asked["moved to"] == "cpu"
    assert "offloaded" not in asked
    assert cli.main(["generate", "wan", "--memory-budget", "1GiB"]) == 0
    assert asked["offloaded"]


HELP = """\
PRESET: what to run: flux (black-forest-labs/FLUX.1-dev), flux2 (black-forest-labs/FLUX.2-dev), wan
    (Wan-AI/Wan2.2-T2V-A14B-Diffusers), qwen-image (Qwen/Qwen-Image), sd3 (stabilityai/stable-diffusion-3.5-large),
    ltx (Lightricks/LTX-Video)
--model: another hub id, or a folder in diffusers format, instead of the preset's
--tiny: a tiny pipeline of the preset's class with random weights: no download
--dtype: of the weights; left out: bfloat16, or float32 with --tiny
--compile: compile the transformers; offloaded ones stream as one graph
--segment-compiler: what --compile compiles with; left out: inductor
--plan-only: print a plan for every component; nothing runs, no weights are loaded
--prompt: left out: one that goes with the preset
--negative-prompt: what to keep away from
--height: pixels
--width: pixels
--num-frames: of a video
--num-inference-steps: how many steps denoise
--guidance-scale: how closely to follow the prompt
--true-cfg-scale: how far away from the negative prompt, where that is apart
--seed: of the noise, which is the same on every device (%(default)s)
--output: where to write the result; left out: PRESET.png or PRESET.mp4. An image may be .png, .jpg, .jpeg, .webp; a
    video .mp4, .gif
--layerwise-offload: keep weights in host memory and stream them to the device; without it the whole pipeline is moved
    to the device
--memory-budget: device memory for the whole pipeline, which its components share: a size such as 8GiB, a part of the
    device such as 0.5, or auto, what is free (the default with --layerwise-offload); asks for --layerwise-offload by
    itself
--layerwise-async-transfer --no-layerwise-async-transfer: copies overlap compute; left out: wherever the device can
--layerwise-text-async-transfer --no-layerwise-text-async-transfer: the same for text encoders
--layerwise-transfer-buckets: how many buckets may be on their way or ready; left out: the planner chooses
--layerwise-text-transfer-buckets: the same for text encoders
--layerwise-persistent-buckets: how many buckets of a component stay on the device; left out: the planner chooses
--layerwise-text-persistent-buckets: the same for text encoders
--layerwise-persistent-bins: over how many evenly spaced ranges the persistent buckets are spread
--layerwise-text-persistent-bins: the same for text encoders
--layerwise-prefetch-limit --no-layerwise-prefetch-limit: cap prefetched but unused buckets at min(4 * transfer
    buckets, 8)
--layerwise-text-prefetch-limit --no-layerwise-text-prefetch-limit: the same for text encoders
--layerwise-max-copy-streams: at most so many streams that copy; one fills the link, and no more are used
--layerwise-text-max-copy-streams: the same for text encoders
--layerwise-max-inflight-prefetch-bytes: cap on pending and ready prefetches together, such as 2GiB; left out: no cap
--layerwise-text-max-inflight-prefetch-bytes: the same for text encoders
"""


def test_help() -> None:
    shown = [f"{' '.join(a.option_strings) or a.metavar}: {a.help}" for a in parser()._actions[1:]]
    lines = [textwrap.fill(line, 118, subsequent_indent="    ", break_on_hyphens=False) for line in shown]
    assert "\n".join(lines) + "\n" == HELP


# -- errors --------------------------------------------------------------------------------------------------------------


SIZE = (
    "is not a size; give a whole number of bytes > 0, as an int or as text such as '512MiB', '4 gb', '0.5KiB' "
    "(units B, KiB, MiB, GiB, TiB or KB, MB, GB, TB, all binary)"
)


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--layerwise-transfer-buckets", "4"], f"--layerwise-transfer-buckets: no weights are offloaded; {OFF}"),
        (["--no-layerwise-text-async-transfer"], f"--layerwise-text-async-transfer: no weights are offloaded; {OFF}"),
        (["--layerwise-prefetch-limit"], f"--layerwise-prefetch-limit: no weights are offloaded; {OFF}"),
        ([*ON, "--layerwise-transfer-buckets", "0"], "--layerwise-transfer-buckets: '0' is not accepted; give an int >= 1"),
        (
            [*ON, "--layerwise-text-persistent-bins", "2.5"],
            "--layerwise-text-persistent-bins: '2.5' is not accepted; give an int >= 1",
        ),
        (
            [*ON, "--layerwise-persistent-buckets", "all"],
            "--layerwise-persistent-buckets: 'all' is not accepted; give an int >= 0",
        ),
        (
            [*ON, "--layerwise-max-inflight-prefetch-bytes", "4g"],
            f"config: --layerwise-max-inflight-prefetch-bytes: '4g' {SIZE}",
        ),
        (["--memory-budget", "much"], f"config: --memory-budget: 'much' {SIZE}"),
        (["--height", "0"], "--height: '0' is not accepted; give an int >= 1"),
        (["--height", "100"], "--height: 100 is no multiple of 16; give one, such as 96"),
        (["--num-frames", "8"], "--num-frames: 8 is no multiple of 4 and one more; give one, such as 9"),
        (["--guidance-scale", "1", "--negative-prompt", "x"], NEGATIVE),
        (["--true-cfg-scale", "4"], "--true-cfg-scale: WanPipeline has no argument 'true_cfg_scale'; leave it out"),
        (["--segment-compiler", "eager"], "--segment-compiler: nothing is compiled; add --compile"),
        (["--plan-only"], f"--plan-only: no weights are offloaded; {OFF}"),
        (["--model", "some/model"], "--model: --tiny makes a pipeline of its own; give one of the two"),
        (["--output", "boat.png"], "--output: 'boat.png' is no name for a video; give one that ends in .mp4 or .gif"),
        (["--output", "boat"], "--output: 'boat' is no name for a video; give one that ends in .mp4 or .gif"),
    ],
)
def test_errors(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused(["wan", "--tiny", *argv], capsys) == text


def test_an_output_folder_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "taken").write_text("")
    line = refused(["wan", "--tiny", "--output", f"{tmp_path}/taken/boat.gif"], capsys)
    assert line == f"--output: {tmp_path}/taken: File exists; give a file in another folder"


def test_memory_that_is_too_little(
    asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(self: Pipeline, **_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    monkeypatch.setattr(Pipeline, "to", lambda self, device: fail(self))
    what = "the device's memory is too little (CUDA out of memory)"
    assert refused(["wan"], capsys) == f"{what}; give --memory-budget SIZE, or a smaller one"


@pytest.mark.parametrize("argv", [["bogus"], ["flux", "--seed", "x"], ["flux", "--dtype", "int8"], ["flux", "--layerwise"]])
def test_usage_errors(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main(["generate", *argv])
    assert stopped.value.code == 2
