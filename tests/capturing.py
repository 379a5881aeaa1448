"""Captures on the CPU: streams that do what they are told at once, and graphs that run their work again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fxoffload import api, graph
from fxoffload.capture import CaptureTransfer
from fxoffload.engine import Engine
from fxoffload.plan import Plan
from fxoffload.transfer import Counters
from fxoffload.verify_capture import Recording


class Event:
    def record(self, stream: Any) -> None:
        assert isinstance(stream, str)

    def wait(self, stream: Any) -> None:
        assert isinstance(stream, str)


class Clock(Event):
    """Every second one stands for an end: `takes_ms` after the one before."""

    def __init__(self, takes_ms: float) -> None:
        self._takes_ms = takes_ms

    def query(self) -> bool:
        return True

    def elapsed_time(self, later: Clock) -> float:
        return later._takes_ms


class Graph:
    """Runs the work once more, into the results that it had first."""

    def __init__(self, capturer: Capturer, work: Callable[[], Any], results: Any) -> None:
        self._capturer = capturer
        self._work = work
        self._results = results
        self.alive = True

    def replay(self) -> None:
        assert self.alive
        again = self._work()
        assert self._capturer.transfer is not None
        self._capturer.transfer.finish()
        with torch.inference_mode():
            for mine, new in zip(tree_leaves(self._results), tree_leaves(again), strict=True):
                if isinstance(mine, torch.Tensor):
                    mine.copy_(new)

    def reset(self) -> None:
        self.alive = False


class Idle(Graph):
    """Does nothing, so that only what the host does around a replay takes time."""

    def replay(self) -> None:
        assert self.alive


class Capturer:
    """`capture.Capturer` for the CPU. A capture holds `each` bytes. `idle`: graphs do nothing.

    `takes_ms`: how long replays of the first capture, the second and so on take, by its clocks; the last is for all others.
    """

    def __init__(
        self,
        engine: Engine | None = None,
        *,
        overlap: bool = True,
        each: int = 0,
        idle: bool = False,
        takes_ms: Sequence[float] = (0.0,),
    ) -> None:
        self.compute = "compute"
        self.copies = "copies" if overlap else self.compute
        self.transfer: CaptureTransfer | None = None
        self.captures = 0
        self.graphs: list[Graph] = []
        self._engine = engine
        self._each = each
        self._kind = Idle if idle else Graph
        self._takes_ms = takes_ms

    @property
    def nbytes(self) -> int:
        return self._each * len(self.graphs)

    def caller(self) -> str:
        return "caller"

    def outside(self) -> str:
        return "outside"

    def event(self, *, external: bool) -> Event:
        return Event()

    def clock(self) -> Clock:
        return Clock(self._takes_ms[min(self.captures, len(self._takes_ms)) - 1])

    def on(self, stream: Any) -> Any:
        return contextlib.nullcontext()

    def capture(self, work: Callable[[], Any]) -> tuple[Graph, Any]:
        """Nothing that is captured runs, so the arena is then as it was."""
        self.captures += 1
        assert self._engine is not None
        memory = [piece.memory for piece in self._engine.arena.pieces if piece.memory is not None]
        before = [piece.clone() for piece in memory]
        try:
            results = work()
        finally:
            for piece, former in zip(memory, before, strict=True):
                piece.copy_(former)
        self.graphs.append(self._kind(self, work, results))
        return self.graphs[-1], results

    def wait(self) -> None:
        pass

    def release(self, graphs: Sequence[Any]) -> None:
        for one in graphs:
            one.reset()
            self.graphs.remove(one)


class Remembered(CaptureTransfer):
    """Known to the capturer, whose graphs end a capture at each replay."""

    def __init__(self, capturer: Capturer, *args: Any, **kwargs: Any) -> None:
        super().__init__(capturer, *args, **kwargs)
        capturer.transfer = self


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Every engine captures on the CPU. What is put into the dictionary goes to the capturers: `each`, `idle`, `takes_ms`."""
    options: dict[str, Any] = {}
    monkeypatch.setattr(graph, "CaptureTransfer", Remembered)
    monkeypatch.setattr(graph, "capturer_for", lambda engine: Capturer(engine, **options))
    return options


def capturer_of(model: Any) -> Capturer:
    found = api.engine_of(model).capturer
    assert isinstance(found, Capturer)
    return found


def record(plan: Plan, *, overlap: bool = True) -> Recording:
    """What a capture of this plan records: all that a top level calls, without bytes and without segments."""
    transfer = CaptureTransfer(Capturer(overlap=overlap), Counters(), [w.name for w in plan.loads if w.wraps], poison=False)
    nothing = torch.empty(0, dtype=torch.uint8)
    slots = {load.name: transfer.slot(nothing, nothing, load.name) for load in plan.loads}
    transfer.start()
    for i, segment in enumerate(plan.segments):
        for load in plan.prefetches_before(i):
            transfer.prefetch(slots[load.name], slots[load.after] if load.after is not None else None)
        for load in plan.loads:
            if load.wait_before == i:
                transfer.wait(slots[load.name])
        transfer.ran(segment)
        for load in plan.loads:
            if load.evict_after == i:
                transfer.evict(slots[load.name])
    transfer.join()
    recording, _ = transfer.finish()
    return recording
