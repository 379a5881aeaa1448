"""The graph as segments: it computes the same, outputs stand in the order of their making, and equal blocks have equal keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fxoffload.blocks import find_blocks
from fxoffload.split import segment_inputs, segment_key, segment_module, split_graph
from tests.models import CASES, seeded, toy
from tests.tracing import Traced, read
from tests.wrapped import Scaled

X = torch.ones(3, 16)
WHOLE = 1 << 30


def keys(traced: Traced, *sizes: int) -> list[str]:
    """The key of every segment; segments by the number of their nodes, or the blocks that are found."""
    if sizes:
        top, _ = traced.split(*sizes)
    else:
        top = split_graph(traced.gm, find_blocks(traced.facts, max_segment_nbytes=WHOLE))
    return [segment_key(segment_module(top, n.target)) for n in top.graph.find_nodes(op="call_module")]


def key_of(function: Callable[..., Any], *args: Any) -> str:
    (key,) = keys(read(function, *args), len(read(function, *args).facts.nodes))[:1]
    return key


# -- cutting ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["toy", "towers", "qwen3_tied"])
def test_the_segments_compute_what_the_graph_does(name: str) -> None:
    case = CASES[name]
    traced = read(case.build(), **case.given(0))
    wanted = traced.gm(*traced.inputs)
    top = split_graph(traced.gm, find_blocks(traced.facts, max_segment_nbytes=8192))
    got = top(*traced.inputs)
    assert len(got) == len(wanted)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))


def test_segments_are_called_in_order_by_their_names_and_return_tuples() -> None:
    traced = read(toy(2), X)
    blocks = find_blocks(traced.facts, max_segment_nbytes=WHOLE)
    top = split_graph(traced.gm, blocks)
    calls = top.graph.find_nodes(op="call_module")
    assert [(n.name, n.target) for n in calls] == [(s.identifier, s.identifier) for s in blocks.segments]
    for call, segment in zip(calls, blocks.segments, strict=True):
        child = segment_module(top, call.target)
        returned = child.graph.output_node().args[0]
        assert isinstance(returned, tuple)
        inside = [n.target for n in child.graph.nodes if n.op not in ("placeholder", "output")]
        assert inside == [n.target for n in traced.gm.graph.nodes if n.name in segment.nodes]
        assert len(segment_inputs(child)) == len(call.args)
        assert all(isinstance(t, torch.Tensor) for t in segment_inputs(child))


class Fan(nn.Module):
    """One segment makes three values, which are read in another order."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.cos()
        c = b.tanh()
        y = c.exp()
        z = a.neg()
        return y + z + b.abs()


def test_outputs_stand_in_the_order_of_their_making_whatever_reads_them() -> None:
    traced = read(Fan(), X)
    top, _ = traced.split(3)
    child = segment_module(top, "s0")
    returned: Any = child.graph.output_node().args[0]
    order = [n.name for n in child.graph.nodes]
    assert [n.name for n in returned] == sorted((n.name for n in returned), key=order.index)
    assert len(returned) == 3
    assert torch.equal(top(X)[0], Fan()(X))


def test_readers_in_another_order_change_no_key() -> None:
    def one(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = x.cos()
        return a.exp() + b.exp()

    def other(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = x.cos()
        return b.exp() - a.exp()

    assert keys(read(one, X), 2)[0] == keys(read(other, X), 2)[0]


def test_a_segment_that_returns_an_input_or_a_view_of_one() -> None:
    def function(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.relu()
        b = a.view(-1)
        return b.sin(), a, b

    traced = read(function, X, X)
    for sizes in ((1,), (2,), (1, 1), (1, 1, 1)):
        top, _ = read(function, X, X).split(*sizes)
        for got, wanted in zip(top(*traced.inputs), function(X, X), strict=True):
            assert torch.equal(got, wanted)


# -- keys -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "distinct"), [("toy", 2), ("qwen3_tied", 5)])
def test_equal_blocks_have_equal_keys(name: str, distinct: int) -> None:
    case = CASES[name]
    found = keys(read(case.build(), **case.given(0)))
    assert len(set(found)) <= distinct
    assert len(set(found)) < len(found)


def test_the_number_of_keys_does_not_grow_with_depth() -> None:
    assert [len(set(keys(read(toy(n), X)))) for n in (2, 4, 9)] == [2, 2, 2]


def test_keys_are_the_same_in_another_trace() -> None:
    assert keys(read(toy(3), X)) == keys(read(toy(3, seed=1), X))


def test_names_do_not_count() -> None:
    assert key_of(lambda x: x.sin() * 2, X) == key_of(lambda other: (other.sin()) * 2, X)


DIFFERENT: list[tuple[Callable[..., Any], Callable[..., Any]]] = [
    (lambda x: x * 2, lambda x: x * 3),
    (lambda x: x * 2, lambda x: x * 2.0),
    (lambda x: x.sum(0), lambda x: x.sum(1)),
    (lambda x: x.sum(0), lambda x: x.sum(0, keepdim=True)),
    (lambda x: x.sin(), lambda x: x.cos()),
    (lambda x: torch.sin(x), lambda x: torch.cos(x)),
    (lambda x: F.gelu(x), lambda x: F.gelu(x, approximate="tanh")),
    (lambda x: x.to(torch.float16), lambda x: x.to(torch.bfloat16)),
    (lambda x: x[1:], lambda x: x[:1]),
    (lambda x: x.sin() + x, lambda x: x + x.sin()),
    (lambda x: torch.full_like(x, 1.0), lambda x: torch.full_like(x, 1.5)),
]


@pytest.mark.parametrize("pair", DIFFERENT)
def test_operators_and_constants_count(pair: tuple[Callable[..., Any], Callable[..., Any]]) -> None:
    one, other = pair
    assert key_of(one, X) != key_of(other, X)


@pytest.mark.parametrize(
    "other",
    [
        torch.ones(4, 16),
        torch.ones(16, 3).t(),
        torch.ones(3, 32)[:, ::2],
        torch.ones(3, 16, dtype=torch.bfloat16),
        torch.ones(3, 16, device="meta"),
    ],
    ids=["shape", "transposed", "strided", "dtype", "device"],
)
def test_the_layout_of_an_input_counts(other: torch.Tensor) -> None:
    assert key_of(torch.sin, X) != key_of(torch.sin, other)


class Tagged(Scaled):
    """A wrapper of one layout that is made with a tag."""

    tag = ""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], self.tag

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Any:
        made = cls(inner["data_"], inner["scale"])
        made.tag = context
        return made


def tagged(tag: str, scale: torch.Tensor) -> torch.Tensor:
    return Tagged.__tensor_unflatten__({"data_": torch.ones(3, 16, dtype=torch.int8), "scale": scale}, tag, None, None)


def test_what_a_wrapper_is_made_with_and_how_it_lies_inside_counts() -> None:
    one = key_of(torch.sin, tagged("a", torch.ones(3, 1)))
    assert one == key_of(torch.sin, tagged("a", torch.ones(3, 1)))
    assert one != key_of(torch.sin, tagged("b", torch.ones(3, 1)))
    assert one != key_of(torch.sin, tagged("a", torch.ones(1, 1)))


def test_a_storage_offset_does_not_count() -> None:
    assert key_of(torch.sin, X) == key_of(torch.sin, torch.ones(4, 16)[1:])


def test_inputs_that_share_memory_count() -> None:
    def shared(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = a.view(48)
        return a.exp().view(48) + b

    def apart(x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        b = x.cos().view(48)
        return a.exp().view(48) + b

    # The last segment takes (a, b) in both: a value and its view, or two values.
    assert keys(read(shared, X), 2)[-1] != keys(read(apart, X), 3)[-1]


class Constants(nn.Module):
    """Each block holds a table that Dynamo makes a constant of the graph."""

    def __init__(self, *values: float) -> None:
        super().__init__()
        self.values = values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for value in self.values:
            x = x + torch.tensor([value] * 16)
        return x


def test_constant_tensors_count_by_their_values() -> None:
    traced = read(Constants(1.0, 1.0, 2.0), X)
    per_step = len(traced.facts.nodes) // 3
    a, b, c = keys(traced, per_step, per_step)
    assert a == b != c


def test_a_weight_and_a_value_are_told_apart_by_nothing_but_layout() -> None:
    linear = seeded(lambda: nn.Linear(16, 16, bias=False))
    assert keys(read(linear, X)) == keys(read(lambda w, x: F.linear(x, w, None), torch.ones(16, 16), X))


class Conditional(nn.Module):
    """A higher-order operator: its branches are graph modules, and operands by name."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x * self.scale, lambda x: x - 1, (x,))


def test_the_code_of_a_branch_counts() -> None:
    two, again, three = (keys(read(Conditional(s), X))[0] for s in (2.0, 2.0, 3.0))
    assert two == again != three
