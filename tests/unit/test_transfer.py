"""The CPU as a device: copies on a thread, in order, late when told so, with evicted bytes poisoned."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from fxoffload.arena import POISON
from fxoffload.transfer import Slot, ThreadTransfer

NBYTES = 64


@pytest.fixture
def transfer() -> Iterator[ThreadTransfer]:
    found = ThreadTransfer(overlap=True)
    yield found
    found.close()


def slot(transfer: ThreadTransfer, value: int, device: torch.Tensor | None = None) -> Slot:
    host = torch.full((NBYTES,), value, dtype=torch.uint8)
    return transfer.slot(host, torch.zeros(NBYTES, dtype=torch.uint8) if device is None else device)


def copies() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "fxoffload-copies"]


def test_a_prefetch_and_a_wait_bring_the_bytes(transfer: ThreadTransfer) -> None:
    found = slot(transfer, 7)
    transfer.begin()
    transfer.prefetch(found)
    transfer.wait(found)
    assert found.device.eq(7).all()
    counters = transfer.counters
    assert (counters.nbytes_copied, counters.prefetches) == (NBYTES, 1)
    counters.reset()
    assert (counters.nbytes_copied, counters.prefetches, counters.stalls) == (0, 0, 0)


def test_the_host_bytes_are_read_when_the_copy_runs(transfer: ThreadTransfer) -> None:
    found = slot(transfer, 1)
    for value in (2, 3):
        found.host.fill_(value)
        transfer.prefetch(found)
        transfer.wait(found)
        assert found.device.eq(value).all()


def test_copies_run_in_the_order_of_their_issue(transfer: ThreadTransfer) -> None:
    place = torch.zeros(NBYTES, dtype=torch.uint8)
    slots = [slot(transfer, value, place) for value in range(1, 6)]
    transfer.delay_s = 0.002
    for found in slots:
        transfer.prefetch(found)
    for value, found in enumerate(slots, start=1):
        transfer.wait(found)
        assert int(place[0]) >= value
        assert all(earlier.ready.is_set() for earlier in slots[: value - 1])
    assert place.eq(5).all()


def test_a_delay_makes_copies_late_and_a_wait_waits_for_it(transfer: ThreadTransfer) -> None:
    transfer.delay_s = 0.5
    found = slot(transfer, 7)
    start = time.perf_counter()
    transfer.prefetch(found)
    assert not found.ready.is_set()
    assert found.device.eq(0).all()
    transfer.wait(found)
    assert time.perf_counter() - start >= 0.5
    assert found.device.eq(7).all()
    assert transfer.counters.stalls == 1


def test_a_wait_for_what_is_there_is_no_stall(transfer: ThreadTransfer) -> None:
    found = slot(transfer, 7)
    transfer.prefetch(found)
    transfer.drain()
    for _ in range(2):
        transfer.wait(found)
    assert transfer.counters.stalls == 0


def test_a_second_load_of_a_slot_is_waited_for_anew(transfer: ThreadTransfer) -> None:
    found = slot(transfer, 7)
    transfer.prefetch(found)
    transfer.wait(found)
    transfer.evict(found)
    transfer.delay_s = 0.02
    transfer.prefetch(found)
    transfer.wait(found)
    assert found.device.eq(7).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_evicted_bytes_read_as_nan(transfer: ThreadTransfer, dtype: torch.dtype) -> None:
    found = slot(transfer, 0)
    transfer.prefetch(found)
    transfer.wait(found)
    transfer.evict(found)
    assert found.device.eq(POISON).all()
    assert found.device.view(dtype).isnan().all()
    assert found.host.eq(0).all()


def test_without_overlap_a_copy_is_done_when_it_is_issued() -> None:
    before = len(copies())
    transfer = ThreadTransfer(overlap=False)
    found = slot(transfer, 7)
    transfer.prefetch(found)
    assert found.device.eq(7).all()
    transfer.wait(found)
    transfer.drain()
    assert len(copies()) == before
    assert transfer.counters.stalls == 0
    transfer.close()


def test_a_drain_returns_when_no_copy_is_under_way(transfer: ThreadTransfer) -> None:
    transfer.drain()
    transfer.delay_s = 0.01
    slots = [slot(transfer, value) for value in (1, 2, 3)]
    for found in slots:
        transfer.prefetch(found)
    transfer.drain()
    assert all(found.ready.is_set() for found in slots)
    assert [int(found.device[0]) for found in slots] == [1, 2, 3]


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_copy_raises_is_raised_by_its_wait_and_once(overlap: bool) -> None:
    transfer = ThreadTransfer(overlap=overlap)
    bad = slot(transfer, 7, torch.zeros(3, dtype=torch.uint8))
    good = slot(transfer, 8)
    transfer.prefetch(bad)
    with pytest.raises(RuntimeError, match="size"):
        transfer.wait(bad)
    transfer.prefetch(good)
    transfer.wait(good)
    assert good.device.eq(8).all()
    transfer.close()


def test_an_error_in_the_thread_ends_no_copy_behind_it(transfer: ThreadTransfer) -> None:
    bad = slot(transfer, 7, torch.zeros(3, dtype=torch.uint8))
    good = slot(transfer, 8)
    transfer.prefetch(bad)
    transfer.prefetch(good)
    transfer.drain()
    assert good.device.eq(8).all()
    with pytest.raises(RuntimeError, match="size"):
        transfer.wait(bad)
    transfer.wait(good)


def test_close_ends_the_thread_and_may_be_repeated() -> None:
    before = len(copies())
    transfer = ThreadTransfer(overlap=True)
    assert len(copies()) == before, "no thread before the first copy"
    found = slot(transfer, 7)
    transfer.delay_s = 0.01
    transfer.prefetch(found)
    assert len(copies()) == before + 1
    transfer.close()
    assert found.device.eq(7).all(), "what was issued is finished first"
    assert len(copies()) == before
    transfer.close()
    transfer.prefetch(found)
    transfer.wait(found)
    assert len(copies()) == before + 1
    transfer.close()


def test_the_thread_may_close_itself(transfer: ThreadTransfer) -> None:
    def close(_: Slot) -> None:
        transfer.close()

    transfer.copy = close
    found = slot(transfer, 7)
    transfer.prefetch(found)
    transfer.wait(found)
