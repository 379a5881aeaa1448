"""How near the planner comes to the optimum: to every placement tried, and to a pool, which no placement beats."""

from __future__ import annotations

import itertools
import random

import pytest

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.offsets import STRATEGIES, moves, place_oldest
from fxoffload.planner import make_plan, smallest_budget
from fxoffload.stream import Problem, latest_overlaps, make_stream, pooled_latest, step_ms
from fxoffload.timeline import simulate
from tests.unit.planner_cases import UNIT, chain, mini_lm, small_flux, tied_chain, uneven_chain


def best_by_trying(costs: Costs, weight_nbytes: int) -> float:
    """The best step over all sets of residents and all offsets on the grid of units."""
    problem = Problem(costs)
    best = float("inf")
    everything = range(len(problem.nbytes))
    for kept in itertools.chain.from_iterable(itertools.combinations(everything, k) for k in range(len(everything) + 1)):
        cap = weight_nbytes - problem.size(kept)
        stream = make_stream(problem, set(kept), -1)
        if cap < max(stream.nbytes, default=0):
            continue
        for offsets in itertools.product(*(range(0, cap - nbytes + 1, UNIT) for nbytes in stream.nbytes)):
            best = min(best, step_ms(problem, stream, latest_overlaps(stream, list(offsets), problem.n)))
    return best


@pytest.mark.parametrize("seed", range(60))
def test_small_cases_are_within_two_percent_of_the_optimum(seed: int):
    draw = random.Random(seed)
    n = draw.randint(2, 5)
    sizes = [UNIT * draw.randint(0, 3) for _ in range(n)]
    compute_ms = [draw.choice([0.0, 0.5, 1.0, 2.0, 3.0]) for _ in range(n)]
    costs = chain(sizes, compute_ms, latency_ms=draw.choice([0.0, 0.1]))
    weight_nbytes = draw.randint(max(sizes) // UNIT, sum(sizes) // UNIT) * UNIT
    plan = make_plan(costs, weight_nbytes)
    assert plan.step_ms <= 1.02 * best_by_trying(costs, weight_nbytes) + 1e-9
    assert plan.step_ms == simulate(plan, costs).step_ms


def pooled_step_ms(problem: Problem, residents: frozenset[int], cap: int) -> float:
    stream = make_stream(problem, residents, -1)
    latest = pooled_latest(stream, cap, problem.n)
    return float("inf") if latest is None else step_ms(problem, stream, latest)


def least_in_a_pool(costs: Costs, weight_nbytes: int) -> float:
    """No set of residents and no placement gives a faster step: all sets, without places."""
    problem = Problem(costs)
    best = float("inf")
    buckets = range(len(problem.nbytes))
    for bits in range(1 << len(buckets)):
        residents = frozenset(b for b in buckets if bits >> b & 1)
        cap = weight_nbytes - problem.size(residents)
        if cap >= max(problem.needed_nbytes(residents)):
            best = min(best, pooled_step_ms(problem, residents, cap))
    return best


@pytest.mark.parametrize("mib", [5.2, 8.0, 10.68, 10.98, 14.5])
def test_a_small_model_of_unequal_buckets_is_within_two_percent_of_the_optimum(mib: float):
    costs = small_flux()
    budget = int(mib * 2**20)
    assert make_plan(costs, budget).step_ms <= 1.02 * least_in_a_pool(costs, budget // UNIT * UNIT)


@pytest.mark.parametrize("mib", [10, 14, 40])
def test_an_embedding_and_equal_layers_are_within_two_percent_of_the_optimum(mib: int):
    costs = mini_lm()
    budget = mib * 2**20
    assert make_plan(costs, budget).step_ms <= 1.02 * least_in_a_pool(costs, budget // UNIT * UNIT)


@pytest.mark.parametrize("seed", range(12))
def test_models_of_ten_buckets_are_within_two_percent_of_the_optimum(seed: int):
    costs = uneven_chain(seed, 10)
    smallest, everything = smallest_budget(costs), sum(bucket.nbytes for bucket in costs.buckets)
    budget = smallest + (everything - smallest) * (seed + 1) // 16 // UNIT * UNIT
    assert make_plan(costs, budget).step_ms <= 1.02 * least_in_a_pool(costs, budget)


@pytest.mark.parametrize("seed", range(20))
def test_no_placement_beats_the_pool(seed: int):
    draw = random.Random(seed)
    costs = tied_chain(seed) if seed % 2 else uneven_chain(seed, 9)
    problem = Problem(costs)
    stream = make_stream(problem, frozenset(), draw.choice([-1, 0]))
    for _ in range(20):
        cap = draw.randint(max(problem.needed_nbytes(frozenset())), sum(stream.nbytes)) // UNIT * UNIT
        latest = pooled_latest(stream, cap, problem.n)
        for strategy in STRATEGIES:
            offsets = strategy(stream, cap, draw.randrange(len(stream)))
            if offsets is not None:
                assert latest is not None
                placed_ms = step_ms(problem, stream, latest_overlaps(stream, offsets, problem.n))
                assert step_ms(problem, stream, latest) <= placed_ms * (1 + 1e-5)


def test_a_pool_of_which_a_load_needs_more_than_there_is():
    """The load of b0 is used by segments 0 and 2, so b1's copy waits for an eviction that comes after its use."""
    segments = tuple(SegmentCost(f"s{i}", 1.0, 0) for i in range(3))
    buckets = (BucketCost("b0", 2 * UNIT, 1.0, (0, 2)), BucketCost("b1", 2 * UNIT, 1.0, (1,)))
    problem = Problem(Costs(segments, buckets, float(UNIT)))
    stream = make_stream(problem, frozenset(), 9 * UNIT)
    assert stream.uses == [(0, 2), (1,)]
    assert pooled_latest(stream, 3 * UNIT, 3) is None
    assert pooled_latest(stream, 4 * UNIT, 3) == [(1, 0), (1, 1)]
    # With one load a use the bytes of b0 are free in between.
    assert pooled_latest(make_stream(problem, frozenset(), -1), 3 * UNIT, 3) == [(1, 2), (0, 0), (0, 1)]


def test_the_oldest_bytes_are_overwritten_first():
    stream = make_stream(Problem(chain([UNIT * size for size in (2, 1, 2, 1, 3)], [1.0] * 5)), frozenset(), -1)
    assert place_oldest(stream, 4 * UNIT) == [0, 2 * UNIT, 0, 3 * UNIT, 0]
    assert place_oldest(stream, 2 * UNIT) is None
    assert list(moves(stream, [0, 2 * UNIT, 0, 3 * UNIT, 0], 1, 4 * UNIT)) == [0, 3 * UNIT]
