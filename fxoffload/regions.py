"""Regions: mappings of host memory that packed weights lie in.

A mapping lives as long as a tensor lies in it, whoever made it: the store, or `loading`, which reads a checkpoint into memory
laid out as the store would lay it out. So weights that lie in mappings already, those of a bucket side by side, are packed by
taking the mappings over: nothing is copied. That also serves a model whose offloading was removed and comes back, with a compiler
or without.
"""

from __future__ import annotations

import mmap
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fxoffload.buckets import align
from fxoffload.errors import OffloadError
from fxoffload.read import span_nbytes
from fxoffload.sizes import show_size


class _Memory(mmap.mmap):
    """Anonymous memory that is private to the process. `used_nbytes` of it hold weights. `held`: a store has it."""

    used_nbytes = 0
    held = False


_memories: weakref.WeakValueDictionary[int, _Memory] = weakref.WeakValueDictionary()
"""All mappings that live, by address."""


@dataclass(slots=True, eq=False)
class Region:
    """One mapping, with one bucket in it or several side by side."""

    memory: _Memory
    nbytes: int
    address: int
    pinned: bool = False

    def flat(self, offset: int, nbytes: int) -> torch.Tensor:
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=nbytes, offset=offset)

    def hold(self) -> None:
        """A store takes the mapping: no other one may."""
        self.memory.held = True

    def let_go(self) -> None:
        self.memory.held = False


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a bucket lies: `nbytes` of a region from `offset` on."""

    region: Region
    offset: int
    nbytes: int


def new_region(nbytes: int) -> Region:
    """Memory for `nbytes` bytes, page-aligned, none of it touched yet. Raises OffloadError where the system has none."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    try:
        memory = _Memory(-1, -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE, flags=flags)
    except OSError as error:
        raise OffloadError(
            f"regions: {show_size(nbytes)} of host memory: the system refuses it ({error.strerror}); free host memory, or raise "
            "the limit on the process's address space (ulimit -v)"
        ) from error
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    memory.used_nbytes = nbytes
    address = torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr()
    _memories[address] = memory
    return Region(memory, nbytes, address)


def lie_in(regions: Sequence[Region], tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in one of these regions."""
    return any(0 <= tensor.data_ptr() - region.address < region.nbytes for region in regions)


def find_places(groups: Sequence[Sequence[torch.Tensor]]) -> list[Place | None]:
    """For each group, the bytes that it fills in a mapping that no store has; None where it must be copied.

    A mapping is taken over whole or not at all: all bytes of it belong to these groups, each of which begins at an aligned
    address, as does every tensor in it that shares no bytes with another.
    """
    addresses = sorted(_memories.keys())
    found: dict[int, list[tuple[int, int, int]]] = {}
    for index, tensors in enumerate(groups):
        run = _run(tensors)
        before = bisect_right(addresses, run[0]) if run is not None else 0
        if run is not None and before:
            address = addresses[before - 1]
            found.setdefault(address, []).append((run[0] - address, run[1] - address, index))
    places: list[Place | None] = [None] * len(groups)
    for address, runs in found.items():
        memory = _memories.get(address)
        if memory is not None and not memory.held and _tile(sorted(runs), memory.used_nbytes):
            region = Region(memory, memory.used_nbytes, address)
            for start, end, index in runs:
                places[index] = Place(region, start, end - start)
    return places


def _run(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """Addresses from which to which tensors lie side by side, as in a bucket; None where they do not."""
    spans = sorted((t.data_ptr(), t.data_ptr() + span_nbytes(t)) for t in tensors if t.numel())
    if not spans or any(t.device.type != "cpu" for t in tensors) or spans[0][0] != align(spans[0][0]):
        return None
    end = spans[0][0]
    for first, last in spans:
        if first >= end and first != align(end):
            return None
        end = max(end, last)
    return spans[0][0], align(end)


def _tile(runs: Sequence[tuple[int, int, int]], nbytes: int) -> bool:
    """Whether these runs, in order, fill so many bytes without a gap."""
    end = 0
    for first, last, _ in runs:
        if first != end:
            return False
        end = last
    return end == nbytes
