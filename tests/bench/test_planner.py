"""How long planning takes: it runs again for every new budget."""

from __future__ import annotations

import pytest

from fxoffload.planner import make_plan, smallest_budget
from fxoffload.timeline import simulate, windowed_bound
from fxoffload.verify import check_plan
from tests.bench.graphs import KNOBS, SIZES, costs_of, half, plan_of

pytestmark = pytest.mark.benchmark(group="planner")


@pytest.mark.parametrize("buckets", SIZES)
def test_make_plan(benchmark, buckets: int) -> None:
    costs = costs_of(buckets)
    plan = benchmark(make_plan, costs, half(costs), KNOBS)
    assert plan.loads


@pytest.mark.parametrize("buckets", SIZES)
def test_smallest_budget(benchmark, buckets: int) -> None:
    costs = costs_of(buckets)
    assert benchmark(smallest_budget, costs, KNOBS) < half(costs)


@pytest.mark.parametrize("buckets", SIZES)
def test_judge(benchmark, buckets: int) -> None:
    plan = plan_of(buckets)
    benchmark(check_plan, plan, costs_of(buckets))


@pytest.mark.parametrize("buckets", SIZES)
def test_simulate(benchmark, buckets: int) -> None:
    plan = plan_of(buckets)
    assert benchmark(simulate, plan, costs_of(buckets)).step_ms >= plan.compute_ms


@pytest.mark.parametrize("buckets", SIZES)
def test_bound(benchmark, buckets: int) -> None:
    costs = costs_of(buckets)
    assert benchmark(windowed_bound, costs, half(costs)) > 0
