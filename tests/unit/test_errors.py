"""The error tree: what can be caught as what, and what an error carries."""

from __future__ import annotations

import pickle

import pytest

from fxoffload.errors import BudgetError, ConfigError, GradientError, OffloadError, OffloadWarning, PlanError, WeightError


@pytest.mark.parametrize("error", [ConfigError, BudgetError, PlanError, WeightError, GradientError])
def test_one_root(error: type[OffloadError]) -> None:
    assert issubclass(error, OffloadError)
    assert issubclass(error, RuntimeError)


def test_a_bad_setting_is_a_value_error() -> None:
    assert issubclass(ConfigError, ValueError)


def test_a_warning_can_be_filtered_as_ours() -> None:
    assert issubclass(OffloadWarning, UserWarning)


def test_a_budget_error_carries_the_smallest_budget() -> None:
    error = BudgetError("planner: budget 2.00 GiB: too small; raise the budget to at least 3GiB", 3 * 2**30)
    assert str(error) == "planner: budget 2.00 GiB: too small; raise the budget to at least 3GiB"
    assert error.smallest_nbytes == 3 * 2**30


def test_a_budget_error_survives_another_process() -> None:
    error = pickle.loads(pickle.dumps(BudgetError("planner: too small", 7)))
    assert (str(error), error.smallest_nbytes) == ("planner: too small", 7)
