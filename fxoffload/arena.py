"""The arena: all weight memory on the onload device, as one address space whose offsets the plan gives.

Its memory is one allocation, or several where the model shares its budget (`pieces`): then it can give a part back while it is
idle. A piece that was given back and allocated again may lie elsewhere, and has no contents.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

POISON = 0xFF
"""Evicted bytes read as NaN in every floating dtype of 16 bits and more."""


_arenas: weakref.WeakSet[Arena] = weakref.WeakSet()


def nbytes_of_arenas(device: torch.device) -> int:
    """Bytes of all arenas on a device."""
    return sum(arena.nbytes for arena in _arenas if arena.device == device)


@dataclass(slots=True, eq=False)
class Piece:
    """Bytes `[start, end)` of the address space. `memory`: uint8, one dimension; None while the piece is not held."""

    start: int
    end: int
    memory: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    def has(self, start: int, end: int) -> bool:
        """Whether these bytes lie in it."""
        return self.start <= start and end <= self.end


class Arena:
    """Divided before it is allocated. `poison`: new memory reads as if it had been evicted."""

    def __init__(self, device: torch.device, *, poison: bool) -> None:
        _arenas.add(self)
        self.device = device
        self.pieces: list[Piece] = []
        self._poison = poison

    @property
    def nbytes(self) -> int:
        """Bytes that are held. Allocators round each piece up, which counts among the activations as they are measured."""
        return sum(piece.nbytes for piece in self.pieces if piece.memory is not None)

    @property
    def length(self) -> int:
        """Bytes of the address space."""
        return self.pieces[-1].end if self.pieces else 0

    def divide(self, starts: Sequence[int], length: int) -> None:
        """Begin anew with pieces that start at these offsets, none of them held. No view of the old memory may be left."""
        self._free(self.pieces)
        self.pieces = [Piece(start, end) for start, end in pairwise([*starts, length])]

    def missing(self, length: int) -> list[Piece]:
        """Pieces that are not held, of those with some of the first `length` bytes."""
        return [piece for piece in self.pieces if piece.memory is None and piece.start < length]

    def allocate(self, pieces: Sequence[Piece]) -> None:
        """Hold these, with no contents. Raises what the device's allocator raises; none of them is then held."""
        if self.device.type != "cpu":
            # What is cut out of larger memory that the allocator has kept could not be given back alone.
            torch.accelerator.empty_cache()
        # Inference tensors in the arena would break later calls under no_grad.
        with torch.inference_mode(False):
            # All before any is held: if one is refused, the exception keeps none of them.
            memories = [torch.empty(piece.nbytes, dtype=torch.uint8, device=self.device) for piece in pieces]
            for piece, memory in zip(pieces, memories, strict=True):
                piece.memory = memory.fill_(POISON) if self._poison else memory

    def shrink(self, most_nbytes: int, residents: Collection[int]) -> None:
        """Hold no more than so many bytes: give back what has none of the `residents` (offsets) first, then what lies last.

        No view of the memory may be left.
        """
        held = [piece for piece in reversed(self.pieces) if piece.memory is not None]
        held.sort(key=lambda piece: any(piece.has(offset, offset + 1) for offset in residents))
        excess = self.nbytes - most_nbytes
        freed: list[Piece] = []
        for piece in held:
            if excess <= 0:
                break
            freed.append(piece)
            excess -= piece.nbytes
        self._free(freed)

    def holds(self, offset: int) -> bool:
        """Whether this byte lies in a piece that is held."""
        return any(piece.memory is not None and piece.has(offset, offset + 1) for piece in self.pieces)

    def has(self, start: int, end: int) -> bool:
        """Whether these bytes lie in one piece, held or not."""
        return any(piece.has(start, end) for piece in self.pieces)

    def find(self, offset: int, nbytes: int) -> tuple[torch.Tensor, int]:
        """The memory in which these bytes lie, and where in it they begin."""
        piece = next(piece for piece in self.pieces if piece.has(offset, offset + nbytes))
        assert piece.memory is not None, (offset, nbytes)
        return piece.memory, offset - piece.start

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        """These bytes, which lie in one piece that is held."""
        memory, start = self.find(offset, nbytes)
        return memory[start : start + nbytes]

    def find_room(self, offset: int, nbytes: int) -> int | None:
        """The least offset, from this one on, where so many bytes lie in one piece that is held; None if there is none."""
        places = ((piece, max(offset, piece.start)) for piece in self.pieces if piece.memory is not None)
        return next((place for piece, place in places if piece.has(place, place + nbytes)), None)

    def _free(self, pieces: Iterable[Piece]) -> None:
        held = [piece for piece in pieces if piece.memory is not None]
        if held and self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        for piece in held:
            piece.memory = None
        if held and self.device.type != "cpu":
            torch.accelerator.empty_cache()
