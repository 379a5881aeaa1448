"""Passes: the golden graph after each, the refusal of a foreign plan, the check of what was written, and the dump."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import expecttest
import pytest
import torch.fx as fx
from torch import nn

from fxoffload import ops, passes
from fxoffload.errors import PlanError
from fxoffload.passes import PIPELINE, InsertEvictions, InsertPrefetches, InsertWaits
from fxoffload.passes.base import copy_graph, node_name, segment_calls
from fxoffload.plan import Load, Plan


def top_level(n: int = 3) -> fx.GraphModule:
    """`blocks_0`, `blocks_1`, ...: each takes the value of the one before and a weight."""
    root = nn.Module()
    graph = fx.Graph()
    value = graph.placeholder("x")
    weights = [graph.placeholder(f"w{i}") for i in range(n)]
    for i, weight in enumerate(weights):
        root.add_module(f"blocks_{i}", nn.Bilinear(1, 1, 1))
        call = graph.call_module(f"blocks_{i}", (value, weight))
        value = graph.call_function(operator.getitem, (call, 0))
    graph.output((value,))
    return fx.GraphModule(root, graph)


def load(i: int, before: int, after: int | None, uses: tuple[int, ...] | None = None, name: str = "") -> Load:
    after_name = None if after is None else f"blocks.{after}"
    return Load(name or f"blocks.{i}", f"blocks.{i}", 0, 256, uses or (i,), before, after_name)


def plan(*loads: Load, n: int = 3) -> Plan:
    return Plan(tuple(f"blocks.{i}" for i in range(n)), (), loads, 0, 0, 0, True, 0.0, 0.0, 0.0)


# blocks.0 is issued by the forward before, behind blocks.2's prefetch; blocks.1 before blocks.0 runs.
PLAN = plan(load(0, 2, 1), load(1, 0, 0), load(2, 2, 2))


def text(gm: fx.GraphModule) -> str:
    return "\n".join(_line(n) for n in gm.graph.nodes if n.op in ("call_module", "call_function"))


def _line(n: fx.Node) -> str:
    target = n.target if isinstance(n.target, str) else getattr(n.target, "__name__", "")
    return f"{n.name} = {target}({', '.join(map(str, n.args))})"


class TestGolden(expecttest.TestCase):
    def test_before(self) -> None:
        self.assertExpectedInline(
            text(top_level()),
            """\
blocks_0 = blocks_0(x, w0)
getitem = getitem(blocks_0, 0)
blocks_1 = blocks_1(getitem, w1)
getitem_1 = getitem(blocks_1, 0)
blocks_2 = blocks_2(getitem_1, w2)
getitem_2 = getitem(blocks_2, 0)""",
        )

    def test_prefetches(self) -> None:
        self.assertExpectedInline(
            text(passes.run(top_level(), PLAN, pipeline=[InsertPrefetches()])),
            """\
prefetch_blocks_1 = prefetch(blocks.1, blocks.0)
blocks_0 = blocks_0(x, w0)
getitem = getitem(blocks_0, 0)
blocks_1 = blocks_1(getitem, w1)
getitem_1 = getitem(blocks_1, 0)
prefetch_blocks_2 = prefetch(blocks.2, blocks.2)
prefetch_blocks_0 = prefetch(blocks.0, blocks.1)
blocks_2 = blocks_2(getitem_1, w2)
getitem_2 = getitem(blocks_2, 0)""",
        )

    def test_waits(self) -> None:
        self.assertExpectedInline(
            text(passes.run(top_level(), PLAN, pipeline=[InsertWaits()])),
            """\
wait_blocks_0 = wait(blocks.0)
blocks_0 = blocks_0(x, w0)
getitem = getitem(blocks_0, 0)
wait_blocks_1 = wait(blocks.1)
blocks_1 = blocks_1(getitem, w1)
getitem_1 = getitem(blocks_1, 0)
wait_blocks_2 = wait(blocks.2)
blocks_2 = blocks_2(getitem_1, w2)
getitem_2 = getitem(blocks_2, 0)""",
        )

    def test_evictions(self) -> None:
        self.assertExpectedInline(
            text(passes.run(top_level(), PLAN, pipeline=[InsertEvictions()])),
            """\
blocks_0 = blocks_0(x, w0)
evict_blocks_0 = evict(blocks.0)
getitem = getitem(blocks_0, 0)
blocks_1 = blocks_1(getitem, w1)
evict_blocks_1 = evict(blocks.1)
getitem_1 = getitem(blocks_1, 0)
blocks_2 = blocks_2(getitem_1, w2)
evict_blocks_2 = evict(blocks.2)
getitem_2 = getitem(blocks_2, 0)""",
        )

    def test_all(self) -> None:
        self.assertExpectedInline(
            text(passes.run(top_level(), PLAN)),
            """\
prefetch_blocks_1 = prefetch(blocks.1, blocks.0)
wait_blocks_0 = wait(blocks.0)
blocks_0 = blocks_0(x, w0)
evict_blocks_0 = evict(blocks.0)
getitem = getitem(blocks_0, 0)
wait_blocks_1 = wait(blocks.1)
blocks_1 = blocks_1(getitem, w1)
evict_blocks_1 = evict(blocks.1)
getitem_1 = getitem(blocks_1, 0)
prefetch_blocks_2 = prefetch(blocks.2, blocks.2)
prefetch_blocks_0 = prefetch(blocks.0, blocks.1)
wait_blocks_2 = wait(blocks.2)
blocks_2 = blocks_2(getitem_1, w2)
evict_blocks_2 = evict(blocks.2)
getitem_2 = getitem(blocks_2, 0)""",
        )

    def test_a_load_that_two_segments_read_and_two_loads_of_one_bucket(self) -> None:
        both = plan(load(0, 0, 0, (0, 1)), load(0, 2, 0, (2,), "blocks.0#1"), load(1, 1, 1), load(2, 2, None))
        self.assertExpectedInline(
            text(passes.run(top_level(), both)),
            """\
prefetch_blocks_0 = prefetch(blocks.0, blocks.0)
wait_blocks_0 = wait(blocks.0)
blocks_0 = blocks_0(x, w0)
getitem = getitem(blocks_0, 0)
prefetch_blocks_1 = prefetch(blocks.1, blocks.1)
wait_blocks_1 = wait(blocks.1)
blocks_1 = blocks_1(getitem, w1)
evict_blocks_0 = evict(blocks.0)
evict_blocks_1 = evict(blocks.1)
getitem_1 = getitem(blocks_1, 0)
prefetch_blocks_0_1 = prefetch(blocks.0#1, blocks.0)
prefetch_blocks_2 = prefetch(blocks.2, None)
wait_blocks_0_1 = wait(blocks.0#1)
wait_blocks_2 = wait(blocks.2)
blocks_2 = blocks_2(getitem_1, w2)
evict_blocks_0_1 = evict(blocks.0#1)
evict_blocks_2 = evict(blocks.2)
getitem_2 = getitem(blocks_2, 0)""",
        )


def test_a_plan_that_streams_nothing_changes_nothing() -> None:
    before = top_level()
    assert text(passes.run(before, plan())) == text(before)


def test_the_graph_that_was_given_stays_as_it_is() -> None:
    before = top_level()
    seen = text(before)
    after = passes.run(before, PLAN)
    assert text(before) == seen
    assert after.graph is not before.graph
    assert after.get_submodule("blocks_1") is before.get_submodule("blocks_1")


def test_nodes_keep_names_and_metadata_in_a_copy() -> None:
    gm = top_level()
    nodes = [n for n in gm.graph.nodes if n.op != "output"]
    for n in nodes:
        n.meta["mark"] = n.name
    copied = [n for n in copy_graph(gm.graph).nodes if n.op != "output"]
    assert [(n.op, n.name, n.target, n.meta["mark"]) for n in copied] == [(n.op, n.name, n.target, n.name) for n in nodes]


@pytest.mark.parametrize("step", PIPELINE, ids=lambda step: step.name)
@pytest.mark.parametrize(
    ("segments", "differs"),
    [
        (("blocks.0", "blocks.1"), "it has 2 segments, the graph 3 (differs: ['blocks_2'])"),
        (("blocks.0", "blocks.1", "out"), "it has 3 segments, the graph 3 (differs: ['blocks_2', 'out'])"),
        (("blocks.1", "blocks.0", "blocks.2"), "it has 3 segments, the graph 3 (differs: another order)"),
    ],
)
def test_a_plan_for_another_graph_is_refused(step: passes.Pass, segments: tuple[str, ...], differs: str) -> None:
    with pytest.raises(PlanError) as error:
        step(top_level(), dataclasses.replace(plan(), segments=segments))
    assert str(error.value) == f"passes: the plan is for another graph: {differs}; plan this graph"


def test_segments_are_found_in_the_plans_order() -> None:
    gm = top_level()
    assert [n.name for n in segment_calls(gm, plan())] == ["blocks_0", "blocks_1", "blocks_2"]
    assert node_name("prefetch", "blocks.3:1#2") == "prefetch_blocks_3_1_2"


# -- the check --------------------------------------------------------------------------------------------------------


def written() -> fx.GraphModule:
    gm = passes.run(top_level(), PLAN)
    passes._check(gm, PLAN)
    return gm


def find(gm: fx.GraphModule, name: str) -> fx.Node:
    (found,) = (n for n in gm.graph.nodes if n.name == name)
    return found


@pytest.mark.parametrize("load_name", ["blocks.0", "blocks.1", "blocks.2"])
@pytest.mark.parametrize("op", ["prefetch", "wait", "evict"])
def test_a_removed_or_doubled_node_is_found(op: str, load_name: str) -> None:
    order = ["prefetch", "wait", "evict"]
    for count in (0, 2):
        gm = written()
        node = find(gm, node_name(op, load_name))
        if count:
            with gm.graph.inserting_after(node):
                gm.graph.node_copy(node)
        else:
            gm.graph.erase_node(node)
        counts = [count if name == op else 1 for name in order]
        with pytest.raises(PlanError) as error:
            passes._check(gm, PLAN)
        wanted = f"passes: {load_name}: prefetch, wait and evict must stand once each, but stand {counts} times"
        assert str(error.value) == wanted


@pytest.mark.parametrize(
    ("name", "where"),
    [("wait_blocks_1", "blocks_1"), ("evict_blocks_1", "wait_blocks_1"), ("prefetch_blocks_1", "wait_blocks_1")],
)
def test_a_node_on_the_wrong_side_is_found(name: str, where: str) -> None:
    gm = written()
    find(gm, where).append(find(gm, name))
    with pytest.raises(PlanError) as error:
        passes._check(gm, PLAN)
    assert str(error.value) == "passes: blocks.1: prefetch, wait and evict stand in the wrong order around its segments"


def test_a_load_that_the_plan_has_not_is_found() -> None:
    gm = written()
    with gm.graph.inserting_before(find(gm, "blocks_0")):
        gm.graph.call_function(ops.wait, ("blocks.9",))
    with pytest.raises(PlanError, match=r"^passes: .*blocks\.9.*: the plan has no such load$"):
        passes._check(gm, PLAN)


def test_a_prefetch_of_other_bytes_or_behind_another_eviction_is_found() -> None:
    gm = written()
    find(gm, "prefetch_blocks_1").args = ("blocks.1", "blocks.2")
    with pytest.raises(PlanError):
        passes._check(gm, PLAN)


def test_a_prefetch_at_another_segment_than_planned_is_found() -> None:
    gm = written()
    find(gm, "blocks_1").prepend(find(gm, "prefetch_blocks_0"))
    with pytest.raises(PlanError):
        passes._check(gm, PLAN)


# -- the runner -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rename:
    """A pass that renames nothing, to be named in the dump."""

    name: ClassVar[str] = "rename-nothing"

    def __call__(self, gm: fx.GraphModule, plan: Plan) -> fx.GraphModule:
        return gm


def test_the_dump_has_the_graph_after_every_pass(tmp_path: Path) -> None:
    dump = tmp_path / "made" / "here"
    gm = passes.run(top_level(), PLAN, dump=dump)
    assert sorted(p.name for p in dump.iterdir()) == [
        "01-insert-prefetches.txt",
        "02-insert-waits.txt",
        "03-insert-evictions.txt",
    ]
    assert (dump / "03-insert-evictions.txt").read_text() == gm.code
    first = (dump / "01-insert-prefetches.txt").read_text()
    assert "prefetch_blocks_1" in first
    assert "wait_blocks_1" not in first
    passes.run(top_level(), PLAN, pipeline=[Rename()], dump=tmp_path / "other")
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["01-rename-nothing.txt"]


def test_what_the_passes_insert_survives_dead_code_elimination() -> None:
    gm = passes.run(top_level(), PLAN)
    before = text(gm)
    gm.graph.eliminate_dead_code()
    assert text(gm) == before
