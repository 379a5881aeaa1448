"""Which weights are offloaded: all, or those of the modules that `module_names` or `module_filter` choose.

The others stay resident.
"""

from __future__ import annotations

from itertools import chain

import torch

from fxoffload.config import OffloadConfig, nearest
from fxoffload.errors import ConfigError


def selected_weights(config: OffloadConfig, root: torch.nn.Module | None) -> frozenset[int] | None:
    """`id`s of the tensors of the chosen modules, or None for all.

    Raises AttributeError for a name that is no module of the model (with the nearest names), ConfigError when nothing is chosen.
    """
    if config.module_names is None and config.module_filter is None:
        return None
    if root is None:
        raise ConfigError(
            "select: module_names: the compiled function belongs to no module, so its names are unknown; "
            "compile the module itself, or leave module_names and module_filter out"
        )
    modules = dict(root.named_modules())
    if config.module_names is not None:
        for name in config.module_names:
            if name not in modules:
                known = nearest(name, modules)
                raise AttributeError(f"select: module_names: {type(root).__name__} has no module {name!r}; {known}")
        chosen = [modules[name] for name in config.module_names]
    else:
        assert config.module_filter is not None
        chosen = [module for name, module in modules.items() if config.module_filter(name, module)]
    found = frozenset(id(tensor) for module in chosen for tensor in chain(module.parameters(), module.buffers()))
    if not found:
        option = "module_filter" if config.module_names is None else "module_names"
        raise ConfigError(f"select: {option}: no module with weights is chosen; choose at least one, or leave it out")
    return found
