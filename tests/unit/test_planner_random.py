"""The planner on random models, budgets and knobs: the judge accepts every plan, and the promises hold."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.cost import Costs
from fxoffload.errors import BudgetError
from fxoffload.planner import AS_SHORT, Knobs, make_plan, smallest_budget
from fxoffload.timeline import simulate
from fxoffload.verify import check_plan
from tests.unit.planner_cases import (
    GIB,
    UNIT,
    flux,
    mini_lm,
    random_costs,
    random_knobs,
    small_flux,
    tied_chain,
    uneven_chain,
)


@settings(max_examples=150, deadline=None)
@given(random_costs(), random_knobs, st.integers(0, 40 * UNIT))
def test_the_judge_accepts_every_plan(costs: Costs, knobs: Knobs, extra_nbytes: int):
    smallest = smallest_budget(costs, knobs)
    plan = make_plan(costs, smallest + extra_nbytes, knobs)
    check_plan(plan, costs)
    assert plan.peak_nbytes <= smallest + extra_nbytes
    assert plan.step_ms >= plan.bound_ms - 1e-9
    assert plan == make_plan(costs, smallest + extra_nbytes, knobs)


@settings(max_examples=100, deadline=None)
@given(random_costs(), random_knobs, st.integers(0, 40 * UNIT))
def test_captured_copies_are_gathered_in_their_forward_or_left(costs: Costs, knobs: Knobs, extra_nbytes: int):
    budget = smallest_budget(costs, knobs) + extra_nbytes
    plan, captured = (make_plan(costs, budget, dataclasses.replace(knobs, cuda_graph=on)) for on in (False, True))
    check_plan(captured, costs)
    assert captured.step_ms == simulate(captured, costs).step_ms
    if captured.loads != plan.loads:
        assert not any(load.wraps for load in captured.loads)
        assert captured.step_ms <= simulate(dataclasses.replace(plan, cuda_graph=True), costs).step_ms * AS_SHORT
    assert [load.bucket for load in captured.loads] == [load.bucket for load in plan.loads]
    assert captured.residents == plan.residents


@settings(max_examples=100, deadline=None)
@given(random_costs(), random_knobs)
def test_the_smallest_budget_is_the_smallest(costs: Costs, knobs: Knobs):
    smallest = smallest_budget(costs, knobs)
    check_plan(make_plan(costs, smallest, knobs), costs)
    for too_small in (smallest - 1, smallest - UNIT):
        with pytest.raises(BudgetError) as error:
            make_plan(costs, too_small, knobs)
        assert error.value.smallest_nbytes == smallest


@settings(max_examples=100, deadline=None)
@given(random_costs(), random_knobs, st.integers(0, 40 * UNIT))
def test_no_overlap_issues_at_the_use(costs: Costs, knobs: Knobs, extra_nbytes: int):
    knobs = dataclasses.replace(knobs, async_transfer=False)
    plan = make_plan(costs, smallest_budget(costs, knobs) + extra_nbytes, knobs)
    check_plan(plan, costs)
    copy_ms = {bucket.name: bucket.copy_ms for bucket in costs.buckets}
    assert all(load.prefetch_before == load.wait_before for load in plan.loads)
    assert plan.step_ms == pytest.approx(plan.compute_ms + sum(copy_ms[load.bucket] for load in plan.loads))


AUTO = Knobs()


def slowdowns(costs: Costs, budgets: Sequence[int], knobs: Knobs = AUTO) -> list[tuple[int, float]]:
    """The budgets at which the step is more than 0.5% slower than at a smaller one, and by how much."""
    found: list[tuple[int, float]] = []
    best_ms = float("inf")
    for budget in budgets:
        plan = make_plan(costs, budget, knobs)
        check_plan(plan, costs)
        if plan.step_ms > 1.005 * best_ms:
            found.append((budget, plan.step_ms / best_ms))
        best_ms = min(best_ms, plan.step_ms)
    return found


def budgets_of(costs: Costs, knobs: Knobs = AUTO, count: int = 24) -> list[int]:
    """From the smallest that works to where everything fits."""
    smallest = smallest_budget(costs, knobs)
    activations = max(segment.activation_nbytes for segment in costs.segments)
    largest = max(smallest, activations + sum(bucket.nbytes for bucket in costs.buckets))
    return [smallest + (largest - smallest) * i // (count - 1) for i in range(count)]


@pytest.mark.parametrize("seed", range(10))
def test_more_budget_is_never_slower(seed: int):
    costs = uneven_chain(seed, 6 + 2 * seed)
    assert slowdowns(costs, budgets_of(costs)) == []


@pytest.mark.parametrize("seed", range(5))
def test_more_budget_is_never_slower_with_shared_buckets(seed: int):
    costs = tied_chain(seed)
    assert slowdowns(costs, budgets_of(costs)) == []


@pytest.mark.parametrize("costs", [small_flux(), mini_lm(), flux(1, doubles=2, singles=4)], ids=["flux", "lm", "blocks"])
def test_more_budget_is_never_slower_for_small_models(costs: Costs):
    assert slowdowns(costs, budgets_of(costs)) == []


@pytest.mark.slow
@pytest.mark.parametrize(("batch", "largest", "count"), [(1, 18, 24), (3, 8, 12)])
def test_more_budget_is_never_slower_for_flux(batch: int, largest: int, count: int):
    """To where the link keeps up."""
    costs = flux(batch)
    smallest = smallest_budget(costs)
    assert slowdowns(costs, [smallest + (largest * GIB - smallest) * i // (count - 1) for i in range(count)]) == []


@pytest.mark.parametrize(
    "knobs", [Knobs(transfer_buckets=2), Knobs(max_inflight_prefetch_bytes=1 << 20), Knobs(async_transfer=False)]
)
@pytest.mark.parametrize("seed", range(3))
def test_more_budget_is_never_slower_with_knobs(seed: int, knobs: Knobs):
    costs = uneven_chain(seed, 10)
    assert slowdowns(costs, budgets_of(costs, knobs), knobs) == []
