"""What the first forwards on an accelerator show, with an allocator that the test plays."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from fxoffload.warmup import FORWARDS, MORE_SLACK_NBYTES, SHARED_SLACK_NBYTES, SLACK_NBYTES, WATCHED, Warmup

MIB = 1 << 20


@dataclass
class Allocator:
    allocated: int = 0
    reserved: int = 0
    settled: int = 0
    arenas: int = 0


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> Allocator:
    state = Allocator()

    def settle() -> None:
        state.settled += 1
        state.reserved = state.allocated

    monkeypatch.setattr("fxoffload.warmup.nbytes_of_arenas", lambda device: state.arenas)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda device: state.allocated)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda device: state.reserved)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.accelerator, "empty_cache", settle)
    return state


def started(allocator: Allocator, **options: bool) -> Warmup:
    warmup = Warmup(torch.device("cuda", 0), **{"known": False, "profile": False, "shares": False, **options})
    # 70 MiB of others, 1 MiB of inputs; the arena comes later.
    allocator.allocated, allocator.reserved = 71 * MIB, 100 * MIB
    warmup.begin([torch.zeros(MIB, dtype=torch.uint8), 3, None])
    return warmup


def test_activations_are_what_is_held_beside_the_arena_and_the_tensors_of_others(allocator: Allocator) -> None:
    warmup = started(allocator)
    allocator.arenas = 200 * MIB
    for k in range(FORWARDS):
        assert not warmup.done
        allocator.reserved = (70 + 200 + 700) * MIB
        assert warmup.after_forward() is (k == FORWARDS - 1)
    assert warmup.done
    assert allocator.settled == 2
    assert warmup.activations(500 * MIB) == 700 * MIB + MORE_SLACK_NBYTES + SLACK_NBYTES


def test_arenas_of_other_models_may_come_and_go(allocator: Allocator) -> None:
    warmup = Warmup(torch.device("cuda", 0), known=False, profile=False, shares=False)
    # Another model under the same budget holds 500 MiB while this one begins, and has given them up when it is over.
    allocator.arenas, allocator.allocated = 500 * MIB, 510 * MIB
    warmup.begin([])
    allocator.arenas = 200 * MIB
    for _ in range(FORWARDS):
        allocator.reserved = (10 + 200 + 300) * MIB
        warmup.after_forward()
    assert warmup.activations(0) == 300 * MIB + 300 * MIB // 16 + SLACK_NBYTES


def test_models_that_share_a_budget_get_more_slack(allocator: Allocator) -> None:
    warmup = started(allocator, shares=True)
    for _ in range(FORWARDS):
        allocator.reserved = (70 + 640) * MIB
        warmup.after_forward()
    assert warmup.activations(0) == 640 * MIB + MORE_SLACK_NBYTES + SLACK_NBYTES + SHARED_SLACK_NBYTES


def test_of_large_activations_the_slack_is_a_part(allocator: Allocator) -> None:
    warmup = started(allocator)
    for _ in range(FORWARDS):
        allocator.reserved = (70 + 6400) * MIB
        warmup.after_forward()
    assert warmup.activations(0) == (6400 + 100) * MIB + SLACK_NBYTES


def test_of_small_models_the_estimate_counts(allocator: Allocator) -> None:
    warmup = started(allocator)
    for _ in range(FORWARDS):
        allocator.reserved = 70 * MIB
        warmup.after_forward()
    assert warmup.activations(60 * MIB) == 60 * MIB
    assert warmup.activations(2 * MIB) == SLACK_NBYTES


def test_the_next_forwards_are_watched(allocator: Allocator) -> None:
    warmup = started(allocator)
    for _ in range(FORWARDS):
        warmup.after_forward()
    allocator.reserved = (70 + 300) * MIB
    assert warmup.excess(310 * MIB) == 0
    assert warmup.excess(290 * MIB) == 10 * MIB
    for _ in range(WATCHED - 2):
        warmup.excess(290 * MIB)
    assert warmup.excess(290 * MIB) == 0
    warmup.watch()
    assert warmup.excess(290 * MIB) == 10 * MIB


def test_a_program_that_was_measured_needs_no_warm_up(allocator: Allocator) -> None:
    warmup = started(allocator, known=True)
    assert warmup.done
    assert allocator.settled == 0
    assert warmup.activations(5) == 5
    assert warmup.excess(0) == 0


def test_the_cpu_measures_only_to_profile() -> None:
    assert Warmup(torch.device("cpu"), known=False, profile=False, shares=False).done
    timed = Warmup(torch.device("cpu"), known=False, profile=True, shares=False)
    assert not timed.done
    assert timed.timer is not None
    assert timed.after_forward()
    assert timed.activations(7) == 7
