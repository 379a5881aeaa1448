"""One captured forward: its inputs are copied in, it is replayed, and its results are handed out."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from fxoffload.capture import Call, CaptureTransfer, Graph
from fxoffload.edits import elements
from fxoffload.pace import Pace
from fxoffload.staged import Staged
from fxoffload.storages import storage_of


def twin(value: torch.Tensor) -> torch.Tensor:
    """A tensor of the same layout."""
    with torch.inference_mode(False):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


@dataclass(frozen=True, slots=True)
class Result:
    """One output of a capture. Where it is an input or a view of one: which, and how many elements behind its start."""

    value: Any
    source: int | None = None
    shift: int = 0
    itself: bool = False

    def hand_out(self, inputs: Sequence[Any], copies: dict[int, torch.Tensor]) -> Any:
        value = self.value
        if self.source is not None:
            given = inputs[self.source]
            if self.itself:
                return given
            return given.as_strided(value.shape, value.stride(), given.storage_offset() + self.shift)
        if not isinstance(value, torch.Tensor):
            return value
        if id(value) not in copies:
            copies[id(value)] = value.clone()
        return copies[id(value)]


def result_of(value: Any, arguments: Sequence[Any]) -> Result:
    """`value` is an output of a capture with these inputs."""
    if not isinstance(value, torch.Tensor):
        return Result(value)
    for i, argument in enumerate(arguments):
        if not isinstance(argument, torch.Tensor) or argument.dtype != value.dtype:
            continue
        if storage_of(argument) == storage_of(value):
            return Result(value, i, int(value.storage_offset()) - int(argument.storage_offset()), value is argument)
    return Result(value)


@dataclass(slots=True, eq=False)
class Capture:
    """One captured forward. `own`: its inputs that calls copy theirs into, by position."""

    staged: Staged
    transfer: CaptureTransfer
    graph: Graph
    behind: tuple[Call, ...]
    own: list[tuple[int, torch.Tensor]]
    results: list[Result]
    pace: Pace | None
    """What times it, until it is known to be good."""
    replays: int = 0

    def replay(self, *inputs: Any) -> tuple[Any, ...]:
        """A forward with these inputs. Its results are the caller's: later replays do not touch them."""
        for i, mine in self.own:
            _assign(mine, inputs[i])
        with self.pace.timed() if self.pace is not None else nullcontext():
            self.transfer.launch(self.graph, self.behind)
        self.replays += 1
        counters, plan = self.transfer.counters, self.staged.plan
        counters.prefetches += len(plan.loads)
        counters.nbytes_copied += plan.streamed_nbytes
        copies: dict[int, torch.Tensor] = {}
        return tuple([result.hand_out(inputs, copies) for result in self.results])

    def clear(self) -> Graph:
        """Let go of all memory but the graph's."""
        self.own, self.results, self.behind = [], [], ()
        return self.graph


def _assign(mine: torch.Tensor, given: torch.Tensor) -> None:
    if mine.is_contiguous():
        mine.copy_(given)
    else:
        # An expanded tensor has several elements in one place, which copy_ refuses to write.
        elements(mine).copy_(elements(given))
