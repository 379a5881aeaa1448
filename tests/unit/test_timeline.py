"""The simulated machine by hand, and the windowed bound against its definition."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.plan import Load, Plan
from fxoffload.planner import Knobs, make_plan
from fxoffload.stream import Problem, latest_overlaps, make_stream, step_ms
from fxoffload.timeline import chrome_trace, simulate, windowed_bound
from tests.unit.planner_cases import UNIT, chain, equal_chain, flux


def plan_of(costs: Costs, loads: list[tuple[int, int, int, int]], *, overlap: bool = True) -> Plan:
    """Loads `(bucket, slot, prefetch_before, after)` of a chain in which nothing is resident."""
    names = [segment.name for segment in costs.segments]
    return Plan(
        segments=tuple(names),
        residents=(),
        loads=tuple(Load(names[b], names[b], slot * UNIT, UNIT, (b,), before, names[after]) for b, slot, before, after in loads),
        arena_nbytes=UNIT * (1 + max(slot for _, slot, _, _ in loads)),
        activation_nbytes=0,
        budget_nbytes=10 * UNIT,
        async_transfer=overlap,
        compute_ms=0.0,
        step_ms=0.0,
        bound_ms=0.0,
    )


def test_one_slot_takes_turns():
    # compute 1 ms and copy 1 ms cannot overlap when there is one place only
    plan = plan_of(equal_chain(2), [(0, 0, 0, 1), (1, 0, 1, 0)])
    timeline = simulate(plan, equal_chain(2))
    assert timeline.step_ms == 4.0
    assert [(s.start_ms, s.end_ms, s.stall_ms) for s in timeline.segments] == [(1.0, 2.0, 1.0), (3.0, 4.0, 1.0)]
    assert [(load.start_ms, load.end_ms) for load in timeline.loads] == [(0.0, 1.0), (2.0, 3.0)]


def test_two_slots_overlap():
    # Each bucket has its own slot, and is copied again right after it was read.
    plan = plan_of(equal_chain(2), [(0, 0, 1, 0), (1, 1, 0, 1)])
    timeline = simulate(plan, equal_chain(2))
    assert timeline.step_ms == 2.0
    assert timeline.stall_ms == 0.0
    assert [(load.start_ms, load.end_ms) for load in timeline.loads] == [(-1.0, 0.0), (0.0, 1.0)]


def test_copies_are_in_order_of_issue():
    # A copy that has to wait for its slot holds up the one behind it, whose slot has long been free.
    costs = equal_chain(3)
    plan = plan_of(costs, [(0, 0, 0, 2), (1, 1, 0, 1), (2, 0, 1, 0)])
    timeline = simulate(plan, costs)
    assert [(load.start_ms, load.end_ms) for load in timeline.loads] == [(0.0, 1.0), (1.0, 2.0), (2.0, 3.0)]
    assert timeline.step_ms == 4.0


def test_without_overlap_everything_adds_up():
    costs = equal_chain(3)
    plan = plan_of(costs, [(0, 0, 0, 2), (1, 1, 1, 1), (2, 0, 2, 0)], overlap=False)
    assert simulate(plan, costs).step_ms == 6.0


def test_nothing_to_load():
    costs = chain([0, 0], [1.0, 2.0])
    assert simulate(make_plan(costs, 1), costs).step_ms == 3.0


def test_a_slow_start_is_not_reported():
    """A link that is busy 99% of the time needs many forwards to catch up with the first one."""
    costs = equal_chain(4, compute_ms=1.01)
    plan = make_plan(costs, 3 * UNIT, Knobs(persistent_buckets=0))
    assert simulate(plan, costs, forwards=1).step_ms > 4.9
    assert simulate(plan, costs).step_ms == pytest.approx(4.04)


@pytest.mark.parametrize("seed", range(40))
def test_the_fast_simulation_agrees(seed: int):
    draw = random.Random(seed)
    n = draw.randint(1, 8)
    costs = chain([UNIT * draw.randint(0, 4) for _ in range(n)], [draw.choice([0.0, 0.5, 1.0, 3.0]) for _ in range(n)])
    if not costs.buckets:
        return
    plan = make_plan(costs, draw.randint(4, 12) * UNIT)
    problem = Problem(costs)
    residents = {b for b, bucket in enumerate(costs.buckets) if bucket.name in {r.bucket for r in plan.residents}}
    stream = make_stream(problem, residents, -1)
    offsets = [load.offset for load in plan.loads]
    assert step_ms(problem, stream, latest_overlaps(stream, offsets, problem.n)) == pytest.approx(plan.step_ms, rel=1e-4)


def brute_bound(costs: Costs, weight_nbytes: int) -> float:
    """The definition: every set of disjoint cyclic windows, by the places where they begin and end."""
    n = len(costs.segments)
    read = [0.0] * n
    for bucket in costs.buckets:
        read[bucket.uses[0]] += bucket.nbytes
    best = 0.0
    # Each segment is outside (0), the first of a window (1) or continues one (2); a 2 behind a 0 is no window.
    for states in itertools.product((0, 1, 2), repeat=n):
        if any(states[i] == 2 and states[i - 1] == 0 for i in range(n)) or (2 in states and 1 not in states):
            continue
        inside = [i for i in range(n) if states[i]]
        gain = sum(read[i] / costs.link_bytes_per_ms - costs.segments[i].compute_ms for i in inside)
        best = max(best, gain - states.count(1) * weight_nbytes / costs.link_bytes_per_ms)
    return sum(segment.compute_ms for segment in costs.segments) + best


@pytest.mark.parametrize("seed", range(40))
def test_windowed_bound_is_its_definition(seed: int):
    draw = random.Random(seed)
    n = draw.randint(1, 7)
    costs = chain([UNIT * draw.randint(0, 8) for _ in range(n)], [draw.choice([0.0, 1.0, 3.0, 6.0]) for _ in range(n)])
    weight_nbytes = UNIT * draw.randint(0, 12)
    assert windowed_bound(costs, weight_nbytes) == pytest.approx(brute_bound(costs, weight_nbytes))


def test_windowed_bound_counts_a_shared_bucket_once():
    segments = tuple(SegmentCost(name, 1.0, 0) for name in "abc")
    costs = Costs(segments, (BucketCost("tied", 10 * UNIT, 10.0, (0, 2)),), float(UNIT))
    # Window a alone: 10 ms of copies behind 1 ms of compute.
    assert windowed_bound(costs, 0) == 12.0
    assert windowed_bound(costs, 10 * UNIT) == 3.0


def test_windowed_bound_of_flux():
    """Never below compute or below what does not fit; and where the double blocks alone are link-bound, above both."""
    costs = flux(1)
    activations = costs.segments[0].activation_nbytes
    weights = sum(bucket.nbytes for bucket in costs.buckets)
    bounds = [windowed_bound(costs, int(gib * 2**30) - activations) for gib in (1.25, 4, 8, 16)]
    naive = [(weights - int(gib * 2**30) + activations) / costs.link_bytes_per_ms for gib in (1.25, 4, 8, 16)]
    assert bounds == sorted(bounds, reverse=True)
    assert all(bound >= max(131.3, low) - 1e-9 for bound, low in zip(bounds, naive, strict=True))
    assert math.isclose(bounds[0], 411.7, abs_tol=0.1)
    costs = flux(3)
    weight_nbytes = 4 * 2**30 - costs.segments[0].activation_nbytes
    assert (weights - weight_nbytes) / costs.link_bytes_per_ms < 388
    assert math.isclose(windowed_bound(costs, weight_nbytes), 433.6, abs_tol=0.1)


def test_chrome_trace():
    costs = equal_chain(2)
    trace = chrome_trace(simulate(plan_of(costs, [(0, 0, 1, 0), (1, 1, 0, 1)]), costs))
    events = [(e["name"], e["tid"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    # The first copy belongs to the forward before; it is time 0.
    assert events == [
        ("blocks.0", 0, 1000.0, 1000.0),
        ("blocks.1", 0, 2000.0, 1000.0),
        ("blocks.0", 1, 0.0, 1000.0),
        ("blocks.1", 1, 1000.0, 1000.0),
    ]
    assert [e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"] == ["compute", "copy"]
