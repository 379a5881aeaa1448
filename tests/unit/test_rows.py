"""Large weights cut by rows: the same values, and only where every reader allows it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F
from torch import nn

import fxoffload
from fxoffload.hostalias import is_weight
from fxoffload.machine import Machine
from fxoffload.passes.base import copy_graph
from fxoffload.rows import Source, split_rows
from tests.checks import budgets, check_budgets
from tests.models import seeded
from tests.tracing import trace

LIMIT = 2048
IDS = torch.tensor([[0, 99, 31], [32, 64, 5]])


class Embedding(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 16, **options)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) * 2


class Head(nn.Module):
    def __init__(self, *, bias: bool = True, rows: int = 100) -> None:
        super().__init__()
        self.head = nn.Linear(16, rows, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.sin())


class Tied(nn.Module):
    """Looked up at the start, projected on at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 16)
        self.inner = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
        self.head = nn.Linear(16, 100, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.table(ids)).relu())


def split(model: nn.Module, *args: Any, limit: int = LIMIT, whole: int = 0) -> tuple[fx.GraphModule, list[Any], list[Source]]:
    """The graph after `split_rows`, its inputs, and where they come from."""

    def look(gm: fx.GraphModule, inputs: Sequence[Any]) -> tuple[fx.GraphModule, list[Any], list[Source]]:
        gm = fx.GraphModule(gm, copy_graph(gm.graph))
        return (gm, *split_rows(gm, inputs, limit, is_weight, whole))

    with torch.no_grad():
        return trace(model, *args, look=look)


def pieces(sources: Sequence[Source]) -> list[tuple[int, int]]:
    return [s.rows for s in sources if s.rows is not None]


def assert_same(model: nn.Module, *args: Any, limit: int = LIMIT) -> list[Source]:
    """The graph that was cut gives the model's own values."""
    gm, inputs, sources = split(model, *args, limit=limit)
    with torch.no_grad():
        (got,), wanted = gm(*inputs), model(*args)
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    if not any(isinstance(m, nn.Linear) for m in model.modules()):
        assert torch.equal(got, wanted)
    return sources


@pytest.mark.parametrize("limit", [64, 1024, 2048, 3200, 6399])
def test_an_embedding_is_exact_whatever_the_pieces(limit: int) -> None:
    model = seeded(Embedding)
    sources = assert_same(model, torch.arange(100).reshape(4, 25), limit=limit)
    found = pieces(sources)
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]
    assert found[-1][1] == 100
    assert len(found) > 1


@pytest.mark.parametrize(("whole", "count"), [(6399, 3), (6400, 0)])
def test_a_weight_that_is_to_stay_whole_is_not_cut(whole: int, count: int) -> None:
    _, _, sources = split(seeded(Embedding), IDS, limit=3200, whole=whole)
    assert len(pieces(sources)) == count


def test_a_weight_a_little_larger_than_a_piece_stays_whole_where_the_size_of_pieces_is_ours() -> None:
    with torch.device("meta"):
        model, x = nn.Sequential(nn.Linear(1024, 1280), nn.Linear(1280, 1536)), torch.empty(4, 1024)  # 5 and 7.5 MiB of float32
    found = {}
    for setting in ("auto", "4MiB"):
        explanation = fxoffload.explain(model, x, machine=Machine.nominal(), memory_budget="1GiB", max_bucket_bytes=setting)
        found[setting] = [w.shape for w in explanation.program.facts.weights if len(w.shape) == 2]
    assert found["auto"] == [(1280, 1024), (768, 1280), (768, 1280)]
    assert found["4MiB"] == [(640, 1024), (640, 1024), (768, 1280), (768, 1280)]


@pytest.mark.parametrize(
    ("rows", "limit_rows", "wanted"),
    [
        (14336, 6144, [4864, 4864, 4608]),  # thirds, to the next tile of 128 columns
        (128256, 14336, [14336] * 8 + [13568]),
        (14336, 4800, [4784, 4784, 4768]),  # no room for a tile: to a load of 8 columns
        (14336, 4780, [4779, 4779, 4778]),
        (1030, 512, [344, 344, 342]),
        (1026, 1, [1] * 1026),
    ],
)
def test_pieces_are_as_wide_as_matrix_units_like(rows: int, limit_rows: int, wanted: list[int]) -> None:
    with torch.device("meta"):
        model, x = nn.Linear(4096, rows, bias=False, dtype=torch.bfloat16), torch.empty(4, 4096, dtype=torch.bfloat16)
    _, _, sources = split(model, x, limit=limit_rows * model.weight[0].nbytes)
    found = pieces(sources)
    assert [end - first for first, end in found] == wanted
    assert [first for first, _ in found] == [0, *(end for _, end in found[:-1])]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_of_any_integer_type_and_shape(dtype: torch.dtype) -> None:
    model = seeded(Embedding)
    for ids in (IDS.to(dtype), torch.tensor(57, dtype=dtype), torch.zeros(0, 3, dtype=dtype)):
        assert_same(model, ids)


@pytest.mark.parametrize("bad", [-1, -100, 100, 101, 2**40])
def test_an_id_outside_the_table_is_still_an_error(bad: int) -> None:
    gm, inputs, sources = split(seeded(Embedding), IDS)
    assert len(pieces(sources)) > 2
    position = next(i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.dtype == torch.int64)
    inputs[position] = torch.tensor([[1, bad, 2]])
    with pytest.raises(IndexError):
        gm(*inputs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [100, 97])
def test_a_projection_gives_its_values_in_order(bias: bool, rows: int) -> None:
    sources = assert_same(seeded(lambda: Head(bias=bias, rows=rows)), torch.randn(2, 3, 16))
    assert pieces(sources)[-1][1] == rows


def test_a_tied_weight_is_cut_for_both_its_readers() -> None:
    sources = assert_same(seeded(Tied), IDS)
    assert len(pieces(sources)) == len({s.rows for s in sources if s.rows is not None}) > 1


@pytest.mark.parametrize(
    ("width", "dtype", "limit", "bounds"),
    [
        (16, torch.float32, 2048, [(0, 28), (28, 56), (56, 84), (84, 100)]),  # 4 rows are 256 bytes
        (16, torch.float32, 64, [(i, i + 4) for i in range(0, 100, 4)]),  # never less than what is aligned
        (24, torch.bfloat16, 2400, [(0, 48), (48, 96), (96, 100)]),  # 16 rows are 768 bytes
        (64, torch.float32, 12800, [(0, 50), (50, 100)]),
    ],
)
def test_pieces_start_at_aligned_bytes(width: int, dtype: torch.dtype, limit: int, bounds: list[tuple[int, int]]) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.rand(100, width).to(dtype))

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, self.weight)

    _, inputs, sources = split(seeded(Table), IDS, limit=limit)
    assert pieces(sources) == bounds
    row_nbytes = width * dtype.itemsize
    assert all(first * row_nbytes % 256 == 0 for first, _ in bounds)
    assert [tuple(t.shape) for t, s in zip(inputs, sources, strict=True) if s.rows] == [(b - a, width) for a, b in bounds]


def test_a_source_takes_its_rows_of_the_argument() -> None:
    table = torch.arange(20).reshape(10, 2)
    assert torch.equal(Source(3).of(table), table)
    assert torch.equal(Source(3, (4, 6)).of(table), table[4:6])


# -- what stays whole -------------------------------------------------------------------------------------------------


class OtherReader(Embedding):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table(ids) + self.table.weight.sum()


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(16, 100).t())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Overlapping(nn.Module):
    """Two tables that are runs of rows of one memory."""

    def __init__(self) -> None:
        super().__init__()
        base = torch.rand(120, 16)
        self.a = nn.Parameter(base[:100])
        self.b = nn.Parameter(base[20:])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.a) + F.embedding(ids, self.b)


class AsBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(64, 64))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.weight, self.weight) + ids.sum()


@pytest.mark.parametrize(
    "make",
    [lambda: Embedding(max_norm=1.0), OtherReader, Strided, Overlapping, AsBias],
    ids=["max_norm", "another reader", "strided", "overlapping", "both operands"],
)
def test_stays_whole(make: Callable[[], nn.Module]) -> None:
    assert pieces(assert_same(seeded(make), IDS)) == []


def test_a_weight_within_the_limit_stays_whole() -> None:
    assert pieces(assert_same(seeded(Embedding), IDS, limit=6400)) == []


def test_a_padding_index_is_no_obstacle() -> None:
    assert len(pieces(assert_same(seeded(lambda: Embedding(padding_idx=3)), IDS))) > 1


def test_two_parameters_of_one_memory_are_cut_alike() -> None:
    class Alike(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Parameter(torch.rand(100, 16))
            self.b = nn.Parameter(self.a.data)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.embedding(ids, self.a) + F.embedding(ids + 1, self.b)

    found = pieces(assert_same(seeded(Alike), IDS % 50))
    assert found[: len(found) // 2] == found[len(found) // 2 :] != []


def test_streamed_under_every_budget() -> None:
    model = seeded(Tied)
    check_budgets(model, [IDS, IDS.flip(0), IDS.flip(1)], max_bucket_bytes=LIMIT)
    fxoffload.set_memory_budget(model, budgets(model)["smallest"])
    assert "table.weight[28:56]" in {load.bucket for load in fxoffload.get_plan(model).loads}
