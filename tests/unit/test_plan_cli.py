"""`fxoffload plan` on the config files of models: no weights, no accelerator."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import cli, metamodel, plancmd, shapes
from fxoffload.errors import ConfigError
from fxoffload.machine import Machine
from fxoffload.plan import Plan
from tests.models import CASES

SMALL = ["--height", "64", "--width", "64", "--tokens", "8"]
ACCEPTED = "give the config.json of a model, its folder, or a file that Plan.save wrote"


@pytest.fixture(autouse=True)
def no_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: None)


def config_of(case: str) -> dict[str, Any]:
    """What `save_pretrained` writes into config.json."""
    model: Any = CASES[case].build()
    if hasattr(model.config, "to_dict"):
        return {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return {"_class_name": type(model).__name__, "_diffusers_version": "0.0", **model.config}


def write(folder: Path, data: Any, name: str = "config.json") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data))
    return path


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert cli.main(["plan", *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()[-1].removeprefix("fxoffload: ")


@pytest.mark.parametrize(
    ("case", "sizes"), [("flux", SMALL), ("t5", ["--tokens", "8"]), ("llama", ["--tokens", "8", "--batch", "2"])]
)
def test_plan_of_a_config(case: str, sizes: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, config_of(case))
    assert cli.main(["plan", str(tmp_path), "--dtype", "float32", "--budget", "1MiB", *sizes]) == 0
    model = CASES[case].build()
    numbers = {name.removeprefix("--"): int(value) for name, value in zip(sizes[::2], sizes[1::2], strict=True)}
    inputs = shapes.example_inputs(model, device="cpu", **numbers)
    expected = fxoffload.explain(model, inputs, machine=Machine.nominal(), memory_budget="1MiB")
    assert capsys.readouterr().out == f"{expected}\n"


def test_without_a_budget_copies_overlap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, config_of("llama"))
    assert cli.main(["plan", str(path), "--tokens", "8"]) == 0
    assert "\nsmallest with overlap, this plan" in capsys.readouterr().out


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, out = write(tmp_path, config_of("llama")), tmp_path / "out"
    assert cli.main(["plan", str(path), "--tokens", "8", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(f"\nwritten to {out}: plan.json, timeline.json, timeline.png, curve.png\n")
    assert sorted(p.name for p in out.iterdir()) == ["curve.png", "plan.json", "timeline.json", "timeline.png"]
    assert cli.main(["plan", str(out / "plan.json")]) == 0
    assert capsys.readouterr().out == f"{Plan.load(out / 'plan.json')}\n"
    (tmp_path / "taken").write_text("")
    assert cli.main(["plan", str(path), "--tokens", "8", "--out", str(tmp_path / "taken")]) == 2
    assert capsys.readouterr().err == f"fxoffload: cli: {tmp_path / 'taken'}: File exists; give a folder with --out\n"


# -- machines ------------------------------------------------------------------------------------------------------


def test_a_machine_by_its_constants(tmp_path: Path) -> None:
    machine = plancmd.parse_machine("link_gb_s=55.5,bfloat16=650")
    assert machine.name == "link_gb_s=55.5,bfloat16=650"
    assert (machine.link_gb_s, dict(machine.tflop_s)["bfloat16"]) == (55.5, 650.0)
    assert machine.memory_gb_s == Machine.nominal().memory_gb_s
    assert dict(plancmd.parse_machine("bfloat16_attention=400").tflop_s) == {
        **dict(Machine.nominal().tflop_s),
        "bfloat16_attention": 400.0,
    }
    machine.save(tmp_path / "machine.json")
    assert plancmd.parse_machine(str(tmp_path / "machine.json")) == machine
    assert plancmd.parse_machine("nominal") == Machine.nominal()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "link=5",
            r"cli: --machine: 'link=5' is not accepted; give NAME=VALUE with a number > 0, NAME one of link_gb_s, .*, float32",
        ),
        ("link_gb_s=fast", r"cli: --machine: 'link_gb_s=fast' is not accepted; .*"),
        ("link_gb_s=-1", r"cli: --machine: 'link_gb_s=-1' is not accepted; .*"),
        ("link_gb_s=nan", r"cli: --machine: 'link_gb_s=nan' is not accepted; .*"),
        ("link_gb_s=inf", r"machine: link_gb_s=inf: link_gb_s: inf is not accepted; give a number from 1e-06 to 1e\+09"),
        ("link_gb_s=1e305", r"machine: link_gb_s=1e305: link_gb_s: 1e\+305 is not accepted; .*"),
        ("launch_ms=inf", r"machine: launch_ms=inf: launch_ms: inf is not accepted; give a number from 0 to 1e\+09"),
        ("bfloat16=inf", r"machine: bfloat16=inf: bfloat16: inf is not accepted; .*"),
        ("name=1", r"cli: --machine: 'name=1' is not accepted; .*"),
        ("nowhere", r"cli: --machine: nowhere: No such file or directory; give a file, 'nominal', or NAME=VALUE,..."),
    ],
)
def test_what_is_no_machine(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        plancmd.parse_machine(text)
    assert re.fullmatch(message, str(refusal.value))


@pytest.mark.parametrize(
    "change", [None, {"link_gb_s": 0}, {"link_gb_s": "x"}, {"tflop_s": []}, {"tflop_s": [["bfloat16", None]]}]
)
def test_a_file_that_is_no_machine(change: dict[str, Any] | None, tmp_path: Path) -> None:
    data = {"link_gb_s": 3} if change is None else {**dataclasses.asdict(Machine.nominal()), **change}
    path = write(tmp_path, data, "machine.json")
    with pytest.raises(ConfigError, match=r"this is no saved machine \(.*\); give what Machine.save wrote"):
        plancmd.parse_machine(str(path))


# -- models --------------------------------------------------------------------------------------------------------


def test_weights_have_the_type_of_the_config(tmp_path: Path) -> None:
    llama = config_of("llama")
    said = {key: value for key, value in llama.items() if key not in ("dtype", "torch_dtype")}
    for data, given, expected in (
        (said, None, torch.bfloat16),
        ({**said, "torch_dtype": "float16"}, None, torch.float16),
        ({**said, "dtype": "float32"}, "bfloat16", torch.bfloat16),
    ):
        model = metamodel.build(data, tmp_path, dtype=given)
        assert {p.dtype for p in model.parameters()} == {expected}
        assert {p.device.type for p in model.parameters()} == {"meta"}
        assert not model.training


@pytest.mark.parametrize(("key", "said"), [("dtype", "float64"), ("torch_dtype", "float8_e4m3fn")])
def test_a_config_that_says_another_type(key: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {k: value for k, value in config_of("llama").items() if k not in ("dtype", "torch_dtype")}
    path = write(tmp_path, {**data, key: said})
    line = f"cli: {path}: dtype: {said!r} cannot be planned; give --dtype with one of bfloat16, float16, float32"
    assert refused([str(path), "--tokens", "8"], capsys) == line
    assert cli.main(["plan", str(path), "--tokens", "8", "--dtype", "float16"]) == 0


@pytest.mark.parametrize(("dtype", "kept"), [("float16", torch.float32), ("bfloat16", torch.bfloat16)])
def test_parts_that_transformers_keeps_from_float16(dtype: str, kept: torch.dtype, tmp_path: Path) -> None:
    model = metamodel.build(config_of("t5"), tmp_path, dtype=dtype)
    by_name = {name: p.dtype for name, p in model.named_parameters()}
    assert by_name["encoder.block.0.layer.1.DenseReluDense.wo.weight"] == kept
    assert by_name["encoder.block.0.layer.1.DenseReluDense.wi_0.weight"] == getattr(torch, dtype)


def test_parts_that_a_class_keeps_in_float32(tmp_path: Path) -> None:
    model = metamodel.build(config_of("wan"), tmp_path)
    by_dtype = {str(p.dtype): name for name, p in model.named_parameters()}
    assert set(by_dtype) == {"torch.float32", "torch.bfloat16"}
    assert dict(model.named_parameters())["scale_shift_table"].dtype == torch.float32
    inputs = shapes.example_inputs(model, height=32, width=32, frames=5, tokens=4)
    fxoffload.explain(model, inputs, machine=Machine.nominal(), memory_budget="1GiB")


def test_a_config_without_architectures(tmp_path: Path) -> None:
    data = config_of("llama")
    del data["architectures"]
    assert type(metamodel.build(data, tmp_path)).__name__ == "LlamaModel"


IN_PYTHON = (
    "in Python, build the model under torch.device('meta') and call "
    "fxoffload.explain(model, *inputs, machine=fxoffload.Machine.nominal())"
)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"_class_name": "Nonesuch"}, f"cli: PATH: diffusers VERSION has no class 'Nonesuch'; {IN_PYTHON}"),
        ({"_class_name": "__version__"}, f"cli: PATH: diffusers VERSION has no class '__version__'; {IN_PYTHON}"),
        (
            {"_class_name": "FlowMatchEulerDiscreteScheduler", "shift": 3.0},
            "cli: PATH: FlowMatchEulerDiscreteScheduler is no model; give the config.json of one",
        ),
        (
            {"architectures": ["LlamaForCausalLM"]},
            f"cli: PATH: it has no model_type, by which transformers finds a class; {IN_PYTHON}",
        ),
        ({"model_type": "nonesuch"}, f"cli: PATH: transformers VERSION has no model_type 'nonesuch'; {IN_PYTHON}"),
        (
            {"model_type": "t5", "architectures": ["Nonesuch"]},
            f"cli: PATH: transformers VERSION has no class 'Nonesuch'; {IN_PYTHON}",
        ),
        (
            {"_class_name": "FluxPipeline", "vae": ["x", "AutoencoderKL"], "transformer": ["x", "FluxTransformer2DModel"]},
            "cli: PATH: FluxPipeline is no model but has models as parts; give the folder of one (transformer)",
        ),
    ],
)  # fmt: skip
def test_classes_that_are_no_models(
    data: dict[str, Any], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path, data)
    line = refused([str(path)], capsys)
    assert re.sub(r"(diffusers|transformers) \d\S*", r"\1 VERSION", line) == message.replace("PATH", str(path))


def test_the_folder_of_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = {"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]}
    path = write(tmp_path, data, "model_index.json")
    assert refused([str(tmp_path)], capsys).startswith(f"cli: {path}: FluxPipeline is no model")


def test_a_config_that_its_class_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"_class_name": "FluxTransformer2DModel", "num_layers": "many"})
    line = refused([str(path)], capsys)
    assert line.startswith(f"cli: {path}: FluxTransformer2DModel cannot be built from it (TypeError: ")
    assert line.endswith("); give the config.json of its weights")


SMALL_LLAMA = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000,
}  # fmt: skip
SMALL_FLUX = {"_class_name": "FluxTransformer2DModel", "num_layers": 1, "num_single_layers": 1}


@pytest.mark.parametrize(
    "data",
    [
        {**SMALL_LLAMA, "num_attention_heads": 5},
        {**SMALL_LLAMA, "num_attention_heads": 0},
        {**SMALL_LLAMA, "hidden_size": -64},
        {**SMALL_LLAMA, "hidden_size": "64"},
        {**SMALL_LLAMA, "architectures": "LlamaForCausalLM"},
        {**SMALL_FLUX, "attention_head_dim": 0},
        {**SMALL_FLUX, "in_channels": -4},
    ],
)
def test_whatever_a_class_raises_is_one_line(data: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cli: c\.json: .* cannot be built from it \(\w+: .*\); give the config") as refusal:
        metamodel.build(data, Path("c.json"))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("settings", "method"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "quantization_config"),
    ],
)
@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_quantized_weights_are_refused(settings: dict[str, Any], method: str, dtype: str | None) -> None:
    with pytest.raises(ConfigError) as refusal:
        metamodel.build({**SMALL_LLAMA, "quantization_config": settings}, Path("c.json"), dtype=dtype)
    assert str(refusal.value) == (
        f"cli: c.json: its weights are quantized ({method}), and what they take is not known without them; in Python, load the "
        "model and call fxoffload.explain(model, *inputs), or take quantization_config out of the file for the plan of "
        "unquantized weights"
    )


def test_a_config_that_says_that_nothing_is_quantized() -> None:
    metamodel.build({**SMALL_LLAMA, "quantization_config": None}, Path("c.json"))


def test_files_of_brackets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    assert refused([str(deep)], capsys) == f"cli: {deep}: this is neither the config of a model nor a saved plan; {ACCEPTED}"
    with pytest.raises(ConfigError, match=r"this is no saved machine \(.*\); give what Machine.save wrote"):
        plancmd.parse_machine(str(deep))


def test_inputs_that_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, {"_class_name": "AutoencoderTiny"})
    assert refused([str(path)], capsys).startswith("shapes: AutoencoderTiny: the inputs of this class are not known; known are ")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--budget", "1KiB"], r"planner: budget 1.00 KiB: .*; raise the budget to at least .*"),
        (["--budget", "0.5"], r"config: --budget: '0.5' comes to 0.5 bytes; .*"),
        (["--tokens", "0"], r"shapes: tokens: 0 is not accepted; give an int >= 1"),
        (["--height", "64"], r"shapes: height: 64 is given, but the inputs of LlamaForCausalLM have none; leave it out"),
        (["--frames", "3"], r"shapes: frames: 3 is given, but the inputs of LlamaForCausalLM have none; leave it out"),
        (["--machine", "slow"], r"cli: --machine: slow: No such file or directory; .*"),
    ],
)
def test_arguments_that_are_refused(argv: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, config_of("llama"))
    assert re.fullmatch(message, refused([str(path), "--tokens", "8", *argv], capsys))


def test_a_folder_without_a_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refused([str(tmp_path)], capsys) == f"cli: {tmp_path}: there is no config.json in this folder; {ACCEPTED}"
