"""Where nothing can be captured: one warning, or an error where that was asked for."""

from __future__ import annotations

import warnings

import pytest
import torch

import fxoffload
from fxoffload import OffloadError, OffloadWarning
from tests.checks import assert_streams, halve, offload
from tests.models import Block, rows, toy


@pytest.mark.parametrize("options", [{"cuda_graph": True}, {"mode": "reduce-overhead"}], ids=str)
@torch.no_grad()
def test_the_cpu_captures_nothing(options: dict[str, object]) -> None:
    model = toy(5)
    expected = offload(toy(5))(rows(0))
    compiled = offload(model, **options)
    with pytest.warns(OffloadWarning) as caught:
        compiled(rows(0))
    (only,) = caught
    assert str(only.message) == (
        "graph: Toy: not captured: the onload device is 'cpu', and only CUDA captures; the host issues its segments and copies "
        "one by one, with the same results; leave cuda_graph out for this model"
    )
    halve(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            assert torch.equal(compiled(rows(0)), expected)
    assert_streams(model)
    assert fxoffload.stats(model).replays == 0


@torch.no_grad()
def test_one_warning_a_model_with_graph_breaks() -> None:
    class Broken(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block(16) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
                torch._dynamo.graph_break()
            return x

    model = Broken().eval().requires_grad_(False)
    compiled = offload(model, fullgraph=False, cuda_graph=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled(rows(0)), compiled(rows(0))
    assert len([w for w in caught if str(w.message).startswith("graph: ")]) == 1


@torch.no_grad()
def test_strict() -> None:
    compiled = offload(toy(4), cuda_graph="strict")
    for _ in range(2):
        with pytest.raises(OffloadError) as caught:
            compiled(rows(0))
        assert str(caught.value) == (
            "graph: Toy: not captured: the onload device is 'cpu', and only CUDA captures; "
            "pass cuda_graph=True to run it uncaptured, or leave cuda_graph out"
        )
