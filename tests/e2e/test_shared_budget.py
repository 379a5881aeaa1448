"""Models that run in turn under one budget: an idle one keeps what there is to spare, and copies the rest when it runs again."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import api, pieces
from fxoffload.arena import Arena
from fxoffload.errors import OffloadError
from tests.capturing import capturer_of, captures  # noqa: F401
from tests.checks import EVERYTHING, assert_state, offload, snapshot
from tests.models import rows
from tests.sharing import PIECE, Member, never_over, refusing, settle, total

BLOCKS = (8, 5, 3)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PIECE_NBYTES", PIECE)


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("ways", [(True, True), (False, False), (True, False)], ids=["compiled", "eager", "both"])
def test_an_idle_model_keeps_a_part(ways: tuple[bool, bool]) -> None:
    budget = 50 << 10
    shared = fxoffload.Budget(budget)
    a, b = (Member(n, shared, seed=n, compiled=way) for n, way in zip(BLOCKS, ways, strict=False))
    for _ in range(2):
        settle([a, b])
    for k in range(12):
        for runner, idle in ((a, b), (b, a)):
            before = idle.held
            runner.run_and_count(k)
            plan = fxoffload.get_plan(runner.model)
            assert total([a, b]) + plan.activation_nbytes <= budget
            assert 0 < idle.held < before, "it gives a part back"
            assert runner.copied < plan.resident_nbytes, "not all of its residents"
            # Not even one piece more would have fitted.
            assert idle.held + 2 * PIECE > budget - plan.peak_nbytes


def test_the_staging_area_goes_first() -> None:
    a, b = Member(8, "1GiB"), Member(1, "1GiB", seed=1)
    settle([a, b])
    weights = sum(bucket.nbytes for bucket in api.bindings_of(a.model)[0].costs.buckets)
    budget = weights * 3 // 4
    shared = fxoffload.Budget(budget)
    for member in (a, b):
        fxoffload.set_memory_budget(member.model, shared)
    a()
    plan = fxoffload.get_plan(a.model)
    assert plan.streamed_nbytes > 0
    b()
    assert plan.resident_nbytes <= budget - fxoffload.get_plan(b.model).peak_nbytes < plan.arena_nbytes
    assert a.held == a.kept == plan.resident_nbytes
    a.run_and_count()
    a.run_and_count()


def test_three_models() -> None:
    budget = 56 << 10
    members = [Member(n, fxoffload.Budget("1MiB"), seed=n, compiled=n != 5) for n in BLOCKS]
    settle(members)
    shared = fxoffload.Budget(budget)
    for member in members:
        fxoffload.set_memory_budget(member.model, shared)
    with never_over(budget, members):
        settle(members)
        for k, i in enumerate([0, 1, 2, 1, 0, 2, 0, 0, 1, 1, 2, 2, 0, 1]):
            members[i].run_and_count(k)
            assert total(members) + fxoffload.get_plan(members[i].model).activation_nbytes <= budget
            assert sum(m.held > 0 for m in members) > 1


def test_another_shared_budget_counts_what_is_held_from_before() -> None:
    """The model that has not run under it yet, too."""
    first, second = fxoffload.Budget("1MiB"), fxoffload.Budget("50KiB")
    a, b = (Member(n, first, seed=n) for n in BLOCKS[:2])
    settle([a, b])
    assert total([a, b]) > 50 << 10
    for member in (a, b):
        fxoffload.set_memory_budget(member.model, second)
    with never_over(50 << 10, [a, b]):
        a()
    assert b.held > 0
    assert total([a, b]) <= 50 << 10
    fxoffload.set_memory_budget(b.model, "40KiB")
    held = b.held
    a()
    assert b.held == held, "a model with a budget of its own gives nothing back"


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("block", [0, 7], ids=["kept", "lost"])
def test_edits_of_an_idle_model_reach_it(block: int, compiled: bool) -> None:
    shared = fxoffload.Budget("50KiB")
    a, b = Member(8, shared, compiled=compiled), Member(5, shared, seed=1)
    settle([a, b])
    settle([a, b])
    bucket = a.engine.store.find(a.model.blocks[block].up.weight).parts[0].bucket
    assert (bucket.name in a.engine.present.values()) is (block == 0)
    for change in (lambda w: w.mul_(1.5), lambda w: w.data.add_(0.25), lambda w: setattr(w, "data", w.data * 0.5)):
        a.edit(block, change)
        a()
        b()
    assert_state(a.model, snapshot(a.twin))


def test_what_is_kept_stays_where_it_is_and_what_fits_is_not_made_again(captures: dict[str, Any]) -> None:  # noqa: F811
    del captures
    a, b = (Member(n, "1MiB", seed=n, cuda_graph=True) for n in BLOCKS[:2])
    settle([a, b])

    def made(budget: object) -> list[int]:
        """How often a forward was captured, in turns of three calls of each."""
        shared = fxoffload.Budget(budget)
        for member in (a, b):
            fxoffload.set_memory_budget(member.model, shared)
        counts = []
        for k in range(3):
            before = capturer_of(a.model).captures
            for member in (a, b):
                for _ in range(3):
                    member(k)
            counts.append(capturer_of(a.model).captures - before)
        return counts

    assert made("1MiB") == [1, 0, 0]
    with warnings.catch_warnings():
        # After some turns captures are given up, for each is lost before it has paid.
        warnings.simplefilter("ignore", fxoffload.OffloadWarning)
        assert made("50KiB") == [1, 1, 1]
        places = {piece.start: piece.memory.data_ptr() for piece in a.engine.arena.pieces if piece.memory is not None}
        a.run_and_count()
    assert 0 < len(places) < len(a.engine.arena.pieces)
    assert all(a.engine.arena.view(start, 1).data_ptr() == address for start, address in places.items())


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("at", [1, 3])
def test_an_allocation_that_is_refused_half_way(at: int, compiled: bool) -> None:
    shared = fxoffload.Budget("50KiB")
    a, b = Member(8, shared, compiled=compiled), Member(5, shared, seed=1, compiled=compiled)
    settle([a, b])
    settle([a, b])
    held, kept = a.held, a.kept
    assert len(a.engine.arena.missing(a.engine.arena.length)) >= 3
    for _ in range(2):
        with refusing(at) as given:
            with pytest.raises(OffloadError, match=r"^engine: arena: cpu refuses [\d.]+ KiB for weights, of its ") as caught:
                a()
            assert [memory() for memory in given] == [None] * (at - 1), "the exception keeps nothing"
        assert (a.held, a.kept) == (held, kept)
        del caught
    a.edit(0, lambda w: w.add_(0.125))
    a.edit(7, lambda w: w.add_(0.125))
    b()
    for _ in range(2):
        a()
        b()
    a.run_and_count()


def test_a_first_allocation_that_is_refused() -> None:
    a = Member(8, fxoffload.Budget("50KiB"))
    with refusing(2), pytest.raises(OffloadError, match="engine: arena: cpu refuses"):
        a()
    assert a.held == 0
    a()
    a()
    assert a.copied == 0


def test_graphs_of_one_model_share_pieces() -> None:
    """Their plans differ, and none makes the arena of the other anew."""
    shared = fxoffload.Budget("40KiB")
    a, b = Member(8, shared, persistent_buckets=3), Member(4, shared, seed=1)
    other = offload(a.model, memory_budget=shared, persistent_buckets=5, persistent_bins=2)
    wanted = [offload(a.twin)(rows(k)) for k in range(12)]
    divided: list[Any] = []
    divide = Arena.divide
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Arena, "divide", lambda arena, *args: (divided.append(arena), divide(arena, *args)))
        for k in range(12):
            a(k)
            assert torch.equal(other(rows(k)), wanted[k])
            b(k)
            assert total([a, b]) <= 40 << 10
            if k == 2:
                divided.clear()
    assert not [arena for arena in divided if arena is a.engine.arena]


def test_a_restore_that_fails_leaves_nothing_to_trust() -> None:
    a = Member(6, EVERYTHING, persistent_buckets=2)
    other = offload(a.model, memory_budget=EVERYTHING, persistent_buckets=4, persistent_bins=2)
    a(), other(rows(0)), a()
    a()
    copy, calls = a.engine.transfer.copy, []

    def failing(slot: Any) -> None:
        calls.append(slot)
        if len(calls) == 2:
            raise RuntimeError("no copy")
        copy(slot)

    a.engine.transfer.copy = failing
    with pytest.raises(RuntimeError, match="no copy"):
        other(rows(0))
    a.engine.transfer.copy = copy
    a(1)
    a(2)


@pytest.mark.parametrize("compiled", [True, False])
def test_a_model_that_another_one_calls_takes_nothing_from_it(compiled: bool) -> None:
    small, large = fxoffload.Budget("50KiB"), fxoffload.Budget("1MiB")
    outer, inner = Member(6, large, compiled=False), Member(5, large, seed=1, compiled=compiled)
    settle([outer, inner])
    hook = outer.model.blocks[2].register_forward_hook(lambda *_: inner(1))
    outer()
    for member in (outer, inner):
        fxoffload.set_memory_budget(member.model, small)
    with pytest.raises(OffloadError, match=r"^budget: Budget\(51200\): a model is called by another one's forward, .* its own$"):
        outer()
    fxoffload.set_memory_budget(inner.model, "50KiB")
    outer()
    hook.remove()
    fxoffload.set_memory_budget(inner.model, small)
    for k in range(3):
        outer(k)
        inner(k)
        assert total([outer, inner]) <= 50 << 10


@pytest.mark.parametrize("compiled", [True, False])
def test_a_thread_that_runs_the_inner_model_waits_for_the_outer_one(compiled: bool) -> None:
    large = fxoffload.Budget("1MiB")
    outer, inner = Member(6, large, compiled=False), Member(5, large, seed=1, compiled=compiled)
    settle([outer, inner])
    inside, wrong = threading.Event(), list[BaseException]()

    def call(member: Member) -> None:
        try:
            with torch.no_grad():
                member(1)
        except BaseException as error:
            wrong.append(error)

    def alone() -> None:
        assert inside.wait(60)
        call(inner)

    def calls_inner(*_: Any) -> None:
        if threading.current_thread() is threads[0] and not inside.is_set():
            inside.set()
            # By now the other thread has taken all that it can.
            threads[1].join(0.3)
            inner(2)

    outer.model.blocks[2].register_forward_hook(calls_inner)
    threads = [threading.Thread(target=call, args=(outer,), daemon=True), threading.Thread(target=alone, daemon=True)]
    for thread in reversed(threads):
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "they wait for each other"
    assert not wrong
