"""The order in which a model calls its units, as learned from its forwards. Pure, no torch.

A forward may leave units out; it is then a subsequence of the order that is known. One that is not makes a longer order, of which
both are subsequences, so that from then on either is followed without a surprise.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from difflib import SequenceMatcher
from typing import TypeVar

_T = TypeVar("_T", bound=Hashable)
_MOST = 4
"""An order may grow to so many times the longer of two; beyond, the newer one counts alone."""


def find_next(order: Sequence[_T], start: int, item: _T) -> int | None:
    """The first position of `item` in `order` from `start` on, or None.

    Taking the first is enough: if what follows is a subsequence behind any position, then also behind the first.
    """
    return next((i for i in range(start, len(order)) if order[i] == item), None)


def merge(known: Sequence[_T], observed: Sequence[_T]) -> tuple[_T, ...]:
    """An order that has both as subsequences, or `observed` where that would be many times as long."""
    merged: list[_T] = []
    for tag, a, b, c, d in SequenceMatcher(None, known, observed, autojunk=False).get_opcodes():
        merged.extend(known[a:b])
        if tag != "equal":
            merged.extend(observed[c:d])
    return tuple(merged) if len(merged) <= _MOST * len(set(merged)) else tuple(observed)
