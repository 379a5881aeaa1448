"""A plan is data: it saves, loads and derives what the passes ask for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from fxoffload.plan import Load, Plan
from fxoffload.planner import Knobs, make_plan
from tests.unit.planner_cases import UNIT, chain, equal_chain


def test_save_and_load_round_trip(tmp_path: Path):
    costs = chain([UNIT, 2 * UNIT, 0, UNIT], [1.0, 0.1, 2.0, 1 / 3], activation_nbytes=7)
    plan = make_plan(costs, 3 * UNIT + 7)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")).loads[0].uses == plan.loads[0].uses


def test_another_format_is_refused(tmp_path: Path):
    path = tmp_path / "plan.json"
    make_plan(equal_chain(2), 2 * UNIT).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(ValueError) as error:
        Plan.load(path)
    assert str(error.value) == f"plan file {path}: format 99, this version reads 1; plan the model again"


def test_sums():
    plan = make_plan(equal_chain(4), 3 * UNIT + 100, Knobs(persistent_buckets=1), activation_nbytes=100)
    assert plan.resident_nbytes == UNIT
    assert plan.streamed_nbytes == 3 * UNIT
    assert plan.peak_nbytes == plan.arena_nbytes + 100
    assert plan.stall_ms == plan.step_ms - plan.compute_ms


def test_order_of_issue():
    """What is needed soonest goes first, across the end of a forward; loads of one segment keep the order of the plan."""

    def load(name: str, use: int, before: int, offset: int) -> Load:
        return Load(name, name, offset, UNIT, (use,), before, name)

    plan = make_plan(equal_chain(4), 4 * UNIT)
    loads = (load("a", 0, 2, 4 * UNIT), load("b", 0, 2, 0), load("c", 1, 2, 2 * UNIT), load("d", 2, 2, 3 * UNIT))
    plan = dataclasses.replace(plan, residents=(), loads=(*loads, load("e", 3, 3, UNIT)))
    assert [load.name for load in plan.prefetches_before(2)] == ["d", "a", "b", "c"]
    assert [load.name for load in plan.prefetches_before(3)] == ["e"]
    assert [load.name for load in plan.live_at_start()] == ["a", "b", "c"]
    assert [load.wraps for load in plan.loads] == [True, True, True, False, False]
