"""On a GPU: copies and compute that are late, slots that stay where they are, and memory that stays within the budget.

Models are tiny, so that a missing wait shows only because a stream was held up: `torch.cuda._sleep` on the copy stream makes
copies late, on the current stream compute. Results are compared bit for bit with the same program fully resident.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.transfer import Slot, StreamTransfer
from tests import checks
from tests.checks import assert_state, assert_streams, budgets, snapshot
from tests.models import Toy, seeded

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.filterwarnings("ignore:Synchronization debug mode"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores"),
    pytest.mark.filterwarnings("ignore:Not enough SMs"),
]
DEVICE = torch.device("cuda", 0)
LATE = 20_000_000
"""Clock cycles, about ten milliseconds."""
D = 64
SETTLED = 12
"""Calls after which the warm-up is over and no forward is watched any more."""


@pytest.fixture(autouse=True)
def poisoned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Evicted bytes read as NaN, and one test leaves no device memory to the next."""
    from fxoffload.calibrate import machine_of

    machine_of(DEVICE)
    monkeypatch.setenv("FXOFFLOAD_POISON", "1")
    yield
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def offload(model: nn.Module, **options: Any) -> Any:
    return checks.offload(model, **{"onload_device": "cuda", **options})


def given(k: int, *, d: int = D, dtype: torch.dtype = torch.bfloat16, n: int = 8) -> torch.Tensor:
    """The `k`-th input, on the device."""
    return torch.randn(n, d, generator=torch.Generator().manual_seed(k)).to(DEVICE, dtype)


def toy(n: int = 6, d: int = D) -> Toy:
    model = seeded(lambda: Toy(n, d).bfloat16())
    assert isinstance(model, Toy)
    return model


def settle(compiled: Callable[..., Any], *args: Any) -> None:
    for _ in range(SETTLED):
        compiled(*args)
    torch.cuda.synchronize()


def results(compiled: Callable[..., Any], calls: int) -> list[torch.Tensor]:
    """Results of the program when everything is resident."""
    settle(compiled, given(0))
    return [compiled(given(k)).clone() for k in range(calls)]


def transfer_of(model: Any) -> StreamTransfer:
    found = api.engine_of(model).transfer
    assert isinstance(found, StreamTransfer)
    return found


def late_copies(model: Any) -> None:
    with transfer_of(model)._copy_stream:
        torch.cuda._sleep(LATE)


def late_compute(model: Any) -> None:
    torch.cuda._sleep(LATE)


def slots(model: Any) -> dict[str, Slot]:
    staged = api.bindings_of(model)[-1].staged
    assert staged is not None
    return staged._slots


def use_budget(model: Any, label: str) -> None:
    fxoffload.set_memory_budget(model, budgets(model)[label])


@pytest.mark.parametrize("late", [late_copies, late_compute], ids=["late copies", "late compute"])
@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@torch.no_grad()
def test_streamed_is_resident_bit_for_bit(compiler: str, late: Callable[[Any], None]) -> None:
    model = toy()
    reference = copy.deepcopy(model).to(DEVICE)
    compiled = offload(model, segment_compiler=compiler)
    expected = results(compiled, 4)
    assert fxoffload.stats(model).nbytes_copied == 0
    for k, wanted in enumerate(expected):
        torch.testing.assert_close(wanted, reference(given(k)), rtol=2e-2, atol=2e-2)
    for label in ("smallest", "quarter", "half", "almost all"):
        use_budget(model, label)
        for k, wanted in enumerate(expected):
            late(model)
            assert torch.equal(compiled(given(k)), wanted), (label, k)
        assert_streams(model)


@torch.no_grad()
def test_ten_calls_without_host_synchronisation() -> None:
    """Case 2: late compute, ten calls, outputs kept and compared at the end."""
    model = toy()
    compiled = offload(model)
    expected = results(compiled, 10)
    use_budget(model, "quarter")
    settle(compiled, given(0))
    inputs = [given(k) for k in range(10)]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.cuda._sleep(100 * LATE)
        outputs = [compiled(x) for x in inputs]
        done = torch.cuda.Event()
        done.record()
        assert not done.query(), "the host waited for the device"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True))
    assert_streams(model)


@torch.no_grad()
def test_every_copy_is_late_at_the_first_call_and_at_the_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 3."""
    model = toy()
    compiled = offload(model)
    expected = results(compiled, 5)
    prefetch = StreamTransfer.prefetch

    def late(self: StreamTransfer, slot: Slot, after: Slot | None = None) -> None:
        with self._copy_stream:
            torch.cuda._sleep(LATE // 4)
        prefetch(self, slot, after)

    monkeypatch.setattr(StreamTransfer, "prefetch", late)
    for label in ("smallest", "half"):
        use_budget(model, label)
        for k, wanted in enumerate(expected):
            assert torch.equal(compiled(given(k)), wanted), (label, k)
        assert any(load.wraps for load in fxoffload.get_plan(model).loads)
        assert_streams(model)


@torch.no_grad()
def test_inputs_and_outputs_dropped_right_after_launch() -> None:
    """Case 4: the copy into a slot waits for its last reader, whatever the host has let go of."""
    model = toy()
    compiled = offload(model)
    resident = results(compiled, 10)
    expected = torch.zeros_like(resident[0], dtype=torch.float32)
    for one in resident:
        expected.add_(one)
    host = [given(k).cpu().pin_memory() for k in range(10)]
    for label in ("smallest", "quarter"):
        use_budget(model, label)
        total = torch.zeros_like(expected)
        for x in host:
            late_compute(model)
            total.add_(compiled(x.to(DEVICE, non_blocking=True)))
        assert torch.equal(total, expected), label
        assert_streams(model)


class Stored(nn.Module):
    """Blocks store fp8 and a scale, and compute in bf16."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Stored() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Stored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter((torch.randn(D, D) / 4).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(D, 1).bfloat16() + 0.5, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ (self.weight.to(torch.bfloat16) * self.scale).t()).tanh()


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@torch.no_grad()
def test_weights_stored_in_fp8_are_cast_behind_their_copy(compiler: str) -> None:
    """Case 5."""
    torch.manual_seed(0)
    model = Stored()
    reference = copy.deepcopy(model).to(DEVICE)
    compiled = offload(model, segment_compiler=compiler)
    expected = results(compiled, 4)
    torch.testing.assert_close(expected[1], reference(given(1)), rtol=5e-2, atol=5e-2)
    use_budget(model, "quarter")
    for late in (late_copies, late_compute):
        for k, wanted in enumerate(expected):
            late(model)
            assert torch.equal(compiled(given(k)), wanted)
    assert_streams(model)


@pytest.mark.parametrize("ordered", [True, False], ids=["the caller orders the streams", "nobody does"])
@torch.no_grad()
def test_calls_from_a_side_stream_and_from_the_default_one(ordered: bool) -> None:
    model = toy()
    compiled = offload(model)
    expected = results(compiled, 8)
    use_budget(model, "quarter")
    inputs = [given(k) for k in range(8)]
    torch.cuda.synchronize()
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    outputs: list[torch.Tensor] = []
    for k, x in enumerate(inputs):
        here, other = (side, main) if k % 2 else (main, side)
        if ordered:
            here.wait_stream(other)
        with torch.cuda.stream(here):
            late_compute(model)
            outputs.append(compiled(x))
    torch.cuda.synchronize()
    assert all(torch.equal(got, wanted) for got, wanted in zip(outputs, expected, strict=True))
    assert_streams(model)


@torch.no_grad()
def test_slots_stay_where_they_are_and_nothing_is_allocated() -> None:
    model = toy(9)
    compiled = offload(model)
    settle(compiled, given(0))
    use_budget(model, "half")
    x = given(1)
    settle(compiled, x)
    assert_streams(model)

    def state() -> tuple[Any, ...]:
        counts = torch.cuda.memory_stats(DEVICE)
        addresses = {name: (s.device.data_ptr(), s.host.data_ptr()) for name, s in slots(model).items()}
        return addresses, counts["num_device_alloc"], counts["num_device_free"], counts["num_alloc_retries"]

    before = state()
    allocated = torch.cuda.memory_allocated(DEVICE)
    for _ in range(100):
        compiled(x)
    torch.cuda.synchronize()
    assert state() == before
    assert torch.cuda.memory_allocated(DEVICE) == allocated


@pytest.mark.parametrize("mebibytes", [160, 224, 288, 512])
@torch.no_grad()
def test_the_peak_stays_under_the_budget(mebibytes: int) -> None:
    budget = mebibytes << 20
    d = 1024
    model = seeded(lambda: Toy(36, d).bfloat16())
    nbytes = sum(p.nbytes for p in model.parameters())
    assert 280 << 20 < nbytes < 320 << 20
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
    if budget < nbytes:
        assert_streams(model)
        assert peak > budget // 2, "the budget is used"
    else:
        assert plan.streamed_nbytes == 0


class Rows(nn.Module):
    """100 weights of 1.1 x a power of two bytes."""

    def __init__(self, n: int = 100, d: int = 512, rows: int = 1126) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(d, rows, bias=False, dtype=torch.bfloat16) for _ in range(n))
        self.d = d

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)[..., : self.d] * 0.1
        return x


@torch.no_grad()
def test_pinned_bytes_are_hardly_more_than_the_weights() -> None:
    """Case 61."""
    model = seeded(Rows)
    nbytes = sum(p.nbytes for p in model.parameters())
    assert 1.05 * 2**20 * 100 < nbytes < 1.15 * 2**20 * 100
    offload(model)(given(0, d=512))
    stats = fxoffload.stats(model)
    assert nbytes <= stats.nbytes_pinned <= 1.05 * nbytes
    assert stats.nbytes_pinned == stats.nbytes_host
    assert all(p.is_pinned() for p in model.parameters())


@torch.no_grad()
def test_weights_that_start_on_the_device_are_taken_over() -> None:
    model = toy(6, 512)
    before = snapshot(model)
    model.to(DEVICE)
    wanted = model(given(1, d=512)).clone()
    nbytes = sum(p.nbytes for p in model.parameters())
    compiled = offload(model)
    settle(compiled, given(0, d=512))
    assert_state(model, before)
    expected = compiled(given(1, d=512)).clone()
    torch.testing.assert_close(expected, wanted, rtol=2e-2, atol=2e-2)
    allocated = torch.cuda.memory_allocated(DEVICE)
    use_budget(model, "quarter")
    for _ in range(3):
        late_copies(model)
        assert torch.equal(compiled(given(1, d=512)), expected)
    assert_streams(model)
    assert torch.cuda.memory_allocated(DEVICE) < allocated - nbytes // 4


class Counting(nn.Module):
    """Every block counts its calls and remembers its last input."""

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
        self.register_buffer("last", torch.zeros(8, D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.n += 1
        x = x + self.proj(x).tanh() * self.n + self.last * 0.1
        self.last.copy_(x)
        return x


@torch.no_grad()
def test_buffers_that_the_model_writes_are_written_back() -> None:
    model = seeded(Counting)
    reference = copy.deepcopy(model).to(DEVICE)
    compiled = offload(model)
    for k in range(SETTLED + 6):
        if k == SETTLED:
            use_budget(model, "half")
        late_compute(model)
        got = compiled(given(k, dtype=torch.float32))
        torch.testing.assert_close(got, reference(given(k, dtype=torch.float32)), rtol=1e-2, atol=1e-2)
        assert [int(block.n) for block in model.blocks] == [k + 1] * 5
        assert torch.equal(model.blocks[4].last, got.cpu())
    assert_streams(model)


@torch.library.custom_op("fxoffload_gpu_tests::perhaps", mutates_args=())
def _perhaps(x: torch.Tensor, k: int) -> torch.Tensor:
    if k in _failing:
        raise ValueError("now")
    return x.clone()


@_perhaps.register_fake
def _(x: torch.Tensor, k: int) -> torch.Tensor:
    return torch.empty_like(x)


_failing: set[int] = set()


class Failing(Toy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for k, block in enumerate(self.blocks):
            x = block(_perhaps(x, k))
        return self.out(x)


@torch.no_grad()
def test_the_call_after_an_exception_is_right() -> None:
    model = seeded(lambda: Failing(6, D).bfloat16())
    compiled = offload(model)
    expected = results(compiled, 3)
    use_budget(model, "quarter")
    settle(compiled, given(0))
    allocated = torch.cuda.memory_allocated(DEVICE)
    for k in range(6):
        _failing.add(k)
        late_compute(model)
        try:
            with pytest.raises(ValueError, match="now"):
                compiled(given(0))
        finally:
            _failing.clear()
        for again, wanted in enumerate(expected):
            late_copies(model)
            assert torch.equal(compiled(given(again)), wanted), (k, again)
        assert_streams(model)
    assert torch.cuda.memory_allocated(DEVICE) == allocated


@torch.no_grad()
def test_poison_shows_a_missing_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy()
    compiled = offload(model)
    expected = results(compiled, 1)
    monkeypatch.setattr(StreamTransfer, "wait", lambda self, slot: None)
    use_budget(model, "smallest")
    wrong = False
    for _ in range(4):
        late_copies(model)
        wrong |= not torch.equal(compiled(given(0)), expected[0])
    assert wrong
