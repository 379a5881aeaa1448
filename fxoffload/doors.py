"""The front doors: offload a model or a pipeline, with or without a compiler, and remove it again."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import torch

from fxoffload import api
from fxoffload.config import OffloadConfig
from fxoffload.errors import ConfigError
from fxoffload.handle import LayerwiseOffloadHandle, handle_of, offload_module
from fxoffload.pipelines import LayerwiseOffloadHandleGroup, group_of, handles_of, keep_resident_but_blocks, offload_pipeline
from fxoffload.units import BLOCKS_ATTRS, block_names

_F = TypeVar("_F", bound=Callable[..., Any])


def _with_settings(*left_out: str) -> Callable[[_F], _F]:
    """Give a function the settings as keywords with their defaults in its signature, so that `help` shows them."""

    def decorate(function: _F) -> _F:
        signature = inspect.signature(function)
        own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
        devices: Mapping[str, object] = {"onload_device": "cuda", "offload_device": "cpu"}
        settings = [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=devices.get(f.name, f.default), annotation=f.type)
            for f in dataclasses.fields(OffloadConfig)
            if f.name not in left_out
        ]
        function.__signature__ = signature.replace(parameters=[*own, *settings])  # type: ignore[attr-defined]
        return function

    return decorate


@overload
def layerwise_offload(model: torch.nn.Module | LayerwiseOffloadHandle, **settings: Any) -> LayerwiseOffloadHandle: ...
@overload
def layerwise_offload(
    model: Any, *, component_settings: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
) -> LayerwiseOffloadHandle | LayerwiseOffloadHandleGroup: ...
@_with_settings()
def layerwise_offload(
    model: Any, *, component_settings: Mapping[str, Mapping[str, Any]] | None = None, **settings: Any
) -> LayerwiseOffloadHandle | LayerwiseOffloadHandleGroup:
    """Run a model, or the components of a pipeline, with weights that stay in host memory and stream to `onload_device`.

    `model`: a torch.nn.Module, what torch.compile made of one, a handle, or a pipeline: an object with modules in `.components`
    or as attributes. It runs as before, without a compiler; `torch.compile(model, backend="layerwise")` takes the settings over.

    Settings: the fields of `OffloadConfig`. For a pipeline, `module_names` and `module_filter` choose components, the budget is
    one for all of them, and `component_settings` has other settings for some, by name or pattern
    (`{"text_encoder*": {"transfer_buckets": 2}}`). Text encoders have transfer_buckets=1 and persistent_buckets=0 unless given.

    Returns the handle, for a pipeline a group of handles.
    Raises ConfigError for a setting that is not accepted, AttributeError for a name that is not there, BudgetError where the
    weights cannot fit, OffloadError where somebody offloads the model already. All is then as it was.

    >>> model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8))).requires_grad_(False)
    >>> with layerwise_offload(model, memory_budget="100KiB", onload_device="cpu") as handle:
    ...     result = model(torch.ones(1, 64))
    ...     print(handle.stats().nbytes_copied > 0)
    True
    >>> handle.is_removed
    True
    """
    module = _module_of(model)
    if module is not None:
        if component_settings is not None:
            raise ConfigError("doors: component_settings: they are for pipelines, and a module was given; leave them out")
        return offload_module(module, OffloadConfig.from_options(settings))
    return offload_pipeline(_source_of(model), settings, component_settings or {})


@_with_settings("offload_device")
def layerwise_cpu_offload(model: Any, **settings: Any) -> LayerwiseOffloadHandle | LayerwiseOffloadHandleGroup:
    """`layerwise_offload` to host memory, which is its default too."""
    return layerwise_offload(model, **settings, offload_device="cpu")


@_with_settings("module_names", "module_filter")
def enable_layerwise_offload(pipeline: Any, **settings: Any) -> LayerwiseOffloadHandle | LayerwiseOffloadHandleGroup:
    """Stream the blocks of a pipeline's denoisers, and keep everything else on `onload_device`: encoders, VAE, embeddings, norms.

    Denoisers are components named transformer*, unet* or dit*, or of a class that declares its blocks. The budget is for them;
    what the other components take comes on top. For a module: its blocks stream, all else of it stays.
    """
    module = _module_of(pipeline)
    if module is not None:
        names = block_names(module)
        if not names:
            raise ConfigError(
                f"doors: {type(module).__name__}: it has no blocks; declare them on its class, as {BLOCKS_ATTRS} = ['blocks'], "
                "or use layerwise_offload"
            )
        return offload_module(module, OffloadConfig.from_options({**settings, "module_names": names}))
    return keep_resident_but_blocks(_source_of(pipeline), settings)


def remove_layerwise_offload(model: Any, *, device: torch.device | str | None = None) -> int:
    """Remove the offloading of a model or a pipeline, and return how many handles were removed.

    Weights are on `device` then, or on the offload device, with all updates.
    """
    handles = get_layerwise_offload_handles(model)
    for handle in handles:
        handle.remove(device)
    group = _group_of(model)
    if group is not None:
        group.remove(device)
    return len(handles)


def get_layerwise_offload_handles(model: Any) -> list[LayerwiseOffloadHandle]:
    """Handles of what is offloaded in a model or a pipeline; of a model, also of modules inside it."""
    module = _module_of(model)
    if module is not None:
        return [handle for m in module.modules() if (handle := handle_of(m)) is not None]
    if isinstance(model, LayerwiseOffloadHandleGroup):
        return [handle for handle in model if not handle.is_removed]
    return handles_of(model)


def _module_of(model: Any) -> torch.nn.Module | None:
    """The module that a module, a compiled wrapper or a handle stands for; None for a pipeline."""
    try:
        return api.module_of(model)
    except TypeError:
        return None


def _source_of(model: Any) -> Any:
    return model.source if isinstance(model, LayerwiseOffloadHandleGroup) else model


def _group_of(model: Any) -> LayerwiseOffloadHandleGroup | None:
    return model if isinstance(model, LayerwiseOffloadHandleGroup) else group_of(model)
