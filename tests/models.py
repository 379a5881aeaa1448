"""Tiny models with random weights; nothing is downloaded. Every weight has a value that matters: no zero gates, no unit norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Inputs = dict[str, Any]


class Block(nn.Module):
    """A residual block: norm, up, down."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.up = nn.Linear(d, 2 * d)
        self.down = nn.Linear(2 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Toy(nn.Module):
    """Linear in, `n` residual blocks, Linear out."""

    def __init__(self, n: int, d: int = 16) -> None:
        super().__init__()
        self.inp = nn.Linear(d, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(n))
        self.out = nn.Linear(d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Reversed(Toy):
    """Runs its blocks in reverse of their declared order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in reversed(self.blocks):
            x = block(x)
        return self.out(x)


class Counting(nn.Module):
    """Every block counts its calls, and remembers its last input, of `rows` rows."""

    def __init__(self, n: int = 5, d: int = 16, rows: int = 3) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Counting(d, rows) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Counting(nn.Module):
    n: torch.Tensor
    last: torch.Tensor

    def __init__(self, d: int, rows: int) -> None:
        super().__init__()
        self.proj = nn.Linear(d, d)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))
        self.register_buffer("last", torch.zeros(rows, d), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        x = x + self.proj(x).tanh() * self.n + self.last * 0.1
        self.last.copy_(x)
        return x


@torch.library.custom_op("fxoffload_tests::perhaps", mutates_args=())
def _perhaps(x: torch.Tensor, k: int) -> torch.Tensor:
    if k in failing:
        raise failing[k]
    return x.clone()


@_perhaps.register_fake
def _(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty_like(x)


failing: dict[int, BaseException] = {}
"""What raises before the blocks of `Failing`, by their numbers."""


class Failing(Toy):
    """Raises before a block when the test says so."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for k, block in enumerate(self.blocks):
            x = block(_perhaps(x, k))
        return self.out(x)


class Towers(nn.Module):
    """Two containers in a container, and one block that is called after each."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.shared = nn.Linear(d, d)
        self.towers = nn.ModuleList(nn.ModuleList(nn.Linear(d, d) for _ in range(2)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for tower in self.towers:
            for layer in tower:
                x = layer(x).relu()
            x = self.shared(x)
        return x


def seeded(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Build a model under a seed, in eval mode and without gradients, and give every weight a value that matters."""
    torch.manual_seed(seed)
    model = make().eval().requires_grad_(False)
    for tensor in model.parameters():
        if tensor.is_floating_point() and tensor.dim() < 2:
            tensor.add_(torch.randn(tensor.shape).to(tensor.dtype) * 0.3)
    return model


def toy(n: int = 4, d: int = 16, *, seed: int = 0) -> Toy:
    model = seeded(lambda: Toy(n, d), seed)
    assert isinstance(model, Toy)
    return model


def rows(k: int, d: int = 16, n: int = 3) -> torch.Tensor:
    """The `k`-th input of a Toy: others for other `k`."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(k))


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and its `k`-th inputs: others for other `k`, of the same shapes."""

    make: Callable[[], nn.Module]
    inputs: Callable[[], Inputs]

    def build(self) -> nn.Module:
        return seeded(self.make)

    def given(self, k: int) -> Inputs:
        torch.manual_seed(1000 + k)
        return self.inputs()


def first(result: Any) -> torch.Tensor:
    """The tensor in what a model returns."""
    return result if isinstance(result, torch.Tensor) else result[0]


def _ids(batch: int, length: int) -> torch.Tensor:
    return torch.randint(0, 100, (batch, length))


def _flux() -> nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )


def _flux_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 32),
        "timestep": torch.rand(1),
        "img_ids": torch.randn(16, 3),
        "txt_ids": torch.randn(8, 3),
        "guidance": torch.rand(1) * 4,
        "return_dict": False,
    }


def _flux2() -> nn.Module:
    from diffusers import Flux2Transformer2DModel

    return Flux2Transformer2DModel(
        patch_size=1,
        in_channels=4,
        num_layers=2,
        num_single_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=32,
        timestep_guidance_channels=32,
        mlp_ratio=2.0,
        axes_dims_rope=(4, 4, 4, 4),
    )


def _flux2_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 16, 4),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "timestep": torch.rand(1),
        "img_ids": torch.randn(1, 16, 4),
        "txt_ids": torch.randn(1, 8, 4),
        "guidance": torch.rand(1) * 4,
        "return_dict": False,
    }


def _wan() -> nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(
        patch_size=(1, 2, 2),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=16,
        freq_dim=32,
        ffn_dim=32,
        num_layers=3,
        cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )


def _wan_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 4, 2, 8, 8),
        "timestep": torch.randint(0, 1000, (1,)),
        "encoder_hidden_states": torch.randn(1, 8, 16),
        "return_dict": False,
    }


def _qwen_image() -> nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel(
        patch_size=2,
        in_channels=16,
        out_channels=4,
        num_layers=3,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=16,
        axes_dims_rope=(8, 4, 4),
    )


def _qwen_image_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 16, 16),
        "encoder_hidden_states": torch.randn(1, 7, 16),
        "encoder_hidden_states_mask": torch.ones(1, 7, dtype=torch.long),
        "timestep": torch.rand(1),
        "img_shapes": [(1, 4, 4)],
        "return_dict": False,
    }


def _sd3() -> nn.Module:
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=8,
        patch_size=1,
        in_channels=4,
        num_layers=3,
        attention_head_dim=8,
        num_attention_heads=4,
        caption_projection_dim=32,
        joint_attention_dim=32,
        pooled_projection_dim=64,
        out_channels=4,
        pos_embed_max_size=8,
        dual_attention_layers=(0, 1),
        qk_norm="rms_norm",
    )


def _sd3_inputs() -> Inputs:
    return {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "pooled_projections": torch.randn(1, 64),
        "timestep": torch.rand(1),
        "return_dict": False,
    }


def _t5() -> nn.Module:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(
        T5Config(vocab_size=100, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_heads=4, feed_forward_proj="gated-gelu")
    )


def _t5_inputs() -> Inputs:
    return {"input_ids": _ids(1, 8), "attention_mask": torch.ones(1, 8, dtype=torch.long), "return_dict": False}


def _llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def _qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=100,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            tie_word_embeddings=True,
        )
    )


def _causal_inputs() -> Inputs:
    return {"input_ids": _ids(2, 8), "use_cache": False, "return_dict": False}


CASES: dict[str, Case] = {
    "toy": Case(lambda: Toy(5), lambda: {"x": torch.randn(3, 16)}),
    "towers": Case(Towers, lambda: {"x": torch.randn(3, 16)}),
    "flux": Case(_flux, _flux_inputs),
    "flux2": Case(_flux2, _flux2_inputs),
    "wan": Case(_wan, _wan_inputs),
    "qwen_image": Case(_qwen_image, _qwen_image_inputs),
    "sd3": Case(_sd3, _sd3_inputs),
    "t5": Case(_t5, _t5_inputs),
    "llama": Case(_llama, _causal_inputs),
    "qwen3_tied": Case(_qwen3, _causal_inputs),
}
