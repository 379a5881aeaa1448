"""LoRA adapters through a diffusers pipeline whose components are offloaded: every change counts in the next image."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload.tiny import tiny_pipeline

pytestmark = [
    pytest.mark.filterwarnings("ignore:Already found a `peft_config`"),
    pytest.mark.filterwarnings("ignore:Merging lora module"),
]
CHANGES: dict[str, Callable[[Any], object]] = {
    "load": lambda p: p.load_lora_weights(adapter(p, 1), adapter_name="one"),
    "scale": lambda p: p.set_adapters(["one"], [0.5]),
    "load another": lambda p: p.load_lora_weights(adapter(p, 2), adapter_name="two"),
    "both": lambda p: p.set_adapters(["one", "two"], [0.5, 0.7]),
    "scale both": lambda p: p.set_adapters(["one", "two"], [0.1, 0.9]),
    "off": lambda p: p.disable_lora(),
    "on": lambda p: p.enable_lora(),
    "delete": lambda p: p.delete_adapters("two"),
    "fuse": lambda p: p.fuse_lora(),
    "unfuse": lambda p: p.unfuse_lora(),
    "unload": lambda p: p.unload_lora_weights(),
}


FEWER = ("load", "scale", "fuse", "unfuse", "unload")
"""For the compiled transformer: each but a scale traces anew, and Dynamo stops at eight."""


def adapter(pipeline: Any, seed: int) -> dict[str, torch.Tensor]:
    """Rank-4 weights for the queries and values of the transformer, in the format that pipelines load."""
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, module in tiny_pipeline("flux").transformer.named_modules():
        if name.endswith(("attn.to_q", "attn.to_v")):
            state[f"transformer.{name}.lora_A.weight"] = torch.randn(4, module.in_features, generator=generator) * 0.3
            state[f"transformer.{name}.lora_B.weight"] = torch.randn(module.out_features, 4, generator=generator) * 0.3
    return state


def image(pipeline: Any) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    given: dict[str, Any] = {"height": 64, "width": 64, "num_inference_steps": 2, "generator": generator, "output_type": "pt"}
    return pipeline("a cat", **given).images


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_every_change_counts_in_the_next_image(how: str) -> None:
    plain, offloaded = tiny_pipeline("flux"), tiny_pipeline("flux")
    for pipeline in (plain, offloaded):
        pipeline.set_progress_bar_config(disable=True)
    budget = "340KiB" if how == "eager" else "1300KiB"
    group = fxoffload.layerwise_offload(offloaded, onload_device="cpu", memory_budget=budget)
    if how == "compiled":
        options = {"segment_compiler": "eager", "onload_device": "cpu"}
        offloaded.transformer.compile(backend=fxoffload.layerwise, fullgraph=True, dynamic=False, options=options)
    before = image(plain)
    assert torch.equal(image(offloaded), before)
    seen = [before]
    for name in CHANGES if how == "eager" else FEWER:
        for pipeline in (plain, offloaded):
            CHANGES[name](pipeline)
        wanted = image(plain)
        assert torch.equal(image(offloaded), wanted), name
        assert fxoffload.stats(offloaded.transformer).nbytes_copied > 0, name
        if name not in {"on", "fuse", "unfuse"}:
            assert not torch.equal(wanted, seen[-1]), name
        seen.append(wanted)
    torch.testing.assert_close(seen[-1], before)
    group.remove()
    assert torch.equal(image(offloaded), seen[-1])
