"""Hooks and layers of other libraries that move or convert weights too. Both at once would pull them away under each other."""

# Private names of torch: an error of Dynamo, the tracing context. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch._dynamo.exc import TorchRuntimeError
from torch._guards import TracingContext

from fxoffload.errors import OffloadError
from fxoffload.wrappers import refuse_opaque

_CASTING = "layerwise_casting"
_checked: weakref.ref[TracingContext] | None = None
"""The trace whose model was looked at."""
_INT8_WEIGHT = "Int8Params"
"""The class of 8-bit weights of bitsandbytes."""
_GROUP_OFFLOAD = ("group_offloading", "lazy_prefetch_group_offloading", "layer_execution_tracker")


class TracingRefused(OffloadError, TorchRuntimeError):
    """What is raised while Dynamo traces: it hands errors of its own on, and wraps all others."""


def refuse_foreign_hooks(root: torch.nn.Module) -> None:
    """Raise OffloadError that names the first such hook, and the call that removes it; or a layer that moves its own weight."""
    for name, module in root.named_modules():
        if any(type(parameter).__name__ == _INT8_WEIGHT for parameter in module._parameters.values()):
            raise OffloadError(
                f"foreign: {_where(root, name)}: the 8-bit layers of bitsandbytes hand their weight on to a state of "
                "their own while they run, so it cannot be moved; load the model in 4 bits, or in 8 bits with torchao"
            )
    for name, what, remedy in _foreign_hooks(root):
        raise OffloadError(f"foreign: {_where(root, name)}: {what} moves its weights already; call {remedy} first")


def refuse_untraceable(root: torch.nn.Module | None) -> None:
    """Raise TracingRefused for what Dynamo, which traces this module, would give up without a name.

    That is a weight that hooks convert in place, and one of a class that does not say what it consists of.
    """
    global _checked
    trace = TracingContext.try_get()
    if trace is None or root is None or (_checked is not None and trace is _checked()):
        return
    try:
        _refuse_untraceable(root)
    except OffloadError as error:
        raise TracingRefused(str(error)) from None
    _checked = weakref.ref(trace)


def _refuse_untraceable(root: torch.nn.Module) -> None:
    for name, module in root.named_modules():
        if _casts(module):
            raise OffloadError(
                f"foreign: {_where(root, name)}: layerwise casting of diffusers converts weights in place, which cannot be "
                "compiled; offload the model without a compiler (fxoffload.layerwise_offload), or quantize it with torchao "
                "(Float8WeightOnlyConfig), which streams as few bytes"
            )
        for key, weight in module.named_parameters(name, recurse=False):
            refuse_opaque(key, weight)


def _where(root: torch.nn.Module, name: str) -> str:
    return f"{type(root).__name__}.{name}" if name else type(root).__name__


def _casts(module: torch.nn.Module) -> bool:
    registry: Any = vars(module).get("_diffusers_hook")
    return registry is not None and _CASTING in registry.hooks


def cast_weights(root: torch.nn.Module) -> Iterator[torch.Tensor]:
    """Weights that layerwise casting of diffusers keeps in one dtype and converts to another around every use."""
    for module in root.modules():
        if _casts(module):
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
