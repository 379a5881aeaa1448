"""The examples in docstrings do what they show."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import fxoffload

ROOT = Path(__file__).parents[2]
MODULES = [
    path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
    for path in sorted((ROOT / "fxoffload").glob("*.py"))
    if ">>> " in path.read_text()
]


def test_there_are_examples() -> None:
    assert len(MODULES) > 5


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    module = importlib.import_module(name)
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    failed, tried = doctest.testmod(module, optionflags=flags)
    assert tried > 0
    assert failed == 0


def public_members() -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name in fxoffload.__all__:
        value = getattr(fxoffload, name)
        found.append((name, value))
        for key, member in vars(value).items() if isinstance(value, type) else ():
            if not key.startswith("_"):
                found.append((f"{name}.{key}", getattr(member, "fget", None) or getattr(member, "__func__", member)))
    return [(name, value) for name, value in found if callable(value)]


def test_every_public_name_has_a_docstring() -> None:
    assert [name for name, value in public_members() if not value.__doc__] == []
