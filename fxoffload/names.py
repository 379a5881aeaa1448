"""Dynamo's spellings of a module path, brought to the dotted names that `named_parameters` uses."""

from __future__ import annotations

import re
from collections.abc import Callable

_HEAD = re.compile(r"^[LG]\['\w+'\](?:\[0\])?")
_STEP = re.compile(
    r"\.__dict__\['_(?:modules|parameters|buffers)'\]"
    r"|\._(?:modules|parameters|buffers)\b"
    r"|\.(?P<attr>\w+)"
    r"|\[(?P<quote>['\"]?)(?P<key>[^\]]*?)(?P=quote)\]"
)
_WRAPPERS = [["_orig_mod"], ["_method", "__self__"]]
"""Steps from a wrapper of `torch.compile`, and from what stands in for a method of an offloaded model, to the model."""


def dotted_name(path: str) -> str:
    """`L['self']._modules['blocks']._modules['0']._parameters['w']` -> `blocks.0.w`; the root itself is ``""``."""
    head = _HEAD.match(path)
    rest = path[head.end() :] if head is not None else path if path.startswith((".", "[")) else f".{path}"
    steps = [step["attr"] or step["key"] for step in _STEP.finditer(rest) if step["attr"] or step["key"]]
    for prefix in _WRAPPERS:
        if steps[: len(prefix)] == prefix:
            del steps[: len(prefix)]
    return ".".join(steps)


def identifier(name: str) -> str:
    """A Python identifier for a dotted name: `blocks.3:1` -> `blocks_3_1`."""
    text = re.sub(r"\W", "_", name)
    return text if text and not text[0].isdigit() else f"_{text}"


def claim(name: str, taken: set[str], *, spell: Callable[[str], str] = str) -> str:
    """`name`, or the first of `name~2`, `name~3`, ... whose spelling is not taken. It is from now on."""
    candidate, k = name, 2
    while spell(candidate) in taken:
        candidate, k = f"{name}~{k}", k + 1
    taken.add(spell(candidate))
    return candidate
