"""What a call of a pipeline gets from the command line."""

from __future__ import annotations

from typing import Any

import pytest

from fxoffload.errors import ConfigError
from fxoffload.presets import PRESETS, call_arguments, sizes_of

diffusers = pytest.importorskip("diffusers")


def class_of(preset: str) -> Any:
    return getattr(diffusers, PRESETS[preset].pipeline)


def call(preset: str, **given: Any) -> dict[str, Any]:
    made = call_arguments(class_of(preset), PRESETS[preset], given)
    assert made.pop("prompt") == PRESETS[preset].prompt
    return made


def test_guidance_goes_where_the_class_has_it() -> None:
    assert call("flux", guidance_scale=2.0) == {"guidance_scale": 2.0}
    assert call("flux", true_cfg_scale=2.0) == {"true_cfg_scale": 2.0, "negative_prompt": " "}
    assert call("flux", true_cfg_scale=2.0, negative_prompt="x") == {"true_cfg_scale": 2.0, "negative_prompt": "x"}
    assert call("qwen-image") == {"negative_prompt": " "}
    assert call("qwen-image", guidance_scale=2.0) == {"true_cfg_scale": 2.0, "negative_prompt": " "}
    assert call("qwen-image", guidance_scale=1.0) == {"true_cfg_scale": 1.0}
    assert call("wan", guidance_scale=2.0, negative_prompt="x") == {"guidance_scale": 2.0, "negative_prompt": "x"}


@pytest.mark.parametrize(
    ("preset", "given", "text"),
    [
        (
            "flux",
            {"negative_prompt": "x"},
            "--negative-prompt: FluxPipeline ignores it where the guidance is 1; give --true-cfg-scale above",
        ),
        ("flux2", {"negative_prompt": "x"}, "--negative-prompt: Flux2Pipeline has no argument 'negative_prompt'; leave it out"),
        ("flux", {"num_frames": 5}, "--num-frames: FluxPipeline has no argument 'num_frames'; leave it out"),
        (
            "qwen-image",
            {"guidance_scale": 2.0, "true_cfg_scale": 3.0},
            "--guidance-scale: QwenImagePipeline has one guidance, and",
        ),
        ("ltx", {"height": 80}, "--height: 80 is no multiple of 32; give one, such as 64"),
        ("ltx", {"num_frames": 13}, "--num-frames: 13 is no multiple of 8 and one more; give one, such as 9"),
    ],
)
def test_what_would_have_no_effect(preset: str, given: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        call(preset, **given)
    assert str(raised.value).startswith(f"cli: {text}")


def test_sizes_of_a_forward() -> None:
    def sizes(preset: str, **given: Any) -> dict[str, int]:
        return sizes_of(class_of(preset), PRESETS[preset], given)

    assert sizes("flux") == {"height": 1024, "width": 1024, "batch": 1}
    assert sizes("wan", height=64) == {"height": 64, "width": 832, "frames": 81, "batch": 1}
    assert sizes("ltx", num_frames=9) == {"height": 512, "width": 704, "frames": 9, "batch": 2}
    assert sizes("sd3", guidance_scale=1.0)["batch"] == 1
