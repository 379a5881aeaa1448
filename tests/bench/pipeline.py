"""A whole pipeline of FLUX.1-dev's size (random weights, bf16) under one budget: prompt to image, text encoders and VAE included.

    python tests/bench/pipeline.py --out tests/bench/results/pipelines/flux.json

Every row is one image at 1024x1024 after a first one that warms up. `peak_gib` is what the allocator reserved at most during
that image, `first_peak_gib` during the one that warms up; both are to stay under the budget. Budget `none` is the plain pipeline
on the device. Images of rows with the same transformer program are compared bit for bit with the first of them.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sweep import DEVICE, GIB

import fxoffload
from fxoffload.hardware import driver
from fxoffload.sizes import parse_size
from fxoffload.tiny import byte_tokenizer

WARM_STEPS = 12
PROMPT = "A cat reads a newspaper in a sunlit library"


def flux_pipeline() -> Any:
    """Configurations as published for FLUX.1-dev; tokens are bytes."""
    import diffusers
    import transformers

    t5 = transformers.T5Config(
        vocab_size=32128, d_model=4096, d_kv=64, d_ff=10240, num_layers=24, num_heads=64, feed_forward_proj="gated-gelu"
    )
    clip = transformers.CLIPTextConfig(
        hidden_size=768, intermediate_size=3072, num_hidden_layers=12, num_attention_heads=12, projection_dim=768
    )
    with DEVICE:
        transformer = diffusers.FluxTransformer2DModel(guidance_embeds=True)
        text_encoder, text_encoder_2 = transformers.CLIPTextModel(clip), transformers.T5EncoderModel(t5)
        vae = diffusers.AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4, layers_per_block=2, latent_channels=16, sample_size=1024,
            use_quant_conv=False, use_post_quant_conv=False, scaling_factor=0.3611, shift_factor=0.1159,
        )  # fmt: skip
    for module in (transformer, text_encoder, text_encoder_2, vae):
        generator = torch.Generator(DEVICE).manual_seed(0)
        for parameter in module.parameters():
            parameter.normal_(0, 0.02, generator=generator)
        module.eval().requires_grad_(False).cpu()
    torch.cuda.empty_cache()
    pipeline = diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae, transformer=transformer,
        text_encoder=text_encoder, tokenizer=byte_tokenizer(length=77), text_encoder_2=text_encoder_2,
        tokenizer_2=byte_tokenizer(),
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def image(pipeline: Any, steps: int) -> tuple[torch.Tensor, dict[str, float], float]:
    """One image, seconds by phase (`step_s`: the median after the first), and the reserved peak in bytes."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    marks: list[float] = [time.perf_counter()]

    def mark(*_: Any) -> dict[str, Any]:
        torch.cuda.synchronize()
        marks.append(time.perf_counter())
        return {}

    given = {"height": 1024, "width": 1024, "num_inference_steps": steps, "output_type": "pt", "callback_on_step_end": mark}
    made = pipeline(PROMPT, generator=torch.Generator("cpu").manual_seed(1), **given).images.cpu()
    mark()
    times = [b - a for a, b in pairwise(marks)]
    seconds = {
        "seconds": marks[-1] - marks[0],
        "prompt_and_first_step_s": times[0],
        "step_s": statistics.median(times[1:-1]),
        "decode_s": times[-1],
    }
    return made, seconds, torch.cuda.max_memory_reserved()


def row(pipeline: Any, budget: str, how: str, steps: int, reference: dict[str, torch.Tensor]) -> dict[str, Any]:
    _, first, first_peak = image(pipeline, WARM_STEPS)
    made, seconds, peak = image(pipeline, steps)
    wanted = reference.get(how)
    reference.setdefault(how, made)
    nbytes = None if budget == "none" else parse_size(budget, what="--budgets")
    return {
        "budget": budget,
        "transformer": how,
        **seconds,
        "first_s": first["seconds"],
        "peak_gib": peak / GIB,
        "first_peak_gib": first_peak / GIB,
        "under_budget": None if nbytes is None else max(peak, first_peak) <= nbytes,
        "equal": None if wanted is None else torch.equal(made, wanted),
        "finite": bool(made.isfinite().all()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", default="6GiB,8GiB,16GiB")
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--transformer", default="eager,compiled", help="how it runs: eager, compiled, or both")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.bfloat16)
    pipeline = flux_pipeline()
    report: dict[str, Any] = {
        "command": "python " + " ".join(sys.argv),
        "machine": {
            "device": torch.cuda.get_device_name(),
            "driver": driver(),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "model": f"FLUX.1-dev size pipeline (T5-XXL, CLIP-L, transformer, VAE), 1024x1024, {args.steps} steps, bf16",
        "weights_gib": sum(p.numel() * p.element_size() for m in modules(pipeline) for p in m.parameters()) / GIB,
        "rows": [],
    }
    reference: dict[str, torch.Tensor] = {}

    def add(entry: dict[str, Any]) -> None:
        report["rows"].append(entry)
        print(json.dumps(entry), flush=True)
        if args.out is not None:
            args.out.write_text(json.dumps(report, indent=1) + "\n")

    for how in args.transformer.split(","):
        group = None
        for budget in args.budgets.split(","):
            if group is None:
                group = fxoffload.layerwise_offload(pipeline, memory_budget=budget)
                if how == "compiled":
                    pipeline.transformer.compile(backend=fxoffload.layerwise, fullgraph=True, dynamic=False)
            else:
                group.set_memory_budget(budget)
            entry = row(pipeline, budget, how, args.steps, reference)
            counters = {name: stats.nbytes_copied / GIB for name, stats in group.stats().items()}
            add({**entry, "streamed_gib": counters})
        assert group is not None
        group.remove()
        pipeline.transformer._compiled_call_impl = None
        torch._dynamo.reset()
        gc.collect()
    for module in modules(pipeline):
        module.to(DEVICE)
    for how in args.transformer.split(","):
        if how == "compiled":
            pipeline.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        add(row(pipeline, "none", f"{how} per block" if how == "compiled" else how, args.steps, reference))


def modules(pipeline: Any) -> list[torch.nn.Module]:
    return [m for m in pipeline.components.values() if isinstance(m, torch.nn.Module)]


if __name__ == "__main__":
    main()
