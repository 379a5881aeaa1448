"""What the planner promises: right for every slot count, the golden placement, knobs met, errors with numbers, near the bound."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.errors import BudgetError
from fxoffload.plan import Plan
from fxoffload.planner import Knobs, make_plan, persistent_indices, smallest_budget
from fxoffload.sizes import parse_size
from fxoffload.timeline import simulate
from fxoffload.verify import check_plan
from tests.unit.planner_cases import GIB, UNIT, chain, equal_chain, flux, uneven_chain

SLOT_PAIRS = list(itertools.product(range(1, 10), range(1, 6)))


def residents(plan: Plan) -> list[str]:
    return [resident.bucket for resident in plan.residents]


@pytest.mark.parametrize(("n", "slots"), SLOT_PAIRS)
def test_every_number_of_streamed_buckets_and_slots(n: int, slots: int):
    costs = equal_chain(n)
    plan = make_plan(costs, slots * UNIT, Knobs(persistent_buckets=0))
    check_plan(plan, costs)
    assert plan.streamed_nbytes == n * UNIT
    assert plan.arena_nbytes <= slots * UNIT
    # One place only, or one bucket that is copied over itself: no overlap. Two places and an odd number of buckets:
    # somewhere in the cycle two neighbours share a place, and one copy shows.
    if slots == 1 or n == 1:
        assert plan.step_ms == 2 * n
    elif slots == 2 and n % 2:
        assert plan.step_ms == n + 1
    else:
        assert plan.step_ms == n


@pytest.mark.parametrize(("n", "slots"), SLOT_PAIRS)
@pytest.mark.parametrize("look_ahead", range(1, 6))
def test_every_look_ahead(n: int, slots: int, look_ahead: int):
    costs = equal_chain(n)
    plan = make_plan(costs, slots * UNIT, Knobs(persistent_buckets=0, transfer_buckets=look_ahead))
    check_plan(plan, costs)
    assert plan.streamed_nbytes == n * UNIT
    assert most_ahead(plan)[0] <= look_ahead
    if look_ahead > 1 and slots > 2 and n > 1:
        assert plan.step_ms == n


@pytest.mark.parametrize("look_ahead", range(1, 6))
def test_the_look_ahead_holds_on_the_device_too(look_ahead: int):
    """The host is far ahead, so it is `after` that keeps a copy from starting before its turn."""
    costs = chain([UNIT] * 12, [0.0, 0.0, 4.0] * 4)
    plan = make_plan(costs, 8 * UNIT, Knobs(persistent_buckets=0, transfer_buckets=look_ahead))
    check_plan(plan, costs)
    timeline = simulate(plan, costs)
    used_ms = [timeline.segments[load.wait_before].start_ms for load in plan.loads]
    spans = [(load.start_ms, used) for load, used in zip(timeline.loads, used_ms, strict=True)]
    spans += [(start + timeline.step_ms, used + timeline.step_ms) for start, used in spans]
    for now, _ in spans[: len(plan.loads)]:
        assert sum(start <= now < used - 1e-9 for start, used in spans) <= look_ahead


def test_what_a_captured_forward_needs_first_it_copies_itself():
    """Hardly anything computes any more when the first copy of the next forward could be issued."""
    costs = chain([UNIT] * 6, [0.001] * 6)
    plan, captured = (make_plan(costs, 3 * UNIT, Knobs(persistent_buckets=0, cuda_graph=on)) for on in (False, True))
    assert [load.wraps for load in plan.loads] == [True] + [False] * 5
    assert captured.loads == (dataclasses.replace(plan.loads[0], prefetch_before=0), *plan.loads[1:])
    assert (plan.step_ms, captured.step_ms) == pytest.approx((6.0, 6.001))
    check_plan(captured, costs)


def test_what_is_copied_behind_the_end_of_compute_is_left_to_the_forward_before():
    costs = chain([UNIT] * 6 + [0], [0.0] * 6 + [3.0])
    plan, captured = (make_plan(costs, 3 * UNIT, Knobs(persistent_buckets=0, cuda_graph=on)) for on in (False, True))
    assert captured == dataclasses.replace(plan, cuda_graph=True)
    assert sum(load.wraps for load in plan.loads) == 3
    assert plan.step_ms == 6.0
    # Three copies take as long as the last segment; in a graph of the next forward none could start before its end.
    loads = tuple(dataclasses.replace(load, prefetch_before=0) if load.wraps else load for load in plan.loads)
    assert simulate(dataclasses.replace(captured, loads=loads), costs).step_ms == 9.0


def test_smallest_budget_with_tiny_buckets():
    """Tiny buckets are kept first, but not where there is no room for them."""
    costs = chain([UNIT, 1000 * UNIT] * 8, [1.0] * 16, 1000.0 * UNIT, latency_ms=1.0)
    assert smallest_budget(costs) == 1000 * UNIT
    for budget in (1000, 1001, 1007, 1008, 1500, 2000):
        check_plan(make_plan(costs, budget * UNIT), costs)


@pytest.mark.parametrize(
    ("n", "persistent", "bins", "kept"),
    [
        (32, 16, 4, [(0, 4), (8, 12), (16, 20), (24, 28)]),
        (32, 16, 1, [(0, 16)]),
        (10, 5, 3, [(0, 2), (3, 5), (6, 7)]),
        (57, 32, 4, [(0, 8), (14, 22), (28, 36), (42, 50)]),
        (5, 4, 2, [(0, 4)]),
        (7, 7, 3, [(0, 7)]),
        (7, 9, 3, [(0, 7)]),
        (7, 2, 5, [(0, 1), (3, 4)]),
        (11, 10, 4, [(0, 2), (2, 5), (5, 8), (8, 10)]),
        (5, 0, 3, []),
        (0, 4, 3, []),
        (4, 2, 0, [(0, 2)]),
    ],
)
def test_persistent_indices(n: int, persistent: int, bins: int, kept: list[tuple[int, int]]):
    assert persistent_indices(n, persistent, bins) == {i for start, end in kept for i in range(start, end)}


def test_persistent_knobs_are_met_exactly():
    costs = equal_chain(10)
    plan = make_plan(costs, 9 * UNIT, Knobs(persistent_buckets=5, persistent_bins=3))
    assert residents(plan) == [f"blocks.{i}" for i in (0, 1, 3, 4, 6)]
    assert residents(make_plan(costs, 9 * UNIT, Knobs(persistent_buckets=2))) == ["blocks.0", "blocks.1"]
    # Also where everything would fit: what the user fixed wins.
    assert make_plan(costs, 99 * UNIT, Knobs(persistent_buckets=4)).streamed_nbytes == 6 * UNIT
    assert make_plan(costs, 99 * UNIT, Knobs(persistent_buckets=99)).streamed_nbytes == 0


def test_what_must_stay_takes_no_persistent_place():
    costs = equal_chain(7)
    first, *others, last = costs.buckets
    kept = (dataclasses.replace(first, keep=True), *others, dataclasses.replace(last, keep=True))
    costs = dataclasses.replace(costs, buckets=kept)
    plan = make_plan(costs, 7 * UNIT, Knobs(persistent_buckets=2, persistent_bins=2))
    check_plan(plan, costs)
    assert residents(plan) == ["blocks.0", "blocks.1", "blocks.3", "blocks.6"]


@pytest.mark.parametrize("seed", [0, 7])
def test_offsets_are_aligned_in_staging_areas_of_any_size(seed: int):
    """Staging areas of one and a half of the largest bucket and the like are tried, too."""
    costs = uneven_chain(seed, 12)
    for budget in range(smallest_budget(costs), sum(bucket.nbytes for bucket in costs.buckets), 1000 * UNIT):
        check_plan(make_plan(costs, budget, Knobs(persistent_buckets=0)), costs)
        check_plan(make_plan(costs, budget, Knobs(persistent_bins=2)), costs)


def test_bins_alone_leave_the_number_to_the_planner():
    costs = equal_chain(10, compute_ms=0.1)
    plan = make_plan(costs, 7 * UNIT, Knobs(persistent_bins=3))
    kept = {int(name.removeprefix("blocks.")) for name in residents(plan)}
    assert kept == persistent_indices(10, len(kept), 3)
    assert len(kept) in (5, 6)


def test_everything_fits():
    costs = chain([UNIT * 3, 0, UNIT], [1.0, 1.0, 1.0], activation_nbytes=1000)
    plan = make_plan(costs, 4 * UNIT + 1000)
    check_plan(plan, costs)
    assert (plan.loads, plan.arena_nbytes, plan.step_ms, plan.bound_ms) == ((), 4 * UNIT, 3.0, 3.0)


def test_segments_without_buckets_only():
    plan = make_plan(chain([0, 0], [1.0, 2.0]), 1)
    assert (plan.loads, plan.residents, plan.arena_nbytes, plan.step_ms) == ((), (), 0, 3.0)


def test_activations_are_given_or_the_largest_of_the_segments():
    costs = Costs((SegmentCost("a", 1.0, 500), SegmentCost("b", 1.0, 700)), (), 1.0)
    assert make_plan(costs, 700).activation_nbytes == 700
    assert make_plan(costs, 700, activation_nbytes=300).activation_nbytes == 300


def least(costs: Costs, knobs: Knobs) -> tuple[int, int]:
    """In units: the smallest budget, and the smallest in which copies overlap compute."""
    return smallest_budget(costs, knobs) // UNIT, smallest_budget(costs, knobs, overlap=True) // UNIT


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((2,) * 8, (2, 4)),
        # The last and the first stream one behind the other, too.
        ((4, 1, 1, 1, 1, 3), (4, 9)),
        # So do those on both sides of a segment without weights.
        ((3, 0, 4, 1, 1, 1), (4, 9)),
        # Two neighbours fit into 6, but then half of the copies wait for compute; what would bring that holds everything.
        ((4, 1, 3, 2), (4, 6)),
        ((5, 2), (5, 7)),
        ((0, 5, 0), (5, 5)),
        ((0, 0), (0, 0)),
    ],
)
def test_smallest_budget_that_overlaps(sizes: tuple[int, ...], expected: tuple[int, int]):
    costs = chain([UNIT * size for size in sizes], [1.0] * len(sizes))
    assert least(costs, Knobs()) == expected
    assert least(costs, Knobs(async_transfer=False)) == (expected[0], expected[0])
    assert smallest_budget(costs, activation_nbytes=100, overlap=True) == expected[1] * UNIT + 100


def test_smallest_budget_that_overlaps_holds_a_shared_bucket_once():
    segments = tuple(SegmentCost(f"s{i}", 1.0, 0) for i in range(4))
    uses = ((0, 1), (1,), (2,), (3,))
    costs = Costs(segments, tuple(BucketCost(f"b{i}", (4 - i) * UNIT, 1.0, u) for i, u in enumerate(uses)), float(UNIT))
    # Segments 0 and 1 read b0 and b1; segments 1 and 2 read b2, too.
    assert least(costs, Knobs()) == (7, 9)
    # What must stay streams nowhere: b1 is kept, and segments 3 and 0 read b3 and b0 beside it.
    assert least(costs, Knobs(persistent_buckets=2)) == (7 + 2, 7 + 2 + 1)


def test_smallest_budget_that_overlaps_is_enough_for_equal_blocks():
    costs = equal_chain(8)
    plan = make_plan(costs, smallest_budget(costs, overlap=True), Knobs(persistent_buckets=0))
    assert plan.step_ms == plan.compute_ms
    assert make_plan(costs, smallest_budget(costs), Knobs(persistent_buckets=0)).step_ms == 2 * plan.compute_ms


def test_too_small_a_budget():
    costs = chain([640 * 2**20, 2468 * 2**20], [1.0, 1.0], 55e6, activation_nbytes=2**28)
    with pytest.raises(BudgetError) as error:
        make_plan(costs, 2 * GIB)
    assert str(error.value) == (
        "planner: budget 2.00 GiB: blocks.1 alone needs 2.66 GiB (256.00 MiB of activations + 2.41 GiB of weights at once); "
        "raise the budget to at least 2724MiB"
    )
    assert error.value.smallest_nbytes == smallest_budget(costs) == 2724 * 2**20
    given_back = re.search(r"at least (\S+)$", str(error.value))
    assert given_back is not None
    check_plan(make_plan(costs, parse_size(given_back[1])), costs)


def test_too_small_a_budget_for_what_is_fixed():
    costs = equal_chain(4)
    with pytest.raises(BudgetError) as error:
        make_plan(costs, 3 * UNIT, Knobs(persistent_buckets=3))
    assert str(error.value) == (
        "planner: budget 768 B: blocks.3 alone needs 1.00 KiB (0 B of activations + 768 B that must stay resident "
        "(3 buckets, persistent_buckets=3) + 256 B of weights at once); raise the budget to at least 1KiB, or keep fewer "
        "persistent_buckets"
    )
    assert error.value.smallest_nbytes == smallest_budget(costs, Knobs(persistent_buckets=3)) == 4 * UNIT


def test_a_segment_that_reads_several_buckets_needs_them_at_once():
    segments = (SegmentCost("s0", 1.0, 0), SegmentCost("s1", 1.0, 0))
    buckets = tuple(BucketCost(f"b{i}", UNIT, 1.0, (i // 2,)) for i in range(4))
    costs = Costs(segments, buckets, float(UNIT))
    with pytest.raises(BudgetError, match=r"segment s0 with its 2 buckets alone needs 512 B"):
        make_plan(costs, UNIT)
    check_plan(make_plan(costs, 2 * UNIT), costs)


def test_no_overlap_keeps_as_much_as_fits():
    costs = chain([UNIT * size for size in (4, 1, 1, 4, 2)], [1.0] * 5)
    plan = make_plan(costs, 8 * UNIT, Knobs(async_transfer=False))
    check_plan(plan, costs)
    assert all(load.prefetch_before == load.wait_before for load in plan.loads)
    # The two large ones stream through 4 units, or one of them stays and the place is smaller: 4 + 4 = 8 holds one more.
    assert plan.step_ms == 5 + 8
    assert plan.peak_nbytes <= 8 * UNIT


def test_tiny_buckets_stay():
    """A copy of a few bytes takes its latency, so keeping it is worth far more than its place."""
    sizes = [100 * UNIT if i % 2 else UNIT for i in range(12)]
    costs = chain(sizes, [1.0] * 12, 100.0 * UNIT, latency_ms=0.5)
    plan = make_plan(costs, 330 * UNIT)
    assert {f"blocks.{i}" for i in range(0, 12, 2)} <= set(residents(plan))


def test_tied_bucket_is_loaded_once_where_its_uses_are_close():
    segments = tuple(SegmentCost(f"s{i}", 1.0, 0) for i in range(8))
    plain = tuple(BucketCost(f"b{i}", 4 * UNIT, 4.0, (i,)) for i in range(8) if i not in (2, 3))
    tied = BucketCost("tied", 4 * UNIT, 4.0, (2, 3))
    costs = Costs(segments, (*plain[:2], tied, *plain[2:]), float(UNIT))
    plan = make_plan(costs, 12 * UNIT, Knobs(persistent_buckets=0))
    check_plan(plan, costs)
    assert [load.uses for load in plan.loads if load.bucket == "tied"] == [(2, 3)]


def test_tied_bucket_is_loaded_once_for_neighbours_that_leave_no_room_for_more():
    """What else the two segments read is not copied between them."""
    segments = tuple(SegmentCost(f"s{i}", 1.0, 0) for i in range(4))
    buckets = [BucketCost(f"b{i}", 8 * UNIT, 8.0, (i,)) for i in range(4)]
    costs = Costs(segments, (*buckets, BucketCost("tied", UNIT, 1.0, (1, 2))), float(UNIT))
    plan = make_plan(costs, 17 * UNIT, Knobs(persistent_buckets=0))
    assert [load.uses for load in plan.loads if load.bucket == "tied"] == [(1, 2)]
    assert plan.streamed_nbytes == 33 * UNIT


def test_without_overlap_a_part_of_what_a_segment_reads_stays():
    """Of two buckets of each segment one, with room for one other: no staging area that serves both, or keeps both."""
    segments = tuple(SegmentCost(f"s{i}", 1.0, 0) for i in range(2))
    costs = Costs(segments, tuple(BucketCost(f"b{i}", 4 * UNIT, 4.0, (i // 2,)) for i in range(4)), float(UNIT))
    plan = make_plan(costs, 12 * UNIT, Knobs(async_transfer=False))
    assert (plan.streamed_nbytes, plan.step_ms) == (8 * UNIT, 10.0)


def test_tied_bucket_is_loaded_twice_where_its_uses_are_far_apart():
    segments = tuple(SegmentCost(f"s{i}", 1.0, 0) for i in range(10))
    tied = BucketCost("tied", 4 * UNIT, 4.0, (0, 9))
    costs = Costs(segments, (tied, *(BucketCost(f"b{i}", 4 * UNIT, 4.0, (i,)) for i in range(1, 9))), float(UNIT))
    plan = make_plan(costs, 8 * UNIT, Knobs(persistent_buckets=0))
    check_plan(plan, costs)
    assert [(load.name, load.uses) for load in plan.loads if load.bucket == "tied"] == [("tied#0", (0,)), ("tied#1", (9,))]
    # With room for it, one resident copy serves both.
    assert residents(make_plan(costs, 12 * UNIT)) == ["tied"]


def most_ahead(plan: Plan) -> tuple[int, int]:
    """The most loads, and the most bytes of several loads, that are issued before their first use begins."""
    n = len(plan.segments)
    loads, nbytes = 0, 0
    for segment in range(n):
        # In flight or ready once the prefetches before `segment` are issued, and not used by it or before.
        ahead = [
            load
            for load in plan.loads
            if load.wait_before != segment
            and (segment - load.prefetch_before) % n < (load.wait_before - load.prefetch_before) % n
        ]
        loads = max(loads, len(ahead))
        if len(ahead) > 1:
            nbytes = max(nbytes, sum(load.nbytes for load in ahead))
    return loads, nbytes


@pytest.mark.parametrize(("transfer_buckets", "limit", "most"), [(None, False, 19), (3, True, 3), (12, True, 8), (None, True, 8)])
def test_prefetch_limit(transfer_buckets: int | None, limit: bool, most: int):
    """Without compute in the first half, and with all of it in the second, looking far ahead pays."""
    costs = chain([UNIT] * 40, [0.0] * 20 + [2.0] * 20)
    plan = make_plan(costs, 20 * UNIT, Knobs(transfer_buckets, persistent_buckets=0, prefetch_limit=limit))
    check_plan(plan, costs)
    assert most_ahead(plan)[0] == most


@pytest.mark.parametrize("cap", [1, 2, 3, 5, 8])
def test_bytes_in_flight(cap: int):
    """Never more bytes than the cap, and a bucket larger than the cap is still loaded, alone."""
    costs = chain([UNIT * size for size in (1, 2, 3, 1, 4, 1, 2)], [1.0] * 7)
    plan = make_plan(costs, 10 * UNIT, Knobs(persistent_buckets=0, max_inflight_prefetch_bytes=cap * UNIT))
    check_plan(plan, costs)
    loads, nbytes = most_ahead(plan)
    assert nbytes <= cap * UNIT
    assert loads >= 1


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("gib", [1.25, 2, 4, 6, 8, 12, 16])
def test_flux_is_within_three_percent_of_the_bound(batch: int, gib: float):
    costs = flux(batch)
    plan = make_plan(costs, int(gib * GIB))
    check_plan(plan, costs)
    assert plan.bound_ms - 1e-9 <= plan.step_ms <= 1.03 * plan.bound_ms
