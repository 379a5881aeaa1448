"""Predicted against measured on the CPU device: what is timed, how often, and that nothing stays behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import api, lower
from fxoffload.cost import Costs
from fxoffload.errors import OffloadError
from fxoffload.lower import Compiled, boxed
from fxoffload.measure import LoadMeasure, Measurement, SegmentMeasure
from fxoffload.timeline import LoadTime, SegmentTime, Timeline
from tests.models import rows, toy


def compiled(budget: str, **options: Any) -> Any:
    settings = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": budget, **options}
    return torch.compile(toy(6, 64), backend="layerwise", options=settings)


@pytest.mark.parametrize("budget", ["115KiB", "200KiB", "300KiB", "1MiB"])
def test_every_segment_and_copy_is_timed(budget: str) -> None:
    model, x = compiled(budget), rows(0, 64, 32)
    calls: list[torch.Tensor] = []
    with torch.no_grad():
        found = fxoffload.measure(model, lambda: calls.append(model(x)))
        assert torch.equal(calls[0], toy(6, 64)(x))
    assert all(torch.equal(call, calls[0]) for call in calls)
    plan = fxoffload.get_plan(model)
    assert found.plan is plan
    assert [s.name for s in found.segments] == list(plan.segments)
    assert [load.name for load in found.loads] == [load.name for load in plan.loads]
    assert all(s.measured_ms > 0 for s in found.segments)
    assert all(load.measured_ms > 0 for load in found.loads)
    assert [s.compute_ms for s in api.bindings_of(model)[-1].costs.segments] == [s.predicted_ms for s in found.segments]
    assert found.predicted.step_ms == pytest.approx(plan.step_ms)
    assert found.step_ms >= found.compute_ms


class Hashless:
    """As what AOTAutograd's cache returns."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, program: Compiled) -> None:
        self._program = program

    def __call__(self, arguments: list[Any]) -> Any:
        return self._program(arguments)


@pytest.mark.parametrize("made", [boxed, lambda program: Hashless(boxed(program))], ids=["", "without a hash"])
def test_equal_segments_are_one_kind(monkeypatch: pytest.MonkeyPatch, made: Callable[..., Compiled]) -> None:
    monkeypatch.setattr(lower, "boxed", made)
    model, x = compiled("200KiB"), rows(0, 64, 32)
    with torch.no_grad():
        found = fxoffload.measure(model, lambda: model(x))
    assert [s.kind for s in found.segments] == [0, 1, 1, 1, 1, 1, 1, 0]
    assert isinstance(found.costs, Costs)
    assert len({s.compute_ms for s in found.costs.segments}) == 2


def test_the_order_of_what_is_measured() -> None:
    model, x = compiled("200KiB"), rows(0, 64, 32)
    with torch.no_grad():
        found = fxoffload.measure(model, lambda: model(x))
    ends = [0.0, *(s.end_ms for s in found.measured.segments)]
    assert all(s.start_ms >= end for s, end in zip(found.measured.segments, ends, strict=False))
    assert found.measured.step_ms == ends[-1]
    for load, time in zip(found.plan.loads, found.measured.loads, strict=True):
        assert time.start_ms < time.end_ms <= found.measured.segments[load.wait_before].start_ms, "copied before it is read"


def test_a_call_of_several_forwards() -> None:
    model, x = compiled("200KiB"), rows(0, 64, 32)
    forwards: list[int] = []

    def call() -> None:
        for _ in range(4):
            model(x)
        forwards.append(4)

    with torch.no_grad():
        fxoffload.measure(model, call)
    assert len(forwards) == 2


def test_nothing_stays_behind() -> None:
    model, x = compiled("200KiB", profile=True), rows(0, 64, 32)
    with torch.no_grad():
        fxoffload.measure(model, lambda: model(x))
        copied = fxoffload.stats(model)
        expected = model(x)
        binding, transfer = api.bindings_of(model)[-1], api.engine_of(model).transfer
        assert transfer.copy.__module__ == "fxoffload.transfer"
        assert binding.staged is not None
        assert all(binding.staged.top.forward.__globals__[name] is p for name, p in binding.program.programs.items())
        fxoffload.set_memory_budget(model, "1MiB")
        assert torch.equal(model(x), expected)
    assert copied.nbytes_copied > 0


def test_a_call_that_fails_leaves_nothing_behind() -> None:
    model, x = compiled("200KiB"), rows(0, 64, 32)
    calls: list[int] = []

    def call() -> None:
        model(x)
        calls.append(1)
        if len(calls) > 1:
            raise KeyError("mine")

    with torch.no_grad():
        with pytest.raises(KeyError, match="mine"):
            fxoffload.measure(model, call)
        assert api.engine_of(model).transfer.copy.__module__ == "fxoffload.transfer"
        assert torch.equal(model(x), toy(6, 64)(x))


def test_a_call_that_does_not_run_the_model() -> None:
    model = compiled("200KiB")
    with torch.no_grad():
        with pytest.raises(OffloadError, match="its weights are not offloaded yet"):
            fxoffload.measure(model, lambda: None)
        model(rows(0, 64, 32))
        with pytest.raises(OffloadError) as refusal:
            fxoffload.measure(model, lambda: None)
    assert str(refusal.value) == (
        "measure: Toy: the graph that ran last did not run 3 times on end in 16 calls; "
        "give a call that runs the model with one kind of inputs"
    )


def by_hand() -> Measurement:
    plan = fxoffload.explain(toy(2), rows(0), machine=fxoffload.Machine.nominal(), memory_budget="1MiB")
    names = ("inp", "blocks.0", "blocks.1", "out")
    segments = tuple(SegmentMeasure(n, k, 1.0 + k, 1.5 + k) for n, k in zip(names, (0, 1, 1, 0), strict=True))
    loads = (LoadMeasure("blocks.0", 1 << 20, 2.0, 2.5), LoadMeasure("blocks.1", 1 << 20, 2.0, 3.5))

    def timeline(scale: float) -> Timeline:
        times = tuple(SegmentTime(n, i * scale, (i + 0.5) * scale, 0.5 * scale) for i, n in enumerate(names))
        return Timeline(times, (LoadTime("blocks.0", -scale, 0.0),), 4 * scale)

    return Measurement(plan.plan, segments, loads, timeline(2.0), timeline(2.5), plan.costs)


def test_text() -> None:
    assert str(by_hand()) == (
        """\
         predicted ms  measured ms  measured / predicted
step           8.0000      10.0000                  1.25
compute        6.0000       8.0000                  1.33
stall          4.0000       2.0000                  0.50
copies         4.0000       6.0000                  1.50

segments that are equal  each  predicted ms  measured ms  measured / predicted
inp                      x2          1.0000       1.5000                  1.50
blocks.0                 x2          2.0000       2.5000                  1.25

copies of  each  predicted ms  measured ms  measured / predicted  GB/s
1.00 MiB   x2          2.0000       3.0000                  1.50   0.3"""
    )


def test_trace(tmp_path: Path) -> None:
    by_hand().save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X" and event["tid"] == 0}
    assert spans == {n: (2500.0 + 2500.0 * i, 1250.0) for i, n in enumerate(("inp", "blocks.0", "blocks.1", "out"))}
    assert [(e["name"], e["ts"], e["dur"]) for e in events if e["ph"] == "X" and e["tid"] == 1] == [("blocks.0", 0.0, 2500.0)]
