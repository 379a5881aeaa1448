"""On a GPU: copies and compute that are late, whatever the host does meanwhile, change no result.

Models are tiny, so that a missing wait shows only because a stream was held up: `torch.cuda._sleep` on the copy stream makes
copies late, on the current stream compute. Results are compared bit for bit with the same program fully resident.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.transfer import Slot, StreamTransfer
from tests.checks import assert_streams
from tests.gpu.helpers import (
    DEVICE,
    LATE,
    ON_GPU,
    SETTLED,
    D,
    given,
    late_compute,
    late_copies,
    offload,
    results,
    settle,
    toy,
    use_budget,
)
from tests.models import Counting, Failing, failing, seeded

pytestmark = ON_GPU


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


@pytest.mark.parametrize("cuda_graph", [False, "strict"])
@torch.no_grad()
def test_products_that_inductor_pads_are_read_by_the_next_segment(cuda_graph: Any) -> None:
    """1030 columns in bfloat16 are no multiple of 16 bytes: results of a product are slices of one that is wider."""
    d = 1030
    model = toy(4, d)
    reference = copy.deepcopy(model).to(DEVICE)
    compiled = offload(
        model, segment_compiler="inductor", inductor={"force_shape_pad": True}, max_bucket_bytes="4MiB", cuda_graph=cuda_graph
    )
    settle(compiled, given(0, d=d, n=512))
    expected = [compiled(given(k, d=d, n=512)).clone() for k in range(3)]
    for k, wanted in enumerate(expected):
        torch.testing.assert_close(wanted, reference(given(k, d=d, n=512)), rtol=5e-2, atol=5e-2)
    use_budget(model, "quarter")
    for _ in range(2):
        for k, wanted in enumerate(expected):
            late_copies(model)
            assert torch.equal(compiled(given(k, d=d, n=512)), wanted)
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
def test_buffers_that_the_model_writes_are_written_back() -> None:
    model = seeded(lambda: Counting(d=D, rows=8))
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


@torch.no_grad()
def test_the_call_after_an_exception_is_right() -> None:
    model = seeded(lambda: Failing(6, D).bfloat16())
    compiled = offload(model)
    expected = results(compiled, 3)
    use_budget(model, "quarter")
    settle(compiled, given(0))
    allocated = torch.cuda.memory_allocated(DEVICE)
    for k in range(6):
        failing[k] = ValueError("now")
        late_compute(model)
        try:
            with pytest.raises(ValueError, match="now"):
                compiled(given(0))
        finally:
            failing.clear()
        for again, wanted in enumerate(expected):
            late_copies(model)
            assert torch.equal(compiled(given(again)), wanted), (k, again)
        assert_streams(model)
    gc.collect()
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
