"""Graphs in which wrappers are replaced by what they consist of: inputs, names, and a wrapper in front of every reader."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import expecttest
import torch
import torch.fx as fx
from torch import nn

from fxoffload.hostalias import is_weight
from fxoffload.owner import tensor_names
from fxoffload.passes.base import copy_graph
from fxoffload.read import name_of, read_facts
from fxoffload.rows import Source
from fxoffload.unwrap import Rebuild, unwrap
from tests.models import Toy, seeded
from tests.tracing import CPU, trace
from tests.wrapped import Scaled, Shifted, requantized

X = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """One wrapper with two readers, and a plain weight."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) @ self.proj.weight


def unwrapped(model: nn.Module) -> tuple[fx.GraphModule, list[Any], list[Source], dict[int, str]]:
    names = tensor_names(model)

    def look(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        gm = fx.GraphModule(gm, copy_graph(gm.graph))
        return gm, *unwrap(gm, inputs, CPU, is_weight=is_weight, name_of=lambda n, t: name_of(n, t, names))

    with torch.no_grad():
        return trace(model, X, look=look)


def test_the_graph_computes_the_same_from_plain_inputs() -> None:
    for of in (Scaled.of, Shifted.of):
        model = requantized(seeded(lambda: Toy(2, 16)), of)
        gm, inputs, sources, _ = unwrapped(model)
        assert all(type(t) in (torch.Tensor, nn.Parameter) for t in inputs)
        assert len(gm.graph.find_nodes(op="placeholder")) == len(inputs) == len(sources)
        with torch.no_grad():
            assert torch.equal(gm(*inputs)[0], model(X))


def test_names_and_sources() -> None:
    model: Any = requantized(seeded(Twice), Shifted.of)
    _, inputs, sources, names = unwrapped(model)
    found = {names[id(t)]: s for t, s in zip(inputs, sources, strict=True) if id(t) in names}
    position = found["proj.weight.scale"].position
    assert found == {
        "proj.weight.data_.data_": Source(position, path=("data_", "data_")),
        "proj.weight.data_.scale": Source(position, path=("data_", "scale")),
        "proj.weight.scale": Source(position, path=("scale",)),
        "proj.bias": Source(found["proj.bias"].position),
    }
    assert found["proj.weight.data_.scale"].of(model.proj.weight) is model.proj.weight.data_.scale
    assert Source(1, (2, 3), ("scale",)).whole == Source(1, path=("scale",))


def test_equal_wrappers_are_made_by_one_function() -> None:
    gm, *_ = unwrapped(requantized(seeded(lambda: Toy(3, 16)), Scaled.of))
    makers = [n.target for n in gm.graph.nodes if isinstance(n.target, Rebuild)]
    assert len(makers) == 8
    assert len({maker.__name__ for maker in makers}) == 3, "of three shapes"


def test_what_cannot_be_compared_is_not_the_same() -> None:
    def made(context: Any) -> Rebuild:
        return Rebuild(Scaled, (("data_", None), ("scale", None)), context, X.shape, X.stride())

    assert made({"block": [1, 2]}).is_like(made({"block": [1, 2]}))
    assert not made({"block": [1, 2]}).is_like(made({"block": [1, 3]}))
    assert not made(torch.ones(2)).is_like(made(torch.ones(2)))
    assert not made(object()).is_like(made(object()))


def test_the_memory_of_a_dequantized_weight_counts_while_its_reader_runs() -> None:
    model = requantized(seeded(Twice), Scaled.of)
    names = tensor_names(model)

    def look(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        gm = fx.GraphModule(gm, copy_graph(gm.graph))
        plain, _, inner = unwrap(gm, inputs, CPU, is_weight=is_weight, name_of=lambda n, t: name_of(n, t, names))
        return read_facts(gm, plain, CPU, {**inner, **names})

    with torch.no_grad():
        facts = trace(model, X, look=look)
    assert {w.name: w.nbytes for w in facts.weights} == {"proj.weight.data_": 256, "proj.weight.scale": 64, "proj.bias": 64}
    readers = [n for n in facts.nodes if n.flops != 0]
    assert [[int(nbytes) for _, nbytes in n.allocates] for n in readers] == [[192, 1024], [192, 1024]]
    assert len({storage for n in facts.nodes for storage, _ in n.allocates}) == 4
    rebuilds = [n for n in facts.nodes if n.kind == "view"]
    assert [n.weights for n in rebuilds] == [n.weights[-2:] for n in readers]


class TestGolden(expecttest.TestCase):
    def test_graph(self) -> None:
        """A wrapper in a wrapper with two readers."""
        gm, *_ = unwrapped(requantized(seeded(Twice), Shifted.of))
        short = [str(n).replace("l_self_modules_proj_parameters_", "") for n in gm.graph.nodes]
        names = dict(zip(gm.graph.nodes, short, strict=True))
        lines = [f"{names[n]} = {', '.join(names[a] for a in n.all_input_nodes)}".rstrip(" =") for n in gm.graph.nodes]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
weight__data__data_
weight__data__scale
weight__scale
bias_
l_x_
rebuild_scaled_0 = weight__data__data_, weight__data__scale
rebuild_shifted_1 = rebuild_scaled_0, weight__scale
linear = l_x_, rebuild_shifted_1, bias_
rebuild_scaled_1 = weight__data__data_, weight__data__scale
rebuild_shifted_2 = rebuild_scaled_1, weight__scale
matmul = linear, rebuild_shifted_2
output = matmul""",
        )
