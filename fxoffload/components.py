"""What a pipeline is made of, and the device that it says it is on.

A diffusers pipeline makes its latents where its weights lie. While its components are offloaded that has to be the onload device,
so until `release_pipeline` this one pipeline has a class of its own, derived from the one it had.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from fxoffload.errors import OffloadError
from fxoffload.select import nbytes_below

GROUP = "_layerwise_offload_group"
"""The attribute that holds the group of a pipeline's handles."""
_CLASS = "_layerwise_offload_class"

Module = torch.nn.Module


def find_components(pipeline: Any) -> dict[str, Module]:
    """Module components by name, each module once; those of a pipeline inside it below that one's name."""
    return {name: module for name, module in all_components(pipeline) if nbytes_below(module)}


def find_pipelines(source: Any) -> list[tuple[str, Any]]:
    """The pipeline and those inside it, with their dotted names, each once."""
    found: list[tuple[str, Any]] = [("", source)]
    for path, pipeline in found:
        for name, value in members_of(pipeline).items():
            if _is_pipeline(value) and all(value is not other for _, other in found):
                found.append((f"{path}.{name}" if path else name, value))
    return found


def all_components(source: Any) -> Iterator[tuple[str, Module]]:
    """Modules with their dotted names, each once, those without weights too."""
    seen: set[int] = set()
    for path, pipeline in find_pipelines(source):
        for name, value in members_of(pipeline).items():
            module = getattr(value, "_orig_mod", value)
            if isinstance(module, Module) and id(module) not in seen:
                seen.add(id(module))
                yield (f"{path}.{name}" if path else name), module


def members_of(pipeline: Any) -> dict[str, Any]:
    """What a pipeline holds, by name: its components first."""
    components = getattr(pipeline, "components", None)
    members: dict[str, Any] = dict(components) if isinstance(components, Mapping) else {}
    attributes = getattr(pipeline, "__dict__", {})
    return {**members, **{name: value for name, value in attributes.items() if name not in members and name != GROUP}}


def _is_pipeline(value: Any) -> bool:
    if isinstance(value, (Module, type, types.ModuleType, types.FunctionType)) or not hasattr(value, "__dict__"):
        return False
    if isinstance(getattr(value, "components", None), Mapping):
        return True
    return any(isinstance(member, Module) for member in vars(value).values())


def hold_pipeline(pipeline: Any, device: torch.device, names: tuple[str, ...]) -> None:
    """Make `device` the device that the pipeline says it is on, and refuse to move its components."""
    kind = type(pipeline)
    replaced = {name: property(lambda _: device) for name in ("_execution_device", "device") if hasattr(kind, name)}
    if not replaced:
        return

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        """As the class's own `to`, for a dtype alone: the components are offloaded."""
        asked = kwargs.get("device", args[0] if args and not isinstance(args[0], torch.dtype) else None)
        if asked is not None:
            raise OffloadError(
                f"pipelines: {kind.__name__}.to({str(asked)!r}): its components ({', '.join(names)}) are offloaded and run on "
                f"{str(device)!r} already; leave the call out (enable_model_cpu_offload and enable_sequential_cpu_offload of "
                "diffusers make it), or call fxoffload.remove_layerwise_offload(pipeline) first"
            )
        return kind.to(self, *args, **kwargs)

    def reduced(self: Any, protocol: Any) -> Any:
        """A deep copy or a pickle is a plain pipeline."""
        reduce: Any = kind.__reduce_ex__
        make, given, *rest = reduce(self, protocol)
        return _made, (make, *(kind if value is type(self) else value for value in given)), *rest

    def copied(self: Any) -> Any:
        """A shallow copy has the same components, which are offloaded."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        return other

    copies = {"__reduce_ex__": reduced, **({"__copy__": copied} if hasattr(pipeline, "__dict__") else {})}
    same = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    moved = {"to": to} if hasattr(kind, "to") else {}
    pipeline.__class__ = type(kind.__name__, (kind,), {**same, **replaced, **moved, **copies, "__slots__": (), _CLASS: kind})


def _made(make: Any, *given: Any) -> Any:
    return make(*given)


def release_pipeline(pipeline: Any) -> None:
    """Give the pipeline its own class back."""
    kind = vars(type(pipeline)).get(_CLASS)
    if kind is not None:
        pipeline.__class__ = kind
