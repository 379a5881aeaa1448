"""Sessions of other projects, each by its public calls as its documentation shows them. They are imported when they are used."""

# A limit of Dynamo is a private name of torch. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from fxoffload.errors import ConfigError
from fxoffload.sessions import FLAGS, Scene, Session, Setting
from fxoffload.sizes import parse_size
from fxoffload.twoblock import TwoBlockHooks

_TRIES = 4
_MORE_TRIES = 3
"""With another look-ahead. A try takes ten seconds for a model of real size, and there is one budget after another."""
_LOOK_AHEAD, _LEAST_LOOK_AHEAD = 2, 1
"""Targets that Cache-DiT may have ahead of use where its flags are fitted, and where nothing fits with so many."""
_PUBLISHED_LOOK_AHEAD = 4
"""As in the row of its page with the most residents, which caps no bytes."""
_GROUPS_RECOMPILE_LIMIT = 1000
"""As on the page of diffusers, there by the setting's older name `cache_size_limit`."""


class CacheDit(Session):
    """Cache-DiT's `layerwise_offload`; a setting is its keywords. Its targets are leaf modules, as it chooses them.

    It can be told to take blocks, but then its asynchronous transfers (1.5.3) move a block's own tensors alone, and those of the
    modules inside stay on the host. What it has no target for (weights directly on a block or on the root) stays on the device.
    """

    def apply(self, setting: Setting) -> None:
        self._offload(setting)
        if self.compiled:
            # As its page does it: the whole model, hooks and all.
            self.runs = torch.compile(self.scene.model, backend=self.scene.compiler)

    def undo(self) -> None:
        self._handle.remove()

    def targets(self) -> list[torch.nn.Module]:
        return [module for module in self.scene.model.modules() if next(module.children(), None) is None]

    def _offload(self, flags: Mapping[str, Any]) -> None:
        needs_accelerator(self.scene, "Cache-DiT's layerwise offload")
        cache_dit: Any = importlib.import_module("cache_dit")
        move_outside(self.scene.model, self.targets(), self.scene.device)
        self._handle = cache_dit.layerwise_offload(
            self.scene.model, onload_device=self.scene.device, offload_device="cpu", **flags
        )


class CacheDitFitted(CacheDit):
    """Cache-DiT with the fastest flags that were found for a budget."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        sizes = [sum(p.nbytes for p in module.parameters()) for module in self.targets()]
        self.target_nbytes = [nbytes for nbytes in sizes if nbytes]

    def apply(self, setting: Setting) -> None:
        self._offload(setting[FLAGS])

    def next_try(self, setting: Setting, tried: Sequence[tuple[Setting, int | None]]) -> Setting | None:
        needs_accelerator(self.scene, "flags that fit what an allocator reserves")
        if FLAGS in setting:
            return None if tried else setting
        budget_nbytes = parse_size(setting["budget"], what="--budgets")
        look_ahead, counts = _LOOK_AHEAD, _counts(tried, _LOOK_AHEAD)
        count = next_count(budget_nbytes, self.target_nbytes, counts)
        if count is None:
            found = max((count for count, reserved in counts if reserved <= budget_nbytes), default=None)
            look_ahead = _LEAST_LOOK_AHEAD if found is None else _PUBLISHED_LOOK_AHEAD
            counts = _counts(tried, look_ahead)
            count = next_count(budget_nbytes, self.target_nbytes, counts, first=found or 0, most=_MORE_TRIES)
        return None if count is None else {**setting, FLAGS: self._flags(look_ahead, count)}

    def _flags(self, look_ahead: int, count: int) -> dict[str, Any]:
        flags: dict[str, Any] = {
            "async_transfer": True, "transfer_buckets": look_ahead, "prefetch_limit": True, "persistent_buckets": count,
            "persistent_bins": max(count, 1),
        }  # fmt: skip
        if look_ahead != _PUBLISHED_LOOK_AHEAD:
            flags["max_inflight_prefetch_bytes"] = look_ahead * max(self.target_nbytes)
        return flags


def _counts(tried: Sequence[tuple[Setting, int | None]], look_ahead: int) -> list[tuple[int, int]]:
    """Of the tries with this look-ahead: targets kept resident, and the reserved peak."""
    flags = [(before[FLAGS], reserved or 0) for before, reserved in tried]
    return [(int(f["persistent_buckets"]), reserved) for f, reserved in flags if f["transfer_buckets"] == look_ahead]


def next_count(
    budget_nbytes: int, target_nbytes: Sequence[int], tried: Sequence[tuple[int, int]], *, first: int = 0, most: int = _TRIES
) -> int | None:
    """How many targets to keep resident in the next try, after tries of (count, reserved bytes); None: no more tries.

    From the last try by the mean size: up by what has room, rounded down, or down by what is over, rounded up. Targets differ,
    and an allocator holds more than they take: where that leads to a count that is known to be too large or too small, or two
    tries in a row were over, it is the middle between the largest count within the budget and the smallest one over it.

    >>> next_count(100, [10] * 8, [])
    0
    >>> next_count(100, [10] * 8, [(0, 55)])
    4
    >>> next_count(100, [10] * 8, [(0, 55), (4, 104)])
    3
    >>> next_count(100, [10] * 8, [(0, 55), (4, 104), (3, 93)]) is None
    True
    >>> next_count(100, [10] * 8, [(0, 55), (4, 150)])
    2
    """
    if not tried:
        return first
    # Peaks of equal flags differ: a count may have been over the budget that is smaller than one within it.
    low = max((count for count, reserved in tried if reserved <= budget_nbytes), default=-1)
    high = min((count for count, reserved in tried if reserved > budget_nbytes and count > low), default=len(target_nbytes) + 1)
    count, reserved = tried[-1]
    guess = min(count + int((budget_nbytes - reserved) // (sum(target_nbytes) / len(target_nbytes))), len(target_nbytes))
    has_no_room = guess == count and reserved <= budget_nbytes
    if len(tried) >= most or high - low < 2 or has_no_room:
        return None
    is_misled = len(tried) > 1 and all(reserved > budget_nbytes for _, reserved in tried[-2:])
    return guess if low < guess < high and not is_misled else (low + high) // 2


class Groups(Session):
    """diffusers' group offloading, of the module that holds the blocks; all else of the model stays on the device.

    Compiled as its page on compilation and offloading does it: the whole model, with its hooks, and Dynamo's limit on compiling a
    function again raised, since blocks differ by their hooks.
    """

    def __init__(self, scene: Scene, *, level: str, streams: bool, record: bool, compiled: bool) -> None:
        super().__init__(scene, compiled=compiled)
        self._arguments: dict[str, Any] = {"offload_type": f"{level}_level", "use_stream": streams, "record_stream": record}
        if level == "block":
            self._arguments["num_blocks_per_group"] = 1

    def apply(self, setting: Setting) -> None:
        if self._arguments["use_stream"]:
            needs_accelerator(self.scene, "diffusers' groups with streams")
        hooks: Any = importlib.import_module("diffusers.hooks")
        model, device = self.scene.model, self.scene.device
        path = self.scene.workload.blocks[0].rpartition(".")[0]
        owner = model.get_submodule(path)
        host = torch.device("cpu")
        hooks.apply_group_offloading(owner, onload_device=device, offload_device=host, **self._arguments, **setting)
        move_outside(model, [owner], device)
        if self.compiled:
            torch._dynamo.config.recompile_limit = _GROUPS_RECOMPILE_LIMIT
            self.runs = torch.compile(model, backend=self.scene.compiler)


class TwoBlocks(Session):
    """The two-block scheme, on the blocks."""

    def apply(self, setting: Setting) -> None:
        del setting
        blocks = self.scene.blocks()
        if self.compiled:
            for block in blocks:
                block.forward = torch.compile(block.forward, backend=self.scene.compiler)
        self._hooks = TwoBlockHooks(self.scene.model, blocks, self.scene.device)

    def facts(self) -> dict[str, Any]:
        return {"copied_nbytes": self._hooks.nbytes_copied}


class Sequential(Session):
    """accelerate's `cpu_offload`, which `enable_sequential_cpu_offload` of diffusers calls."""

    def apply(self, setting: Setting) -> None:
        del setting
        accelerate: Any = importlib.import_module("accelerate")
        accelerate.cpu_offload(self.scene.model, execution_device=self.scene.device)


class WholeModel(Session):
    """`enable_model_cpu_offload` of diffusers for one model: it moves to the device at its first call, and stays for the run."""

    def apply(self, setting: Setting) -> None:
        del setting
        accelerate: Any = importlib.import_module("accelerate")
        accelerate.cpu_offload_with_hook(self.scene.model, self.scene.device)


def needs_accelerator(scene: Scene, what: str) -> None:
    """Raises ConfigError on the CPU device."""
    if scene.device.type == "cpu":
        raise ConfigError(f"peers: {scene.workload.name}: {what}: only on an accelerator")


def move_outside(model: torch.nn.Module, targets: Iterable[torch.nn.Module], device: torch.device) -> None:
    """Move every parameter and buffer that no target has to the device."""
    inside = {module for target in targets for module in target.modules()}
    for module in model.modules():
        if module not in inside:
            module._apply(lambda tensor: tensor.to(device), recurse=False)
