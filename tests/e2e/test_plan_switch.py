"""A saved plan that runs instead of the planner's (`FXOFFLOAD_PLAN`): judged by the budget and the activations at hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import api
from fxoffload.attached import attachment_of
from fxoffload.errors import PlanError
from fxoffload.plan import Plan
from tests.checks import halve, offload
from tests.models import rows, toy

ENDING = "; plan the model again, or report this as a bug if the planner made the plan"


@pytest.fixture(autouse=True)
def no_grad() -> Any:
    with torch.no_grad():
        yield


@pytest.fixture
def saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """A plan within half of the weights, which is to run from now on: everything would fit the budgets that follow."""
    model = toy(6)
    offload(model)(rows(0))
    halve(model)
    plan = fxoffload.get_plan(model)
    assert plan.loads
    give(plan, tmp_path, monkeypatch)
    return plan


def give(plan: Plan, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan.save(folder / "plan.json")
    monkeypatch.setenv("FXOFFLOAD_PLAN", str(folder / "plan.json"))


def run(budget: int | str) -> torch.nn.Module:
    model = toy(6)
    torch.testing.assert_close(offload(model, memory_budget=budget)(rows(0)), toy(6)(rows(0)), rtol=1e-4, atol=1e-5)
    return model


def test_it_runs_under_any_budget_that_holds_it(saved: Plan) -> None:
    for budget in (saved.peak_nbytes, 1 << 30):
        plan = fxoffload.get_plan(run(budget))
        assert plan == dataclasses.replace(saved, budget_nbytes=budget)


def test_the_budget_of_the_call_counts(saved: Plan) -> None:
    least = saved.peak_nbytes
    parts = f"arena {saved.arena_nbytes} + activations {saved.activation_nbytes} = {least} bytes"
    with pytest.raises(PlanError) as refusal:
        run(least - 1)
    assert str(refusal.value) == f"judge: budget: {parts} are over the budget of {least - 1}{ENDING}"
    model = run(least)
    with pytest.raises(PlanError, match=f"are over the budget of {least - 1}"):
        fxoffload.set_memory_budget(model, least - 1)
    assert fxoffload.get_plan(model).budget_nbytes == least


@pytest.mark.parametrize("nbytes", [0, -(10**9)])
def test_the_activations_of_the_call_count(saved: Plan, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    give(dataclasses.replace(saved, activation_nbytes=nbytes), tmp_path, monkeypatch)
    with pytest.raises(PlanError, match=f"activations {saved.activation_nbytes} = {saved.peak_nbytes} bytes are over"):
        run(saved.peak_nbytes - 1)
    assert fxoffload.get_plan(run(saved.peak_nbytes)).activation_nbytes == saved.activation_nbytes


def test_before_activations_are_known_those_of_the_file_count(saved: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first forwards of an accelerator: an estimate may be more than what was measured when the plan was made."""
    model = run(saved.peak_nbytes)
    (binding,) = api.bindings_of(model)
    monkeypatch.setattr(binding._warmup, "_forwards", 2)
    monkeypatch.setattr(binding, "activation_nbytes", 10 * saved.activation_nbytes)
    binding.replan()
    assert binding.plan == saved
    with pytest.raises(PlanError, match=f"are over the budget of {saved.peak_nbytes - 1}"):
        binding.decide(saved.peak_nbytes - 1)
    monkeypatch.setattr(binding._warmup, "_forwards", 0)
    with pytest.raises(PlanError, match=f"activations {10 * saved.activation_nbytes} = "):
        binding.replan()


def test_without_a_compiler(saved: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FXOFFLOAD_PLAN")
    model = toy(6)
    fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="1GiB")
    model(rows(0))
    assert attachment_of(model) is not None
    give(fxoffload.get_plan(model), tmp_path, monkeypatch)
    with pytest.raises(PlanError, match="are over the budget of 4096"):
        fxoffload.set_memory_budget(model, 4096)
    model(rows(0))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "this is no saved plan (Expecting value: line 1 column 1 (char 0)); give a file that Plan.save wrote"),
        ('{"format": 2}', "format 2, this version reads 1; plan the model again"),
        (None, "this is no saved plan (arena_nbytes is null, not a whole number); give a file that Plan.save wrote"),
    ],
)
def test_a_file_that_holds_no_plan(saved: Plan, text: str | None, why: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "arena_nbytes": None}) if text is None else text)
    with pytest.raises(PlanError) as refusal:
        run("1GiB")
    assert str(refusal.value) == f"plan: {path}: {why}"


def test_a_budget_that_is_no_number_of_bytes() -> None:
    model = run("1GiB")
    with pytest.raises(fxoffload.ConfigError, match="memory_budget: an int of 1329 bits is not a size"):
        fxoffload.set_memory_budget(model, 10**400)
