"""Random sequences of what models under one budget go through: equal to resident twins, and never over the budget."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fxoffload
from fxoffload import OffloadError, api, pieces
from tests.checks import assert_state, snapshot
from tests.sharing import PIECE, Member, never_over, refusing, total

which = st.integers(0, 2)
CHANGES: list[Callable[[torch.Tensor], object]] = [
    lambda w: w.neg_(),
    lambda w: w.data.neg_(),
    lambda w: w[1].neg_(),
    lambda w: setattr(w, "data", -w.data),
]
step = st.one_of(
    st.tuples(st.just("run"), which),
    st.tuples(st.just("run"), which),
    st.tuples(st.just("run"), which),
    st.tuples(st.just("edit"), which, st.integers(0, 7), st.integers(0, len(CHANGES) - 1)),
    st.tuples(st.just("budget"), st.sampled_from([18, 24, 32, 44, 50, 56, 64, 80, 120])),
    st.tuples(st.just("refuse"), which, st.integers(1, 4)),
    st.tuples(st.just("refresh"), which),
)


@functools.cache
def members() -> list[Member]:
    """Compiled, without a compiler, and compiled with knobs. Each has run."""
    made = [Member(8, "1MiB"), Member(5, "1MiB", seed=1, compiled=False), Member(6, "1MiB", seed=2, persistent_buckets=3)]
    for member in made:
        member()
    return made


class Group:
    """All of them under one budget."""

    def __init__(self) -> None:
        for member in members():
            member.engine.shrink_arena(0)
        self._settled: set[int] = set()
        """Those that ran since their weights or the budget changed: what is kept of them counts."""
        self.budget(50)

    def budget(self, kib: int) -> None:
        self.nbytes = kib << 10
        self._settled.clear()
        shared = fxoffload.Budget(self.nbytes)
        for member in members():
            fxoffload.set_memory_budget(member.model, shared)

    def run(self, i: int) -> None:
        member = members()[i]
        with never_over(self.nbytes, members()):
            member.run_and_count() if i in self._settled else member()
        self._settled.add(i)
        plan = fxoffload.get_plan(member.model)
        assert total(members()) + plan.activation_nbytes <= self.nbytes
        assert member.kept == plan.resident_nbytes

    def edit(self, i: int, block: int, change: int) -> None:
        member = members()[i]
        self._settled.discard(i)
        member.edit(block % len(member.model.blocks), CHANGES[change])

    def refuse(self, i: int, at: int) -> None:
        # Nothing is refused where little is missing.
        with refusing(at), never_over(self.nbytes, members()), contextlib.suppress(OffloadError):
            members()[i]()

    def refresh(self, i: int) -> None:
        api.refresh(members()[i].model)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(step, max_size=16))
@torch.no_grad()
def test_models_in_turn(steps: list[tuple[Any, ...]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_NBYTES", PIECE)
        group = Group()
        for name, *arguments in steps:
            getattr(group, name)(*arguments)
        for i in range(len(members())):
            group.run(i)
    for member in members():
        assert_state(member.model, snapshot(member.twin))
