"""On a GPU: captured forwards, copies inside, replayed with other inputs, weights and budgets, while streams are late."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import planned, planner
from tests.checks import assert_streams
from tests.gpu.helpers import (
    DEVICE,
    LATE,
    ON_GPU,
    SETTLED,
    D,
    assert_replayed,
    capturer_of,
    given,
    graphed,
    late_compute,
    late_copies,
    offload,
    resident,
    settle,
    toy,
    use_budget,
)
from tests.models import Counting, Toy, seeded

pytestmark = ON_GPU
LABELS = ("smallest", "quarter", "half", "almost all")


@pytest.mark.parametrize("late", [late_copies, late_compute], ids=["late copies", "late compute"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@torch.no_grad()
def test_replays_are_resident_bit_for_bit(compiler: str, late: Callable[[Any], None]) -> None:
    """Case 20."""
    model = toy()
    expected = resident(model, 6, segment_compiler=compiler)
    compiled = graphed(model, segment_compiler=compiler)
    settle(compiled, given(0))
    for label in ("all", *LABELS):
        use_budget(model, label)
        settle(compiled, given(0))
        replayed = assert_replayed(model, len(expected))
        for k, wanted in enumerate(expected):
            late(model)
            assert torch.equal(compiled(given(k)), wanted), (label, k)
        replayed()
        if label != "all":
            assert_streams(model)


@torch.no_grad()
@pytest.mark.parametrize("beside", [True, False])
def test_many_replays_without_host_synchronisation(beside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are queued before the first begins: what the host issues around replays waits for the right ones."""
    if beside:
        # Copies for the next forward are left to the host, however short the step would be without.
        monkeypatch.setattr(planner, "AS_SHORT", 0.0)
        monkeypatch.setattr(planned, "_planned", planned._planned.__wrapped__)
    model = toy(9)
    expected = resident(model, 10)
    compiled = graphed(model)
    settle(compiled, given(0))
    wraps = 0
    for label in LABELS:
        use_budget(model, label)
        settle(compiled, given(0))
        inputs = [given(k) for k in range(10)]
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.cuda._sleep(6 * LATE)
            outputs = []
            for k, x in enumerate(inputs):
                if k % 3 == 1:
                    late_copies(model)
                outputs.append(compiled(x))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True)), label
        assert_streams(model)
        wraps += sum(load.wraps for load in fxoffload.get_plan(model).loads)
    assert wraps or not beside


@torch.no_grad()
def test_a_capture_that_begins_while_copies_are_in_flight() -> None:
    """Case 21."""
    model = toy()
    expected = resident(model, 3)
    compiled = graphed(model)
    settle(compiled, given(0))
    for label in ("quarter", "half"):
        use_budget(model, label)
        count = fxoffload.stats(model).replays
        late_copies(model)
        assert torch.equal(compiled(given(0)), expected[0])
        for k, wanted in enumerate(expected):
            late_copies(model)
            assert torch.equal(compiled(given(k)), wanted), (label, k)
        assert fxoffload.stats(model).replays == count + 3


@torch.no_grad()
def test_two_shapes() -> None:
    """Case 22."""
    model = toy()
    other = copy.deepcopy(model)
    plain = offload(other, dynamic=True)
    compiled = graphed(model, dynamic=True)
    settle(plain, given(0, n=103))
    settle(compiled, given(0, n=103))
    use_budget(model, "half")
    settle(compiled, given(0, n=103))
    # So near that both run under one plan, which is made for the larger.
    for _ in range(2):
        compiled(given(0, n=100))
    for n in (100, 103):
        compiled(given(0, n=n))
    replayed = assert_replayed(model, 8)
    for k in range(4):
        for n in (100, 103):
            late_compute(model)
            assert torch.equal(compiled(given(k, n=n)), plain(given(k, n=n))), (k, n)
    replayed()
    assert_streams(model)


@torch.no_grad()
def test_the_budget_changes_while_a_replay_runs() -> None:
    """Case 23."""
    model = toy(9)
    expected = resident(model, 3)
    compiled = graphed(model)
    settle(compiled, given(0))
    for label in (*LABELS, *reversed(LABELS)):
        late_compute(model)
        last = compiled(given(2))
        use_budget(model, label)
        for k, wanted in enumerate(expected):
            assert torch.equal(compiled(given(k)), wanted), (label, k)
        assert torch.equal(last, expected[2])


@torch.no_grad()
def test_edits_between_replays() -> None:
    """Case 24."""
    model, other = toy(6), toy(6)
    plain = offload(other)
    compiled = graphed(model)
    settle(plain, given(0))
    settle(compiled, given(0))
    use_budget(model, "half")
    settle(compiled, given(0))
    plan = fxoffload.get_plan(model)
    assert plan.residents
    assert plan.loads
    count = fxoffload.stats(model).replays
    for k, block in enumerate(model.blocks):
        torch.cuda.synchronize()
        for one in (block, other.blocks[k]):
            one.up.weight.data.add_(0.25)
            one.down.weight.mul_(1.5)
        for again in range(2):
            late_compute(model)
            assert torch.equal(compiled(given(again)), plain(given(again))), k
            torch.cuda.synchronize()
        assert_streams(model)
    assert fxoffload.stats(model).replays == count + 12


class Random(Toy):
    """Noise after every block."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
            x = x + torch.randn_like(x)
        return self.out(x)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@torch.no_grad()
def test_random_numbers(compiler: str) -> None:
    model = seeded(lambda: Random(4, D).bfloat16())
    plain = offload(copy.deepcopy(model), segment_compiler=compiler)
    compiled = graphed(model, segment_compiler=compiler)
    settle(plain, given(0))
    settle(compiled, given(0))
    use_budget(model, "half")
    settle(compiled, given(0))
    torch.cuda.manual_seed(7)
    wanted = [plain(given(0)) for _ in range(3)] + [torch.randn(5, device=DEVICE)]
    torch.cuda.manual_seed(7)
    got = [compiled(given(0)) for _ in range(3)] + [torch.randn(5, device=DEVICE)]
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    assert not torch.equal(got[0], got[1])


@torch.no_grad()
def test_calls_from_a_side_stream_and_from_the_default_one() -> None:
    model = toy()
    expected = resident(model, 8)
    compiled = graphed(model)
    settle(compiled, given(0))
    use_budget(model, "quarter")
    settle(compiled, given(0))
    inputs = [given(k) for k in range(8)]
    torch.cuda.synchronize()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    outputs: list[torch.Tensor] = []
    for k, x in enumerate(inputs):
        with torch.cuda.stream(side if k % 2 else main):
            late_compute(model)
            outputs.append(compiled(x))
    torch.cuda.synchronize()
    assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True))
    assert_streams(model)


@torch.no_grad()
def test_two_models_with_graphs() -> None:
    models = [seeded(lambda: Toy(6, D).bfloat16(), seed) for seed in (0, 1)]
    expected = [resident(model, 4) for model in models]
    runs = [graphed(model) for model in models]
    for model, run in zip(models, runs, strict=True):
        settle(run, given(0))
        use_budget(model, "quarter")
        settle(run, given(0))
    for k in range(4):
        for model, run, wanted in zip(models, runs, expected, strict=True):
            late_compute(model)
            assert torch.equal(run(given(k)), wanted[k])
            assert_streams(model)
    use_budget(models[0], "half")
    for k in range(4):
        for run, wanted in zip(runs, expected, strict=True):
            assert torch.equal(run(given(k)), wanted[k])
    assert len({id(capturer_of(model)) for model in models}) == 2


@torch.no_grad()
def test_buffers_that_the_model_writes_are_written_back() -> None:
    model = seeded(lambda: Counting(d=D, rows=8))
    reference = copy.deepcopy(model).to(DEVICE)
    compiled = graphed(model)
    for k in range(2 * SETTLED):
        if k == SETTLED:
            use_budget(model, "half")
        late_compute(model)
        x = given(k, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), reference(x), rtol=1e-2, atol=1e-2)
        assert [int(block.n) for block in model.blocks] == [k + 1] * 5
    assert_streams(model)
