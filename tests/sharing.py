"""Models under one budget, each beside a twin that is resident, and what their device may refuse."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import api
from fxoffload.arena import Arena, Piece
from fxoffload.config import OffloadConfig
from fxoffload.eager import attach
from tests.checks import DELAY_S, offload
from tests.models import rows, toy

PIECE = 4096
"""Bytes of a piece of an arena here: less than a block of a toy."""


class Member:
    """A toy under a shared budget, and a twin of it that is resident."""

    def __init__(self, n: int, budget: object, *, seed: int = 0, compiled: bool = True, **options: Any) -> None:
        self.model, self.twin = toy(n, seed=seed), toy(n, seed=seed)
        self._resident = offload(self.twin)
        self._run: Any = self.model
        if compiled:
            self._run = offload(self.model, memory_budget=budget, **options)
        else:
            attach(self.model, OffloadConfig.from_options({"onload_device": "cpu", "memory_budget": budget, **options}))

    def __call__(self, k: int = 0) -> None:
        """A forward with late copies, bit-equal to the resident one."""
        got, wanted = self._run(rows(k)), self._resident(rows(k))
        assert torch.equal(got, wanted)
        self.engine.transfer.delay_s = DELAY_S

    @property
    def engine(self) -> Any:
        return api.engine_of(self.model)

    @property
    def held(self) -> int:
        return self.engine.arena.nbytes

    @property
    def kept(self) -> int:
        """Bytes of residents that are in the arena now."""
        plan = fxoffload.get_plan(self.model)
        return sum(r.nbytes for r in plan.residents if self.engine.present.get(r.offset) == r.bucket)

    @property
    def copied(self) -> int:
        return fxoffload.stats(self.model).nbytes_copied

    def edit(self, block: int, change: Callable[[torch.Tensor], object]) -> None:
        for model in (self.model, self.twin):
            change(model.blocks[block].up.weight)

    def run_and_count(self, k: int = 0) -> None:
        """A forward copies the residents that are not there, what the forward before should have prefetched, and what streams."""
        plan, kept, restores = fxoffload.get_plan(self.model), self.kept, self.engine.restores
        self(k)
        assert fxoffload.get_plan(self.model) is plan
        wraps = sum(load.nbytes for load in plan.live_at_start()) if self.engine.restores > restores else 0
        assert self.copied == plan.resident_nbytes - kept + wraps + plan.streamed_nbytes


def total(members: Sequence[Member]) -> int:
    return sum(m.held for m in members)


def settle(members: Sequence[Member]) -> None:
    for member in members:
        member()


@contextlib.contextmanager
def never_over(budget: int, members: Sequence[Member]) -> Iterator[None]:
    """Whenever memory was allocated, all of them together hold no more."""
    allocate = Arena.allocate

    def watching(arena: Arena, missing: Sequence[Piece]) -> None:
        allocate(arena, missing)
        assert total(members) <= budget

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "allocate", watching)
        yield


@contextlib.contextmanager
def refusing(at: int) -> Iterator[list[weakref.ref[torch.Tensor]]]:
    """Of every allocation of an arena the device refuses the piece with this number. Yields what it gave before."""
    allocate, empty = Arena.allocate, torch.empty
    given: list[weakref.ref[torch.Tensor]] = []

    def allocating(arena: Arena, missing: Sequence[Piece]) -> None:
        left = at

        def give(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal left
            left -= 1
            if not left:
                raise torch.OutOfMemoryError("no")
            memory = empty(*args, **kwargs)
            given.append(weakref.ref(memory))
            return memory

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", give)
            allocate(arena, missing)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "allocate", allocating)
        yield given
