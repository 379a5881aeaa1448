"""A diffusion transformer whose blocks hold modules of modules. Tiny, or of the size of a published one on the meta device."""

from __future__ import annotations

import torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(d, 6 * d), nn.Linear(d, 2 * d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v, _, _, _ = self.qkv(x).chunk(6, dim=-1)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v)).chunk(2, dim=-1)[0]


class Mlp(nn.Module):
    """Holds its layers in a container, as diffusers does, and calls them one by one."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU(), nn.Linear(4 * d, d))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.net:
            x = layer(x)
        return x


class DiTBlock(nn.Module):
    """Modulation, attention and two MLPs: 6, 8, 8 and 8 matrices of d * d. At d = 3072 about a block of Qwen-Image or FLUX.1."""

    def __init__(self, d: int) -> None:
        super().__init__()
        self.mod = nn.Sequential(nn.SiLU(), nn.Linear(d, 6 * d))
        self.attn, self.mlp, self.mlp_text = Attention(d), Mlp(d), Mlp(d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(x * self.mod(x).chunk(6, dim=-1)[1])
        return x + self.mlp(x) + self.mlp_text(x)


class DiT(nn.Module):
    def __init__(self, n: int = 3, d: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(DiTBlock(d) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x
