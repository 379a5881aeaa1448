"""Weights that change between calls of different graphs of one model: shapes, grad modes, and lists of blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from tests.checks import Trio, assert_streams, attached, delay_copies, halve, offload
from tests.models import Toy, rows, seeded, toy


def _edit(model: Toy, i: int) -> None:
    model.blocks[i].up.weight.add_(0.5)


def _replace(model: Toy, i: int) -> None:
    model.blocks[i].up.weight = nn.Parameter(model.blocks[i].up.weight + 0.5, requires_grad=False)


def _assign(model: Toy, i: int) -> None:
    model.blocks[i].up.weight.data = model.blocks[i].up.weight + 0.5


class CutTwice(nn.Module):
    """An embedding in one graph that is the projection of the next, which has more weights, so each cuts it by other rows."""

    def __init__(self, swapped: bool) -> None:
        super().__init__()
        self.swapped = swapped
        self.embed = nn.Embedding(24_000, 256)
        self.small = nn.Linear(256, 256)
        self.large = nn.ModuleList(nn.Linear(256, 8192) for _ in range(5))
        self.head = nn.Linear(256, 24_000, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids) + 1
        x = self._many(x) if self.swapped else self.small(x)
        torch._dynamo.graph_break()
        x = self.small(x) if self.swapped else self._many(x)
        return self.head(x)

    def _many(self, x: torch.Tensor) -> torch.Tensor:
        return x + sum(layer(x).mean(-1, keepdim=True) for layer in self.large)


@pytest.mark.filterwarnings("ignore:backend. graph break")
@pytest.mark.parametrize("swapped", [False, True], ids=["finer first", "coarser first"])
def test_graphs_that_cut_a_tied_weight_by_other_rows(swapped: bool) -> None:
    ids = torch.arange(0, 24_000, 997)[None]
    model, reference = (seeded(lambda: CutTwice(swapped)) for _ in range(2))
    compiled = offload(model, fullgraph=False)
    with torch.no_grad():
        torch.testing.assert_close(compiled(ids), reference(ids))
        cuts = [{w.rows for w in binding._weights.values() if w.rows} for binding in api.bindings_of(model)]
        assert all(cuts), "both graphs cut it"
        assert cuts[0] != cuts[1], "by other rows"
        expected = compiled(ids)
        halve(model)
        for k in range(3):
            delay_copies(model)
            assert torch.equal(compiled(ids), expected)
            assert fxoffload.stats(model).nbytes_copied > 0
            for m in (model, reference):
                m.embed.weight[997 * k].add_(0.5)
            torch.testing.assert_close(compiled(ids), reference(ids))
            expected = compiled(ids)


CHANGES = pytest.mark.parametrize("change", [_edit, _replace, _assign])


@CHANGES
def test_an_edit_right_before_the_first_call_of_another_graph(change: Callable[[Toy, int], None]) -> None:
    model, reference = toy(4), toy(4)
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0, n=3))
        for m in (model, reference):
            change(m, 1)
        torch.testing.assert_close(compiled(rows(1, n=5)), reference(rows(1, n=5)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(compiled(rows(1, n=3)), reference(rows(1, n=3)), rtol=1e-4, atol=1e-5)


@CHANGES
def test_edits_between_calls_of_two_shapes(change: Callable[[Toy, int], None]) -> None:
    trio = Trio(lambda: toy(6), rows(0, n=3))
    trio.check(rows(0, n=5))
    for i in range(6):
        trio.edit(lambda m, i=i: change(m, i))
        trio.check(rows(i, n=3))
        trio.check(rows(i, n=5))
        trio.edit(lambda m, i=i: change(m, 5 - i))
        trio.check(rows(i, n=5))
        trio.check(rows(i, n=3))
        trio.check(rows(i + 1, n=3))
        assert_streams(trio.streamed)
        trio.check_state()


def test_edits_between_no_grad_and_inference_mode() -> None:
    model, reference = toy(5), toy(5)
    compiled = offload(model)
    with torch.inference_mode():
        compiled(rows(0))
    halve(model)
    for k in range(4):
        with torch.no_grad():
            for m in (model, reference):
                m.blocks[k].up.weight.add_(0.5)
            torch.testing.assert_close(compiled(rows(k)), reference(rows(k)), rtol=1e-4, atol=1e-5)
        with torch.inference_mode():
            for m in (model, reference):
                m.blocks[k + 1].up.weight.mul_(1.5)
            torch.testing.assert_close(compiled(rows(k)), reference(rows(k)), rtol=1e-4, atol=1e-5)
    assert len(api.bindings_of(model)) == 2


def test_an_edit_that_is_taken_back_before_the_graph_that_did_not_see_it_runs() -> None:
    """No counter moves, and to the first graph nothing happened. But the second one has copied other values to the same place."""
    model, reference = toy(6), toy(6)
    compiled = offload(model, dynamic=False)
    with torch.no_grad():
        compiled(rows(0, n=3)), compiled(rows(0, n=5))
        halve(model)
        for n in (3, 5, 3):
            compiled(rows(0, n=n))
        kept = [{(r.bucket, r.offset) for r in binding.plan.residents} for binding in api.bindings_of(model) if binding.plan]
        assert kept[0] & kept[1]
        for factor, n in ((2.0, 5), (0.5, 3)):
            for m in (model, reference):
                for parameter in m.parameters():
                    parameter.data.mul_(factor)
            torch.testing.assert_close(compiled(rows(0, n=n)), reference(rows(0, n=n)), rtol=1e-4, atol=1e-5)
        restores = fxoffload.stats(model).restores
        compiled(rows(0, n=3))
        assert fxoffload.stats(model).restores == restores, "it is told once"


class Tied(nn.Module):
    """Two parameters over the memory of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = nn.Parameter(self.table.weight.data)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.table(ids)))


@pytest.mark.parametrize("part", ["table", "head"])
def test_an_edit_of_a_table_that_a_graph_cut_by_rows_counts_without_a_compiler(part: str) -> None:
    model: Any = seeded(Tied)
    plain: Any = seeded(Tied)
    compiled = offload(model, max_bucket_bytes=2048)
    ids = torch.arange(5)
    with torch.no_grad():
        compiled(ids)
        assert len(api.engine_of(model).store.buckets) > 2
        attached(model, 2)
        for _ in range(3):
            assert torch.equal(model(ids), plain(ids))
            for m in (model, plain):
                getattr(m, part).weight.mul_(1.5)


def test_a_block_list_replaced_by_a_shorter_one_and_back() -> None:
    trio = Trio(lambda: toy(6), rows(0))
    full = {id(m): m.blocks for m in (trio.streamed, trio.resident, trio.eager)}
    for k in range(1, 4):
        trio.edit(lambda m: setattr(m, "blocks", m.blocks[:3]))
        trio.check(rows(k))
        trio.edit(lambda m: setattr(m, "blocks", full[id(m)]))
        trio.check(rows(k))


def test_weights_replaced_by_ones_of_another_layout() -> None:
    trio = Trio(lambda: toy(5), rows(0))

    def transpose(model: Any) -> None:
        up = model.blocks[2].up
        up.weight = nn.Parameter((up.weight + 0.5).t().contiguous().t(), requires_grad=False)

    def widen(model: Any) -> None:
        model.blocks[3].up = nn.Linear(16, 48).requires_grad_(False)
        model.blocks[3].down = nn.Linear(48, 16).requires_grad_(False)
        for p in model.blocks[3].parameters():
            p.copy_(torch.sin(torch.arange(p.numel())).view_as(p) * 0.3)

    for change in (transpose, widen):
        trio.edit(change)
        for k in range(3):
            trio.check(rows(k))
        trio.check_state()
    delay_copies(trio.streamed, 0)
    live = sum(p.nbytes for p in trio.streamed.parameters())
    assert fxoffload.stats(trio.streamed).nbytes_host < 1.3 * live


def test_to_another_dtype_and_back() -> None:
    trio = Trio(lambda: toy(4), rows(0))
    trio.edit(lambda m: m.to(torch.float64))
    for k in range(3):
        trio.check(rows(k).double())
    trio.edit(lambda m: m.to(torch.float32))
    for k in range(3):
        trio.check(rows(k))
    trio.check_state()


def test_the_host_store_does_not_grow_with_replaced_weights() -> None:
    model = toy(4)
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0))
        host = fxoffload.stats(model).nbytes_host
        for _ in range(5):
            for block in model.blocks:
                block.up = nn.Linear(16, 32).requires_grad_(False)
            compiled(rows(1))
    assert fxoffload.stats(model).nbytes_host == host
