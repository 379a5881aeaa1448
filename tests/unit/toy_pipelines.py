"""Pipelines of toy models, for tests of the front doors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import fxoffload
from tests.models import toy
from tests.unit.handles import BUDGET, run


class Plain:
    """A pipeline as anybody writes one: modules as attributes, and other things."""

    def __init__(self) -> None:
        self.text_encoder = toy(4, seed=1)
        self.transformer = toy(6, seed=2)
        self.vae = toy(3, seed=3)
        self.activation = nn.ReLU()
        self.steps = 2

    def __call__(self) -> torch.Tensor:
        text = run(self.text_encoder, 1)[0]
        for _ in range(self.steps):
            with torch.no_grad():
                text = self.transformer(text)
        with torch.no_grad():
            return self.vae(text)


class Placed(Plain):
    """One that says where it is, as those of diffusers do."""

    device = property(lambda self: next(self.transformer.parameters()).device)
    _execution_device = property(lambda self: self.device)

    def to(self, *args: Any, **kwargs: Any) -> Placed:
        for module in (self.text_encoder, self.transformer, self.vae):
            module.to(*args, **kwargs)
        return self


def offload(pipeline: Any, **settings: Any) -> Any:
    return fxoffload.layerwise_offload(pipeline, **{"onload_device": "cpu", "memory_budget": BUDGET, **settings})


def hooked(*modules: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for module in modules for m in module.modules())
