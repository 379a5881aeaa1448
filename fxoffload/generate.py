"""`fxoffload generate`: run a pipeline of diffusers by the name of a preset, with its weights in host memory if so asked.

Whatever can be checked is checked before weights are loaded, and `--plan-only` loads none.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fxoffload.components import find_components
from fxoffload.config import SEGMENT_COMPILERS
from fxoffload.devices import available_device
from fxoffload.errors import ConfigError, OffloadError
from fxoffload.flags import Layerwise, add_flags, layerwise_settings, parse_count
from fxoffload.forecast import forecast
from fxoffload.media import SUFFIXES, check_output, save
from fxoffload.metamodel import DTYPES
from fxoffload.pipelines import (
    DENOISERS,
    TEXT_ENCODERS,
    LayerwiseOffloadHandleGroup,
    component_defaults,
    is_named,
    offload_pipeline,
)
from fxoffload.presets import PRESETS, Preset, call_arguments, makes_of, sizes_of
from fxoffload.sources import Source, find_source
from fxoffload.summary import Watch, summary

_COUNTS = ("height", "width", "num_frames", "num_inference_steps")
_OTHERS = ("prompt", "negative_prompt", "guidance_scale", "true_cfg_scale")
_OUTPUT = "where to write the result; left out: PRESET.png or PRESET.mp4. An image may be {}; a video {}"
_OFF = "no weights are offloaded; add --layerwise-offload or --memory-budget SIZE"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    hub_ids = ", ".join(f"{name} ({preset.model})" for name, preset in PRESETS.items())
    parser.add_argument("preset", choices=PRESETS, metavar="PRESET", help=f"what to run: {hub_ids}")
    parser.add_argument(
        "--model", metavar="ID|DIR", help="another hub id, or a folder in diffusers format, instead of the preset's"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="a tiny pipeline of the preset's class with random weights: no download"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights; left out: bfloat16, or float32 with --tiny")
    parser.add_argument("--compile", action="store_true", help="compile the transformers; offloaded ones stream as one graph")
    parser.add_argument("--segment-compiler", choices=SEGMENT_COMPILERS, help="what --compile compiles with; left out: inductor")
    parser.add_argument(
        "--plan-only", action="store_true", help="print a plan for every component; nothing runs, no weights are loaded"
    )
    what = parser.add_argument_group("what to generate", "What is left out, the pipeline chooses.")
    what.add_argument("--prompt", metavar="TEXT", help="left out: one that goes with the preset")
    what.add_argument("--negative-prompt", metavar="TEXT", help="what to keep away from")
    what.add_argument("--height", metavar="N", help="pixels")
    what.add_argument("--width", metavar="N", help="pixels")
    what.add_argument("--num-frames", metavar="N", help="of a video")
    what.add_argument("--num-inference-steps", metavar="N", help="how many steps denoise")
    what.add_argument("--guidance-scale", type=float, metavar="X", help="how closely to follow the prompt")
    what.add_argument(
        "--true-cfg-scale", type=float, metavar="X", help="how far away from the negative prompt, where that is apart"
    )
    what.add_argument(
        "--seed", type=int, default=0, metavar="N", help="of the noise, which is the same on every device (%(default)s)"
    )
    what.add_argument("--output", type=Path, metavar="FILE", help=_OUTPUT.format(*map(", ".join, SUFFIXES.values())))
    add_flags(parser)


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Generate, or print plans. Raises OffloadError for what a user can act on."""
    device = available_device(device)
    layerwise = layerwise_settings(arguments)
    _check_together(arguments, layerwise)
    given = _given(arguments, PRESETS[arguments.preset])
    source = find_source(arguments.preset, arguments.model, tiny=arguments.tiny)
    call = call_arguments(source.kind, source.preset, given)
    dtype = arguments.dtype or ("float32" if arguments.tiny else "bfloat16")
    if layerwise is not None and arguments.plan_only:
        sizes = sizes_of(source.kind, source.preset, call)
        _print_plans(
            source.components(dtype), layerwise, _options(layerwise, device, arguments), sizes, compiled=arguments.compile
        )
        return
    makes = makes_of(source.kind)
    output = arguments.output or Path(f"{arguments.preset}{SUFFIXES[makes][0]}")
    check_output(output, makes)
    try:
        made = _generate(source, call, dtype, layerwise, device, arguments)
    except torch.OutOfMemoryError as error:
        what = str(error).partition(". ")[0]
        raise OffloadError(
            f"cli: the device's memory is too little ({what}); give --memory-budget SIZE, or a smaller one"
        ) from error
    path, note = save(made, output, fps=source.preset.fps)
    print(f"\nwritten to {path}" + (f": {note}" if note else ""))


# -- what was asked for ------------------------------------------------------------------------------------------------


def _check_together(arguments: argparse.Namespace, layerwise: Layerwise | None) -> None:
    """Raises ConfigError for flags that do not go together, or that need another one."""
    if arguments.tiny and arguments.model is not None:
        raise ConfigError("cli: --model: --tiny makes a pipeline of its own; give one of the two")
    if arguments.segment_compiler is not None and not arguments.compile:
        raise ConfigError("cli: --segment-compiler: nothing is compiled; add --compile")
    if arguments.plan_only and layerwise is None:
        raise ConfigError(f"cli: --plan-only: {_OFF}")


def _given(arguments: argparse.Namespace, preset: Preset) -> dict[str, Any]:
    """Arguments of the call that the command line gives, each checked by itself."""
    given: dict[str, Any] = dict(preset.tiny) if arguments.tiny else {}
    for name in _COUNTS:
        text = getattr(arguments, name)
        if text is not None:
            given[name] = parse_count(f"--{name.replace('_', '-')}", text)
    return given | {name: value for name in _OTHERS if (value := getattr(arguments, name)) is not None}


def _options(layerwise: Layerwise, device: torch.device, arguments: argparse.Namespace) -> dict[str, Any]:
    """Settings of every component."""
    compiler = {} if arguments.segment_compiler is None else {"segment_compiler": arguments.segment_compiler}
    return {**layerwise.settings, **compiler, "onload_device": device}


# -- a run -------------------------------------------------------------------------------------------------------------


def _generate(
    source: Source,
    call: Mapping[str, Any],
    dtype: str,
    layerwise: Layerwise | None,
    device: torch.device,
    arguments: argparse.Namespace,
) -> Any:
    """Load and run the pipeline, and print what that took. Returns an image, or the frames of a video."""
    start = time.perf_counter()
    pipeline = source.load(dtype)
    load_s = time.perf_counter() - start
    components = find_components(pipeline)
    group = _place(pipeline, components, layerwise, device, arguments)
    # tqdm keeps quiet where standard error is a file.
    pipeline.set_progress_bar_config(disable=None)
    generator = torch.Generator("cpu").manual_seed(arguments.seed)
    watch = Watch(device)
    with watch.watching(pipeline):
        result = pipeline(**call, generator=generator, output_type="pil", callback_on_step_end=watch.on_step)
    handles = {} if group is None else dict(zip(group.root_names, group.handles, strict=True))
    print(summary(watch.times, components, handles, device=device, load_s=load_s))
    return result.frames[0] if hasattr(result, "frames") else result.images[0]


def _place(
    pipeline: Any,
    components: Mapping[str, torch.nn.Module],
    layerwise: Layerwise | None,
    device: torch.device,
    arguments: argparse.Namespace,
) -> LayerwiseOffloadHandleGroup | None:
    """Offload the pipeline, or move it to the device; then compile its denoisers."""
    group, backend = None, "layerwise"
    if layerwise is None:
        pipeline.to(device)
        backend = arguments.segment_compiler or SEGMENT_COMPILERS[0]
    else:
        own = {name: layerwise.text for name in components if is_named(name, TEXT_ENCODERS)}
        group = offload_pipeline(pipeline, _options(layerwise, device, arguments), own)
    if arguments.compile:
        for name, module in components.items():
            if is_named(name, DENOISERS):
                module.compile(backend=backend)
    return group


# -- plans -------------------------------------------------------------------------------------------------------------


def _print_plans(
    components: Mapping[str, torch.nn.Module | ConfigError],
    layerwise: Layerwise,
    options: Mapping[str, Any],
    sizes: Mapping[str, int],
    *,
    compiled: bool,
) -> None:
    """Components run in turn, so each is planned for the whole budget."""
    for name, model in components.items():
        if isinstance(model, ConfigError):
            print(f"{name}  no plan: {model}\n")
            continue
        own = layerwise.text if is_named(name, TEXT_ENCODERS) else {}
        settings = {**component_defaults(name), **options, **own}
        print(f"{forecast(name, model, settings, compiled=compiled and is_named(name, DENOISERS), sizes=sizes)}\n")
