"""The engine of a model: how long it lives, what it counts, and what the weights are afterwards."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import eval_frame

import fxoffload
from fxoffload import ConfigError, OffloadError, api
from fxoffload import engine as engines
from tests.checks import assert_state, delay_copies, halve, offload, snapshot
from tests.models import rows, toy


def _copy_threads() -> int:
    return sum(t.name == "fxoffload-copies" for t in threading.enumerate())


@torch.no_grad()
def test_all_goes_with_the_model() -> None:
    gc.collect()
    threads = _copy_threads()
    model = toy(4)
    compiled = offload(model)
    compiled(rows(0))
    halve(model)
    compiled(rows(1))
    engine = api.engine_of(model)
    watched = [weakref.ref(x) for x in (engine, engine.arena, engine.store, engine.arena.pieces[0].memory, model)]
    watched += [weakref.ref(x) for x in api.bindings_of(model)]
    watched += [weakref.ref(bucket.flat) for bucket in engine.store.buckets.values()]
    del engine, model, compiled
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)
    assert _copy_threads() <= threads


@torch.no_grad()
def test_all_goes_where_the_garbage_collector_runs_in_a_frame_that_dynamo_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    failed: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    model = toy(4)
    compiled = offload(model)
    compiled(rows(0))
    store, model.itself = api.engine_of(model).store, model
    del model, compiled
    watching = torch._dynamo.optimize("eager", nopython=True)
    before = eval_frame.set_eval_frame(watching.callback)
    try:
        gc.collect()
    finally:
        eval_frame.set_eval_frame(before)
    assert not failed
    assert not store.buckets


@torch.no_grad()
def test_all_goes_with_a_model_compiled_in_place() -> None:
    model = toy(4)
    model.compile(backend=fxoffload.layerwise, options={"onload_device": "cpu", "segment_compiler": "eager"})
    model(rows(0))
    engine = weakref.ref(api.engine_of(model))
    del model
    gc.collect()
    assert engine() is None


@torch.no_grad()
def test_a_weight_that_is_kept_outlives_the_model() -> None:
    model = toy(4)
    value = model.blocks[1].up.weight.clone()
    offload(model)(rows(0))
    kept = model.blocks[1].up.weight
    state = model.state_dict()
    before = snapshot(model)
    del model
    gc.collect()
    assert torch.equal(kept, value)
    kept.add_(1)
    assert torch.equal(state["blocks.1.up.weight"], value + 1)
    assert all(torch.equal(state[k], before[k]) for k in before if k != "blocks.1.up.weight")


@torch.no_grad()
def test_a_model_outlives_its_compiled_wrapper_and_may_be_compiled_again() -> None:
    model = toy(4)
    before = snapshot(model)
    offload(model)(rows(0))
    engine = api.engine_of(model)
    torch._dynamo.reset()
    gc.collect()
    compiled = offload(model, transfer_buckets=1)
    for k in range(3):
        torch.testing.assert_close(compiled(rows(k)), model(rows(k)), rtol=1e-4, atol=1e-5)
    assert api.engine_of(model) is engine
    assert_state(model, before)


@torch.no_grad()
def test_counters() -> None:
    model = toy(4)
    compiled = offload(model)
    compiled(rows(0))
    total = sum(b.nbytes for b in api.bindings_of(model)[0].costs.buckets)
    stats = fxoffload.stats(model)
    assert (stats.nbytes_copied, stats.nbytes_resident, stats.nbytes_arena, stats.nbytes_host) == (total,) * 4
    assert (stats.forwards, stats.restores, stats.nbytes_pinned) == (1, 1, 0)
    compiled(rows(0))
    stats = fxoffload.stats(model)
    assert (stats.nbytes_copied, stats.prefetches, stats.stalls, stats.forwards, stats.restores) == (0, 0, 0, 2, 1)
    halve(model)
    for delay_s in (0, 0, 0.2):
        delay_copies(model, delay_s)
        compiled(rows(0))
    stats, plan = fxoffload.stats(model), fxoffload.get_plan(model)
    assert stats.nbytes_copied == plan.streamed_nbytes
    assert stats.nbytes_resident == plan.resident_nbytes
    assert stats.nbytes_arena == plan.arena_nbytes
    assert stats.prefetches == len(plan.loads)
    assert 0 < stats.stalls <= len(plan.loads)
    assert (stats.forwards, stats.restores) == (5, 2)


def test_a_model_that_has_not_run_has_no_engine() -> None:
    with pytest.raises(OffloadError, match=r"^api: Toy: its weights are not offloaded yet; compile it with torch.compile"):
        fxoffload.stats(toy(2))
    with pytest.raises(TypeError, match=r"^api: int: give a torch\.nn\.Module"):
        fxoffload.stats(3)


@torch.no_grad()
def test_fifty_models_one_after_another_leave_nothing() -> None:
    from fxoffload import engine

    gc.collect()
    before = len(engine._engine_of_weight)
    for _ in range(5):
        model = toy(3)
        offload(model)(rows(0))
        del model
        torch._dynamo.reset()
    gc.collect()
    assert len(engine._engine_of_weight) == before


@torch.no_grad()
def test_a_copy_that_fails_is_raised_by_the_call_and_the_next_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    model = toy(5)
    compiled = offload(model)
    expected = compiled(rows(0)).clone()
    halve(model)
    compiled(rows(0)), compiled(rows(0))
    transfer = api.engine_of(model).transfer
    load = fxoffload.get_plan(model).loads[2].name
    slot = api.bindings_of(model)[0].staged.of_load[load]
    host = slot.host
    slot.host = torch.empty(3, dtype=torch.uint8)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="size"):
            [compiled(rows(0)) for _ in range(2)]
    slot.host = host
    assert transfer._failed is None
    for _ in range(3):
        assert torch.equal(compiled(rows(0)), expected)


def test_one_is_offloaded_while_another_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both change the tables that find engines by weights."""
    removed, offloaded = toy(4), toy(4, seed=1)
    handle = fxoffload.layerwise_offload(removed, onload_device="cpu", memory_budget="1MiB")
    table = engines._engine_of_weight
    entries, begun, done = table.items, threading.Event(), threading.Event()

    def slowly() -> Iterator[tuple[torch.Tensor, object]]:
        for k, entry in enumerate(entries()):
            if k == 3:
                begun.set()
                done.wait(0.3)
            yield entry

    monkeypatch.setattr(table, "items", slowly)
    thread = threading.Thread(target=handle.remove)
    thread.start()
    assert begun.wait(60)
    fxoffload.layerwise_offload(offloaded, onload_device="cpu", memory_budget="1MiB").remove()
    done.set()
    thread.join(60)
    assert handle.is_removed
    assert engines.find_engine([*removed.parameters(), *offloaded.parameters()]) is None


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False])
def test_another_way_to_copy_is_refused(first: bool) -> None:
    model = toy(3)
    expected = offload(model, async_transfer=first)(rows(0))
    torch._dynamo.reset()
    with pytest.raises(ConfigError, match=f"async_transfer: {not first}, but the model runs with {first} .* give the same"):
        offload(model, async_transfer=not first)(rows(0))
    assert torch.equal(offload(model, async_transfer=first)(rows(0)), expected)
