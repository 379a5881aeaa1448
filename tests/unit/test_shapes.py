"""Inputs that are made for a model run through it, and trace without weights to the same costs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fxoffload.analysis import costs_of, trace
from fxoffload.config import OffloadConfig
from fxoffload.errors import ConfigError
from fxoffload.machine import Machine
from fxoffload.shapes import example_inputs
from tests.models import CASES, toy

IMAGE = {"height": 64, "width": 32, "tokens": 8}
VIDEO = {**IMAGE, "frames": 9}
SMALL: dict[str, dict[str, int]] = {
    "flux": IMAGE,
    "flux2": IMAGE,
    "wan": VIDEO,
    "qwen_image": IMAGE,
    "sd3": {"height": 64, "width": 64, "tokens": 8},
    "t5": {"tokens": 8},
    "llama": {"tokens": 8},
    "qwen3_tied": {"tokens": 8},
}


def on_meta(make: Any) -> nn.Module:
    with torch.device("meta"):
        return make().eval().requires_grad_(False)


def ltx() -> nn.Module:
    from diffusers import LTXVideoTransformer3DModel

    return LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=12, cross_attention_dim=24, num_layers=2,
        caption_channels=16,
    )  # fmt: skip


def wan_from_images() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=32, ffn_dim=32,
        num_layers=1, rope_max_seq_len=32, image_dim=16, added_kv_proj_dim=24,
    )  # fmt: skip


def costs(model: nn.Module, inputs: dict[str, Any]) -> Any:
    config = OffloadConfig.from_options({"onload_device": "cpu"})
    return costs_of(trace(model, (), inputs, config, machine=Machine.nominal()))


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_inputs_run_and_trace(name: str) -> None:
    model = CASES[name].build()
    inputs = example_inputs(model, device="cpu", batch=2, **SMALL[name])
    with torch.no_grad():
        model(**inputs)
    empty = on_meta(CASES[name].make)
    assert costs(empty, example_inputs(empty, batch=2, **SMALL[name])) == costs(model, inputs)


@pytest.mark.parametrize("make", [ltx, wan_from_images])
def test_more_inputs_run(make: Any) -> None:
    with torch.no_grad():
        model = make()
        model(**example_inputs(model, device="cpu", **VIDEO))


def shapes(make: Any, **sizes: int) -> dict[str, tuple[int, ...]]:
    return {name: tuple(t.shape) for name, t in example_inputs(on_meta(make), **sizes).items() if isinstance(t, torch.Tensor)}


def test_defaults_are_those_of_the_pipelines() -> None:
    assert shapes(CASES["flux"].make) == {
        "hidden_states": (1, 4096, 4),
        "encoder_hidden_states": (1, 512, 32),
        "pooled_projections": (1, 32),
        "timestep": (1,),
        "guidance": (1,),
        "img_ids": (4096, 3),
        "txt_ids": (512, 3),
    }
    assert shapes(CASES["flux2"].make, batch=2)["img_ids"] == (2, 4096, 4)
    assert shapes(CASES["qwen_image"].make)["hidden_states"] == (1, 6889, 16)
    assert shapes(CASES["sd3"].make)["encoder_hidden_states"] == (1, 333, 32)
    assert shapes(CASES["wan"].make)["hidden_states"] == (1, 4, 21, 60, 104)
    assert shapes(ltx)["hidden_states"] == (1, 21 * 15 * 22, 8)
    assert shapes(CASES["t5"].make) == {"input_ids": (1, 512)}
    assert shapes(CASES["llama"].make) == {"input_ids": (1, 2048)}


def test_positions_on_an_image() -> None:
    inputs = example_inputs(CASES["flux"].build(), device="cpu", height=32, width=48, tokens=2)
    assert inputs["img_ids"].tolist() == [[0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 1, 1], [0, 1, 2]]


def test_dtype_and_seed() -> None:
    model = CASES["flux"].build().to(torch.bfloat16)
    first, again, other = (example_inputs(model, device="cpu", seed=seed, **IMAGE)["hidden_states"] for seed in (0, 0, 1))
    assert first.dtype == torch.bfloat16
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_class_that_is_not_known() -> None:
    with pytest.raises(ConfigError) as refusal:
        example_inputs(toy())
    assert str(refusal.value) == (
        "shapes: Toy: the inputs of this class are not known; known are Flux2Transformer2DModel, FluxTransformer2DModel, "
        "LTXVideoTransformer3DModel, QwenImageTransformer2DModel, SD3Transformer2DModel, WanTransformer3DModel and the text "
        "models of transformers; in Python, give your own: fxoffload.explain(model, *inputs, machine=fxoffload.Machine.nominal())"
    )


def test_an_encoder_and_decoder_is_not_known() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=1)
    model = on_meta(lambda: T5ForConditionalGeneration(config))
    with pytest.raises(ConfigError, match="shapes: T5ForConditionalGeneration: the inputs of this class are not known"):
        example_inputs(model)


@pytest.mark.parametrize(
    ("case", "sizes", "text"),
    [
        ("flux", {"height": 100}, "shapes: height: 100 is no multiple of 16; give one, such as 96"),
        ("flux", {"width": 8}, "shapes: width: 8 is no multiple of 16; give one, such as 16"),
        ("wan", {"frames": 80}, "shapes: frames: 80 is no multiple of 4 and one more; give one, such as 81"),
        ("llama", {"batch": 0}, "shapes: batch: 0 is not accepted; give an int >= 1"),
        ("llama", {"tokens": -1}, "shapes: tokens: -1 is not accepted; give an int >= 1"),
        ("flux", {"frames": 5}, "shapes: frames: 5 is given, but the inputs of FluxTransformer2DModel have none; leave it out"),
        ("t5", {"width": 64}, "shapes: width: 64 is given, but the inputs of T5EncoderModel have none; leave it out"),
    ],
)
def test_sizes_that_make_no_latents(case: str, sizes: dict[str, int], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        example_inputs(on_meta(CASES[case].make), **sizes)
    assert str(refusal.value) == text
