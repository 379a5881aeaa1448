"""What is not captured, or not any more, runs all the same, and one warning says why; on the CPU (`capturing`)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import OffloadError, OffloadWarning
from fxoffload.graph import STRIKES
from tests import models
from tests.capturing import capturer_of, captures
from tests.checks import EVERYTHING, assert_streams, budgets, offload, weight_nbytes
from tests.e2e.test_graph import graphed, replays
from tests.models import Failing, rows, seeded, toy

__all__ = ["captures"]
pytestmark = pytest.mark.usefixtures("captures")


@torch.no_grad()
def test_a_capture_that_fails() -> None:
    """Case 25."""
    model = seeded(lambda: Failing(4))
    compiled = graphed(model)
    compiled(rows(0))
    expected = compiled(rows(1))
    torch._dynamo.reset()
    other = seeded(lambda: Failing(4))
    run = graphed(other)
    run(rows(0))
    capturer = capturer_of(other)
    capture = capturer.capture

    def failing(work: Callable[[], Any]) -> Any:
        models.failing[0] = RuntimeError("not permitted here\nmore lines")
        try:
            return capture(work)
        finally:
            models.failing.clear()

    capturer.capture = failing  # type: ignore[method-assign]
    with pytest.warns(OffloadWarning) as caught:
        assert torch.equal(run(rows(1)), expected)
    (only,) = caught
    assert str(only.message) == (
        "graph: Failing: not captured: segment inp cannot be captured (RuntimeError: not permitted here); "
        "the host issues its segments and copies one by one, with the same results; leave cuda_graph out for this model"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            assert torch.equal(run(rows(1)), expected)
        fxoffload.set_memory_budget(other, budgets(other)["half"])
        for _ in range(3):
            assert torch.equal(run(rows(1)), expected)
    assert_streams(other)
    assert replays(other) == 0
    assert capturer.captures == 1


@torch.no_grad()
def test_strict() -> None:
    model = seeded(lambda: Failing(4))
    compiled = offload(model, cuda_graph="strict")
    compiled(rows(0))

    def failing(work: Callable[[], Any]) -> Any:
        raise RuntimeError("no")

    capturer_of(model).capture = failing  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(OffloadError) as caught:
            compiled(rows(1))
        assert str(caught.value) == (
            "graph: Failing: not captured: the capture cannot begin (RuntimeError: no); "
            "pass cuda_graph=True to run it uncaptured, or leave cuda_graph out"
        )


@torch.no_grad()
def test_models_that_take_the_memory_from_each_other() -> None:
    models = [toy(4, seed=0), toy(4, seed=1)]
    budget = fxoffload.Budget(40_000)
    runs = [offload(model, cuda_graph=True, memory_budget=budget) for model in models]
    expected = [offload(toy(4, seed=seed), memory_budget=EVERYTHING)(rows(0)) for seed in (0, 1)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(STRIKES + 1):
            for run, wanted in zip(runs, expected, strict=True):
                for _ in range(3):
                    assert torch.equal(run(rows(0)), wanted)
    assert [str(w.message).split(": ", 3)[3].split(";")[0] for w in caught] == [
        "another model under its budget takes the memory of its captures before they have paid"
    ] * len(caught)
    assert 1 <= len(caught) <= 2


@torch.no_grad()
def test_captures_that_fit_beside_another_model_stay() -> None:
    models = [toy(4, seed=0), toy(4, seed=1)]
    budget = fxoffload.Budget("1GiB")
    runs = [offload(model, cuda_graph=True, memory_budget=budget) for model in models]
    for _ in range(6):
        for run in runs:
            run(rows(0))
    assert [replays(model) for model in models] == [5, 5]


@torch.no_grad()
def test_uncaptured_forwards_that_need_the_memory(captures: dict[str, Any]) -> None:
    """Captures of one shape are given back for the first forward of another, and both are then captured."""
    captures["each"] = 1 << 20
    model = toy(5)
    compiled, plain = graphed(model, dynamic=True), offload(toy(5), dynamic=True)
    compiled(rows(0, n=7))
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    for n in (5, 5, 5, 6, 5, 6, 5, 6):
        assert torch.equal(compiled(rows(0, n=n)), plain(rows(0, n=n)))
    capturer = capturer_of(model)
    assert len(capturer.graphs) == 2
    assert capturer.captures == 3
    assert fxoffload.stats(model).nbytes_arena < weight_nbytes(model)
