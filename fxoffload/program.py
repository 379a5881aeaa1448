"""What one Dynamo graph compiles to: its stages, and its segments as programs. It knows no tensors; `binding` adds them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Any

import torch
import torch.fx as fx

from fxoffload.blocks import Blocks
from fxoffload.buckets import Buckets
from fxoffload.config import OffloadConfig
from fxoffload.facts import Facts
from fxoffload.machine import Machine
from fxoffload.planner import Knobs, knobs_of
from fxoffload.price import SegmentPrice
from fxoffload.profile import Compiled
from fxoffload.rows import Source


@dataclass(frozen=True, eq=False)
class Program:
    """One compiled graph.

    `sources` says for each of `facts.weights` which argument of a call it comes from, `places` where the plain tensors are that
    these are or hold; `inputs` are the arguments passed on: (position, placeholder, parameter name in the generated function).
    """

    facts: Facts
    blocks: Blocks
    buckets: Buckets
    prices: tuple[SegmentPrice, ...]
    machine: Machine
    top: fx.GraphModule
    config: OffloadConfig
    onload: torch.device
    places: tuple[Source, ...]
    sources: tuple[Source, ...]
    inputs: tuple[tuple[int, str, str], ...]
    output_device: torch.device | None
    """Where results go; None where they are, and where code behind a graph break goes on with them."""
    seconds: tuple[tuple[str, float], ...]
    """How long each stage took."""
    programs: dict[str, Compiled] = field(default_factory=dict)
    """The compiled segments by identifier; empty until they are compiled."""
    distinct: int = 0

    @property
    def knobs(self) -> Knobs:
        return knobs_of(self.config)

    def __str__(self) -> str:
        return "\n\n".join(str(stage) for stage in (self.machine, self.facts, self.blocks, self.buckets))


def picker(places: Sequence[Source]) -> Callable[[Sequence[Any]], tuple[torch.Tensor, ...]]:
    """A function that picks the tensors at these places of a call's arguments: there may be a thousand, at every call."""
    positions = [place.position for place in places]
    if any(place.path for place in places):
        getters = [(p.position, attrgetter(".".join(p.path)) if p.path else None) for p in places]
        return lambda args: tuple([args[i] if get is None else get(args[i]) for i, get in getters])
    if len(places) < 2:
        return lambda args: tuple(args[i] for i in positions)
    return itemgetter(*positions)


def ids_of(objects: tuple[object, ...]) -> bytes:
    """The `id` of each: the pointers that a tuple holds, as they lie in its memory.

    To make a thousand numbers and hash them at every call takes many times as long as to copy these bytes.
    """
    return ctypes.string_at(id(objects) + tuple.__basicsize__, len(objects) * ctypes.sizeof(ctypes.c_void_p))


def input_names(placeholders: list[str]) -> list[str]:
    """Parameter names for placeholders: `l_hidden_states_` -> `hidden_states`, where that leaves them distinct."""
    short = [name.removeprefix("L_").removeprefix("l_").strip("_") or name for name in placeholders]
    return [s if short.count(s) == 1 and s.isidentifier() else p for s, p in zip(short, placeholders, strict=True)]
