"""Slots that are used again and again: late copies, poison, every count of buckets and slots."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import PlanError, api
from fxoffload.verify import check_plan
from tests.checks import assert_streams, budgets, delay_copies, halve, offload
from tests.models import Reversed, rows, seeded, toy


@pytest.mark.parametrize("n", range(1, 10))
@torch.no_grad()
def test_every_count_of_blocks_through_every_count_of_slots(n: int) -> None:
    model = toy(n)
    compiled = offload(model)
    expected = [compiled(rows(k)) for k in range(4)]
    delay_copies(model, 0.0003)
    binding = api.bindings_of(model)[0]
    block = max(bucket.nbytes for bucket in binding.costs.buckets)
    smallest = fxoffload.smallest_budget(model)
    for slots in range(1, 6):
        torch._dynamo.reset()
        other = toy(n)
        run = offload(other, persistent_buckets=0, transfer_buckets=slots, memory_budget=smallest + (slots - 1) * block)
        run(rows(0))
        delay_copies(other, 0.0003)
        for k in range(4):
            assert torch.equal(run(rows(k)), expected[k]), (slots, k)
        plan = fxoffload.get_plan(other)
        assert not plan.residents
        # A lone block is part of what is around it.
        assert len(plan.loads) == (n + 2 if n > 1 else 1)
        assert_streams(other)


@pytest.mark.parametrize("knobs", [{"prefetch_limit": True}, {"max_inflight_prefetch_bytes": "8KiB"}, {"async_transfer": False}])
@pytest.mark.parametrize("persistent", [0, 3])
@torch.no_grad()
def test_every_knob(knobs: dict[str, Any], persistent: int) -> None:
    model = toy(7)
    expected = [offload(model)(rows(k)) for k in range(4)]
    torch._dynamo.reset()
    other = toy(7)
    compiled = offload(other, persistent_buckets=persistent, **knobs)
    compiled(rows(0))
    for budget in budgets(other).values():
        if budget < fxoffload.smallest_budget(other):
            continue
        fxoffload.set_memory_budget(other, budget)
        delay_copies(other, 0.0003)
        for k in range(4):
            assert torch.equal(compiled(rows(k)), expected[k])
        assert_streams(other)
        assert len(fxoffload.get_plan(other).residents) == persistent


@torch.no_grad()
def test_what_a_call_prefetched_for_the_next_is_right_after_a_pause() -> None:
    model = toy(6)
    compiled = offload(model)
    expected = [compiled(rows(k)) for k in range(6)]
    halve(model)
    assert fxoffload.get_plan(model).live_at_start()
    for k in range(3):
        assert torch.equal(compiled(rows(k)), expected[k])
    gc.collect()
    time.sleep(0.05)
    for k in range(3, 6):
        assert torch.equal(compiled(rows(k)), expected[k])
        assert_streams(model)
    assert fxoffload.stats(model).restores == 2


class Twice(nn.Module):
    """One Linear that is called twice, `gap` blocks apart."""

    def __init__(self, gap: int) -> None:
        super().__init__()
        self.gap = gap
        self.shared = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            if i in (1, 1 + self.gap):
                x = x + self.shared(x)
            x = x + block(x).relu()
        return x


@pytest.mark.parametrize("gap", [1, 2, 4])
@torch.no_grad()
def test_a_layer_used_twice(gap: int) -> None:
    model = seeded(lambda: Twice(gap))
    compiled = offload(model)
    expected = [compiled(rows(k)) for k in range(4)]
    delay_copies(model)
    for label, budget in budgets(model).items():
        fxoffload.set_memory_budget(model, budget)
        for k in range(4):
            assert torch.equal(compiled(rows(k)), expected[k]), (label, k)
        plan = fxoffload.get_plan(model)
        own = [load for load in plan.loads if load.bucket == "shared.shared"]
        assert sorted(use for load in own for use in load.uses) in ([], [1, 1 + gap + 1], *[[b] for b in ()]) or len(own) in (
            1,
            2,
        )
        if label == "smallest":
            assert_streams(model)


@torch.no_grad()
def test_blocks_that_run_in_reverse() -> None:
    model = seeded(lambda: Reversed(6))
    compiled = offload(model)
    expected = [compiled(rows(k)) for k in range(4)]
    halve(model)
    for k in range(4):
        assert torch.equal(compiled(rows(k)), expected[k])
    plan = fxoffload.get_plan(model)
    assert [s for s in plan.segments if s.startswith("blocks")] == [f"blocks.{i}" for i in reversed(range(6))]
    assert all(load.prefetch_before != load.wait_before for load in plan.loads)
    assert_streams(model)


@torch.no_grad()
def test_a_hundred_calls_never_move_a_slot() -> None:
    model = toy(6)
    compiled = offload(model)
    compiled(rows(0))
    halve(model)
    delay_copies(model, 0)
    expected = [model(rows(k)) for k in range(5)]
    compiled(rows(0)), compiled(rows(0))
    engine, binding = api.engine_of(model), api.bindings_of(model)[0]
    addresses = (
        engine.arena.view(0, 1).data_ptr(),
        id(binding.top),
        [p.data_ptr() for p in model.parameters()],
    )
    restores = fxoffload.stats(model).restores
    for k in range(100):
        torch.testing.assert_close(compiled(rows(k % 5)), expected[k % 5], rtol=1e-4, atol=1e-5)
        assert_streams(model)
    assert addresses == (
        engine.arena.view(0, 1).data_ptr(),
        id(binding.top),
        [p.data_ptr() for p in model.parameters()],
    )
    assert fxoffload.stats(model).restores == restores


@torch.no_grad()
def test_a_plan_that_overwrites_bytes_still_to_be_read_is_refused() -> None:
    import dataclasses

    model = toy(4)
    compiled = offload(model)
    compiled(rows(0))
    halve(model)
    costs, plan = api.bindings_of(model)[0].costs, fxoffload.get_plan(model)
    check_plan(plan, costs)
    first, second = plan.loads[:2]
    for change in ({"offset": second.offset}, {"prefetch_before": (first.wait_before + 1) % len(plan.segments)}, {"after": None}):
        loads = (dataclasses.replace(first, **change), *plan.loads[1:])
        with pytest.raises(PlanError, match=r"^judge: "):
            check_plan(dataclasses.replace(plan, loads=loads), costs)


@torch.no_grad()
def test_poison_shows_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above would fail if the runtime did not wait: the reads find poison."""
    model = toy(5)
    compiled = offload(model)
    expected = compiled(rows(0)).clone()
    halve(model)
    assert torch.equal(compiled(rows(0)), expected)
    fxoffload.set_memory_budget(model, budgets(model)["smallest"])
    transfer, go = api.engine_of(model).transfer, threading.Event()
    copy = transfer.copy
    with monkeypatch.context() as patch:
        # No copy begins before the forward has ended, however long a busy machine takes over it.
        patch.setattr(transfer, "copy", lambda slot: go.wait(60) and copy(slot))
        patch.setattr(transfer, "wait", lambda slot: None)
        assert compiled(rows(0)).isnan().any()
        go.set()
        transfer.drain()
    halve(model)
    assert torch.equal(compiled(rows(0)), expected)
