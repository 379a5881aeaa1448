"""How long the passes take to write a plan into a graph, their checks included; and the generated source behind them."""

from __future__ import annotations

import pytest

from fxoffload import passes
from fxoffload.passes import PIPELINE
from tests.bench.graphs import SIZES, plan_of, top_level
from tests.bench.test_host_cost import Generated

pytestmark = pytest.mark.benchmark(group="passes")


def with_names_of(n: int):
    """A graph whose segments are called as those of the plan."""
    return top_level(n), plan_of(n)


@pytest.mark.parametrize("segments", SIZES)
def test_all(benchmark, segments: int) -> None:
    gm = benchmark(passes.run, *with_names_of(segments))
    assert len(gm.graph.nodes) > 3 * segments


@pytest.mark.parametrize("step", PIPELINE, ids=lambda step: step.name)
def test_one(benchmark, step) -> None:
    top, plan = with_names_of(SIZES[0])
    before = list(PIPELINE[: PIPELINE.index(step)])
    gm = passes.run(top, plan, pipeline=before)
    benchmark(lambda: passes.run(gm, plan, pipeline=[step]))


@pytest.mark.parametrize("segments", SIZES)
def test_generate(benchmark, segments: int) -> None:
    made = Generated(segments)
    assert "wait_blocks" in benchmark(made.generate).source
