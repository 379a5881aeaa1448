"""Tiny pipelines: every weight counts, the same seed makes the same weights, every text has its own tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxoffload import tiny
from fxoffload.errors import ConfigError
from fxoffload.presets import PRESETS
from fxoffload.tiny import TINY, byte_tokenizer, tiny_pipeline
from fxoffload.units import block_names

pytest.importorskip("diffusers")
pytest.importorskip("transformers")


def modules(pipeline: Any) -> dict[str, torch.nn.Module]:
    return {name: c for name, c in pipeline.components.items() if isinstance(c, torch.nn.Module)}


def weights(pipeline: Any) -> dict[str, torch.Tensor]:
    return {f"{name}.{key}": tensor for name, module in modules(pipeline).items() for key, tensor in module.named_parameters()}


def latents(pipeline: Any, **call: int) -> torch.Tensor:
    """What two steps make of a prompt."""
    pipeline.set_progress_bar_config(disable=True)
    call = {"height": 32, "width": 32, "num_inference_steps": 2, "max_sequence_length": 16, **call}
    return pipeline("a cat", generator=torch.Generator().manual_seed(0), output_type="latent", return_dict=False, **call)[0]


def test_every_preset_has_one() -> None:
    assert list(TINY) == list(PRESETS)


@pytest.mark.parametrize("preset", TINY)
def test_weights(preset: str) -> None:
    state = torch.get_rng_state()
    first, again, other = tiny_pipeline(preset), tiny_pipeline(preset), tiny_pipeline(preset, seed=1)
    assert torch.equal(torch.get_rng_state(), state)
    assert type(first).__name__ == PRESETS[preset].pipeline
    same, others = weights(again), weights(other)
    for name, tensor in weights(first).items():
        assert tensor.any(), name
        assert torch.equal(tensor, same[name]), name
        assert not torch.equal(tensor, others[name]), name
        assert tensor.dtype == torch.float32
        assert not tensor.requires_grad
    assert not any(module.training for module in modules(first).values())


@pytest.mark.parametrize(("preset", "call", "count"), [("flux", {}, 12), ("wan", {"num_frames": 1}, 9)])
def test_every_block_counts(preset: str, call: dict[str, int], count: int) -> None:
    pipeline = tiny_pipeline(preset)
    expected = latents(pipeline, **call)
    assert torch.equal(latents(pipeline, **call), expected)
    roots = [module for name, module in modules(pipeline).items() if name != "vae"]
    blocks = [module.get_submodule(name) for module in roots for name in block_names(module)]
    assert len(blocks) == count
    for block in blocks:
        before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
        with torch.no_grad():
            for parameter in block.parameters():
                parameter.add_(0.1)
        assert not torch.equal(latents(pipeline, **call), expected), type(block).__name__
        block.load_state_dict(before)


def test_dtypes() -> None:
    pipeline = tiny_pipeline("wan", dtype=torch.bfloat16)
    assert pipeline.text_encoder.dtype == torch.bfloat16
    transformer = dict(pipeline.transformer.named_parameters())
    assert transformer["blocks.0.attn1.to_q.weight"].dtype == torch.bfloat16
    # The class keeps it so.
    assert transformer["blocks.0.scale_shift_table"].dtype == torch.float32


def test_tokens_are_bytes() -> None:
    tokenizer = byte_tokenizer(length=16)
    assert tokenizer.model_max_length == 16
    tokens = tokenizer(["a é", "b"], padding="max_length", max_length=8, truncation=True, return_tensors="pt")
    assert tokens.input_ids.shape == (2, 8)
    assert tokens.attention_mask.sum(1).tolist() == [6, 3]
    assert tokenizer.decode(tokens.input_ids[0], skip_special_tokens=True) == "a é"
    assert tokens.input_ids[1].tolist()[0] == tokenizer.bos_token_id
    assert tokens.input_ids[1].tolist()[2:] == [tokenizer.eos_token_id] + [tokenizer.pad_token_id] * 5


def test_another_preset() -> None:
    with pytest.raises(ConfigError) as raised:
        tiny_pipeline("sdxl")
    assert str(raised.value) == "tiny: 'sdxl' is not accepted; give one of flux, flux2, wan, qwen-image, sd3, ltx"


def test_a_library_that_is_not_there() -> None:
    with pytest.raises(ConfigError) as raised:
        tiny._library("no_such_library")
    assert str(raised.value) == "tiny: no_such_library is not installed; run: pip install 'fxoffload[diffusers]'"
