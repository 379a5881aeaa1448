"""On a GPU: captured forwards, copies inside, replayed with other inputs, weights and budgets, while streams are late."""

from __future__ import annotations

import copy
import gc
import os
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import OffloadError, OffloadWarning, api
from fxoffload.capture import CaptureTransfer
from fxoffload.cuda import CudaCapturer
from tests.checks import assert_streams
from tests.gpu import helpers
from tests.gpu.helpers import (
    DEVICE,
    LATE,
    ON_GPU,
    SETTLED,
    D,
    given,
    late_compute,
    late_copies,
    results,
    settle,
    toy,
    use_budget,
)
from tests.models import Toy, seeded

pytestmark = ON_GPU
LABELS = ("smallest", "quarter", "half", "almost all")


def offload(model: nn.Module, **options: Any) -> Any:
    """`"strict"`: what is not captured fails."""
    return helpers.offload(model, **{"cuda_graph": "strict", **options})


def resident(model: nn.Module, calls: int, **options: Any) -> list[torch.Tensor]:
    """Results of a copy of a model under the same backend, uncaptured and resident."""
    other = copy.deepcopy(model)
    compiled = helpers.offload(other, **options)
    return results(compiled, calls)


def capturer_of(model: Any) -> CudaCapturer:
    found = api.engine_of(model).capturer
    assert isinstance(found, CudaCapturer)
    return found


def assert_replayed(model: Any, count: int = 1) -> Callable[[], None]:
    """To be called when `count` more forwards were replays, and steady ones."""
    before = fxoffload.stats(model)

    def check() -> None:
        after = fxoffload.stats(model)
        assert after.replays - before.replays == count
        assert after.restores == before.restores

    return check


@pytest.mark.parametrize("late", [late_copies, late_compute], ids=["late copies", "late compute"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@torch.no_grad()
def test_replays_are_resident_bit_for_bit(compiler: str, late: Callable[[Any], None]) -> None:
    """Case 20."""
    model = toy()
    expected = resident(model, 6, segment_compiler=compiler)
    compiled = offload(model, segment_compiler=compiler)
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
def test_many_replays_without_host_synchronisation() -> None:
    """All are queued before the first begins: what the host issues around replays waits for the right ones."""
    model = toy(9)
    expected = resident(model, 10)
    compiled = offload(model)
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
    assert wraps


@torch.no_grad()
def test_a_capture_that_begins_while_copies_are_in_flight() -> None:
    """Case 21."""
    model = toy()
    expected = resident(model, 3)
    compiled = offload(model)
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
    plain = helpers.offload(other, dynamic=True)
    compiled = offload(model, dynamic=True)
    settle(plain, given(0, n=100))
    settle(compiled, given(0, n=100))
    use_budget(model, "half")
    settle(compiled, given(0, n=100))
    # So near that both run under one plan.
    for _ in range(2):
        compiled(given(0, n=103))
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
    compiled = offload(model)
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
    plain = helpers.offload(other)
    compiled = offload(model)
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
    plain = helpers.offload(copy.deepcopy(model), segment_compiler=compiler)
    compiled = offload(model, segment_compiler=compiler)
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
    compiled = offload(model)
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
    runs = [offload(model) for model in models]
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


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Counting() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(D, D)
        self.register_buffer("n", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        return x + self.proj(x).tanh() * self.n


@torch.no_grad()
def test_buffers_that_the_model_writes_are_written_back() -> None:
    model = seeded(Counting)
    reference = copy.deepcopy(model).to(DEVICE)
    compiled = offload(model)
    for k in range(2 * SETTLED):
        if k == SETTLED:
            use_budget(model, "half")
        late_compute(model)
        x = given(k, dtype=torch.float32)
        torch.testing.assert_close(compiled(x), reference(x), rtol=1e-2, atol=1e-2)
        assert [int(block.n) for block in model.blocks] == [k + 1] * 5
    assert_streams(model)


@torch.library.custom_op("fxoffload_gpu_graph_tests::touchy", mutates_args=())
def _touchy(x: torch.Tensor) -> torch.Tensor:
    if "raise" in _moods:
        raise ValueError("now")
    if "sync" in _moods:
        x[0, 0].item()
    return x.clone()


@_touchy.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


_moods: set[str] = set()


class Touchy(Toy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for k, block in enumerate(self.blocks):
            x = block(x)
            if k == 2:
                x = _touchy(x)
        return self.out(x)


def touchy() -> nn.Module:
    return seeded(lambda: Touchy(6, D).bfloat16())


@torch.no_grad()
def test_exceptions_between_replays_and_in_captures() -> None:
    model = touchy()
    expected = resident(model, 3)
    compiled = offload(model)
    settle(compiled, given(0))
    for label in ("quarter", "half"):
        use_budget(model, label)
        for calls in (1, 0, 3):
            for k in range(calls):
                assert torch.equal(compiled(given(k)), expected[k])
            _moods.add("raise")
            late_compute(model)
            try:
                # A replay calls nothing that could raise.
                if calls < 3:
                    with pytest.raises(ValueError, match="now"):
                        compiled(given(0))
            finally:
                _moods.clear()
        settle(compiled, given(0))
        for k, wanted in enumerate(expected):
            late_copies(model)
            assert torch.equal(compiled(given(k)), wanted), (label, k)
        assert_streams(model)
    torch.randn(3, device=DEVICE)


@torch.no_grad()
def test_a_host_synchronisation_in_a_block() -> None:
    """Case 25; and neither other captures, nor random numbers, nor the allocator mind that one has failed."""
    well, model = toy(), touchy()
    expected, wanted = resident(well, 2), resident(model, 2)
    run_well = offload(well)
    settle(run_well, given(0))
    use_budget(well, "half")
    settle(run_well, given(0))
    _moods.add("sync")
    try:
        compiled = offload(model, cuda_graph=True)
        compiled(given(0))
        with pytest.warns(OffloadWarning) as caught:
            compiled(given(0))
        (only,) = [str(w.message) for w in caught if issubclass(w.category, OffloadWarning)]
        assert only.startswith("graph: Touchy: not captured: segment blocks.2 cannot be captured (")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            settle(compiled, given(0))
            use_budget(model, "half")
            for k in range(2):
                assert torch.equal(compiled(given(k)), wanted[k])
        assert_streams(model)
        assert fxoffload.stats(model).replays == 0
        torch.manual_seed(3)
        first = torch.randn(5, device=DEVICE)
        torch.manual_seed(3)
        assert torch.equal(torch.randn(5, device=DEVICE), first)
        big = torch.empty(64 << 20, dtype=torch.uint8, device=DEVICE)
        reserved = torch.cuda.memory_reserved(DEVICE)
        del big
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(DEVICE) <= reserved - (64 << 20)
        for k in range(2):
            assert torch.equal(run_well(given(k)), expected[k])
        assert_streams(well)
        use_budget(well, "quarter")
        settle(run_well, given(0))
        replayed = assert_replayed(well, 2)
        for k in range(2):
            assert torch.equal(run_well(given(k)), expected[k])
        replayed()
        torch._dynamo.reset()
        strict = touchy()
        run = offload(strict)
        run(given(0))
        for _ in range(2):
            with pytest.raises(OffloadError, match=r"^graph: Touchy: not captured: segment blocks\.2 cannot be captured \("):
                run(given(0))
    finally:
        _moods.clear()


@torch.no_grad()
def test_slots_stay_where_they_are_and_nothing_is_allocated() -> None:
    model = toy(9)
    compiled = offload(model)
    settle(compiled, given(0))
    use_budget(model, "half")
    x = given(1)
    settle(compiled, x)

    def state() -> tuple[int, ...]:
        counts = torch.cuda.memory_stats(DEVICE)
        return counts["num_device_alloc"], counts["num_device_free"], counts["num_alloc_retries"]

    before, allocated = state(), torch.cuda.memory_allocated(DEVICE)
    for _ in range(100):
        compiled(x)
    torch.cuda.synchronize()
    assert state() == before
    assert torch.cuda.memory_allocated(DEVICE) == allocated
    assert_streams(model)


@pytest.mark.parametrize("mebibytes", [192, 256, 512])
@torch.no_grad()
def test_the_peak_stays_under_the_budget(mebibytes: int) -> None:
    budget = mebibytes << 20
    d = 1024
    model = seeded(lambda: Toy(36, d).bfloat16())
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    compiled = offload(model, memory_budget=budget)
    inputs = [given(k, d=d, n=512) for k in range(2)]
    for _ in range(SETTLED):
        for x in inputs:
            compiled(x)
    torch.cuda.synchronize()
    plan, peak = fxoffload.get_plan(model), torch.cuda.max_memory_reserved(DEVICE) - before
    assert plan.peak_nbytes <= budget
    assert peak <= budget, f"{peak >> 20} MiB of {mebibytes}"
    assert capturer_of(model).nbytes > 0
    assert fxoffload.stats(model).replays > SETTLED


@torch.no_grad()
def test_memory_is_back_when_the_model_is_gone() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved(DEVICE)
    for _ in range(2):
        model = toy(6, 512)
        compiled = offload(model)
        settle(compiled, given(0, d=512))
        use_budget(model, "half")
        settle(compiled, given(0, d=512))
        del model, compiled
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(DEVICE) <= before + (4 << 20)


@torch.no_grad()
def test_poison_shows_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The judge sees it first; without the judge, the results show it."""
    model = toy()
    expected = resident(model, 1)
    compiled = offload(model)
    settle(compiled, given(0))
    monkeypatch.setattr(CaptureTransfer, "wait", lambda self, slot: None)
    use_budget(model, "smallest")
    compiled(given(0))
    with pytest.raises(fxoffload.PlanError, match="does not wait for its copy"):
        compiled(given(0))
    monkeypatch.setattr("fxoffload.graph.check_capture", lambda plan, recording: None)
    wrong = False
    for _ in range(4):
        late_copies(model)
        wrong |= not torch.equal(compiled(given(0)), expected[0])
    assert wrong


def test_private_names_of_torch_are_there() -> None:
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool", "_cuda_clearCublasWorkspaces"):
        assert callable(getattr(torch._C, name))


SANITIZED = """
import torch, fxoffload
from tests.gpu.helpers import given, settle, toy, use_budget
from tests.gpu.test_graph import offload
with torch.no_grad():
    model = toy(5)
    compiled = offload(model)
    settle(compiled, given(0))
    use_budget(model, "half")
    for k in range(4):
        compiled(given(k))
    torch.cuda.synchronize()
    assert fxoffload.stats(model).replays > 3
print("replayed")
"""


@pytest.mark.slow
@pytest.mark.skipif("FXOFFLOAD_SANITIZER" not in os.environ, reason="FXOFFLOAD_SANITIZER names the compute-sanitizer to run")
def test_the_memory_checker_finds_nothing() -> None:
    root = Path(__file__).parents[2]
    checker = [os.environ["FXOFFLOAD_SANITIZER"], "--tool", "memcheck", "--error-exitcode", "9"]
    environment = {**os.environ, "FXOFFLOAD_POISON": "1"}
    ran = subprocess.run(
        [*checker, sys.executable, "-c", SANITIZED], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-2000:]
    assert "replayed" in ran.stdout
    assert "ERROR SUMMARY: 0 errors" in ran.stdout + ran.stderr
