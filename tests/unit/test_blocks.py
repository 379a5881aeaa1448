"""Blocks: where they are found, what rides with them, and where a large one is cut."""

from __future__ import annotations

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxoffload.blocks import Blocks, find_blocks
from fxoffload.facts import Facts
from tests.models import Towers, seeded, toy
from tests.tracing import facts_of, node, read, weight

X = torch.ones(3, 16)
WHOLE = 1 << 30
KIB = 1024


def names(blocks: Blocks) -> list[str]:
    return [s.name for s in blocks.segments]


def assert_covers(facts: Facts, blocks: Blocks) -> None:
    """Every node is in exactly one segment, in order, and every segment has the weights that its nodes read."""
    assert [name for s in blocks.segments for name in s.nodes] == [n.name for n in facts.nodes]
    by_name = {n.name: n for n in facts.nodes}
    for s in blocks.segments:
        assert set(s.weights) == {w for name in s.nodes for w in by_name[name].weights}
    assert len({s.identifier for s in blocks.segments}) == len(blocks.segments)


# -- discovery --------------------------------------------------------------------------------------------------------


def test_blocks_are_the_members_of_a_container() -> None:
    facts = read(toy(3), X).facts
    blocks = find_blocks(facts, max_segment_nbytes=WHOLE)
    assert names(blocks) == ["inp", "blocks.0", "blocks.1", "blocks.2", "out"]
    assert [s.block for s in blocks.segments] == ["", "blocks.0", "blocks.1", "blocks.2", ""]
    assert_covers(facts, blocks)


def test_one_member_is_no_family() -> None:
    assert names(find_blocks(read(toy(1), X).facts, max_segment_nbytes=WHOLE)) == ["inp"]


def test_the_outermost_container_wins() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.parts[1](self.parts[0](x).relu())

    model = seeded(lambda: nn.Sequential(Layer(), Layer(), nn.LayerNorm(16)))
    assert names(find_blocks(read(model, X).facts, max_segment_nbytes=WHOLE)) == ["0", "1", "2"]


def test_a_module_called_again_is_another_block() -> None:
    facts = read(seeded(Towers), X).facts
    assert names(find_blocks(facts, max_segment_nbytes=WHOLE)) == [
        "towers.0.0",
        "towers.0.1",
        "shared",
        "towers.1.0",
        "towers.1.1",
        "shared~2",
    ]

    class Again(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for k in (0, 1, 0, 0):
                x = self.blocks[k](x)
            return x

    facts = read(seeded(Again), X).facts
    blocks = find_blocks(facts, max_segment_nbytes=WHOLE)
    assert names(blocks) == ["blocks.0", "blocks.1", "blocks.0@1", "blocks.0@2"]
    assert blocks.segments[0].weights == blocks.segments[2].weights == blocks.segments[3].weights
    assert_covers(facts, blocks)


def test_declared_blocks_replace_discovery() -> None:
    facts = read(seeded(Towers), X).facts
    assert names(find_blocks(facts, max_segment_nbytes=WHOLE, declared={"towers.1.0", "towers.1.1"})) == [
        "towers.0.0",
        "towers.1.0",
        "towers.1.1",
        "shared",
    ]
    facts = read(toy(1), X).facts
    assert names(find_blocks(facts, max_segment_nbytes=WHOLE, declared={"blocks.0", "blocks.1"})) == ["inp", "blocks.0", "out"]
    assert names(find_blocks(facts, max_segment_nbytes=WHOLE, declared={"inp", "out"})) == ["inp", "blocks.0.norm", "out"]


def test_where_no_declared_block_ran_blocks_are_discovered() -> None:
    blocks = find_blocks(read(toy(2), X).facts, max_segment_nbytes=WHOLE, declared={"others.0"})
    assert names(blocks) == ["inp", "blocks.0", "blocks.1", "out"]


class Glue(nn.Module):
    """Weightless work before, between and after the blocks, and a parameter of the root between two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.relu() * 2
        x = x + self.blocks[0](x).sin()
        x = x + self.blocks[1](x)
        x = (x * self.scale).cos()
        return (x + self.blocks[2](x)).tanh()


def test_glue_rides_with_the_group_before_it_and_at_the_start_with_the_one_behind() -> None:
    facts = read(seeded(Glue), X).facts
    blocks = find_blocks(facts, max_segment_nbytes=WHOLE)
    targets = {n.name: n.target.rpartition(".")[2] for n in facts.nodes}
    assert [(s.name, s.block, [targets[n] for n in s.nodes]) for s in blocks.segments] == [
        ("blocks.0", "blocks.0", ["relu", "mul", "linear", "sin", "add"]),
        ("blocks.1", "blocks.1", ["linear", "add"]),
        ("scale", "", ["mul", "cos"]),
        ("blocks.2", "blocks.2", ["linear", "add", "tanh"]),
    ]


def test_a_graph_without_weights_is_one_segment() -> None:
    facts = read(lambda x: x.relu().sin(), X).facts
    blocks = find_blocks(facts, max_segment_nbytes=1)
    assert len(blocks.segments) == 1
    assert_covers(facts, blocks)


# -- cuts -------------------------------------------------------------------------------------------------------------


class MLP(nn.Module):
    """Pointwise work on both sides of two products."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x)).mul(1.5)
        return x + self.down(F.gelu(h).sin()).cos()


def mlps(n: int = 2) -> Facts:
    return read(seeded(lambda: nn.Sequential(*(MLP() for _ in range(n)))), torch.ones(512, 64)).facts


def test_an_mlp_is_cut_before_a_product_and_not_within_a_pointwise_chain() -> None:
    facts = mlps()
    targets = {n.name: n.target.rpartition(".")[2] for n in facts.nodes}
    blocks = find_blocks(facts, max_segment_nbytes=70 * KIB)
    assert names(blocks) == ["0:0", "0:1", "1:0", "1:1"]
    assert [[targets[n] for n in s.nodes] for s in blocks.segments[:2]] == [
        ["layer_norm", "linear", "mul", "gelu", "sin"],
        ["linear", "cos", "add"],
    ]
    assert_covers(facts, blocks)


@pytest.mark.parametrize("limit", [1, 4 * KIB, 64 * KIB, 65 * KIB, 68 * KIB, 132 * KIB, 200 * KIB, WHOLE])
def test_segments_stay_below_the_limit_or_hold_one_weight(limit: int) -> None:
    facts = mlps(3)
    nbytes = {w.placeholder: w.nbytes for w in facts.weights}
    by_name = {n.name: n for n in facts.nodes}
    blocks = find_blocks(facts, max_segment_nbytes=limit)
    assert_covers(facts, blocks)
    for s in blocks.segments:
        readers = [name for name in s.nodes if by_name[name].weights]
        assert sum(nbytes[w] for w in s.weights) <= limit or len(readers) <= 1, s
    if limit >= 132 * KIB:
        assert len(blocks.segments) == 3


def test_one_weight_above_the_limit_is_a_segment_alone() -> None:
    sizes = [10, 10, 100, 10, 10]
    nodes = [node(f"n{i}", weights=[f"w{i}"], kind="extern") for i in range(len(sizes))]
    facts = facts_of(nodes, weights=[weight(f"w{i}", nbytes) for i, nbytes in enumerate(sizes)])
    blocks = find_blocks(facts, max_segment_nbytes=25)
    assert [s.weights for s in blocks.segments] == [("w0", "w1"), ("w2",), ("w3", "w4")]


def test_no_more_segments_than_the_limit_asks_for() -> None:
    nodes = [node(f"n{i}", weights=[f"w{i}"], kind="extern") for i in range(9)]
    facts = facts_of(nodes, weights=[weight(f"w{i}", 10) for i in range(9)])
    for limit, count in [(90, 1), (89, 2), (50, 2), (49, 3), (30, 3), (29, 5), (19, 9)]:
        assert len(find_blocks(facts, max_segment_nbytes=limit).segments) == count, limit


def chain(*kinds: str, nbytes: int = 1000) -> Facts:
    """`mm` nodes with a weight of 10 bytes each, and pointwise nodes; each reads what the one before made."""
    nodes = [
        node(
            f"n{i}",
            weights=[f"w{i}"] if kind == "mm" else (),
            reads=[i - 1] if i else [],
            makes=(i, nbytes),
            kind="extern" if kind == "mm" else "fused",
        )
        for i, kind in enumerate(kinds)
    ]
    return facts_of(nodes, weights=[weight(f"w{i}", 10) for i, kind in enumerate(kinds) if kind == "mm"])


def sizes(facts: Facts, limit: int) -> list[int]:
    return [len(s.nodes) for s in find_blocks(facts, max_segment_nbytes=limit).segments]


def test_the_cut_stands_where_nothing_would_have_fused() -> None:
    # Behind the first product its result is in memory, but its pointwise readers would read it again.
    assert sizes(chain("mm", "p", "p", "mm"), 10) == [3, 1]
    assert sizes(chain("p", "mm", "p", "mm", "p"), 10) == [3, 2]
    assert sizes(chain("mm", "mm", "p", "p"), 10) == [1, 3]


def test_a_late_cut_is_taken_where_it_costs_less() -> None:
    # n0 makes a value that pointwise nodes read on both sides of n2: right before n3 nothing is alive but n2's result.
    nodes = [
        node("n0", weights=["w0"], makes=(0, 10), kind="extern"),
        node("n1", reads=[0], makes=(1, 1000)),
        node("n2", reads=[1], makes=(2, 10)),
        node("n3", weights=["w3"], reads=[2], makes=(3, 10), kind="extern"),
        node("n4", reads=[3], makes=(4, 10)),
    ]
    facts = facts_of(nodes, weights=[weight("w0", 10), weight("w3", 10)])
    assert sizes(facts, 10) == [3, 2]


def test_a_weight_read_by_pointwise_work_is_cut_at_the_cheapest_place_since_the_weight_before() -> None:
    # Right before n3 a cut would split n2 from n3; on both sides of the product it is free, and the later place is taken.
    nodes = [
        node("n0", weights=["w1"], makes=(1, 1000)),
        node("n1", reads=[1], makes=(2, 1000), kind="extern"),
        node("n2", reads=[2], makes=(4, 1000)),
        node("n3", weights=["w5"], reads=[4], makes=(5, 1000)),
    ]
    facts = facts_of(nodes, weights=[weight("w1", 10), weight("w5", 10)])
    assert sizes(facts, 10) == [2, 2]


def test_a_weight_that_came_with_an_earlier_segment_counts_nothing() -> None:
    nodes = [
        node("n0", weights=["a", "b"], kind="extern", path="blocks.0"),
        node("n1", weights=["a", "c"], kind="extern", path="blocks.1"),
        node("n2", weights=["b", "d"], kind="extern", path="blocks.1"),
    ]
    facts = facts_of(nodes, weights=[weight("a", 100), weight("b", 100), weight("c", 10), weight("d", 10)])
    blocks = find_blocks(facts, max_segment_nbytes=200)
    assert names(blocks) == ["blocks.0", "blocks.1"]
    assert blocks.segments[1].weights == ("a", "c", "b", "d")


class TestGolden(expecttest.TestCase):
    def test_table(self) -> None:
        self.assertExpectedInline(
            str(find_blocks(mlps(), max_segment_nbytes=70 * KIB)),
            """\
blocks  2 blocks  4 segments
segment     block  nodes  weights
0-1:0 (x2)  0-1        5        4
0-1:1 (x2)  0-1        3        2""",
        )


# -- long kernels -----------------------------------------------------------------------------------------------------


def parts(facts: Facts, limit: int, long: set[str]) -> list[str]:
    return [" ".join(s.nodes) for s in find_blocks(facts, max_segment_nbytes=limit, long=long).segments]


def test_no_weights_are_held_while_a_long_kernel_runs_that_reads_none() -> None:
    nodes = [
        node("qkv", weights=["q"], makes=(0, 1000), kind="extern"),
        node("norm", reads=[0], makes=(1, 1000)),
        node("attend", reads=[1], makes=(2, 1000), kind="extern"),
        node("out", weights=["o"], reads=[2], makes=(3, 1000), kind="extern"),
        node("add", reads=[3], makes=(4, 1000)),
        node("up", weights=["u"], reads=[4], makes=(5, 1000), kind="extern"),
    ]
    facts = facts_of(nodes, weights=[weight(name, 10) for name in "qou"])
    assert parts(facts, 20, set()) == ["qkv norm attend", "out add up"]
    assert parts(facts, 20, {"attend"}) == ["qkv norm", "attend", "out add up"]
    assert_covers(facts, find_blocks(facts, max_segment_nbytes=20, long={"attend"}))
    # A group that is one piece stays one.
    assert len(parts(facts, 30, {"attend"})) == 1


def test_a_long_kernel_is_not_parted_from_what_fuses_across_it() -> None:
    nodes = [
        node("gate", weights=["g"], makes=(0, 1000), kind="extern"),
        node("gelu", reads=[0], makes=(1, 1000)),
        node("attend", reads=[0], makes=(2, 1000), kind="extern"),
        node("cat", reads=[1, 2], makes=(3, 1000)),
        node("out", weights=["o"], reads=[3], makes=(4, 1000), kind="extern"),
        node("up", weights=["u"], reads=[4], makes=(5, 1000), kind="extern"),
    ]
    facts = facts_of(nodes, weights=[weight(name, 10) for name in "gou"])
    assert parts(facts, 20, {"attend"}) == parts(facts, 20, set())


def test_a_long_kernel_between_two_that_read_weights_is_parted_from_both() -> None:
    facts = facts_of(
        [
            node("qkv", weights=["q"], makes=(0, 1000), kind="extern"),
            node("attend", reads=[0], makes=(1, 1000), kind="extern"),
            node("out", weights=["o"], reads=[1], makes=(2, 1000), kind="extern"),
            node("up", weights=["u"], reads=[2], makes=(3, 1000), kind="extern"),
        ],
        weights=[weight("q", 10), weight("o", 10), weight("u", 20)],
    )
    assert parts(facts, 20, set()) == ["qkv attend out", "up"]
    assert parts(facts, 20, {"attend"}) == ["qkv", "attend", "out", "up"]


def test_a_long_kernel_is_not_parted_from_what_vmap_runs_with_it() -> None:
    nodes = [
        node("qkv", weights=["q"], makes=(0, 1000), kind="extern"),
        node("_vmap_increment_nesting", reads=[0]),
        node("attend", reads=[0], makes=(1, 1000), kind="extern"),
        node("_vmap_decrement_nesting", reads=[1]),
        node("out", weights=["o"], reads=[1], makes=(2, 1000), kind="extern"),
        node("up", weights=["u"], reads=[2], makes=(3, 1000), kind="extern"),
    ]
    facts = facts_of(nodes, weights=[weight("q", 10), weight("o", 10), weight("u", 20)])
    assert parts(facts, 20, {"attend"}) == parts(facts, 20, set())
