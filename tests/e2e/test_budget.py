"""One budget for several models, other sizes of one graph, and the plan of the first forwards."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import fxoffload
from fxoffload import api
from fxoffload.errors import BudgetError, ConfigError
from fxoffload.resize import estimate
from fxoffload.sizes import MIB
from tests.checks import offload
from tests.models import Toy, rows, seeded, toy


def offloaded(n: int, budget: object, *, seed: int = 0, dynamic: bool | None = False) -> tuple[torch.nn.Module, object]:
    model = toy(n, seed=seed)
    options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": budget}
    return model, torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, dynamic=dynamic, options=options)


def test_two_models_under_one_budget_hold_no_more_than_it() -> None:
    budget = fxoffload.Budget("24KiB")
    pairs = [offloaded(6, budget), offloaded(4, budget, seed=1)]
    with torch.no_grad():
        for k in range(8):
            model, compiled = pairs[k % 2]
            torch.testing.assert_close(compiled(rows(k)), model(rows(k)))
            held = sum(api.engine_of(m).arena.nbytes for m, _ in pairs if k or m is model)
            assert held + fxoffload.get_plan(model).activation_nbytes <= 24 << 10
            assert fxoffload.stats(model).nbytes_copied > 0


def test_an_idle_model_keeps_what_is_to_spare() -> None:
    budget = fxoffload.Budget("1MiB")
    (first, run_first), (second, run_second) = offloaded(3, budget), offloaded(3, budget, seed=1)
    with torch.no_grad():
        for _ in range(2):
            run_first(rows(0))
            run_second(rows(0))
        for model, run in ((first, run_first), (second, run_second)):
            run(rows(1))
            assert fxoffload.stats(model).nbytes_copied == 0
            assert fxoffload.stats(model).restores == 1


def test_a_shared_budget_serialises_threads() -> None:
    budget = fxoffload.Budget("24KiB")
    pairs = [offloaded(5, budget, seed=s) for s in range(2)]
    failures: list[BaseException] = []

    def run(model: torch.nn.Module, compiled: object) -> None:
        try:
            with torch.no_grad():
                for k in range(6):
                    torch.testing.assert_close(compiled(rows(k)), model(rows(k)))
        except BaseException as error:
            failures.append(error)

    with torch.no_grad():
        for _, compiled in pairs:
            compiled(rows(0))
    threads = [threading.Thread(target=run, args=pair) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_bad_budgets_are_refused_when_made() -> None:
    with pytest.raises(ConfigError, match="memory_budget: '4g'"):
        fxoffload.Budget("4g")
    assert repr(fxoffload.Budget("4GiB")) == f"Budget({4 << 30})"


def test_other_sizes_are_priced_again_without_recompiling() -> None:
    model, compiled = offloaded(4, "52KiB", dynamic=True)
    with torch.no_grad():
        plans = {}
        for n in (3, 7, 4, 100, 3):
            x = torch.randn(n, 16)
            torch.testing.assert_close(compiled(x), model(x))
            plans[n] = fxoffload.get_plan(model)
            assert plans[n].peak_nbytes <= 52 << 10
            (binding,) = api.bindings_of(model)
        assert plans[100].activation_nbytes > 4 * plans[7].activation_nbytes
        assert plans[100].streamed_nbytes > 0
        assert binding.program.facts.symbols


def test_a_size_that_leaves_too_little_is_an_error_before_the_run() -> None:
    model, compiled = offloaded(4, "40KiB", dynamic=True)
    with torch.no_grad():
        compiled(torch.randn(4, 16))
        forwards = fxoffload.stats(model).forwards
        with pytest.raises(
            BudgetError, match=r"budget 40\.00 KiB: .* of activations .*; raise the budget to at least \d+"
        ) as caught:
            compiled(torch.randn(4096, 16))
        assert fxoffload.stats(model).forwards == forwards
        x = torch.randn(5, 16)
        torch.testing.assert_close(compiled(x), model(x))
        fxoffload.set_memory_budget(model, caught.value.smallest_nbytes)
        x = torch.randn(4096, 16)
        torch.testing.assert_close(compiled(x), model(x))


@pytest.mark.parametrize(("budget", "all_at_once"), [("1GiB", True), ("40KiB", False)])
def test_the_first_forward_streams_only_where_memory_may_be_short(budget: str, all_at_once: bool) -> None:
    model = toy(4)
    options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": budget, "profile": True}
    compiled = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, options=options)
    with torch.no_grad():
        torch.testing.assert_close(compiled(rows(0)), model(rows(0)))
        (binding,) = api.bindings_of(model)
        total = sum(bucket.nbytes for bucket in binding.costs.buckets)
        assert (fxoffload.stats(model).nbytes_arena == total) is all_at_once
        for k in range(1, 4):
            torch.testing.assert_close(compiled(rows(k)), model(rows(k)))
        assert fxoffload.stats(model).nbytes_arena == fxoffload.get_plan(model).arena_nbytes


@pytest.mark.parametrize("compiler", ["eager", "aot_eager", "inductor"])
@torch.no_grad()
def test_compiling_and_the_first_forwards_take_no_more_than_the_budget(compiler: str) -> None:
    """Case 19, on the CPU as the device: the weights' own memory is a mapping, so all that torch allocates is the device's."""
    peaks = []
    for budget in (MIB * 8, MIB * 64):
        model = seeded(lambda: Toy(16, 256))
        nbytes = sum(p.nbytes for p in model.parameters())
        assert 2 * 8 * MIB < nbytes < 64 * MIB
        compiled = offload(model, segment_compiler=compiler, memory_budget=budget, profile=True)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            # The first is timed piece by piece, with little staging.
            compiled(rows(0, 256, 8))
            compiled(rows(1, 256, 8))
        peaks.append(peak_nbytes(recorded))
    assert peaks[0] <= 8 * MIB
    assert nbytes <= peaks[1] < nbytes + MIB, "what is counted has the arena, and the weights only once"


def peak_nbytes(recorded: Any) -> int:
    """The most that torch held of what it allocated meanwhile."""
    events = (e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]")
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def test_a_size_that_is_a_little_larger_does_not_break_the_budget() -> None:
    model, compiled = offloaded(4, "64KiB", dynamic=True)
    with torch.no_grad():
        compiled(torch.randn(100, 16))
        (binding,) = api.bindings_of(model)
        budget = fxoffload.smallest_budget(model, overlap=False)
        fxoffload.set_memory_budget(model, budget)
        x = torch.randn(100, 16)
        torch.testing.assert_close(compiled(x), model(x))
        with pytest.raises(BudgetError, match="raise the budget to at least"):
            compiled(torch.randn(101, 16))
        fxoffload.set_memory_budget(model, 3 * budget // 2)
        plans = []
        for rows_now in range(100, 130):
            x = torch.randn(rows_now, 16)
            torch.testing.assert_close(compiled(x), model(x))
            plan = fxoffload.get_plan(model)
            plans.append(plan)
            assert plan.arena_nbytes + estimate(binding._sizes.costs(binding.costs)) <= 3 * budget // 2
        assert 2 <= len({id(plan) for plan in plans}) <= 6, "not a plan for each"
        assert len(api.bindings_of(model)) == 1
