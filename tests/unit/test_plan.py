"""A plan is data: it saves, loads and derives what the passes ask for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from fxoffload.errors import PlanError
from fxoffload.plan import Load, Plan
from fxoffload.planner import Knobs, make_plan
from tests.unit.planner_cases import UNIT, chain, equal_chain


def test_save_and_load_round_trip(tmp_path: Path):
    costs = chain([UNIT, 2 * UNIT, 0, UNIT], [1.0, 0.1, 2.0, 1 / 3], activation_nbytes=7)
    plan = make_plan(costs, 3 * UNIT + 7)
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")).loads[0].uses == plan.loads[0].uses


@pytest.mark.parametrize(("found", "shown"), [(99, "99"), ("1", '"1"'), (True, "true"), (1.0, "1.0"), (None, "null")])
def test_another_format_is_refused(found: object, shown: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    make_plan(equal_chain(2), 2 * UNIT).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": found}))
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    assert str(error.value) == f"plan: {path}: format {shown}, this version reads 1; plan the model again"


def refusal(path: Path) -> str:
    """Why a file is no saved plan."""
    with pytest.raises(PlanError) as error:
        Plan.load(path)
    head, end = f"plan: {path}: this is no saved plan (", "); give a file that Plan.save wrote"
    text = str(error.value)
    assert text.startswith(head)
    assert text.endswith(end)
    return text.removeprefix(head).removesuffix(end)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"", "Expecting value: line 1 column 1 (char 0)"),
        (b"\xff", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[]", "the plan is [], not an object with fields"),
        (
            b'{"format": 1, "segments": []}',
            "the plan has no 'residents', 'loads', 'arena_nbytes', 'activation_nbytes', 'budget_nbytes', 'async_transfer', "
            "'compute_ms', 'step_ms', 'bound_ms'",
        ),
    ],
)
def test_a_file_that_holds_no_plan(content: bytes, why: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    path.write_bytes(content)
    assert refusal(path) == why


def test_files_that_cannot_be_read(tmp_path: Path):
    for path, why in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file or directory")):
        with pytest.raises(PlanError) as error:
            Plan.load(path)
        assert str(error.value) == f"plan: {path}: {why}; give a file that Plan.save wrote"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"arena_nbytes": None}, "arena_nbytes is null, not a whole number"),
        ({"arena_nbytes": "123"}, 'arena_nbytes is "123", not a whole number'),
        ({"budget_nbytes": True}, "budget_nbytes is true, not a whole number"),
        ({"activation_nbytes": 1.5}, "activation_nbytes is 1.5, not a whole number"),
        ({"budget_nbytes": 10**400}, f"budget_nbytes is 1{'0' * 39}..., not a whole number"),
        ({"step_ms": float("nan")}, "step_ms is NaN, not a number"),
        ({"async_transfer": "no"}, 'async_transfer is "no", not true or false'),
        ({"segments": "abc"}, 'segments is "abc", not a list'),
        ({"residents": [3]}, "residents[0] is 3, not an object with fields"),
        ({"more": 1}, "the plan has 'more', which this version does not know"),
    ],
)
def test_a_value_of_a_wrong_type(change: dict[str, Any], why: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    make_plan(equal_chain(4), 3 * UNIT).save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert refusal(path) == why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"uses": "0"}, 'loads[0].uses is "0", not a list'),
        ({"uses": [None]}, "loads[0].uses[0] is null, not a whole number"),
        ({"uses": []}, "load 'NAME' has no use, or names a segment outside 0 to 3"),
        ({"uses": [4]}, "load 'NAME' has no use, or names a segment outside 0 to 3"),
        ({"prefetch_before": -1}, "load 'NAME' has no use, or names a segment outside 0 to 3"),
        ({"after": 3}, "loads[0].after is 3, not a text or null"),
    ],
)
def test_a_load_of_a_wrong_type(change: dict[str, Any], why: str, tmp_path: Path):
    path = tmp_path / "plan.json"
    plan = make_plan(equal_chain(4), 3 * UNIT)
    plan.save(path)
    data = json.loads(path.read_text())
    data["loads"][0].update(change)
    path.write_text(json.dumps(data))
    assert refusal(path) == why.replace("NAME", plan.loads[0].name)


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
