"""The planner on random models, budgets and knobs: the judge accepts every plan, and the promises hold."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.cost import Costs
from fxoffload.errors import BudgetError
from fxoffload.planner import Knobs, make_plan, smallest_budget
from fxoffload.verify import check_plan
from tests.unit.planner_cases import UNIT, random_costs, random_knobs


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
