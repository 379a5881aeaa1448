"""Where an arena is divided, and what an arena in pieces holds and gives back."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxoffload import pieces
from fxoffload.arena import POISON, Arena
from fxoffload.pieces import divide, find_spans
from fxoffload.plan import Load, Plan, Resident


def make_plan(residents: list[tuple[int, int]], loads: list[tuple[int, int]], length: int = 0) -> Plan:
    """`residents` and `loads` as (offset, bytes)."""
    ends = [offset + nbytes for offset, nbytes in [*residents, *loads]]
    return Plan(
        segments=("a",),
        residents=tuple(Resident(f"r{i}", *place) for i, place in enumerate(residents)),
        loads=tuple(Load(f"l{i}", f"l{i}", *place, (0,), 0, None) for i, place in enumerate(loads)),
        arena_nbytes=max([length, *ends]),
        activation_nbytes=0,
        budget_nbytes=1 << 40,
        async_transfer=True,
        compute_ms=1.0,
        step_ms=1.0,
        bound_ms=1.0,
    )


def in_a_row(*nbytes: int) -> list[tuple[int, int]]:
    return [(sum(nbytes[:i]), n) for i, n in enumerate(nbytes)]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("residents", "loads", "starts"),
    [
        ([], [], [0]),
        (in_a_row(GIB, GIB), [], [0, GIB]),
        (in_a_row(GIB, GIB), [(2 * GIB, 5)], [0, GIB, 2 * GIB]),
        # No small rest: it goes to the others.
        (in_a_row(3 * GIB, 256), [(3 * GIB + 256, 5)], [0, 3 * GIB + 256]),
        (in_a_row(*[GIB // 4] * 9), [], [0, 5 * GIB // 4]),
        ([], [(0, GIB), (GIB, GIB), (2 * GIB, 5)], [0]),
        # Staging between residents, as a plan from a file may have it.
        ([(0, 256), (1024, 256)], [(256, 512), (512, 512)], [0, 256, 1024]),
    ],
)
def test_divided(residents: list[tuple[int, int]], loads: list[tuple[int, int]], starts: list[int]) -> None:
    assert divide(make_plan(residents, loads)) == tuple(starts)


def test_there_are_not_many_pieces() -> None:
    plan = make_plan(in_a_row(*[GIB // 8] * 1000), [(125 * GIB, 5)])
    assert len(divide(plan)) == pieces.MOST_PIECES + 1


def test_other_plans_have_to_fit_unless_they_are_longer() -> None:
    plan = make_plan(in_a_row(*[GIB] * 4), [])
    assert divide(plan) == (0, GIB, 2 * GIB, 3 * GIB)
    assert divide(plan, [make_plan([(GIB // 2, GIB)], [])]) == (0, 2 * GIB, 3 * GIB)
    assert divide(plan, [make_plan([(0, GIB)], [(GIB, 2 * GIB)])]) == (0, GIB, 3 * GIB)
    assert divide(plan, [make_plan([(GIB // 2, GIB)], [], 5 * GIB)]) == divide(plan)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    sizes = draw(st.lists(st.integers(1, 9), max_size=12))
    residents = in_a_row(*(256 * n for n in sizes))
    base = 256 * sum(sizes)
    loads = draw(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), max_size=6))
    return make_plan(residents, [(base + 256 * offset, 256 * n) for offset, n in loads])


@given(st.lists(plans(), min_size=1, max_size=3), st.integers(256, 4096))
def test_every_bucket_of_every_plan_lies_in_one_piece(drawn: list[Plan], piece_nbytes: int) -> None:
    plan = max(drawn, key=lambda each: each.arena_nbytes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "PIECE_NBYTES", piece_nbytes)
        starts = divide(plan, drawn)
    assert starts[0] == 0
    assert all(a < b for a, b in pairwise(starts))
    assert all(start % 256 == 0 for start in starts)
    arena = Arena(torch.device("cpu"), poison=False)
    arena.divide(starts, plan.arena_nbytes)
    assert arena.length == plan.arena_nbytes
    for each in drawn:
        assert all(arena.has(span.start, span.end) for span in find_spans(each))
    if len(drawn) == 1:
        sizes = [piece.nbytes for piece in arena.pieces if plan.residents and piece.end <= plan.resident_nbytes]
        assert all(size < 3 * max(piece_nbytes, plan.resident_nbytes // pieces.MOST_PIECES) + 9 * 256 for size in sizes)


def filled(starts: tuple[int, ...], length: int) -> Arena:
    arena = Arena(torch.device("cpu"), poison=True)
    arena.divide(starts, length)
    arena.allocate(arena.missing(length))
    return arena


def held(arena: Arena) -> list[int]:
    return [piece.start for piece in arena.pieces if piece.memory is not None]


@pytest.mark.parametrize(
    ("most", "residents", "left"),
    [
        (1000, (0, 100, 300), [0, 100, 300, 600]),
        (999, (0, 100, 300), [0, 100, 300]),
        (600, (0, 100, 300), [0, 100, 300]),
        (599, (0, 100, 300), [0, 100]),
        (300, (0, 100, 300), [0, 100]),
        (299, (0, 100, 300), [0]),
        (0, (0, 100, 300), []),
        # Residents that are stale are worth nothing.
        (700, (150, 650), [0, 100, 600]),
        (699, (150, 650), [100, 600]),
        (550, (), [0, 100]),
    ],
)
def test_an_arena_gives_back_what_is_worth_least_and_no_more_than_it_must(
    most: int, residents: tuple[int, ...], left: list[int]
) -> None:
    arena = filled((0, 100, 300, 600), 1000)
    arena.shrink(most, residents)
    assert held(arena) == left
    assert arena.nbytes == sum(piece.nbytes for piece in arena.pieces if piece.start in left) <= most
    for piece in arena.pieces:
        assert arena.holds(piece.start) is arena.holds(piece.end - 1) is (piece.start in left)


def test_what_is_kept_keeps_its_contents_and_what_is_new_is_poisoned() -> None:
    arena = filled((0, 100, 300), 600)
    arena.view(0, 600 - 500).fill_(1)
    arena.view(350, 10).fill_(3)
    arena.shrink(200, (0,))
    assert held(arena) == [0]
    arena.allocate(arena.missing(150))
    assert held(arena) == [0, 100]
    assert arena.view(0, 100).eq(1).all()
    assert arena.view(100, 200).eq(POISON).all()
    arena.allocate(arena.missing(600))
    assert arena.view(350, 10).eq(POISON).all()


def test_room() -> None:
    arena = filled((0, 100, 300), 600)
    assert arena.find_room(0, 100) == 0
    assert arena.find_room(50, 50) == 50
    assert arena.find_room(50, 60) == 100
    assert arena.find_room(50, 300) == 300
    assert arena.find_room(301, 300) is None
    arena.shrink(400, (0, 300))
    assert arena.find_room(50, 60) == 300
    assert arena.find_room(150, 10) == 300
