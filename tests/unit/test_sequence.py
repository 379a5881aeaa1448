"""Orders of units: looked up, and merged."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fxoffload.sequence import find_next, merge

orders = st.lists(st.integers(0, 6), max_size=12)


def follows(order: tuple[int, ...], forward: list[int]) -> bool:
    position = 0
    for item in forward:
        found = find_next(order, position, item)
        if found is None:
            return False
        position = found + 1
    return True


@given(orders, orders)
def test_both_follow_the_merged_order_or_the_new_one_does(known: list[int], observed: list[int]) -> None:
    merged = merge(known, observed)
    assert follows(merged, observed)
    assert follows(merged, known) or merged == tuple(observed)


@given(orders)
def test_an_order_that_is_followed_stays(known: list[int]) -> None:
    assert merge(known, known) == tuple(known)


def test_by_hand() -> None:
    assert merge((0, 1, 2, 3), (0, 1, 2, 3, 1)) == (0, 1, 2, 3, 1)
    assert merge((0, 2), (0, 1, 2)) == (0, 1, 2)
    assert merge((0, 1), (1, 0)) in {(0, 1, 0), (1, 0, 1)}
    assert find_next((0, 1, 0), 1, 0) == 2
    assert find_next((0, 1, 0), 1, 2) is None
    # Forwards that share no order do not make it grow for ever.
    assert merge((0, 1) * 8, (1,)) == (1,)
