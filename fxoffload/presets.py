"""Pipelines by a short name, and the arguments of a call of one from what the command line says."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fxoffload.errors import ConfigError
from fxoffload.media import Makes

_SIZES = ("height", "width")
_SIDE = 1024
"""Pixels of an image where neither the call nor the signature of its class says."""


def _small(frames: int | None = None) -> dict[str, int]:
    return {"height": 64, "width": 64, "num_inference_steps": 4, **({} if frames is None else {"num_frames": frames})}


@dataclass(frozen=True, slots=True)
class Preset:
    """A pipeline of diffusers."""

    model: str
    """Its hub id."""
    pipeline: str
    """The class that the tiny pipeline is of."""
    prompt: str
    pixels: int = 16
    """Height and width are multiples of it."""
    frames: int = 1
    """A number of frames is one more than a multiple of it."""
    fps: int = 1
    tiny: Mapping[str, int] = field(default_factory=_small)
    """What a call of the tiny pipeline has unless the command line says otherwise."""
    float32: tuple[str, ...] = ()
    """Components that lose too much in bfloat16."""
    joint: bool = False
    """A forward takes the prompt and the negative prompt together, as a batch of two."""


PRESETS = {
    "flux": Preset("black-forest-labs/FLUX.1-dev", "FluxPipeline", "A cat reads a newspaper in a sunlit library"),
    "flux2": Preset("black-forest-labs/FLUX.2-dev", "Flux2Pipeline", "A cat reads a newspaper in a sunlit library"),
    "wan": Preset(
        "Wan-AI/Wan2.2-T2V-A14B-Diffusers", "WanPipeline", "A paper boat sails down a rainy street",
        frames=4, fps=16, tiny=_small(5), float32=("vae",),
    ),
    "qwen-image": Preset("Qwen/Qwen-Image", "QwenImagePipeline", "A chalkboard in a cafe that says: fresh bread"),
    "sd3": Preset(
        "stabilityai/stable-diffusion-3.5-large", "StableDiffusion3Pipeline", "A cat reads a newspaper in a sunlit library",
        joint=True,
    ),
    "ltx": Preset(
        "Lightricks/LTX-Video", "LTXPipeline", "A paper boat sails down a rainy street",
        pixels=32, frames=8, fps=24, tiny=_small(9), joint=True,
    ),
}  # fmt: skip


def makes_of(kind: type) -> Makes:
    """Whether a class of pipelines makes images or videos."""
    return "video" if "num_frames" in _parameters(kind) else "image"


def call_arguments(kind: type, preset: Preset, given: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of a call of a pipeline of class `kind`. `given`: by name, what the command line says.

    Guidance goes where the class has it. Raises ConfigError, naming the flag, for what would have no effect.
    """
    parameters = _parameters(kind)
    call: dict[str, Any] = {"prompt": preset.prompt, **given}
    if "guidance_scale" in call and _default(parameters, "true_cfg_scale") > 1:
        # The class has `guidance_scale` for models to come, and ignores it.
        if "true_cfg_scale" in call:
            raise ConfigError(
                f"cli: --guidance-scale: {kind.__name__} has one guidance, and --true-cfg-scale is given; leave one out"
            )
        call["true_cfg_scale"] = call.pop("guidance_scale")
    for name in call:
        if name not in parameters:
            raise ConfigError(f"cli: {_option(name)}: {kind.__name__} has no argument {name!r}; leave it out")
    _check_sizes(preset, call)
    scale_name = "true_cfg_scale" if "true_cfg_scale" in parameters else "guidance_scale"
    scale = call.get(scale_name, _default(parameters, scale_name))
    if "negative_prompt" in call and scale <= 1:
        what = f"{kind.__name__} ignores it where the guidance is {scale:g}"
        raise ConfigError(f"cli: --negative-prompt: {what}; give {_option(scale_name)} above 1, too")
    if scale_name == "true_cfg_scale" and scale > 1:
        # Without a negative prompt, be it an empty one, these classes leave the guidance out.
        call.setdefault("negative_prompt", " ")
    return call


def sizes_of(kind: type, preset: Preset, call: Mapping[str, Any]) -> dict[str, int]:
    """What a forward in such a call is about, as for `shapes.example_inputs`."""
    parameters = _parameters(kind)
    sizes = {name: int(call.get(name) or _default(parameters, name) or _SIDE) for name in _SIZES}
    if makes_of(kind) == "video":
        sizes["frames"] = int(call.get("num_frames") or _default(parameters, "num_frames"))
    guided = call.get("guidance_scale", _default(parameters, "guidance_scale")) > 1
    return {**sizes, "batch": 2 if preset.joint and guided else 1}


def _parameters(kind: Any) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(kind.__call__).parameters


def _default(parameters: Mapping[str, inspect.Parameter], name: str) -> float:
    value = parameters[name].default if name in parameters else None
    return value if isinstance(value, (int, float)) else 0.0


def _check_sizes(preset: Preset, call: Mapping[str, Any]) -> None:
    by = preset.pixels
    for name in _SIZES:
        size = call.get(name, by)
        if size % by:
            raise ConfigError(f"cli: {_option(name)}: {size} is no multiple of {by}; give one, such as {max(size // by, 1) * by}")
    frames, by = call.get("num_frames", 1), preset.frames
    if frames % by != 1 % by:
        what = f"{frames} is no multiple of {by} and one more"
        raise ConfigError(f"cli: --num-frames: {what}; give one, such as {frames // by * by + 1}")


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"
