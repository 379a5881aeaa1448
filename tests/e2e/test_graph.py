"""When forwards are captured and what replays return, on the CPU: a graph is played by running its work again (`capturing`)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api, graph, pace
from fxoffload.graph import MOST, STRIKES
from tests.capturing import capturer_of, captures
from tests.checks import assert_streams, budgets, offload
from tests.models import Counting, Failing, failing, rows, seeded, toy

__all__ = ["captures"]
pytestmark = pytest.mark.usefixtures("captures")


def graphed(model: nn.Module, **options: Any) -> Any:
    return offload(model, cuda_graph=True, **options)


def replays(model: Any) -> int:
    return fxoffload.stats(model).replays


@torch.no_grad()
def test_the_second_call_is_captured_and_every_budget_gives_the_same() -> None:
    model, other = toy(6), toy(6)
    compiled, plain = graphed(model), offload(other)
    expected = [plain(rows(k)) for k in range(5)]
    assert torch.equal(compiled(rows(0)), expected[0])
    assert replays(model) == 0
    for label, budget in budgets(model).items():
        fxoffload.set_memory_budget(model, budget)
        before = replays(model)
        for k, wanted in enumerate(expected):
            assert torch.equal(compiled(rows(k)), wanted), (label, k)
        assert replays(model) == before + 4, label
        if label != "all":
            assert_streams(model)
        assert len(capturer_of(model).graphs) == 1
    assert fxoffload.stats(model).forwards == 1 + 5 * len(budgets(model))


@torch.no_grad()
def test_a_replay_restores_nothing_and_what_it_prefetched_is_used() -> None:
    model = toy(6)
    compiled = graphed(model)
    compiled(rows(0))
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    assert fxoffload.get_plan(model).live_at_start()
    for _ in range(2):
        compiled(rows(0))
    restores = fxoffload.stats(model).restores
    for k in range(4):
        compiled(rows(k))
        assert_streams(model)
    assert fxoffload.stats(model).restores == restores


@pytest.fixture
def timed(captures: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, Any]]:
    """Makes a model that streams by a fresh plan, whose first, second, ... capture takes so long, and what calls it."""

    def make(*takes_ms: float) -> tuple[Any, Any]:
        monkeypatch.setattr(graph, "is_bound_by_copies", lambda plan: bool(plan.loads))
        captures["takes_ms"] = [0.0, *takes_ms]
        model = toy(6)
        compiled = graphed(model)
        for k in range(4):
            compiled(rows(k))
        (binding,) = api.bindings_of(model)
        assert binding.settled
        assert capturer_of(model).captures == 1
        fxoffload.set_memory_budget(model, budgets(model)["half"])
        assert not binding.settled
        return model, compiled

    return make


@torch.no_grad()
@pytest.mark.parametrize(
    ("takes_ms", "made"),
    [([1e6, 1e6, 0.0], 3), ([1e6], pace.TRIES), ([0.0], 1)],
    ids=["two are slow", "all are slow", "the first is good"],
)
def test_a_capture_that_is_slow_is_made_again(timed: Callable[..., tuple[Any, Any]], takes_ms: list[float], made: int) -> None:
    model, compiled = timed(*takes_ms)
    plain = offload(toy(6))
    for k in range(1 + pace.TRIES * (pace.TIMED + 2)):
        before = replays(model)
        assert torch.equal(compiled(rows(k)), plain(rows(k)))
        assert replays(model) == before + (k > 0)
        assert len(capturer_of(model).graphs) == (k > 0)
    (binding,) = api.bindings_of(model)
    assert binding.settled
    assert capturer_of(model).captures == 1 + made
    # Two plans, each uncaptured at first.
    assert fxoffload.stats(model).restores == 4


@torch.no_grad()
def test_slow_captures_that_are_lost_with_many_replays_have_paid(timed: Callable[..., tuple[Any, Any]]) -> None:
    model, compiled = timed(1e6)
    (binding,) = api.bindings_of(model)
    for turn in range(2 * STRIKES):
        before = capturer_of(model).captures
        for k in range(20):
            compiled(rows(k))
        if turn > 1:
            assert capturer_of(model).captures == before + 1, turn
        binding.lose_captures("another model needs the memory")
    assert binding._graphs is not None
    assert not binding._graphs.refused


@torch.no_grad()
def test_a_slow_capture_that_cannot_be_made_again_at_once(
    timed: Callable[..., tuple[Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, compiled = timed(1e6, 0.0)
    plain = offload(toy(6))
    compiled(rows(0))
    compiled(rows(0))
    capturer = capturer_of(model)
    capture, failures = capturer.capture, []

    def fails_once(work: Callable[[], Any]) -> Any:
        if not failures:
            failures.append(1)
            raise torch.OutOfMemoryError("out of memory")
        return capture(work)

    monkeypatch.setattr(capturer, "capture", fails_once)
    for k in range(12):
        assert torch.equal(compiled(rows(k)), plain(rows(k)))
    (binding,) = api.bindings_of(model)
    assert failures
    assert binding.settled
    assert binding.captured


@torch.no_grad()
def test_results_are_the_callers() -> None:
    model = toy(4)
    compiled = graphed(model)
    compiled(rows(0))
    kept = [compiled(rows(k)) for k in range(4)]
    copies = [one.clone() for one in kept]
    compiled(rows(9))
    assert all(torch.equal(one, copy) for one, copy in zip(kept, copies, strict=True))
    assert len({one.data_ptr() for one in kept}) == 4


@torch.no_grad()
def test_edits_between_replays() -> None:
    """Case 24."""
    model, other = toy(6), toy(6)
    compiled, plain = graphed(model), offload(other)
    compiled(rows(0))
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    plan = fxoffload.get_plan(model)
    assert plan.residents
    assert plan.loads
    for _ in range(3):
        compiled(rows(0))
    count = capturer_of(model).captures
    for k, block in enumerate(model.blocks):
        for one in (block, other.blocks[k]):
            one.up.weight.data.add_(0.25)
            one.down.weight.mul_(1.5)
        before = replays(model)
        for again in range(2):
            assert torch.equal(compiled(rows(again)), plain(rows(again))), k
        assert replays(model) == before + 2
        assert_streams(model)
    model.blocks[1].up.weight.data = torch.ones_like(model.blocks[1].up.weight)
    other.blocks[1].up.weight.data = torch.ones_like(model.blocks[1].up.weight)
    assert torch.equal(compiled(rows(0)), plain(rows(0)))
    assert capturer_of(model).captures == count


@torch.no_grad()
def test_a_captured_graph_goes_with_its_plan() -> None:
    model = toy(5)
    compiled = graphed(model)
    for _ in range(3):
        compiled(rows(0))
    (first,) = capturer_of(model).graphs
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    assert not first.alive
    compiled(rows(0))
    assert not capturer_of(model).graphs
    compiled(rows(0))
    (second,) = capturer_of(model).graphs
    assert second.alive


@torch.no_grad()
def test_an_exception_in_a_replay_and_in_a_capture() -> None:
    model = seeded(lambda: Failing(5))
    compiled = graphed(model)
    expected = compiled(rows(0)).clone()
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    for calls in range(1, 4):
        for _ in range(calls):
            assert torch.equal(compiled(rows(0)), expected)
        failing[0] = ValueError("now")
        with pytest.raises(ValueError, match="now"):
            compiled(rows(0))
        failing.clear()
    for _ in range(3):
        assert torch.equal(compiled(rows(0)), expected)
    assert_streams(model)
    assert replays(model) > 3


@torch.no_grad()
def test_two_models_with_graphs() -> None:
    a, b = toy(4, seed=0), toy(4, seed=1)
    run_a, run_b = graphed(a), graphed(b)
    plain_a, plain_b = offload(toy(4, seed=0)), offload(toy(4, seed=1))
    for model, run in ((a, run_a), (b, run_b)):
        run(rows(0))
        fxoffload.set_memory_budget(model, budgets(model)["half"])
    for k in range(5):
        assert torch.equal(run_a(rows(k)), plain_a(rows(k)))
        assert torch.equal(run_b(rows(k)), plain_b(rows(k)))
    for model in (a, b):
        assert_streams(model)
        assert replays(model) == 4


@torch.no_grad()
def test_other_shapes_get_captures_of_their_own_up_to_a_number() -> None:
    model = toy(5)
    compiled, plain = graphed(model, dynamic=True), offload(toy(5), dynamic=True)
    # So close to each other that all run under one plan, which is made for the largest.
    sizes = range(100, 100 + MOST + 2)
    compiled(rows(0, n=sizes[-1]))
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    for again in range(3):
        for n in sizes:
            assert torch.equal(compiled(rows(again, n=n)), plain(rows(again, n=n)))
    assert len(capturer_of(model).graphs) == MOST
    assert replays(model) == 2 * MOST
    assert len(api.bindings_of(model)) == 1


@torch.no_grad()
def test_buffers_that_the_model_writes() -> None:
    model, eager = seeded(Counting), seeded(Counting)
    compiled = graphed(model)
    for k in range(8):
        if k == 1:
            fxoffload.set_memory_budget(model, budgets(model)["half"])
        torch.testing.assert_close(compiled(rows(k)), eager(rows(k)))
        assert [int(block.n) for block in model.blocks] == [k + 1] * 5
    assert replays(model) == 6


class Handing(nn.Module):
    """Returns its input, a view of it, one result twice, and a number; writes to its second input."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor, cache: torch.Tensor) -> Any:
        y = x
        for block in self.blocks:
            y = y + block(y).relu()
        cache[1:].copy_(y)
        return y, x, x[:, 2:4], y, cache


@torch.no_grad()
def test_inputs_that_are_results_and_inputs_that_are_written() -> None:
    model, eager = seeded(Handing), seeded(Handing)
    compiled = graphed(model)
    caches = [torch.zeros(4, 16) for _ in range(2)]
    for k in range(6):
        x, cache = rows(k), caches[k % 2]
        y, same, view, again, written = compiled(x, cache)
        torch.testing.assert_close(y, eager(x, torch.zeros(4, 16))[0])
        assert same is x
        assert written is cache
        assert torch.equal(cache[1:], y)
        assert torch.equal(view, x[:, 2:4])
        assert view.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
        assert torch.equal(again, y)
    assert replays(model) == 4
    assert len(capturer_of(model).graphs) == 2


@torch.no_grad()
def test_expanded_inputs() -> None:
    model = toy(4)
    compiled, plain = graphed(model), offload(toy(4))
    for k in range(4):
        x = rows(k)[:1].expand(3, 16)
        assert torch.equal(compiled(x), plain(x))
    assert replays(model) == 3


def test_inference_mode_and_no_grad_in_turn() -> None:
    model = toy(4)
    compiled, plain = graphed(model), offload(toy(4))
    for k in range(8):
        mode: Callable[[], Any] = torch.inference_mode if k % 3 else torch.no_grad
        with mode():
            assert torch.equal(compiled(rows(k)), plain(rows(k)))
    assert replays(model) >= 3


@torch.no_grad()
def test_what_is_timed_runs_uncaptured() -> None:
    model = toy(4)
    compiled = graphed(model)
    for _ in range(3):
        compiled(rows(0))
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    measured = fxoffload.measure(model, lambda: compiled(rows(0)))
    assert len(measured.segments) == len(fxoffload.get_plan(model).segments)
    before = replays(model)
    for _ in range(3):
        compiled(rows(0))
    assert replays(model) == before + 2


@torch.no_grad()
def test_all_goes_with_the_model() -> None:
    model = toy(4)
    compiled = graphed(model)
    compiled(rows(0))
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    for _ in range(3):
        compiled(rows(0))
    engine = api.engine_of(model)
    watched = [
        weakref.ref(engine),
        weakref.ref(engine.arena.pieces[0].memory),
        weakref.ref(model),
        weakref.ref(capturer_of(model).graphs[0]),
    ]
    del engine, model, compiled
    torch._dynamo.reset()
    gc.collect()
    assert [ref() for ref in watched] == [None] * 4


@torch.no_grad()
def test_the_arena_goes_at_once_when_the_budget_changes() -> None:
    """No cycle keeps views of it until the garbage collector comes."""
    model = toy(4)
    compiled = graphed(model)
    for _ in range(3):
        compiled(rows(0))
    memory = weakref.ref(api.engine_of(model).arena.pieces[0].memory)
    gc.disable()
    try:
        fxoffload.set_memory_budget(model, budgets(model)["smallest"])
        compiled(rows(0))
        assert memory() is None
    finally:
        gc.enable()


@torch.no_grad()
def test_an_engine_counts_what_its_captures_hold(captures: dict[str, Any]) -> None:
    captures["each"] = 1000
    model = toy(4)
    compiled = graphed(model)
    compiled(rows(0))
    engine = api.engine_of(model)
    assert engine.arena_nbytes == engine.arena.nbytes
    compiled(rows(0))
    assert engine.arena_nbytes == engine.arena.nbytes + 1000
    engine.shrink_arena(0)
    assert engine.arena_nbytes == 0
