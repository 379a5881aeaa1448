"""Odd weights: tied, viewed, strided, empty, tiny, of every dtype, in every place, and buffers that change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from tests.checks import Trio, assert_state, assert_streams, check_budgets, halve, offload, snapshot
from tests.models import Counting, Toy, rows, seeded, toy

D = 16
INPUTS = [rows(k) for k in range(4)]


class Odd(Toy):
    """A Toy that `change` has been at."""

    def __init__(self, change: Callable[[Any], None], n: int = 4) -> None:
        super().__init__(n, D)
        change(self)


def make_odd(change: Callable[[Any], None]) -> nn.Module:
    model = seeded(lambda: Odd(lambda _: None))
    change(model)
    return model


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def tie_two_blocks(m: Any) -> None:
    m.blocks[2].up.weight = m.blocks[0].up.weight


def tie_two_modules(m: Any) -> None:
    m.blocks[3].up = m.blocks[1].up


def tie_ends(m: Any) -> None:
    m.out.weight = m.inp.weight


def two_names_in_one_block(m: Any) -> None:
    m.blocks[1].norm.bias = m.blocks[1].down.bias


def views_of_one_storage(m: Any) -> None:
    both = torch.cat([m.blocks[0].up.weight, m.blocks[2].up.weight])
    m.blocks[0].up.weight, m.blocks[2].up.weight = frozen(both[: 2 * D]), frozen(both[2 * D :])


def overlapping_views_in_two_blocks(m: Any) -> None:
    both = torch.cat([m.blocks[0].up.weight, m.blocks[2].up.weight])
    m.blocks[0].up.weight, m.blocks[2].up.weight = frozen(both[: 2 * D]), frozen(both[D : 3 * D])


def overlapping_views_in_one_block(m: Any) -> None:
    both = torch.cat([m.blocks[1].norm.weight, m.blocks[1].norm.bias])
    m.blocks[1].norm.weight, m.blocks[1].norm.bias = frozen(both[:D]), frozen(both[4 : D + 4])


def one_storage_two_parameters(m: Any) -> None:
    m.blocks[2].up.weight = frozen(m.blocks[0].up.weight.data)


def one_storage_transposed(m: Any) -> None:
    m.blocks[2].down.weight = frozen(m.blocks[0].up.weight.data.t())


def transposed(m: Any) -> None:
    for block in m.blocks[1:3]:
        block.up.weight = frozen(block.up.weight.t().contiguous().t())


def storage_offset(m: Any) -> None:
    for block in m.blocks[1:3]:
        block.up.weight = frozen(torch.cat([torch.ones(5, D), block.up.weight])[5:])


def every_other_column(m: Any) -> None:
    for block in m.blocks[1:3]:
        block.up.weight = frozen(block.up.weight.repeat_interleave(2, dim=1)[:, ::2])


def expanded(m: Any) -> None:
    for block in m.blocks[1:3]:
        block.norm.weight = frozen(torch.full((1,), 1.5).expand(D))


CHANGES = [
    tie_two_blocks,
    tie_two_modules,
    tie_ends,
    two_names_in_one_block,
    views_of_one_storage,
    overlapping_views_in_two_blocks,
    overlapping_views_in_one_block,
    one_storage_two_parameters,
    one_storage_transposed,
    transposed,
    storage_offset,
    every_other_column,
    expanded,
]


@pytest.mark.parametrize("change", CHANGES)
def test_tied_viewed_and_strided(change: Callable[[Any], None]) -> None:
    model = make_odd(change)
    layouts = {name: (p.shape, p.stride(), p.dtype) for name, p in model.named_parameters()}
    check_budgets(model, INPUTS)
    assert {name: (p.shape, p.stride(), p.dtype) for name, p in model.named_parameters()} == layouts
    flat = [(p.data_ptr(), p.nbytes) for p in model.parameters()]
    assert all(pointer % 4 == 0 for pointer, _ in flat)


@pytest.mark.parametrize("change", CHANGES[:9])
def test_a_tie_survives_packing_and_edits(change: Callable[[Any], None]) -> None:
    trio = Trio(lambda: make_odd(change), rows(0))
    for i in (0, 1, 2, 3):
        trio.edit(lambda m, i=i: [p.view(-1)[6:9].add_(0.5) for p in m.blocks[i].parameters() if p.is_contiguous()])
        trio.check(rows(i))
        trio.check_state()
    trio.check(rows(5))
    assert_streams(trio.streamed)


@pytest.mark.parametrize(
    "change", [tie_two_blocks, tie_two_modules, tie_ends, one_storage_two_parameters, one_storage_transposed]
)
def test_a_tied_weight_has_one_host_copy(change: Callable[[Any], None]) -> None:
    model, plain = make_odd(change), toy(4)
    plain_compiled, compiled = offload(plain), offload(model)
    with torch.no_grad():
        plain_compiled(rows(0))
        compiled(rows(0))
    assert fxoffload.stats(model).nbytes_host < fxoffload.stats(plain).nbytes_host


class Mixed(nn.Module):
    """Weights of several dtypes and sizes in one block: a bias of three elements before a large weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Mixed(k) for k in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class _Mixed(nn.Module):
    def __init__(self, k: int) -> None:
        super().__init__()
        self.small = nn.Parameter(torch.randn(3))
        self.scalar = nn.Parameter(torch.tensor(1.5 + k))
        self.weight = nn.Parameter(torch.randn(D, D + k) * 0.3)
        self.back = nn.Parameter((torch.randn(D + k, D) * 0.3).to(torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, D))
        self.register_buffer("mask", torch.rand(D) > 0.3)
        self.register_buffer("index", torch.randperm(D))
        self.register_buffer("byte", torch.randint(0, 9, (D,), dtype=torch.uint8))
        self.register_buffer("phase", torch.polar(torch.ones(D), torch.randn(D)))
        self.register_buffer("shift", torch.randn(D).half(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        y = (y.to(torch.bfloat16) @ self.back).float() * self.scalar + self.small.sum()
        y = torch.where(self.mask, y, -y)[:, self.index] + self.byte * 0.1 + self.shift
        y = (y * self.phase).real
        return torch.cat([x + y, self.empty])


def test_dtypes_sizes_and_empties_of_every_kind() -> None:
    model = seeded(Mixed)
    check_budgets(model, INPUTS)
    for layer in model.layers:
        assert layer.empty.shape == (0, D)
        assert layer.scalar.shape == ()
        assert all(t.data_ptr() % 256 == 0 for t in (layer.weight, layer.back, layer.small))


class Everywhere(nn.Module):
    """Parameters on the root, on the container and on blocks; a block list with parameterless ends; a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale_shift_table = nn.Parameter(torch.randn(2, D))
        self.blocks = nn.ModuleList([nn.Identity(), *(_Tabled() for _ in range(3)), nn.GELU()])
        self.blocks.gain = nn.Parameter(torch.randn(D))
        self.scale = torch.full((D,), 1.25)
        self.register_buffer("rope", torch.randn(D), persistent=False)

    @property
    def layers(self) -> nn.ModuleList:
        return self.blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale_shift_table[0] + self.scale_shift_table[1]
        early = sum(block.table.sum() for block in self.layers[1:-1])
        for block in self.layers:
            x = block(x) if not isinstance(block, _Tabled) else block(x, self.rope)
        return x * self.blocks.gain * self.scale + early


class _Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(D))
        self.proj = nn.Linear(D, D)

    def forward(self, x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
        return x + self.proj(x * rope) * self.table


def test_parameters_in_every_place() -> None:
    model = seeded(Everywhere)
    check_budgets(model, INPUTS)
    names = {w.name for w in api.bindings_of(model)[0].program.facts.weights}
    assert {"scale_shift_table", "blocks.gain", "rope", "scale", "blocks.1.table"} <= names


class OwnOnly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def test_a_root_whose_only_parameter_is_its_own() -> None:
    model = seeded(OwnOnly)
    compiled = offload(model)
    with torch.no_grad():
        for x in INPUTS:
            torch.testing.assert_close(compiled(x), x @ model.weight)


def test_a_model_without_weights() -> None:
    model = nn.GELU()
    compiled = offload(model)
    with torch.no_grad():
        for x in INPUTS:
            torch.testing.assert_close(compiled(x), model(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).relu()
        return x


def images(k: int) -> torch.Tensor:
    return torch.randn(2, 4, 5, 5, generator=torch.Generator().manual_seed(k))


def test_channels_last() -> None:
    model = seeded(lambda: Conv().to(memory_format=torch.channels_last))
    check_budgets(model, [images(k) for k in range(3)])
    assert all(layer[0].weight.is_contiguous(memory_format=torch.channels_last) for layer in model.layers)


def test_batch_norm_in_train_mode_keeps_its_statistics() -> None:
    trio = Trio(lambda: seeded(Conv).train(), images(0))
    for k in range(1, 5):
        trio.check(images(k))
        for name, tensor in trio.eager.state_dict().items():
            torch.testing.assert_close(trio.streamed.state_dict()[name], tensor)
    assert int(trio.streamed.layers[0][1].num_batches_tracked) == 5
    assert_streams(trio.streamed)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_buffers_that_the_model_changes(compiler: str) -> None:
    trio = Trio(lambda: seeded(Counting), rows(0), segment_compiler=compiler)
    for k in range(1, 5):
        trio.check(rows(k))
        assert [int(block.n) for block in trio.streamed.blocks] == [k + 1] * 5
        assert torch.equal(trio.streamed.blocks[2].last, trio.resident.blocks[2].last)
    assert_streams(trio.streamed)
    trio.edit(lambda m: [block.n.zero_() for block in m.blocks])
    trio.check(rows(9))
    assert [int(block.n) for block in trio.streamed.blocks] == [1] * 5


class ViewsFirst(nn.Module):
    """Takes a view of every weight before the loop, and reads the views in it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = [block.weight.t() for block in self.blocks]
        halves = [block.bias[:8] for block in self.blocks]
        for block, view, half in zip(self.blocks, views, halves, strict=True):
            x = x + block(x).relu() @ view + half.sum()
        return x


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_views_taken_before_the_loop(compiler: str) -> None:
    check_budgets(seeded(ViewsFirst), INPUTS, segment_compiler=compiler)


class Returning(nn.Module):
    """Returns weights: as they are, as views, and used later."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        views = [block.weight[1:3].t() for block in self.blocks]
        for block in self.blocks:
            x = x + block(x).relu()
        return x, self.blocks[0].weight, self.blocks[3].bias, views[1], views[4], self.blocks[2].weight.view(-1)


def test_weights_that_the_model_returns_survive_later_calls() -> None:
    model = seeded(Returning)
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0))
        halve(model)
        kept = [(compiled(rows(k)), [t.clone() for t in model(rows(k))]) for k in range(4)]
    assert_streams(model)
    for results, expected in kept:
        for got, wanted in zip(results, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_outputs_that_the_caller_keeps_survive_later_calls() -> None:
    model = toy(6)
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0))
        halve(model)
        kept = [compiled(rows(k)) for k in range(8)]
        for k, got in enumerate(kept):
            torch.testing.assert_close(got, model(rows(k)), rtol=1e-4, atol=1e-5)
    assert_streams(model)


def test_train_mode_without_gradients_changes_nothing() -> None:
    model = toy(5).train()
    before = snapshot(model)
    check_budgets(model, INPUTS)
    assert model.training
    assert_state(model, before)
