"""Offload without a compiler: equal to the plain model, with late copies and poisoned evictions, whatever a forward calls."""

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.attached import attachment_of
from tests.checks import assert_state, snapshot
from tests.dit import DiT
from tests.models import Block, Reversed, Towers, Toy, seeded
from tests.twins import LEVELS, check, inputs, leaf, offload, twins


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("make", [lambda: Toy(6), lambda: Reversed(6), Towers], ids=["toy", "reversed", "towers"])
def test_equal_to_the_plain_model(make: Callable[[], nn.Module], level: str, overlap: bool) -> None:
    part = 0.7 if make is Towers else 0.5
    with twins(make, part=part, async_transfer=overlap, **LEVELS[level]) as (model, plain):
        check(model, plain, inputs(5))
        stats, plan = fxoffload.stats(model), fxoffload.get_plan(model)
        assert plan.async_transfer == overlap
        assert plan.streamed_nbytes == stats.nbytes_copied > 0
        assert plan.peak_nbytes <= plan.budget_nbytes
        # In steady state nothing is brought back: the end of a forward is the beginning of the next.
        assert stats.restores <= 2


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("part", [0.35, 0.6, 0.9])
def test_every_number_of_blocks_and_budget(n: int, part: float) -> None:
    with twins(lambda: Toy(n), part=part, module_filter=leaf) as (model, plain):
        check(model, plain, inputs(4))


@pytest.mark.parametrize(
    ("limit", "parts"), [("9KiB", ("mod.1", "attn", "mlp", "mlp_text")), ("5KiB", ("attn.qkv", "mlp.net.0"))]
)
def test_blocks_in_pieces(limit: str, parts: tuple[str, ...]) -> None:
    with twins(lambda: DiT(4), part=0.5, max_bucket_bytes=limit) as (model, plain):
        check(model, plain, [x[None] for x in inputs(4)])
        assert {f"blocks.0.{part}" for part in parts} <= {load.bucket for load in fxoffload.get_plan(model).loads} | {
            resident.bucket for resident in fxoffload.get_plan(model).residents
        }
        assert fxoffload.get_plan(model).peak_nbytes <= fxoffload.get_plan(model).budget_nbytes


def test_what_is_computed_between_units_is_timed_with_the_unit_before(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = 0.0

    def work(s: float) -> None:
        nonlocal seconds
        seconds += s

    class Working(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x) * 2
                work(3.0)
            return self.out(x)

    monkeypatch.setattr("fxoffload.profile.mark", lambda device: seconds)
    with twins(lambda: Working(8), profile=True) as (model, plain):
        for block in model.blocks:
            block.register_forward_hook(lambda *_: work(1.0), prepend=True)
        check(model, plain, inputs(3))
        costs = attachment_of(model)._ways.follower("forward").costs
        assert [segment.compute_ms for segment in costs.segments] == [4000.0] * 8


def test_all_resident_copies_nothing() -> None:
    with twins(lambda: Toy(3), part=2) as (model, plain):
        check(model, plain, inputs(3), streams=False)
        assert fxoffload.stats(model).nbytes_copied == 0


class Skipping(Toy):
    """Leaves out the blocks that it is told to; `again` are called a second time at the end."""

    skip: frozenset[int] = frozenset()
    again: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skip:
                x = block(x)
        for i in self.again:
            x = self.blocks[i](x)
        return self.out(x)


def test_blocks_left_out_now_and_then() -> None:
    with twins(lambda: Skipping(8), part=0.4) as (model, plain):
        for skip in [(), (1, 2, 3, 4), (), (0,), (7,), (0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4), (), (6, 7), ()]:
            model.skip = plain.skip = frozenset(skip)
            check(model, plain, inputs(1), streams=len(skip) < 8)


def test_left_out_blocks_are_not_copied() -> None:
    with twins(lambda: Skipping(8), part=0.4) as (model, plain):
        check(model, plain, inputs(3))
        every = fxoffload.stats(model).nbytes_copied
        model.skip = plain.skip = frozenset(range(2, 8))
        check(model, plain, inputs(2))
        assert fxoffload.stats(model).nbytes_copied < every / 2
        # Leaving blocks out is no reason to fill the arena anew.
        restores = fxoffload.stats(model).restores
        check(model, plain, inputs(3))
        assert fxoffload.stats(model).restores == restores


def test_a_block_skipped_at_first_and_used_later() -> None:
    with twins(lambda: Skipping(6), part=0.5) as (model, plain):
        model.skip = plain.skip = frozenset({2, 3})
        check(model, plain, inputs(3))
        model.skip = plain.skip = frozenset()
        check(model, plain, inputs(3))


def test_blocks_called_twice() -> None:
    with twins(lambda: Skipping(6), part=0.5) as (model, plain):
        for again in [(), (1, 2), (5, 5), (), (0, 5, 3), (1, 2)]:
            model.again = plain.again = again
            check(model, plain, inputs(3))
        # Orders that were seen are followed: nothing is restored any more.
        before = fxoffload.stats(model).restores
        check(model, plain, inputs(3))
        assert fxoffload.stats(model).restores == before


class Mapped(nn.Module):
    """Arguments and results in containers of all kinds; a parameter on the container, one on the root, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.blocks.register_parameter("shift", nn.Parameter(torch.randn(4, 16)))
        self.scale = nn.Parameter(torch.randn(16))
        self.offset = torch.linspace(0, 1, 16)

    def forward(self, x: dict[str, Any], *, more: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        y = x["x"] * self.scale + self.offset
        for i, block in enumerate(self.blocks):
            y = block(y) + self.blocks.shift[i]  # type: ignore[index]
        return {"y": y, "more": (*more, y), "none": None}


def test_weights_on_containers_and_plain_attributes() -> None:
    with twins(Mapped, part=0.6) as (model, plain):
        for value in inputs(4):
            with torch.no_grad():
                got, wanted = (m({"x": value}, more=(value,)) for m in (model, plain))
            assert type(got) is dict
            assert type(got["more"]) is tuple
            assert torch.equal(got["y"], wanted["y"])
            assert fxoffload.stats(model).nbytes_copied > 0


class Reader(Toy):
    """Reads weights of its blocks outside of their calls, one of them only when it is told to."""

    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * sum(block.up.weight.abs().mean() for block in self.blocks[:2])  # type: ignore[union-attr]
        x = super().forward(x)
        return nn.functional.linear(x, self.blocks[3].up.weight) if self.late else x  # type: ignore[union-attr,arg-type]


def test_weights_read_outside_their_units() -> None:
    with twins(lambda: Reader(6), part=0.8) as (model, plain):
        check(model, plain, inputs(4))
        resident = {r.bucket for r in fxoffload.get_plan(model).residents}
        assert {"blocks.0", "blocks.1"} <= resident


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a block that is in two containers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.more = nn.ModuleList([self.blocks[0], Block(16)])
        self.more[1].up.weight = self.blocks[2].up.weight  # type: ignore[union-attr]
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.empty(0, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in (*self.blocks, *self.more):
            x = block(x)
        return self.head(torch.cat([x, self.empty]))


def test_tied_and_empty_weights() -> None:
    with twins(Tied, part=0.8) as (model, plain):
        check(model, plain, [torch.arange(7) + k for k in range(4)])
        assert model.head.weight is model.embedding.weight
        unique = {id(p): p for p in model.parameters()}.values()
        packed = fxoffload.stats(model).nbytes_host
        assert packed <= sum(p.numel() * 4 + 256 for p in unique)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        for block in self.blocks:
            block.weight.data = block.weight.data.to(memory_format=torch.channels_last)  # type: ignore[union-attr]
        self.linear = nn.Linear(8, 8)
        self.linear.weight.data = torch.randn(8, 8).t()
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen.append((self.blocks[0].weight.stride(), self.linear.weight.stride()))
        return self.linear(x)


def test_strides_are_kept() -> None:
    with twins(Strided, part=0.6, module_filter=leaf) as (model, plain):
        check(model, plain, [torch.randn(2, 4, 8, 8) for _ in range(3)])
        assert model.seen == plain.seen


class Counting(nn.Module):
    """Buffers that a block and the root write; batch norm in training mode."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.norm = nn.BatchNorm1d(64)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("hidden", torch.zeros(64), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.hidden.add_(x.mean(0))
            return self.norm(self.linear(x)) + self.hidden

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting.Part() for _ in range(4))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.total += x.sum()
        return x


def test_buffers_that_change() -> None:
    plain, model = seeded(Counting).train(), seeded(Counting).train()
    attachment = offload(model, part=0.6)
    check(model, plain, inputs(5, 64))
    assert model.blocks[2].count.item() == 5  # type: ignore[union-attr,operator]
    assert_state(model, snapshot(plain))
    attachment.detach()
    assert_state(model, snapshot(plain))


class Unseen(nn.Module):
    """Reads a buffer, of 1.2 MiB where it is `large`, and may write it behind torch's back, as a Triton kernel does."""

    def __init__(self, *, large: bool, writes: bool) -> None:
        super().__init__()
        self.register_buffer("state", torch.ones(20_000 if large else 3, 16))
        self.proj = nn.Linear(16, 16)
        self.writes = writes

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = self.state
        if self.writes:
            values = state.numpy()
            values[:3] = 0.5 * values[:3] + x.numpy()
        return self.proj(x + state[:3])


@pytest.mark.parametrize("inference", [False, True])
def test_buffers_that_torch_does_not_see_written(inference: bool) -> None:
    kinds = [(True, True), (False, False), (True, False), (False, True), (True, True), (True, False)]
    with torch.inference_mode(inference):
        make = lambda: nn.Sequential(*(Unseen(large=large, writes=writes) for large, writes in kinds))  # noqa: E731
        with twins(make, memory_budget="4MiB") as (model, plain):
            for value in inputs(4):
                check(model, plain, [value])
                assert_state(model, snapshot(plain))


class Writing(Toy):
    """A block's weight is written by the forward itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.out.weight.mul_(1.01)
        return x


def test_a_weight_that_the_forward_writes() -> None:
    with twins(lambda: Writing(4), part=0.6, module_filter=leaf) as (model, plain):
        check(model, plain, inputs(4))
