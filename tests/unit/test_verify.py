"""The judge accepts a right plan, and refuses each wrong one with a text that names bucket, segment and bytes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.errors import PlanError
from fxoffload.plan import Load, Plan, Resident
from fxoffload.verify import check_plan
from tests.unit.planner_cases import UNIT, equal_chain

COSTS = equal_chain(4)


def load(i: int, slot: int, prefetch_before: int, after: int | None, **changes: Any) -> Load:
    """Bucket `i` of the chain in a slot (slot 0 is the resident's)."""
    fields: dict[str, Any] = {
        "name": f"blocks.{i}",
        "bucket": f"blocks.{i}",
        "offset": slot * UNIT,
        "nbytes": UNIT,
        "uses": (i,),
        "prefetch_before": prefetch_before,
        "after": None if after is None else f"blocks.{after}",
    }
    return Load(**{**fields, **changes})


def right_plan(**changes: Any) -> Plan:
    """Bucket 3 stays. 0, 1, 2 stream through slots 1, 2, 1; 0 and 1 are issued by the forward before."""
    fields: dict[str, Any] = {
        "segments": tuple(segment.name for segment in COSTS.segments),
        "residents": (Resident("blocks.3", 0, UNIT),),
        "loads": (load(0, 1, 3, 2), load(1, 2, 3, 1), load(2, 1, 1, 0)),
        "arena_nbytes": 3 * UNIT,
        "activation_nbytes": 100,
        "budget_nbytes": 3 * UNIT + 100,
        "async_transfer": True,
        "compute_ms": 4.0,
        "step_ms": 4.0,
        "bound_ms": 4.0,
    }
    return Plan(**{**fields, **changes})


def with_load(i: int, changed: Load) -> Plan:
    plan = right_plan()
    return dataclasses.replace(plan, loads=(*plan.loads[:i], changed, *plan.loads[i + 1 :]))


def refusal(plan: Plan, costs: Costs = COSTS) -> str:
    with pytest.raises(PlanError) as error:
        check_plan(plan, costs)
    text = str(error.value)
    assert text.startswith("judge: ")
    ending = "; plan the model again, or report this as a bug if the planner made the plan"
    assert text.endswith(ending)
    return text.removeprefix("judge: ").removesuffix(ending)


def test_right_plan_is_accepted():
    check_plan(right_plan(), COSTS)


def test_a_later_eviction_than_needed_is_accepted():
    check_plan(with_load(1, load(1, 2, 3, 2)), COSTS)


def test_everything_resident_is_accepted():
    residents = tuple(Resident(f"blocks.{i}", i * UNIT, UNIT) for i in range(4))
    check_plan(right_plan(residents=residents, loads=(), arena_nbytes=4 * UNIT, budget_nbytes=2000), COSTS)


def test_activations_below_zero():
    assert refusal(right_plan(activation_nbytes=-1)) == "activations: -1 bytes in the plan, less than none"


def test_slot_still_read():
    # 2 goes into slot 1 before segment 0, which reads 0 there, has run.
    assert refusal(with_load(2, load(2, 1, 0, 0))) == (
        "blocks.2: its prefetch before segment blocks.0 overwrites bytes 256 to 512 of blocks.0, which may still be read"
    )


def test_shared_slot_at_the_start():
    # All three are issued before segment 3, two of them into slot 1.
    assert refusal(with_load(2, load(2, 1, 3, 2))) == (
        "blocks.2: at the start of a forward it shares bytes 256 to 512 with blocks.0"
    )


def test_wrong_after():
    # 1 was evicted in the forward before: waiting for it does not protect what segment 0 reads now.
    assert refusal(with_load(2, load(2, 1, 1, 1))) == (
        "blocks.2: its prefetch before segment blocks.1 overwrites bytes 256 to 512 of blocks.0 "
        "and does not wait for its last reader, segment blocks.0 (after: blocks.1)"
    )


def test_no_after():
    assert refusal(with_load(2, load(2, 1, 1, None))) == (
        "blocks.2: its prefetch before segment blocks.1 overwrites bytes 256 to 512 of blocks.0 "
        "and does not wait for its last reader, segment blocks.0 (after: None)"
    )


def test_no_after_where_only_the_load_itself_had_the_bytes():
    assert refusal(with_load(1, load(1, 2, 3, None))) == (
        "blocks.1: its prefetch before segment blocks.3 overwrites bytes 512 to 768 of blocks.1 "
        "and does not wait for its last reader, segment blocks.1 (after: None)"
    )


def test_unknown_after():
    assert refusal(with_load(2, load(2, 1, 1, 7))) == "blocks.2: waits for the eviction of blocks.7, which is no load of the plan"


def test_prefetch_while_live():
    # A load of two uses that is issued between them would be overwritten by itself.
    costs = Costs(COSTS.segments, (BucketCost("b", UNIT, 1.0, (0, 2)),), float(UNIT))
    plan = right_plan(residents=(), loads=(Load("b", "b", 0, UNIT, (0, 2), 1, "b"),))
    assert refusal(plan, costs) == "b: prefetched again before segment blocks.1 while segment blocks.2 still has to read it"


def test_missing_prefetch():
    assert refusal(with_load(2, load(2, 1, 9, 0))) == "blocks.2: prefetched before segment 9, outside 0 to 3"


def test_missing_load():
    assert refusal(right_plan(loads=right_plan().loads[:2])) == "blocks.2: neither resident nor loaded"


def test_use_before_the_wait():
    # The plan serves segment 2 only, but segment 1 reads the bucket too.
    buckets = tuple(dataclasses.replace(b, uses=(1, 2)) if b.name == "blocks.2" else b for b in COSTS.buckets)
    costs = dataclasses.replace(COSTS, buckets=buckets)
    assert refusal(right_plan(), costs) == "blocks.2: the loads serve segments [2], but segments [1, 2] read it"


def test_use_that_nothing_reads():
    assert refusal(with_load(2, load(2, 1, 1, 0, uses=(2, 3)))) == (
        "blocks.2: the loads serve segments [2, 3], but segments [2] read it"
    )


def test_uses_out_of_order():
    assert refusal(with_load(2, load(2, 1, 1, 0, uses=(3, 2)))) == "blocks.2: uses (3, 2) are not ascending segment indices"


def test_resident_overwritten():
    assert refusal(with_load(1, load(1, 0, 3, 1))) == "blocks.1: overwrites resident blocks.3 at bytes 0 to 256"


def test_residents_overlap():
    residents = (Resident("blocks.3", 0, UNIT), Resident("blocks.1", 0, UNIT))
    plan = right_plan(residents=residents, loads=(load(0, 1, 3, 2), load(2, 1, 1, 0)))
    assert refusal(plan) == "blocks.3: resident from byte 0 on, over resident blocks.1 that ends at 256"


def test_resident_and_loaded():
    residents = (Resident("blocks.3", 0, UNIT), Resident("blocks.1", 2 * UNIT, UNIT))
    assert refusal(right_plan(residents=residents)) == "blocks.1: both resident and loaded"


def test_bucket_that_has_to_stay_is_loaded():
    buckets = tuple(dataclasses.replace(b, keep=b.name == "blocks.0") for b in COSTS.buckets)
    assert refusal(right_plan(), dataclasses.replace(COSTS, buckets=buckets)) == "blocks.0: must stay resident, but is loaded"


def test_over_budget():
    assert refusal(right_plan(budget_nbytes=800)) == "budget: arena 768 + activations 100 = 868 bytes are over the budget of 800"


def test_outside_the_arena():
    assert refusal(with_load(1, load(1, 3, 3, 1))) == "blocks.1: bytes 768 to 1024 are outside the arena of 768 bytes"


def test_misaligned():
    assert refusal(with_load(1, load(1, 2, 3, 1, offset=500))) == "blocks.1: offset 500 is not a multiple of 256"


def test_wrong_size():
    assert refusal(with_load(1, load(1, 2, 3, 1, nbytes=128))) == "blocks.1: 128 bytes in the plan, 256 in the costs"


def test_names():
    plan = right_plan()
    assert refusal(with_load(1, load(1, 2, 3, 1, name="blocks.0"))) == "blocks.0: two of this load name"
    assert refusal(with_load(1, load(1, 2, 3, 1, bucket="x"))) == "x: in the plan, not in the costs"
    assert refusal(dataclasses.replace(plan, segments=("a", "b"))).startswith("segments: the plan has 2 ")


def test_segments_that_need_more_than_one_bucket():
    """Two buckets of one segment side by side are fine, on top of each other they are not."""
    costs = Costs((SegmentCost("s", 1.0, 0),), tuple(BucketCost(name, UNIT, 1.0, (0,)) for name in "ab"), float(UNIT))

    def plan(offset: int) -> Plan:
        loads = tuple(Load(name, name, at, UNIT, (0,), 0, name) for name, at in (("a", 0), ("b", offset)))
        return right_plan(segments=("s",), residents=(), loads=loads)

    check_plan(plan(UNIT), costs)
    assert refusal(plan(0), costs) == "b: its prefetch before segment s overwrites bytes 0 to 256 of a, which may still be read"
