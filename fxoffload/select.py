"""Which weights are offloaded: all, or those of the modules that `module_names` or `module_filter` choose.

The others stay resident.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from fxoffload.accepted import nearest
from fxoffload.config import OffloadConfig
from fxoffload.errors import ConfigError
from fxoffload.wrappers import own_parts


def chosen_modules(config: OffloadConfig, root: torch.nn.Module | None) -> list[torch.nn.Module] | None:
    """The modules that are chosen by name or by filter, or None for all.

    Raises AttributeError for a name that is no module of the model (with the nearest names), ConfigError when nothing with
    weights is chosen.
    """
    if config.module_names is None and config.module_filter is None:
        return None
    if root is None:
        raise ConfigError(
            "select: module_names: the compiled function belongs to no module, so its names are unknown; "
            "compile the module itself, or leave module_names and module_filter out"
        )
    if config.module_names is not None:
        chosen = [_named_module(root, name) for name in config.module_names]
    else:
        assert config.module_filter is not None
        chosen = [module for name, module in root.named_modules() if config.module_filter(name, module)]
    if not any(nbytes_below(module) for module in chosen):
        option = "module_filter" if config.module_names is None else "module_names"
        raise ConfigError(f"select: {option}: no module with weights is chosen; choose at least one, or leave it out")
    return chosen


def selected_weights(config: OffloadConfig, root: torch.nn.Module | None) -> frozenset[int] | None:
    """`id`s of the plain tensors of the chosen modules, or None for all. Raises what `chosen_modules` raises."""
    chosen = chosen_modules(config, root)
    if chosen is None:
        return None
    return frozenset(id(tensor) for module in chosen for _, tensor in tensors_below(module))


def tensors_below(module: torch.nn.Module, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that a module and all below it have, each once, with their names below `name`.

    Parameters, buffers and tensor attributes; of those that consist of several tensors, these.
    """
    seen: set[int] = set()
    for path, child in module.named_modules(prefix=name):
        for key, tensor in own_tensors(child, path):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield key, tensor


def own_tensors(module: torch.nn.Module, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors that the module itself, whose name is `path`, has (`wrappers.own_parts`), with qualified names."""
    yield from ((part.name, tensor) for part, tensor in own_parts(module, path))


def nbytes_below(module: torch.nn.Module) -> int:
    """Bytes of the weights of a module and all below it."""
    return sum(tensor.numel() * tensor.element_size() for _, tensor in tensors_below(module))


def _named_module(root: torch.nn.Module, name: str) -> torch.nn.Module:
    try:
        return root.get_submodule(name)
    except AttributeError:
        known = nearest(name, (known for known, _ in root.named_modules()))
        raise AttributeError(f"select: module_names: {type(root).__name__} has no module {name!r}; {known}") from None
