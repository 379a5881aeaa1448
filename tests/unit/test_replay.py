"""Saved plans: the planner still makes the same plan of each case in `tests/replay`, so that a refactoring changes none."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.plan import Plan
from fxoffload.planner import Knobs, make_plan
from fxoffload.verify import check_plan
from tests.replay.save_models import text
from tests.unit.planner_cases import GIB, UNIT, equal_chain, flux

REPLAY = Path(__file__).parents[1] / "replay"
MODELS = REPLAY / "models"


def tied_costs() -> Costs:
    """An embedding that the head shares, a bucket that the model writes, and a block that runs twice in a row."""
    segments = tuple(SegmentCost(f"s{i}", 1.0 + i % 3, 1000) for i in range(10))
    buckets = [BucketCost("emb", 6 * UNIT, 6.1, (0, 9)), BucketCost("state", UNIT, 1.1, (1,), keep=True)]
    buckets += [
        BucketCost(f"b{i}", (2 + i % 3) * UNIT, 2.1 + i % 3, (i, i + 1) if i == 4 else (i,)) for i in range(1, 9) if i != 5
    ]
    return Costs(segments, tuple(sorted(buckets, key=lambda b: b.uses)), float(UNIT))


SAVED: dict[str, tuple[Costs, int, Knobs]] = {
    "flux_small": (flux(1, doubles=2, singles=4), GIB * 7 // 10, Knobs()),
    "flux_half": (flux(3, doubles=2, singles=4), 2 * GIB, Knobs()),
    "flux_bins": (flux(1, doubles=2, singles=4), GIB * 2, Knobs(persistent_buckets=8, persistent_bins=3, transfer_buckets=2)),
    "tied": (tied_costs(), 1000 + 14 * UNIT, Knobs()),
    "tied_no_overlap": (tied_costs(), 1000 + 14 * UNIT, Knobs(async_transfer=False)),
    "odd_ring": (equal_chain(7), 3 * UNIT, Knobs(persistent_buckets=0, max_inflight_prefetch_bytes=UNIT)),
}


def read_case(path: Path) -> tuple[Costs, int, Knobs, Any]:
    data = json.loads(path.read_text())
    segments = tuple(SegmentCost(**segment) for segment in data["costs"]["segments"])
    buckets = tuple(BucketCost(**{**bucket, "uses": tuple(bucket["uses"])}) for bucket in data["costs"]["buckets"])
    costs = Costs(segments, buckets, data["costs"]["link_bytes_per_ms"])
    return costs, data["budget_nbytes"], Knobs(**data["knobs"]), data["plan"]


def as_json(plan: Plan) -> Any:
    return json.loads(json.dumps(dataclasses.asdict(plan)))


@pytest.mark.parametrize("name", SAVED)
def test_saved_plans_do_not_change(name: str):
    """A change of the planner that is meant shows here as a diff of `tests/replay`: run with EXPECTTEST_ACCEPT=1 and read it."""
    path = REPLAY / f"{name}.json"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        costs, budget_nbytes, knobs = SAVED[name]
        plan = as_json(make_plan(costs, budget_nbytes, knobs))
        case = {
            "costs": dataclasses.asdict(costs),
            "budget_nbytes": budget_nbytes,
            "knobs": dataclasses.asdict(knobs),
            "plan": plan,
        }
        path.parent.mkdir(exist_ok=True)
        path.write_text(text(case))
    costs, budget_nbytes, knobs, _ = read_case(path)
    assert (costs, budget_nbytes, knobs) == SAVED[name]
    plan_again(path)


@pytest.mark.parametrize("name", sorted(path.stem for path in MODELS.glob("*.json")))
def test_saved_plans_of_real_models_do_not_change(name: str):
    """Models of real size, traced by `tests/replay/save_models.py`; with EXPECTTEST_ACCEPT=1 only the plan is made anew."""
    path = MODELS / f"{name}.json"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        costs, budget_nbytes, knobs, _ = read_case(path)
        data = json.loads(path.read_text())
        path.write_text(text({**data, "plan": as_json(make_plan(costs, budget_nbytes, knobs))}))
    plan = plan_again(path)
    assert plan.step_ms <= 1.05 * plan.bound_ms


def plan_again(path: Path) -> Plan:
    costs, budget_nbytes, knobs, expected = read_case(path)
    plan = make_plan(costs, budget_nbytes, knobs)
    check_plan(plan, costs)
    found = as_json(plan)
    for times in ("compute_ms", "step_ms", "bound_ms"):
        assert found.pop(times) == pytest.approx(expected.pop(times), rel=1e-9)
    assert found == expected
    return plan


def test_there_is_no_saved_plan_without_a_case():
    assert {path.stem for path in REPLAY.glob("*.json")} == set(SAVED)
    assert len(list(MODELS.glob("*.json"))) >= 7
