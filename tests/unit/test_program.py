"""What is looked up at every call: the identity of the weights."""

from __future__ import annotations

import struct

import pytest

from fxoffload.program import ids_of


@pytest.mark.parametrize("n", [0, 1, 2, 1160])
def test_ids_are_those_of_the_objects(n: int) -> None:
    objects = tuple(object() for _ in range(n))
    assert ids_of(objects) == struct.pack(f"{n}P", *map(id, objects))
    assert ids_of((*objects, None)) != ids_of(objects)


def test_equal_objects_are_told_apart() -> None:
    a, b = [], []
    assert ids_of((a, b)) == ids_of((a, b))
    assert ids_of((a, b)) != ids_of((b, a))
