"""A model called from two threads: by its hooks in one, compiled in the other. Calls take turns, packing of weights included."""

# pyright: reportPrivateUsage=false, reportArgumentType=false, reportCallIssue=false
from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload.follow import Follower
from fxoffload.store import HostStore
from tests.checks import assert_state, delay_copies, snapshot
from tests.models import Toy, rows, toy

OPTIONS = {"segment_compiler": "eager"}


class Caller(threading.Thread):
    """Calls a model `n` times. `outputs`, or what it raised."""

    def __init__(self, model: Callable[..., Any], n: int = 3) -> None:
        super().__init__(daemon=True)
        self._model = model
        self._n = n
        self.outputs: list[torch.Tensor] = []
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            with torch.no_grad():
                self.outputs = [self._model(rows(k)).clone() for k in range(self._n)]
        except BaseException as error:
            self.error = error


def pair() -> tuple[Any, Any, Any, Callable[..., Any]]:
    """An offloaded model that has run, its plain twin, its handle, and the same model compiled, which has not."""
    model, plain = toy(6), toy(6)
    nbytes = sum(p.nbytes for p in model.parameters())
    handle = fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes // 2)
    with torch.no_grad():
        for k in range(2):
            model(rows(k))
    delay_copies(model, 0.0003)
    return model, plain, handle, torch.compile(model, backend="layerwise", fullgraph=True, dynamic=False, options=OPTIONS)


def check(callers: list[Caller], plain: Any) -> None:
    for caller in callers:
        caller.join(60)
        assert not caller.is_alive()
    for caller in callers:
        assert caller.error is None, caller.error
        with torch.no_grad():
            for k, got in enumerate(caller.outputs):
                torch.testing.assert_close(got, plain(rows(k)), rtol=1e-5, atol=1e-6)


def paused_caller(model: Toy, unit: int, monkeypatch: pytest.MonkeyPatch) -> tuple[Caller, threading.Event]:
    """A thread whose call has just begun that unit, and goes on once the event is set."""
    paused, go = threading.Event(), threading.Event()
    enter = Follower.enter

    def pausing(self: Follower, index: int) -> None:
        enter(self, index)
        if index == unit and not paused.is_set():
            paused.set()
            assert go.wait(60)

    monkeypatch.setattr(Follower, "enter", pausing)
    caller = Caller(model)
    caller.start()
    assert paused.wait(60)
    return caller, go


@pytest.mark.parametrize("unit", [0, 3])
def test_a_graph_is_packed_while_the_hooks_run(unit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, handle, compiled = pair()
    state = snapshot(plain)
    eager, go = paused_caller(model, unit, monkeypatch)
    graph = Caller(compiled)
    graph.start()
    # It traces, compiles, and comes to where it would pack.
    graph.join(4)
    assert graph.is_alive()
    go.set()
    check([eager, graph], plain)
    handle.remove()
    assert_state(model, state)


def test_the_hooks_begin_while_a_graph_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain, handle, compiled = pair()
    state = snapshot(plain)
    packing = threading.Event()
    pack = HostStore.pack

    def slow(self: HostStore, *args: Any, **kwargs: Any) -> Any:
        packing.set()
        time.sleep(0.05)
        return pack(self, *args, **kwargs)

    monkeypatch.setattr(HostStore, "pack", slow)
    graph = Caller(compiled)
    graph.start()
    assert packing.wait(60)
    eager = Caller(model)
    eager.start()
    check([graph, eager], plain)
    handle.remove()
    assert_state(model, state)


def test_nobody_waits_for_the_hooks_while_it_holds_up_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo compiles one frame at a time: a unit yet to be compiled must not wait for a graph that waits for the unit."""
    model, plain, handle, compiled = pair()
    for block in model.blocks:
        block.up.forward = torch.compile(block.up.forward, backend="eager")
    eager, go = paused_caller(model, 0, monkeypatch)
    graph = Caller(compiled)
    graph.start()
    graph.join(2)
    go.set()
    check([eager, graph], plain)
    handle.remove()


@pytest.mark.parametrize("turn", range(2))
def test_both_at_once(turn: int) -> None:
    model, plain, handle, compiled = pair()
    callers = [Caller(compiled, 8), Caller(model, 8), Caller(model, 8), Caller(compiled, 8)][:: 1 - 2 * turn]
    for caller in callers:
        caller.start()
    check(callers, plain)
    handle.remove()
    assert_state(model, snapshot(plain))
