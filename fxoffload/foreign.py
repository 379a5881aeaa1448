"""Hooks of other libraries that move weights too. Both at once would pull weights away under each other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from fxoffload.errors import OffloadError

_CASTING = "layerwise_casting"
_GROUP_OFFLOAD = ("group_offloading", "lazy_prefetch_group_offloading", "layer_execution_tracker")


def refuse_foreign_hooks(root: torch.nn.Module) -> None:
    """Raise OffloadError that names the first such hook, and the call that removes it."""
    for name, what, remedy in _foreign_hooks(root):
        where = f"{type(root).__name__}.{name}" if name else type(root).__name__
        raise OffloadError(f"foreign: {where}: {what} moves its weights already; call {remedy} first")


def cast_weights(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Weights that layerwise casting of diffusers keeps in one dtype and converts to another around every use."""
    for module in root.modules():
        registry: Any = vars(module).get("_diffusers_hook")
        if registry is not None and _CASTING in registry.hooks:
            yield from module.parameters()
            yield from module.buffers()


def _foreign_hooks(root: torch.nn.Module) -> Iterator[tuple[str, str, str]]:
    for name, module in root.named_modules():
        attributes: dict[str, Any] = vars(module)
        if "_hf_hook" in attributes:
            hook = type(attributes["_hf_hook"]).__name__
            yield name, f"{hook} of accelerate", "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
        registry = attributes.get("_diffusers_hook")
        if registry is not None:
            for key in registry.hooks:
                if key in _GROUP_OFFLOAD:
                    yield (
                        name,
                        f"group offloading of diffusers ({key!r})",
                        f"diffusers.hooks.HookRegistry.check_if_exists_or_initialize(model).remove_hook({key!r}, recurse=True)",
                    )
