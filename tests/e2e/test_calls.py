"""Calls out of the ordinary: grad modes, bad options, graph breaks, exceptions, threads."""

from __future__ import annotations

import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import ConfigError, GradientError, OffloadWarning, api, backend
from tests.checks import assert_streams, halve, offload, resident
from tests.models import Block, Failing, Toy, failing, rows, toy


class Broken(Toy):
    """A graph break inside the loop over the blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            torch._dynamo.graph_break()
        return self.out(x)


class BrokenInside(nn.Module):
    """A graph break inside every block: Dynamo compiles one block's code, and calls it for all."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_BrokenBlock(16) for _ in range(n))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _BrokenBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x)).relu()
        torch._dynamo.graph_break()
        return x + self.down(y)


@pytest.mark.parametrize(
    ("make", "pattern"), [(lambda: Broken(4), "x = block(x)"), (BrokenInside, "torch._dynamo.graph_break()")]
)
def test_a_graph_break_is_right_and_warned_of_once(make: Any, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_warned_breaks", set())
    torch.manual_seed(0)
    model = make().requires_grad_(False)
    compiled = offload(model, fullgraph=False)
    with torch.no_grad(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(rows(0))
        smallest = fxoffload.smallest_budget(model)
        fxoffload.set_memory_budget(model, smallest)
        for k in range(4):
            torch.testing.assert_close(compiled(rows(k)), model(rows(k)), rtol=1e-4, atol=1e-5)
    texts = [str(w.message) for w in caught if issubclass(w.category, OffloadWarning)]
    assert len(texts) == 1, texts
    # For a break in a loop Dynamo compiles what the loop calls: the call is named.
    lines = [i for i, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.strip() == pattern]
    assert any(f"{Path(__file__).name}:{i} " in texts[0] for i in lines)
    assert fxoffload.stats(model).nbytes_arena <= smallest


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("first", ["wrong", "right"])
@torch.no_grad()
def test_an_input_on_the_wrong_device_is_an_error_and_the_next_right_call_works(fullgraph: bool, first: str) -> None:
    """Dynamo's own error, which names both devices. Weights trace on the onload device, so nothing runs where they lie."""
    model = toy(6)
    expected = resident(lambda: toy(6), [rows(k) for k in range(3)])
    torch._dynamo.reset()
    compiled = offload(model, fullgraph=fullgraph)
    wrong = rows(0).to("meta")
    if first == "right":
        compiled(rows(0))
    for k in range(3):
        with pytest.raises(RuntimeError, match="device") as refused:
            compiled(wrong)
        assert "meta" in str(refused.value)
        assert "cpu" in str(refused.value)
        assert torch.equal(compiled(rows(k)), expected[k])
        halve(model)
        assert torch.equal(compiled(rows(k)), expected[k])
    assert torch.equal(compiled(rows(0)), expected[0])
    assert_streams(model)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"memory_budgit": 3}, ConfigError, "config: options: unknown key 'memory_budgit'; did you mean 'memory_budget'?"),
        ({"transfer_buckets": 0}, ConfigError, "config: transfer_buckets: 0 is not accepted; give an int >= 1, or leave it out"),
        (
            {"transfer_buckets": True},
            TypeError,
            "config: transfer_buckets: True is of type bool; give an int >= 1, or leave it out",
        ),
    ],
)
@pytest.mark.parametrize("fullgraph", [True, False])
def test_bad_options_are_raised_as_they_are(options: dict[str, Any], error: type[Exception], text: str, fullgraph: bool) -> None:
    compiled = offload(toy(2), fullgraph=fullgraph, **options)
    for _ in range(2):
        with torch.no_grad(), pytest.raises(error) as caught:
            compiled(rows(0))
        assert (type(caught.value), str(caught.value)) == (error, text)


def test_a_budget_too_small_names_one_that_works() -> None:
    model = toy(4)
    compiled = offload(model, memory_budget=1000)
    with torch.no_grad():
        with pytest.raises(fxoffload.BudgetError) as caught:
            compiled(rows(0))
        smallest = caught.value.smallest_nbytes
        assert str(caught.value).startswith("planner: budget 1000")
        torch._dynamo.reset()
        compiled = offload(toy(4), memory_budget=smallest)
        torch.testing.assert_close(compiled(rows(0)), toy(4)(rows(0)), rtol=1e-4, atol=1e-5)
        with pytest.raises(fxoffload.BudgetError):
            offload(toy(4), memory_budget=smallest - 1)(rows(0))


def test_another_budget_after_one_that_was_too_small() -> None:
    model = toy(4)
    compiled = offload(model)
    with torch.no_grad():
        expected = compiled(rows(0)).clone()
        halve(model)
        before = fxoffload.get_plan(model)
        with pytest.raises(fxoffload.BudgetError):
            fxoffload.set_memory_budget(model, 1000)
        assert fxoffload.get_plan(model) == before
        for _ in range(3):
            assert torch.equal(compiled(rows(0)), expected)
    assert_streams(model)


@pytest.mark.parametrize("wanted_by", ["weights", "input"])
def test_gradients_are_refused_by_name(wanted_by: str) -> None:
    model = toy(3)
    model.requires_grad_(wanted_by == "weights")
    compiled = offload(model)
    with pytest.raises(GradientError, match=r"^facts: the outputs of this model require gradients"):
        compiled(rows(0).requires_grad_(wanted_by == "input"))
    with torch.no_grad():
        for k in range(3):
            torch.testing.assert_close(compiled(rows(k)), model(rows(k)), rtol=1e-4, atol=1e-5)


def test_weights_that_require_gradients_run_under_no_grad() -> None:
    model = toy(4).requires_grad_(True)
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0))
        halve(model)
        for k in range(3):
            got = compiled(rows(k))
            assert not got.requires_grad
            torch.testing.assert_close(got, model(rows(k)), rtol=1e-4, atol=1e-5)
    assert all(p.requires_grad and p.is_leaf for p in model.parameters())
    assert_streams(model)
    model(rows(0)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("order", [("no_grad", "inference"), ("inference", "no_grad"), ("off", "inference", "no_grad")])
def test_grad_modes_in_any_order(order: tuple[str, ...]) -> None:
    modes = {"no_grad": torch.no_grad, "inference": torch.inference_mode, "off": lambda: torch.set_grad_enabled(False)}
    inputs = [rows(k) for k in range(3)]
    expected = resident(lambda: toy(5), inputs)
    model = toy(5)
    compiled = offload(model)
    with modes[order[0]]():
        compiled(rows(9))
        halve(model)
    for mode in (*order, *order):
        with modes[mode]():
            for given, wanted in zip(inputs, expected, strict=True):
                assert torch.equal(compiled(given), wanted)
        assert_streams(model)


def test_a_model_made_in_inference_mode() -> None:
    with torch.inference_mode():
        model = Toy(4).eval()
        compiled = offload(model)
        compiled(rows(0))
        halve(model)
        for k in range(3):
            torch.testing.assert_close(compiled(rows(k)), model(rows(k)), rtol=1e-4, atol=1e-5)
    assert_streams(model)


@pytest.mark.parametrize("error", [ValueError("now"), KeyboardInterrupt()])
def test_the_call_after_an_exception_in_any_block_is_right(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Failing(6).requires_grad_(False)
    compiled = offload(model)
    with torch.no_grad():
        expected = [compiled(rows(k)).clone() for k in range(6)]
        halve(model)
        compiled(rows(0)), compiled(rows(0))
        arena = fxoffload.stats(model).nbytes_arena
        for k in range(6):
            monkeypatch.setitem(failing, k, error)
            with pytest.raises(type(error)):
                compiled(rows(k))
            monkeypatch.delitem(failing, k)
            for again in range(3):
                assert torch.equal(compiled(rows((k + again) % 6)), expected[(k + again) % 6])
            assert_streams(model)
            assert fxoffload.stats(model).nbytes_arena == arena


def _run_in_threads(jobs: list[Any]) -> None:
    errors: list[BaseException] = []

    def guarded(job: Any) -> None:
        try:
            with torch.no_grad():
                job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("models", [1, 2])
def test_two_threads(models: int) -> None:
    both = [toy(5, seed=i) for i in range(models)]
    compiled = [offload(model) for model in both]
    with torch.no_grad():
        expected = [[run(rows(k)).clone() for k in range(10)] for run in compiled]
    for model in both:
        halve(model)

    def work(which: int) -> None:
        for k in range(10):
            assert torch.equal(compiled[which](rows(k)), expected[which][k])

    _run_in_threads([lambda i=i: work(i % models) for i in range(2)])
    for model in both:
        assert fxoffload.stats(model).forwards == 10 + 20 // models
        assert_streams(model)


def test_an_input_of_a_wrong_shape_and_then_a_right_one() -> None:
    model = toy(4)
    compiled = offload(model)
    with torch.no_grad():
        expected = compiled(rows(1)).clone()
        halve(model)
        for _ in range(2):
            with pytest.raises(Exception, match=r"shape|size"):
                compiled(torch.randn(3, 17))
            assert torch.equal(compiled(rows(1)), expected)
            assert torch.equal(compiled(rows(1)), expected)
    assert len(api.bindings_of(model)) == 1
    assert_streams(model)
