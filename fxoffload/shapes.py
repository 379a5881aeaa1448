"""Inputs of one call for the model families that are known, in the shapes that their pipelines use.

    FLUX, FLUX.2   latents [B, H/16 * W/16, in_channels]                        text [B, T, joint_attention_dim]  T = 512
    Qwen-Image     latents [B, H/16 * W/16, in_channels]                        text [B, T, joint_attention_dim]  T = 512
    SD3            latents [B, in_channels, H/8, W/8]                           text [B, T, joint_attention_dim]  T = 333
    Wan            latents [B, in_channels, (F-1)/4 + 1, H/8, W/8]              text [B, T, text_dim]             T = 512
    LTX            latents [B, ((F-1)/8 + 1) * H/32 * W/32, in_channels]        text [B, T, caption_channels]     T = 128
    text models    token ids [B, T]                                       T = 512, and 2048 for `...ForCausalLM`

with batch B, height H and width W in pixels (1024 x 1024; Qwen-Image 1328 x 1328; Wan 480 x 832, LTX 480 x 704), F frames (Wan
81, LTX 161) and T text tokens. Source: `prepare_latents` and `encode_prompt` of the diffusers pipeline of each model.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fxoffload.errors import ConfigError

Inputs = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a call is about. None: the default of the model's family. Pixels, frames, text tokens."""

    batch: int = 1
    height: int | None = None
    width: int | None = None
    frames: int | None = None
    tokens: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"shapes: {name}: {value} is not accepted; give an int >= 1")


def example_inputs(
    model: torch.nn.Module,
    *,
    device: torch.device | str = "meta",
    batch: int = 1,
    height: int | None = None,
    width: int | None = None,
    frames: int | None = None,
    tokens: int | None = None,
    seed: int = 0,
) -> Inputs:
    """Keyword arguments of one call of `model`, in the shapes of this module's table: random values, or none on the meta device.

    Floating-point inputs have the dtype of most of the model's weights. Raises ConfigError for a class that is not
    known, for sizes that do not divide into latents, and for those that inputs of the class do not have.
    """
    name = type(model).__name__
    maker = _MAKERS.get(name) or (_text if _is_text(model) else None)
    if maker is None:
        raise ConfigError(
            f"shapes: {name}: the inputs of this class are not known; known are {', '.join(sorted(_MAKERS))} and the text models "
            "of transformers; in Python, give your own: fxoffload.explain(model, *inputs, machine=fxoffload.Machine.nominal())"
        )
    sizes = Sizes(batch, height, width, frames, tokens)
    for size in _WITHOUT.get(maker, ()):
        if (given := getattr(sizes, size)) is not None:
            raise ConfigError(f"shapes: {size}: {given} is given, but the inputs of {name} have none; leave it out")
    return maker(model, sizes, _Values(torch.device(device), _dtype_of(model), seed))


def _dtype_of(model: torch.nn.Module) -> torch.dtype:
    """Of most elements, because models keep some small parts in float32."""
    counts: Counter[torch.dtype] = Counter()
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            counts[parameter.dtype] += parameter.numel()
    return counts.most_common(1)[0][0] if counts else torch.float32


class _Values:
    """Makes the tensors of one call."""

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int) -> None:
        self.device = device
        self.dtype = dtype
        self._generator = None if device.type == "meta" else torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)

    def full(self, value: float, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.full(shape, value, device=self.device, dtype=dtype or self.dtype)

    def ids(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(high, shape, generator=self._generator, device=self.device)

    def grid(self, rows: int, columns: int, *, axes: int) -> torch.Tensor:
        """`[rows * columns, axes]` positions: the row on axis 1, the column on axis 2."""
        ids = torch.zeros(rows, columns, axes, device=self.device, dtype=self.dtype)
        ids[..., 1] += torch.arange(rows, device=self.device)[:, None]
        ids[..., 2] += torch.arange(columns, device=self.device)
        return ids.reshape(rows * columns, axes)


def _divided(what: str, size: int, by: int) -> int:
    if size % by:
        raise ConfigError(f"shapes: {what}: {size} is no multiple of {by}; give one, such as {max(size // by, 1) * by}")
    return size // by


def _latent_grid(sizes: Sizes, by: int, *, height: int, width: int) -> tuple[int, int]:
    return _divided("height", sizes.height or height, by), _divided("width", sizes.width or width, by)


def _latent_frames(sizes: Sizes, by: int, *, frames: int) -> int:
    chosen = sizes.frames or frames
    if chosen % by != 1:
        raise ConfigError(
            f"shapes: frames: {chosen} is no multiple of {by} and one more; give one, such as {chosen // by * by + 1}"
        )
    return chosen // by + 1


def _flux(model: Any, sizes: Sizes, values: _Values) -> Inputs:
    config, batch, tokens = model.config, sizes.batch, sizes.tokens or 512
    rows, columns = _latent_grid(sizes, 16, height=1024, width=1024)
    second = type(model).__name__ == "Flux2Transformer2DModel"
    axes = len(config.axes_dims_rope)
    image_ids, text_ids = values.grid(rows, columns, axes=axes), values.full(0, tokens, axes)
    inputs: Inputs = {
        "hidden_states": values.normal(batch, rows * columns, config.in_channels),
        "encoder_hidden_states": values.normal(batch, tokens, config.joint_attention_dim),
        "timestep": values.full(0.5, batch),
        "img_ids": image_ids.expand(batch, -1, -1) if second else image_ids,
        "txt_ids": text_ids.expand(batch, -1, -1) if second else text_ids,
        "return_dict": False,
    }
    if not second:
        inputs["pooled_projections"] = values.normal(batch, config.pooled_projection_dim)
    if getattr(config, "guidance_embeds", second):
        inputs["guidance"] = values.full(3.5, batch)
    return inputs


def _qwen_image(model: Any, sizes: Sizes, values: _Values) -> Inputs:
    config, batch, tokens = model.config, sizes.batch, sizes.tokens or 512
    rows, columns = _latent_grid(sizes, 16, height=1328, width=1328)
    inputs: Inputs = {
        "hidden_states": values.normal(batch, rows * columns, config.in_channels),
        "encoder_hidden_states": values.normal(batch, tokens, config.joint_attention_dim),
        "timestep": values.full(0.5, batch),
        "img_shapes": [[(1, rows, columns)]] * batch,
        "return_dict": False,
    }
    if getattr(config, "guidance_embeds", False):
        inputs["guidance"] = values.full(3.5, batch)
    # Before diffusers 0.37 the lengths of the texts were arguments.
    if "txt_seq_lens" in inspect.signature(model.forward).parameters:
        inputs["encoder_hidden_states_mask"] = values.full(1, batch, tokens, dtype=torch.long)
        inputs["txt_seq_lens"] = [tokens] * batch
    return inputs


def _sd3(model: Any, sizes: Sizes, values: _Values) -> Inputs:
    config, batch = model.config, sizes.batch
    rows, columns = _latent_grid(sizes, 16, height=1024, width=1024)
    return {
        "hidden_states": values.normal(batch, config.in_channels, 2 * rows, 2 * columns),
        "encoder_hidden_states": values.normal(batch, sizes.tokens or 333, config.joint_attention_dim),
        "pooled_projections": values.normal(batch, config.pooled_projection_dim),
        "timestep": values.full(500, batch),
        "return_dict": False,
    }


def _wan(model: Any, sizes: Sizes, values: _Values) -> Inputs:
    config, batch = model.config, sizes.batch
    rows, columns = _latent_grid(sizes, 16, height=480, width=832)
    frames = _latent_frames(sizes, 4, frames=81)
    inputs: Inputs = {
        "hidden_states": values.normal(batch, config.in_channels, frames, 2 * rows, 2 * columns),
        "timestep": values.full(500, batch, dtype=torch.long),
        "encoder_hidden_states": values.normal(batch, sizes.tokens or 512, config.text_dim),
        "return_dict": False,
    }
    if getattr(config, "image_dim", None):
        # What the image encoder (CLIP, 257 patches) says of the first frame.
        inputs["encoder_hidden_states_image"] = values.normal(batch, 257, config.image_dim)
    return inputs


def _ltx(model: Any, sizes: Sizes, values: _Values) -> Inputs:
    config, batch, tokens = model.config, sizes.batch, sizes.tokens or 128
    rows, columns = _latent_grid(sizes, 32, height=480, width=704)
    frames = _latent_frames(sizes, 8, frames=161)
    return {
        "hidden_states": values.normal(batch, frames * rows * columns, config.in_channels),
        "encoder_hidden_states": values.normal(batch, tokens, config.caption_channels),
        "encoder_attention_mask": values.full(1, batch, tokens, dtype=torch.long),
        "timestep": values.full(500, batch, dtype=torch.long),
        "num_frames": frames,
        "height": rows,
        "width": columns,
        "return_dict": False,
    }


def _is_text(model: Any) -> bool:
    config = getattr(model, "config", None)
    # Of encoder-decoder models only the encoders take nothing but tokens.
    whole = getattr(config, "is_encoder_decoder", False) and not type(model).__name__.endswith("EncoderModel")
    return getattr(model, "main_input_name", "") == "input_ids" and hasattr(config, "vocab_size") and not whole


def _text(model: Any, sizes: Sizes, values: _Values) -> Inputs:
    config = model.config
    causal = type(model).__name__.endswith("ForCausalLM")
    tokens = sizes.tokens or min(2048 if causal else 512, getattr(config, "max_position_embeddings", 2048))
    inputs: Inputs = {"input_ids": values.ids(config.vocab_size, sizes.batch, tokens), "return_dict": False}
    if getattr(config, "use_cache", False) and not type(model).__name__.endswith("EncoderModel"):
        inputs["use_cache"] = False
    return inputs


_MAKERS: dict[str, Callable[[Any, Sizes, _Values], Inputs]] = {
    "FluxTransformer2DModel": _flux,
    "Flux2Transformer2DModel": _flux,
    "LTXVideoTransformer3DModel": _ltx,
    "QwenImageTransformer2DModel": _qwen_image,
    "SD3Transformer2DModel": _sd3,
    "WanTransformer3DModel": _wan,
}
_WITHOUT: dict[Callable[[Any, Sizes, _Values], Inputs], tuple[str, ...]] = {
    _flux: ("frames",),
    _qwen_image: ("frames",),
    _sd3: ("frames",),
    _text: ("height", "width", "frames"),
}
"""Sizes that say nothing of a family's inputs."""
