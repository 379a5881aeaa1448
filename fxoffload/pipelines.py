"""Pipelines: every module component is a model of its own, and all of them share one budget.

The component that runs has the whole budget. Text encoders, which run once for many steps, are streamed with little memory; what
runs in every step gets what the planner finds best.
"""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any

import torch

from fxoffload.accepted import nearest
from fxoffload.budget import Budget
from fxoffload.components import (
    GROUP,
    all_components,
    find_components,
    find_pipelines,
    hold_pipeline,
    members_of,
    release_pipeline,
)
from fxoffload.config import OffloadConfig
from fxoffload.devices import available_device
from fxoffload.engine import Stats
from fxoffload.errors import BudgetError, ConfigError, OffloadWarning
from fxoffload.handle import LayerwiseOffloadHandle, handle_of, offload_module
from fxoffload.layout import overlapping
from fxoffload.owner import named_tensors
from fxoffload.select import nbytes_below
from fxoffload.sizes import show_size
from fxoffload.units import BLOCKS_ATTRS, block_names

TEXT_ENCODERS = ("text_encoder*", "vision_language_encoder")
DENOISERS = ("transformer*", "unet*", "dit*")
"""Names of components, nested ones by their last part."""
_TEXT_SETTINGS = {"transfer_buckets": 1, "persistent_buckets": 0}
"""A text encoder runs once for many steps: memory is better spent on what runs in every step."""

Module = torch.nn.Module


class LayerwiseOffloadHandleGroup:
    """The handles of a pipeline's components. Leaving a `with` block of it removes the offloading.

    `resident`: components that were moved to the onload device to stay there, and where they were before.
    """

    def __init__(
        self,
        source: Any,
        handles: Mapping[str, LayerwiseOffloadHandle],
        resident: Mapping[str, tuple[Module, torch.device]],
        device: torch.device,
    ) -> None:
        """Not for direct use: `layerwise_offload` makes groups."""
        self.source = source
        """The pipeline."""
        self.root_names = tuple(handles)
        """Names of the offloaded components."""
        self.handles = tuple(handles.values())
        self.resident_names = tuple(resident)
        """Names of components that stay on the onload device."""
        self.onload_device = device
        self._resident = dict(resident)
        former = group_of(source)
        if former is not None:
            # Its handles were removed one by one.
            former.remove()
        self._pipelines = [pipeline for _, pipeline in find_pipelines(source)]
        for pipeline in self._pipelines:
            hold_pipeline(pipeline, device, self.root_names)
        with suppress(TypeError):
            vars(source)[GROUP] = self

    @property
    def module_names(self) -> tuple[str, ...]:
        """Names of all modules whose weights move together, below the names of their components."""
        pairs = zip(self.root_names, self.handles, strict=True)
        return tuple(f"{root}.{name}" if name else root for root, handle in pairs for name in handle.module_names)

    @property
    def is_removed(self) -> bool:
        """Whether every handle is removed."""
        return all(handle.is_removed for handle in self.handles)

    def __len__(self) -> int:
        return len(self.handles)

    def __iter__(self) -> Iterator[LayerwiseOffloadHandle]:
        return iter(self.handles)

    def __getitem__(self, name: str) -> LayerwiseOffloadHandle:
        """The handle of a component. Raises KeyError for one that is not offloaded."""
        return dict(zip(self.root_names, self.handles, strict=True))[name]

    def stats(self) -> dict[str, Stats]:
        """Counters of every component, by its name."""
        return {name: self[name].stats() for name in self.root_names}

    def smallest_budget(self, *, overlap: bool = True) -> int:
        """The least budget, in bytes, that every component that has run works in: they run in turn.

        Raises OffloadError where none has run.
        """
        ran = [handle for handle in self.handles if handle.plan is not None]
        return max(handle.smallest_budget(overlap=overlap) for handle in ran or self.handles)

    def set_memory_budget(self, memory_budget: int | float | str | Budget) -> None:
        """Another budget for all components together. Raises BudgetError, and changes nothing, where one does not fit."""
        shared = memory_budget if isinstance(memory_budget, Budget) else Budget(memory_budget)
        with ExitStack() as changes:
            _for_all(self.root_names, lambda name: changes.enter_context(self[name].changing_budget(shared)))

    def remove(self, device: torch.device | str | None = None) -> None:
        """Remove the offloading of every component, as `LayerwiseOffloadHandle.remove` does.

        Components that were made resident go to `device`, too, or back to where they were. A second call does nothing.
        """
        for handle in self.handles:
            handle.remove(device)
        for module, before in self._resident.values():
            module.to(before if device is None else device)
        self._resident.clear()
        for pipeline in self._pipelines:
            release_pipeline(pipeline)
        self._pipelines.clear()
        with suppress(TypeError):
            if vars(self.source).get(GROUP) is self:
                del vars(self.source)[GROUP]

    def __enter__(self) -> LayerwiseOffloadHandleGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()

    def __reduce__(self) -> Any:
        """A copy of the pipeline, which has this as an attribute, has none: it is not offloaded."""
        return type(None), ()

    def __repr__(self) -> str:
        what = "removed" if self.is_removed else f"{', '.join(self.root_names)} on {self.onload_device}"
        return f"<LayerwiseOffloadHandleGroup {type(self.source).__name__}: {what}>"


def offload_pipeline(
    pipeline: Any, settings: Mapping[str, Any], component_settings: Mapping[str, Mapping[str, Any]]
) -> LayerwiseOffloadHandleGroup:
    """Offload the components of a pipeline, those that `settings` names or all.

    Raises AttributeError for a component that is not there, ConfigError where there is none with weights. The pipeline is then as
    it was.
    """
    config = OffloadConfig.from_options(settings)
    components = find_components(pipeline)
    if not components:
        what = "it has no component with weights"
        raise ConfigError(f"pipelines: {type(pipeline).__name__}: {what}; give a pipeline, or a torch.nn.Module")
    chosen = _choose(pipeline, components, config)
    shared = config.memory_budget if isinstance(config.memory_budget, Budget) else Budget(config.memory_budget)
    common = {k: v for k, v in settings.items() if k not in {"module_names", "module_filter"}} | {"memory_budget": shared}
    own = _own_settings(pipeline, chosen, component_settings)
    configs = {
        name: OffloadConfig.from_options({**component_defaults(name), **common, "module_names": names or None, **own[name]})
        for name, names in chosen.items()
    }
    device = available_device(config.onload_device)
    _warn_of_others({name: module for name, module in components.items() if name not in chosen}, device)
    _warn_of_parted(components)
    handles = _attach({name: (components[name], configs[name]) for name in chosen})
    return LayerwiseOffloadHandleGroup(pipeline, handles, {}, device)


def keep_resident_but_blocks(pipeline: Any, settings: Mapping[str, Any]) -> LayerwiseOffloadHandleGroup:
    """Offload the blocks of a pipeline's denoisers, and move all else to the onload device."""
    config = OffloadConfig.from_options(settings)
    if config.module_names is not None or config.module_filter is not None:
        option = "module_names" if config.module_names is not None else "module_filter"
        raise ConfigError(f"pipelines: {option}: it does not go with enable_layerwise_offload; use layerwise_offload instead")
    components = find_components(pipeline)
    blocks = {name: block_names(module) for name, module in components.items() if _is_denoiser(name, module)}
    blocks = {name: names for name, names in blocks.items() if names}
    if not blocks:
        raise ConfigError(
            f"pipelines: {type(pipeline).__name__}: none of its components ({', '.join(components)}) is a denoiser with blocks; "
            f"declare them on its class, as {BLOCKS_ATTRS} = ['blocks'], or use layerwise_offload"
        )
    device = available_device(config.onload_device)
    shared = config.memory_budget if isinstance(config.memory_budget, Budget) else Budget(config.memory_budget)
    configs = {
        name: OffloadConfig.from_options({**settings, "memory_budget": shared, "module_names": names})
        for name, names in blocks.items()
    }
    _warn_of_parted(components)
    handles = _attach({name: (components[name], configs[name]) for name in blocks})
    resident = {name: (module, _device_of(module)) for name, module in components.items() if name not in blocks}
    try:
        for module, _ in resident.values():
            module.to(device)
    except BaseException:
        for module, before in resident.values():
            module.to(before)
        for handle in handles.values():
            handle.remove()
        raise
    return LayerwiseOffloadHandleGroup(pipeline, handles, resident, device)


def group_of(pipeline: Any) -> LayerwiseOffloadHandleGroup | None:
    """The group of a pipeline whose components are offloaded, or None."""
    return getattr(pipeline, "__dict__", {}).get(GROUP)


def handles_of(pipeline: Any) -> list[LayerwiseOffloadHandle]:
    """Handles of all components that are offloaded, in the order of the components."""
    return [handle for _, module in all_components(pipeline) if (handle := handle_of(module)) is not None]


def is_named(name: str, patterns: Iterable[str]) -> bool:
    """Whether the last part of a component's name fits one of the patterns."""
    return any(fnmatch.fnmatchcase(name.rpartition(".")[2], pattern) for pattern in patterns)


def _is_denoiser(name: str, module: Module) -> bool:
    return is_named(name, DENOISERS) or any(getattr(type(m), BLOCKS_ATTRS, None) for m in module.modules())


def _attach(models: Mapping[str, tuple[Module, OffloadConfig]]) -> dict[str, LayerwiseOffloadHandle]:
    """Offload all of these modules, or none. Where several do not fit, the error is of the one that needs most."""
    handles: dict[str, LayerwiseOffloadHandle] = {}

    def offload(name: str) -> None:
        handles[name] = offload_module(*models[name])

    try:
        _for_all(models, offload)
    except BaseException:
        for handle in handles.values():
            handle.remove()
        raise
    return handles


def _for_all(names: Iterable[str], act: Callable[[str], object]) -> None:
    """Do something with every component, also when some do not fit: the budget that the error names then works for all."""
    errors: dict[str, BudgetError] = {}
    for name in names:
        try:
            act(name)
        except BudgetError as error:  # noqa: PERF203
            errors[name] = error
    if errors:
        name, worst = max(errors.items(), key=lambda item: item[1].smallest_nbytes)
        raise BudgetError(f"pipelines: {name}: {str(worst).removeprefix('planner: ')}", worst.smallest_nbytes) from worst


def _choose(pipeline: Any, components: Mapping[str, Module], config: OffloadConfig) -> dict[str, list[str]]:
    """Names of the chosen components; for each the modules in it that are named, none for all of it."""
    if config.module_filter is not None:
        chosen: dict[str, list[str]] = {name: [] for name, module in components.items() if config.module_filter(name, module)}
        if not chosen:
            raise ConfigError("pipelines: module_filter: no component is chosen; choose at least one, or leave it out")
        return chosen
    if config.module_names is None:
        return {name: [] for name in components}
    chosen = {}
    for name in config.module_names:
        component, path = _locate(pipeline, components, name)
        chosen.setdefault(component, []).append(path)
    # `""` is all of it.
    return {name: [] if "" in chosen[name] else chosen[name] for name in components if name in chosen}


def _locate(pipeline: Any, components: Mapping[str, Module], name: str) -> tuple[str, str]:
    """The component that a name names, or that holds the module that it names, and the path in it.

    Raises AttributeError for a name that is not there, TypeError for one of something else.
    """
    for known in sorted(components, key=len, reverse=True):
        if name == known or name.startswith(f"{known}."):
            return known, name.removeprefix(known).removeprefix(".")
    member = members_of(pipeline).get(name)
    module = getattr(member, "_orig_mod", member)
    if isinstance(module, Module):
        # The same module under a second name.
        same = [known for known, other in components.items() if other is module]
        if same:
            return same[0], ""
    where = f"pipelines: module_names: {type(pipeline).__name__}"
    if member is not None:
        raise TypeError(f"{where}.{name} is of type {type(member).__name__}, no module with weights; {_one_of(components)}")
    raise AttributeError(f"{where} has no component {name!r}; {nearest(name, components)}")


def _one_of(components: Iterable[str]) -> str:
    return f"give one of {', '.join(map(repr, components))}"


def _own_settings(
    pipeline: Any, chosen: Mapping[str, object], component_settings: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What is set for one component alone. A name counts more than a pattern."""
    own: dict[str, dict[str, Any]] = {name: {} for name in chosen}
    for key in sorted(component_settings, key=lambda key: key in own):
        matching = [name for name in own if name == key or is_named(name, [key])]
        if not matching and not any(c in key for c in "*?["):
            what = f"{type(pipeline).__name__} offloads no component {key!r}"
            raise AttributeError(f"pipelines: component_settings: {what}; {nearest(key, own)}")
        for name in matching:
            own[name].update(component_settings[key])
    return own


def component_defaults(name: str) -> dict[str, Any]:
    return _TEXT_SETTINGS if is_named(name, TEXT_ENCODERS) else {}


def _device_of(module: Module) -> torch.device:
    return next((tensor.device for tensor in (*module.parameters(), *module.buffers())), torch.device("cpu"))


def _warn_of_others(others: Mapping[str, Module], device: torch.device) -> None:
    for name, module in others.items():
        where = _device_of(module)
        if where != device:
            warnings.warn(
                f"pipelines: {name}: it is not chosen, and its {show_size(nbytes_below(module))} of weights stay on "
                f"{str(where)!r}, while the pipeline runs on {str(device)!r}; move it there, or offload it too",
                OffloadWarning,
                stacklevel=4,
            )


def _warn_of_parted(components: Mapping[str, Module]) -> None:
    """Weights of several components over one memory are weights of their own from now on, as after `Module.to`.

    Not those that are one Parameter of several.
    """
    tensors: dict[int, tuple[str, torch.Tensor]] = {}
    component_of: dict[str, str] = {}
    for component, module in components.items():
        for name, tensor in named_tensors(module):
            plain = type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.layout == torch.strided
            if plain and tensor.device.type != "meta":
                path = f"{component}.{name}"
                tensors[id(tensor)], component_of[path] = (path, tensor), component
    for group in overlapping(list(tensors.values())):
        names = [name for name, _ in group]
        if len({component_of[name] for name in names}) > 1:
            warnings.warn(
                f"pipelines: {' and '.join(names)} share memory, and are weights of their own from now on: what is written to "
                "one no longer shows in the others; make them one Parameter of all these modules to keep them tied",
                OffloadWarning,
                stacklevel=4,
            )
