"""What a setting may be: checks by kind of value. Each takes the keyword and the value, and returns the form that is stored.

A value of a wrong type is a TypeError, one that is not accepted a ConfigError. Both name the keyword, the value and what is
accepted.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, cast

from fxoffload.errors import ConfigError
from fxoffload.sizes import parse_size

if TYPE_CHECKING:
    import torch


def nearest(name: str, known: Iterable[str]) -> str:
    """`did you mean 'a' or 'b'?` for an unknown name; all that is known where nothing is near."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    if close:
        return f"did you mean {' or '.join(map(repr, close))}?"
    return f"give one of {', '.join(map(repr, names))}"


def refused(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"config: {name}: {value!r} is not accepted; give {accepted}")


def wrong_type(name: str, value: object, accepted: str) -> TypeError:
    return TypeError(f"config: {name}: {value!r} is of type {type(value).__name__}; give {accepted}")


def is_auto(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() == "auto"


def size_or_none(name: str, value: object) -> int | None:
    return None if value is None else parse_size(cast("str | int", value), what=name)


def names_or_none(name: str, value: object) -> tuple[str, ...] | None:
    accepted = "dotted module names, as one string or as a list of strings"
    if value is None:
        return None
    if isinstance(value, str):
        return (value,)
    if isinstance(value, (bytes, Mapping)) or not isinstance(value, Iterable):
        raise wrong_type(name, cast("object", value), accepted)
    names = tuple(cast("Iterable[object]", value))
    for item in names:
        if not isinstance(item, str):
            raise wrong_type(name, item, accepted)
    if not names:
        raise ConfigError(
            f"config: {name}: the list is empty; give at least one name, or leave it out to offload the whole model"
        )
    # A name given twice is one name.
    return tuple(dict.fromkeys(cast("tuple[str, ...]", names)))


def function_or_none(name: str, value: object) -> object:
    if value is not None and not callable(value):
        raise wrong_type(name, value, "a function (name, module) -> bool")
    return value


def device(name: str, value: object) -> torch.device:
    # Imported here because the planner and the plan know this module, and neither may load torch.
    import torch

    accepted = "a torch.device, or its name such as 'cuda', 'cuda:1' or 'cpu'"
    if isinstance(value, torch.device):
        return value
    if not isinstance(value, str):
        raise wrong_type(name, value, accepted)
    try:
        return torch.device(value)
    except RuntimeError as error:
        raise refused(name, value, accepted) from error


def device_or_none(name: str, value: object) -> torch.device | None:
    return None if value is None else device(name, value)


def true_or_false(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise wrong_type(name, value, "True or False")
    return value


def bool_or_none(name: str, value: object) -> bool | None:
    return None if value is None else true_or_false(name, value)


def at_least(least: int, *, unset: int | None) -> Callable[[str, object], int | None]:
    """A check for an int >= `least`; None and "auto" become `unset`."""

    def check(name: str, value: object) -> int | None:
        accepted = f"an int >= {least}, or leave it out"
        if value is None or is_auto(value):
            return unset
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(name, value, accepted)
        if value < least:
            raise refused(name, value, accepted)
        return value

    return check


def settings_or_none(name: str, value: object) -> dict[str, Any] | None:
    accepted = "a dict of Inductor settings by name, such as {'max_autotune': True}"
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise wrong_type(name, value, accepted)
    patches = dict(cast("Mapping[object, object]", value))
    for key in patches:
        if not isinstance(key, str):
            raise wrong_type(name, key, accepted)
    return cast("dict[str, Any]", patches)
