"""Tiny pipelines for tests and for `fxoffload generate --tiny`: real classes of diffusers and transformers, a few blocks each.

Weights are random, and none is zero: what a block does shows in the image. Tokens are bytes, so that every text has its own and
no tokenizer has to be downloaded. From prompt to image or video a pipeline takes a second or two on the CPU.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from fxoffload.errors import ConfigError
from fxoffload.metamodel import set_dtype

_PAD, _EOS, _BOS = "<pad>", "</s>", "<s>"
_SPECIAL = (_PAD, _EOS, _BOS)
_VOCABULARY = len(_SPECIAL) + 256
_WIDTH = 32
"""Of text states."""
_CLIP_TOKENS = 77
_FLUX2_TEXT_LAYERS = 30
"""`Flux2Pipeline` reads the states behind layers 10, 20 and 30 of its text encoder."""
_SPREAD = 0.1


def tiny_pipeline(preset: str, *, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """A diffusers pipeline of the class that `preset` (one of `TINY`) stands for, on the CPU; the same weights for the same seed.

    Raises ConfigError for another preset, and where diffusers or transformers is not installed.
    """
    if preset not in TINY:
        raise ConfigError(f"tiny: {preset!r} is not accepted; give one of {', '.join(TINY)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = TINY[preset](_library("diffusers"), _library("transformers"))
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                _stir(component)
                set_dtype(component.eval().requires_grad_(False), dtype)
    return pipeline


def byte_tokenizer(*, length: int = 512) -> Any:
    """A tokenizer of transformers with one token a byte between `<s>` and `</s>`; `length` is its `model_max_length`."""
    tokenizers = _library("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *letters))}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{_BOS} $A {_EOS}", special_tokens=[(token, vocabulary[token]) for token in (_BOS, _EOS)]
    )
    made = _library("transformers").PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=_PAD, eos_token=_EOS, bos_token=_BOS, model_max_length=length
    )
    made.chat_template = "{% for m in messages %}{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"
    return made


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"tiny: {name} is not installed; run: pip install 'fxoffload[diffusers]'") from error


def _stir(module: torch.nn.Module) -> None:
    """Random values for what a class initialises to ones, to zeros, or so small that it would not show."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif parameter.dim() < 2 or (parameter == parameter.flatten()[0]).all():
                parameter.add_(torch.randn_like(parameter), alpha=_SPREAD)


def _clip(transformers: Any, kind: str, *, width: int = _WIDTH) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=_VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3, num_attention_heads=4,
        projection_dim=width, pad_token_id=0, eos_token_id=1, bos_token_id=2,
    )  # fmt: skip
    return getattr(transformers, kind)(config)


def _t5(transformers: Any, kind: str = "T5") -> Any:
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=_VOCABULARY, d_model=_WIDTH, d_kv=8, d_ff=2 * _WIDTH, num_layers=3, num_heads=4,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return getattr(transformers, f"{kind}EncoderModel")(config)


def _kl_autoencoder(kind: Any, *, channels: int, **more: Any) -> Any:
    """Four levels, as in the large ones: an image has eight times as many pixels a side as its latents."""
    return kind(
        block_out_channels=(8,) * 4, down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=1, latent_channels=channels, norm_num_groups=4, sample_size=64, **more,
    )  # fmt: skip


def _flux(diffusers: Any, transformers: Any) -> Any:
    transformer = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=_WIDTH, pooled_projection_dim=_WIDTH, axes_dims_rope=(4, 4, 8), guidance_embeds=True,
    )  # fmt: skip
    vae = _kl_autoencoder(
        diffusers.AutoencoderKL, channels=4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.1159
    )
    return diffusers.FluxPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae, transformer=transformer,
        text_encoder=_clip(transformers, "CLIPTextModel"), tokenizer=byte_tokenizer(length=_CLIP_TOKENS),
        text_encoder_2=_t5(transformers), tokenizer_2=byte_tokenizer(),
    )  # fmt: skip


def _flux2(diffusers: Any, transformers: Any) -> Any:
    transformer = diffusers.Flux2Transformer2DModel(
        patch_size=1, in_channels=16, num_layers=2, num_single_layers=4, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * _WIDTH, timestep_guidance_channels=32, mlp_ratio=2.0, axes_dims_rope=(4, 4, 4, 4),
    )  # fmt: skip
    text = {
        "model_type": "mistral", "vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": _WIDTH, "head_dim": 8,
        "num_hidden_layers": _FLUX2_TEXT_LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    vision = {
        "model_type": "pixtral", "hidden_size": _WIDTH, "intermediate_size": _WIDTH, "num_hidden_layers": 1,
        "num_attention_heads": 4, "head_dim": 8, "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    encoder = transformers.Mistral3ForConditionalGeneration(transformers.Mistral3Config(text_config=text, vision_config=vision))
    return diffusers.Flux2Pipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), transformer=transformer,
        vae=_kl_autoencoder(diffusers.AutoencoderKLFlux2, channels=4), text_encoder=encoder, tokenizer=byte_tokenizer(),
    )  # fmt: skip


def _wan(diffusers: Any, transformers: Any) -> Any:
    """Wan 2.2: one transformer for the steps with much noise, one for the others."""
    first, second = (
        diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=16, out_channels=16,
            text_dim=_WIDTH, freq_dim=32, ffn_dim=64, num_layers=3, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
        )
        for _ in range(2)
    )  # fmt: skip
    vae = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    scheduler = diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return diffusers.WanPipeline(
        tokenizer=byte_tokenizer(), text_encoder=_t5(transformers, "UMT5"), vae=vae, scheduler=scheduler, transformer=first,
        transformer_2=second, boundary_ratio=0.875,
    )  # fmt: skip


def _qwen_image(diffusers: Any, transformers: Any) -> Any:
    transformer = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=3, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=_WIDTH, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    text = {
        "vocab_size": _VOCABULARY, "hidden_size": _WIDTH, "intermediate_size": 2 * _WIDTH, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1,
        "rope_scaling": {"rope_type": "default", "mrope_section": [1, 1, 2]},
    }  # fmt: skip
    vision = {
        "depth": 1, "hidden_size": _WIDTH, "intermediate_size": _WIDTH, "num_heads": 4, "out_hidden_size": _WIDTH,
        "fullatt_block_indexes": [0],
    }  # fmt: skip
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    vae = diffusers.AutoencoderKLQwenImage(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    )  # fmt: skip
    return diffusers.QwenImagePipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae, transformer=transformer,
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config), tokenizer=byte_tokenizer(length=1024),
    )  # fmt: skip


def _sd3(diffusers: Any, transformers: Any) -> Any:
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=32, patch_size=2, in_channels=4, num_layers=3, attention_head_dim=8, num_attention_heads=4,
        caption_projection_dim=32, joint_attention_dim=_WIDTH, pooled_projection_dim=_WIDTH, out_channels=4,
        pos_embed_max_size=32, qk_norm="rms_norm",
    )  # fmt: skip
    vae = _kl_autoencoder(
        diffusers.AutoencoderKL, channels=4, use_quant_conv=False, use_post_quant_conv=False, shift_factor=0.0609
    )
    # Both CLIPs' states side by side are as wide as T5's.
    first, second = (_clip(transformers, "CLIPTextModelWithProjection", width=_WIDTH // 2) for _ in range(2))
    return diffusers.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0), vae=vae,
        text_encoder=first, tokenizer=byte_tokenizer(length=_CLIP_TOKENS),
        text_encoder_2=second, tokenizer_2=byte_tokenizer(length=_CLIP_TOKENS),
        text_encoder_3=_t5(transformers), tokenizer_3=byte_tokenizer(),
    )  # fmt: skip


def _ltx(diffusers: Any, transformers: Any) -> Any:
    transformer = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=4, attention_head_dim=8, cross_attention_dim=32, num_layers=3,
        caption_channels=_WIDTH,
    )  # fmt: skip
    vae = diffusers.AutoencoderKLLTXVideo(
        latent_channels=8, block_out_channels=(8, 8, 8, 8), decoder_block_out_channels=(8, 8, 8, 8),
        layers_per_block=(1, 1, 1, 1, 1), decoder_layers_per_block=(1, 1, 1, 1, 1),
    )  # fmt: skip
    return diffusers.LTXPipeline(
        scheduler=diffusers.FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True), vae=vae, transformer=transformer,
        text_encoder=_t5(transformers), tokenizer=byte_tokenizer(length=128),
    )  # fmt: skip


TINY: dict[str, Callable[[Any, Any], Any]] = {
    "flux": _flux,
    "flux2": _flux2,
    "wan": _wan,
    "qwen-image": _qwen_image,
    "sd3": _sd3,
    "ltx": _ltx,
}
"""By preset: makes the pipeline from the modules `diffusers` and `transformers`."""
