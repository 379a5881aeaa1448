"""The two-block scheme of vLLM-Omni's layerwise offloading, written anew from its description, to be measured beside ours.

    block k     before its forward      forward            after its forward
    0           prefetch block 1        compute block 0    free block 0
    ...
    last        prefetch block 0        compute last       free the last block

Parameters and buffers of a block lie in one flat pinned host tensor for each dtype. A prefetch allocates device memory of that
size on a copy stream, behind what the compute stream has been given so far, copies each flat tensor whole and makes the block's
tensors views of it. After its forward a block waits for the prefetch that it issued, and its own tensors become empty. So two
blocks are on the device at a time, and compute of one block overlaps one copy. All else of the model stays on the device.

It is no copy of vLLM-Omni's code, and is called "two-block hooks" wherever it is shown. On the CPU device copies run in turn.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from fxoffload.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Flat:
    """Tensors of one dtype of a block, side by side in one host tensor."""

    host: torch.Tensor
    tensors: tuple[torch.Tensor, ...]
    shapes: tuple[torch.Size, ...]


class TwoBlockHooks:
    """The scheme on one model, from construction to `remove`.

    `model` is on the host; `blocks` run in this order in every forward. `nbytes_copied` counts the last forward's copies.
    Where blocks are compiled, it is their `forward` that should be, so that hooks stay outside and break no graph.
    Raises ConfigError for fewer than two blocks.
    """

    def __init__(self, model: torch.nn.Module, blocks: Sequence[torch.nn.Module], device: torch.device) -> None:
        if len(blocks) < 2:
            raise ConfigError(f"twoblock: {type(model).__name__}: it has {len(blocks)} blocks, and the scheme needs two")
        self.device = device
        self.nbytes_copied = 0
        self._copying = torch.Stream(device) if device.type != "cpu" else None
        self._fetched: list[Any] = [None] * len(blocks)
        self._blocks = [_pack(block, device) for block in blocks]
        model.to(device)
        self._handles = [handle for i, block in enumerate(blocks) for handle in self._hook(i, block)]
        self._fetch(0)

    def remove(self) -> None:
        """Take the hooks away and put the weights back on the host."""
        for handle in self._handles:
            handle.remove()
        if self._copying is not None:
            torch.accelerator.synchronize(self.device)
        for flats in self._blocks:
            for flat in flats:
                _bind(flat, flat.host)

    def _hook(self, i: int, block: torch.nn.Module) -> list[Any]:
        following = (i + 1) % len(self._blocks)

        def before(*_: Any) -> None:
            if i == 0:
                self.nbytes_copied = 0
            self._fetch(following)

        def after(*_: Any) -> None:
            self._wait(following)
            for flat in self._blocks[i]:
                _empty(flat, self.device)

        return [block.register_forward_pre_hook(before), block.register_forward_hook(after)]

    def _fetch(self, i: int) -> None:
        on_copy_stream: AbstractContextManager[Any] = nullcontext()
        if self._copying is not None:
            self._copying.wait_stream(torch.accelerator.current_stream(self.device))
            on_copy_stream = self._copying
        with on_copy_stream:
            for flat in self._blocks[i]:
                there = torch.empty_like(flat.host, device=self.device, pin_memory=False)
                there.copy_(flat.host, non_blocking=True)
                _bind(flat, there)
                self.nbytes_copied += flat.host.nbytes
            if self._copying is not None:
                self._fetched[i] = self._copying.record_event()

    def _wait(self, i: int) -> None:
        if self._copying is not None:
            torch.accelerator.current_stream(self.device).wait_event(self._fetched[i])


def _pack(block: torch.nn.Module, device: torch.device) -> list[_Flat]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = defaultdict(list)
    for tensor in chain(block.parameters(), block.buffers()):
        by_dtype[tensor.dtype].append(tensor)
    flats: list[_Flat] = []
    for dtype, tensors in by_dtype.items():
        host = torch.empty(sum(t.numel() for t in tensors), dtype=dtype, pin_memory=device.type != "cpu")
        flat = _Flat(host, tuple(tensors), tuple(t.shape for t in tensors))
        torch.cat([t.detach().flatten() for t in tensors], out=host)
        _empty(flat, device)
        flats.append(flat)
    return flats


def _bind(flat: _Flat, whole: torch.Tensor) -> None:
    """Make the tensors views of `whole`, which is laid out as the host tensor."""
    offset = 0
    for tensor, shape in zip(flat.tensors, flat.shapes, strict=True):
        tensor.data = whole[offset : offset + shape.numel()].view(shape)
        offset += shape.numel()


def _empty(flat: _Flat, device: torch.device) -> None:
    for tensor in flat.tensors:
        tensor.data = torch.empty((), dtype=tensor.dtype, device=device)
