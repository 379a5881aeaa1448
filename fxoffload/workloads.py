"""Models to measure, by name: in real size from their published configurations, and as `<name>-tiny`; weights are random.

    flux           FLUX.1-dev          1024 x 1024                       19 double and 38 single blocks
    flux2          FLUX.2-dev          1024 x 1024                       8 double and 48 single blocks
    wan            Wan 2.2 T2V 14B     480 x 832, 81 frames              40 blocks
    qwen-image     Qwen-Image          1328 x 1328, 256 text tokens      60 blocks
    sd3            SD3.5-large         1024 x 1024                       38 blocks
    t5-xxl         T5-XXL encoder      512 tokens                        24 blocks
    llama-prefill  Llama 3.1 8B        8192 tokens, logits of the last   32 blocks
    llama-decode   Llama 3.1 8B        1 token, without a cache          32 blocks

Nothing is downloaded. Real sizes are bfloat16, as `from_pretrained` would load them (parts that a class keeps in float32 stay
so); tiny ones are float32, so that the CPU is fast. No weight is zero or one: a block with the wrong weights shows in the output.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from fxoffload.accepted import nearest
from fxoffload.errors import ConfigError
from fxoffload.metamodel import set_dtype
from fxoffload.shapes import example_inputs
from fxoffload.sizes import show_size

SPREAD = 0.02
"""Standard deviation of the weights."""
_NOISE = 100_000_007
"""Values of noise that all weights are cut from, one after another, round and round: a prime, so that no two blocks are equal."""
_NOISE_TINY = 1_000_003
_TINY_SUFFIX = "-tiny"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and one call of it."""

    name: str
    what: str
    """For people: the model and the size of the call."""
    module: str
    """Where the class of the model is, in diffusers or transformers."""
    kind: str
    """The class."""
    config: Mapping[str, Any]
    """Keyword arguments of the class, or of its configuration in transformers."""
    blocks: tuple[str, ...]
    """Attributes that hold the blocks, in the order in which they run."""
    sizes: Mapping[str, int]
    """As for `shapes.example_inputs`."""
    budgets: tuple[str, ...]
    """Budgets that are measured unless others are asked for."""
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the call besides those of `shapes.example_inputs`."""
    dtype: torch.dtype = torch.bfloat16

    @property
    def is_tiny(self) -> bool:
        return self.name.endswith(_TINY_SUFFIX)


class MissingLibraryError(ConfigError):
    """A workload's library is not installed, or has no such model."""


def find_workload(name: str) -> Workload:
    """The workload of a name. Raises ConfigError, with the nearest names, for one that is not there."""
    if name not in WORKLOADS:
        raise ConfigError(f"workloads: {name!r} is not known; {nearest(name, WORKLOADS)}")
    return WORKLOADS[name]


def make_model(workload: Workload, device: torch.device, *, onload: torch.device | None = None) -> torch.nn.Module:
    """The model with its weights on `device`: the same values for every call, whatever the device.

    `onload`: where it will compute, by default `device`; tensors that are neither parameters nor buffers lie there.
    Raises MissingLibraryError where the library is not installed.
    """
    model = empty_model(workload, onload or device)
    fill(model, device, values=_NOISE_TINY if workload.is_tiny else _NOISE)
    return model.to(device).eval().requires_grad_(False)


def empty_model(workload: Workload, device: torch.device) -> torch.nn.Module:
    """The model with its parameters on the meta device, and everything else on `device`."""
    kind: Any = getattr(_library(workload.module), workload.kind)
    with _without_weights(device):
        takes_config = workload.module.startswith("transformers.")
        model: Any = kind(kind.config_class(**workload.config)) if takes_config else kind(**workload.config)
    if hasattr(model, "tie_weights"):
        model.tie_weights()
    set_dtype(model, workload.dtype)
    return model


def make_inputs(workload: Workload, model: torch.nn.Module, device: torch.device, *, batch: int = 1) -> dict[str, Any]:
    """Keyword arguments of one call of its model: random values, the same for every call."""
    inputs = example_inputs(model, device=device, batch=batch, seed=1, **workload.sizes)
    if "guidance" in inputs:
        # A thousand times this is exact in bfloat16: eager and compiled code round that product at different places.
        inputs["guidance"].fill_(4.0)
    return {**inputs, **workload.more}


def blocks_of(workload: Workload, model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The blocks with their dotted names, in the order in which they run."""
    return [
        (f"{path}.{name}", block)
        for path in workload.blocks
        for name, block in model.get_submodule(path).named_children()
    ]  # fmt: skip


def weight_nbytes(model: torch.nn.Module) -> int:
    """Bytes of the parameters; a tied one counts once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def fill(model: torch.nn.Module, device: torch.device, *, values: int = _NOISE) -> None:
    """Give every parameter, which may be on the meta device, memory on `device` and values cut from the same `values` of noise.

    Tied parameters stay tied.
    """
    noise = torch.randn(values, generator=torch.Generator().manual_seed(0)) * SPREAD
    by_dtype: dict[torch.dtype, torch.Tensor] = {}
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    offset = 0
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in made:
                dtype = parameter.dtype
                if dtype not in by_dtype:
                    by_dtype[dtype] = noise.to(device, dtype)
                tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
                offset = _cut(by_dtype[dtype], offset, tensor)
                made[parameter] = torch.nn.Parameter(tensor, requires_grad=False)
            setattr(module, name, made[parameter])


def _cut(noise: torch.Tensor, offset: int, tensor: torch.Tensor) -> int:
    """Fill a contiguous tensor with noise from `offset` on; returns where the next one goes on."""
    flat, done = tensor.view(-1), 0
    while done < flat.numel():
        count = min(flat.numel() - done, noise.numel() - offset)
        flat[done : done + count] = noise[offset : offset + count]
        done, offset = done + count, (offset + count) % noise.numel()
    return offset


def show(workload: Workload, nbytes: int, batch: int) -> str:
    """`FLUX.1-dev size, 1024x1024, batch 1, 22.17 GiB bfloat16`."""
    return f"{workload.what}, batch {batch}, {show_size(nbytes)} {str(workload.dtype).removeprefix('torch.')}"


@contextmanager
def _without_weights(device: torch.device) -> Generator[None]:
    """Parameters that are made here are on the meta device, everything else is on `device`."""
    accelerate = _library("accelerate")
    with ExitStack() as contexts:
        contexts.enter_context(device)
        contexts.enter_context(accelerate.init_empty_weights(include_buffers=False))
        yield


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        words = f"workloads: {name} cannot be imported ({error}); run: pip install 'fxoffload[bench]'"
        raise MissingLibraryError(words) from error


_BUDGETS = ("2GiB", "4GiB", "6GiB", "8GiB", "16GiB")
_SMALL_BUDGETS = ("1GiB", "2GiB", "4GiB", "6GiB", "8GiB")
_TINY_BUDGETS = ("smallest", "60%")
_DIFFUSERS = "diffusers.models.transformers.transformer_"
_LLAMA = ("transformers.models.llama.modeling_llama", "LlamaForCausalLM")
_FLUX_BLOCKS = ("transformer_blocks", "single_transformer_blocks")
_MEGAPIXEL = {"height": 1024, "width": 1024}
_LLAMA_8B = {
    "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
    "num_key_value_heads": 8, "max_position_embeddings": 16384, "tie_word_embeddings": False,
}  # fmt: skip
_LAST_LOGITS = {"logits_to_keep": 1}

_REAL = (
    Workload(
        "flux", "FLUX.1-dev size, 1024x1024", f"{_DIFFUSERS}flux", "FluxTransformer2DModel", {"guidance_embeds": True},
        _FLUX_BLOCKS, _MEGAPIXEL, _BUDGETS,
    ),
    Workload(
        "flux2", "FLUX.2-dev size, 1024x1024", f"{_DIFFUSERS}flux2", "Flux2Transformer2DModel", {},
        _FLUX_BLOCKS, _MEGAPIXEL, _BUDGETS,
    ),
    Workload(
        "wan", "Wan 2.2 14B size, 480x832, 81 frames", f"{_DIFFUSERS}wan", "WanTransformer3DModel", {},
        ("blocks",), {"height": 480, "width": 832, "frames": 81}, _BUDGETS,
    ),
    Workload(
        "qwen-image", "Qwen-Image size, 1328x1328", f"{_DIFFUSERS}qwenimage", "QwenImageTransformer2DModel", {},
        ("transformer_blocks",), {"height": 1328, "width": 1328, "tokens": 256}, _BUDGETS,
    ),
    Workload(
        "sd3", "SD3.5-large size, 1024x1024", f"{_DIFFUSERS}sd3", "SD3Transformer2DModel",
        {
            "num_layers": 38, "num_attention_heads": 38, "attention_head_dim": 64, "caption_projection_dim": 2432,
            "pos_embed_max_size": 192, "qk_norm": "rms_norm",
        },
        ("transformer_blocks",), _MEGAPIXEL, _BUDGETS,
    ),
    Workload(
        "t5-xxl", "T5-XXL encoder, 512 tokens", "transformers.models.t5.modeling_t5", "T5EncoderModel",
        {
            "vocab_size": 32128, "d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
            "feed_forward_proj": "gated-gelu",
        },
        ("encoder.block",), {"tokens": 512}, _SMALL_BUDGETS,
    ),
    Workload(
        "llama-prefill", "Llama 8B size, 8192 tokens", *_LLAMA, _LLAMA_8B,
        ("model.layers",), {"tokens": 8192}, _BUDGETS, _LAST_LOGITS,
    ),
    Workload(
        "llama-decode", "Llama 8B size, 1 token", *_LLAMA, _LLAMA_8B,
        ("model.layers",), {"tokens": 1}, _SMALL_BUDGETS, _LAST_LOGITS,
    ),
)  # fmt: skip

_HEADS = {"num_attention_heads": 8, "attention_head_dim": 32}
_SQUARE = {"height": 256, "width": 256, "tokens": 32}
_TINY_LLAMA = {
    **_LLAMA_8B, "vocab_size": 2048, "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 6,
    "num_attention_heads": 8,
}  # fmt: skip
_TINY: dict[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "flux": (
        _SQUARE,
        {
            **_HEADS, "in_channels": 16, "num_layers": 2, "num_single_layers": 4, "joint_attention_dim": 64,
            "pooled_projection_dim": 64, "axes_dims_rope": (8, 12, 12), "guidance_embeds": True,
        },
    ),
    "flux2": (
        _SQUARE,
        {
            **_HEADS, "in_channels": 16, "num_layers": 2, "num_single_layers": 4, "joint_attention_dim": 64,
            "timestep_guidance_channels": 32, "axes_dims_rope": (8, 8, 8, 8),
        },
    ),
    "wan": (
        {"height": 128, "width": 128, "frames": 9, "tokens": 32},
        {**_HEADS, "text_dim": 64, "freq_dim": 64, "ffn_dim": 704, "num_layers": 6, "rope_max_seq_len": 32},
    ),
    "qwen-image": (
        _SQUARE,
        {
            **_HEADS, "in_channels": 16, "out_channels": 4, "num_layers": 6, "joint_attention_dim": 64,
            "axes_dims_rope": (8, 12, 12),
        },
    ),
    "sd3": (
        _SQUARE,
        {
            **_HEADS, "sample_size": 32, "num_layers": 6, "joint_attention_dim": 64, "caption_projection_dim": 256,
            "pooled_projection_dim": 64, "pos_embed_max_size": 32, "qk_norm": "rms_norm",
        },
    ),
    "t5-xxl": (
        {"tokens": 64},
        {
            "vocab_size": 2048, "d_model": 256, "d_kv": 32, "d_ff": 704, "num_layers": 6, "num_heads": 8,
            "feed_forward_proj": "gated-gelu",
        },
    ),
    "llama-prefill": ({"tokens": 256}, _TINY_LLAMA),
    "llama-decode": ({"tokens": 1}, _TINY_LLAMA),
}  # fmt: skip


def _tiny(workload: Workload) -> Workload:
    sizes, config = _TINY[workload.name]
    what = f"tiny model of the class {workload.kind}"
    name = workload.name + _TINY_SUFFIX
    return dataclasses.replace(
        workload, name=name, what=what, config=config, sizes=sizes, budgets=_TINY_BUDGETS, dtype=torch.float32
    )


WORKLOADS: dict[str, Workload] = {w.name: w for w in (*_REAL, *map(_tiny, _REAL))}
