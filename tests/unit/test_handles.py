"""The handle: what is effective, and the way back."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch

import fxoffload
from fxoffload import BudgetError, OffloadError, api
from fxoffload.handle import most_ahead, spans
from fxoffload.sizes import parse_size
from tests.checks import assert_state, snapshot
from tests.models import Toy, rows, seeded, toy
from tests.unit.handles import BLOCK, BUDGET, REST, assert_equal, offload, run

SMALL_BLOCK = 1536
"""Bytes of a block of `toy(n, 4)` as a bucket."""
GOLDEN = [
    (32, 16, 4, [(0, 4), (8, 12), (16, 20), (24, 28)]),
    (32, 16, 1, [(0, 16)]),
    (10, 5, 3, [(0, 2), (3, 5), (6, 7)]),
    (57, 32, 4, [(0, 8), (14, 22), (28, 36), (42, 50)]),
    (5, 4, 2, [(0, 4)]),
    (7, 7, 3, [(0, 7)]),
    (7, 9, 3, [(0, 7)]),
    (7, 2, 5, [(0, 1), (3, 4)]),
    (11, 10, 4, [(0, 10)]),
]

# -- what is effective -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "persistent", "bins", "kept"), GOLDEN)
def test_persistent_spans(n: int, persistent: int, bins: int, kept: list[tuple[int, int]]) -> None:
    model = toy(n, 4)
    handle = offload(model, memory_budget="1MiB", persistent_buckets=persistent, persistent_bins=bins)
    assert handle.persistent_spans == tuple(kept)
    with torch.no_grad():
        for k in range(2):
            model(rows(k, 4))
    assert handle.persistent_spans == tuple(kept)
    count = min(persistent, n)
    assert (handle.persistent_buckets, handle.persistent_bins) == (count, len(kept))
    assert handle.persistent_module_names == tuple(f"blocks.{i}" for a, b in kept for i in range(a, b))
    assert handle.stats().nbytes_copied == (n - count) * SMALL_BLOCK


def test_the_planner_keeps_what_fits() -> None:
    model = toy(8)
    handle = offload(model, memory_budget=REST + 6 * BLOCK)
    run(model)
    assert 0 < handle.persistent_buckets < 8
    assert handle.stats().nbytes_copied == (8 - handle.persistent_buckets) * BLOCK
    handle.set_memory_budget("1MiB")
    run(model)
    assert handle.persistent_spans == ((0, 8),)
    assert handle.stats().nbytes_copied == 0


def test_persistent_buckets_and_a_budget_that_cannot_hold_together() -> None:
    with pytest.raises(BudgetError, match=r"persistent_buckets=4.*; raise .* at least .*, or keep fewer persistent_buckets$"):
        offload(toy(8), persistent_buckets=4)


CAPS: list[tuple[dict[str, Any], int]] = [
    ({"transfer_buckets": 1}, 1),
    ({"transfer_buckets": 3}, 3),
    ({"prefetch_limit": True}, 8),
    ({"transfer_buckets": 12, "prefetch_limit": True}, 8),
]


@pytest.mark.parametrize(("settings", "most"), CAPS)
def test_caps_of_the_look_ahead(settings: dict[str, Any], most: int) -> None:
    model = toy(14)
    handle = offload(model, memory_budget="1MiB", persistent_buckets=0, **settings)
    assert_equal(run(model), run(toy(14)))
    assert handle.plan is not None
    assert 1 <= most_ahead(handle.plan) <= most
    assert handle.transfer_buckets == settings.get("transfer_buckets", most_ahead(handle.plan))
    assert handle.stats().nbytes_copied == 14 * BLOCK


def test_the_look_ahead_is_the_plans_where_the_planner_chooses_it() -> None:
    model = toy(14)
    handle = offload(model, memory_budget="1MiB", persistent_buckets=0)
    assert handle.transfer_buckets is None
    run(model)
    assert handle.transfer_buckets == most_ahead(handle.get_plan()) >= 1


@pytest.mark.parametrize("cap", [1, "5KiB", 2 * BLOCK, "15KiB"])
def test_a_cap_on_bytes_ahead_starves_nothing(cap: int | str) -> None:
    model = toy(6)
    handle = offload(model, memory_budget="1MiB", persistent_buckets=0, max_inflight_prefetch_bytes=cap)
    assert_equal(run(model), run(toy(6)))
    assert handle.max_inflight_prefetch_bytes == parse_size(cap, what="cap")
    assert handle.plan is not None
    assert most_ahead(handle.plan) <= max(handle.max_inflight_prefetch_bytes // BLOCK, 1)
    assert handle.stats().nbytes_copied == 6 * BLOCK


def test_without_asynchronous_copies() -> None:
    model = toy(6)
    handle = offload(model, async_transfer=False)
    assert_equal(run(model), run(toy(6)))
    assert (handle.async_transfer, handle.copy_streams) == (False, 0)
    assert not handle.get_plan().async_transfer
    assert handle.stats().nbytes_copied > 0


def test_another_budget_between_calls() -> None:
    model, wanted = toy(6), run(toy(6))
    handle = offload(model)
    for budget in ("1MiB", BUDGET + BLOCK, BUDGET - BLOCK):
        handle.set_memory_budget(budget)
        assert_equal(run(model), wanted)
        assert handle.stats().nbytes_arena <= handle.memory_budget_nbytes
    with pytest.raises(BudgetError, match="at least"):
        handle.set_memory_budget(REST)
    assert handle.memory_budget_nbytes == BUDGET - BLOCK
    assert_equal(run(model), wanted)


def test_results_go_to_the_output_device() -> None:
    model = toy(3)
    handle = offload(model, output_device="cpu")
    assert handle.output_device == torch.device("cpu")
    assert {result.device.type for result in run(model)} == {"cpu"}


class Result(NamedTuple):
    states: list[torch.Tensor]
    more: dict[str, torch.Tensor]


@pytest.mark.parametrize("output_device", [None, "cpu"])
def test_results_keep_their_types(output_device: str | None) -> None:
    class Typed(Toy):
        def forward(self, x: Result) -> Any:
            states = [super().forward(x.more["x"])]
            return Result(states, OrderedDict(x=states[0] + 1))

    model = seeded(lambda: Typed(3))
    offload(model, output_device=output_device)
    with torch.no_grad():
        result = model(Result([], OrderedDict(x=rows(0))))
    assert (type(result), type(result.states), type(result.more)) == (Result, list, OrderedDict)
    assert_equal(result.states, run(toy(3), 1))


def test_the_last_blocks_of_a_forward_bring_the_first_of_the_next() -> None:
    model = toy(6)
    handle = offload(model, persistent_buckets=0)
    run(model)
    first = min(handle.get_plan().loads, key=lambda load: load.wait_before)
    assert (first.bucket, first.wraps) == ("blocks.0", True)


def test_before_the_first_forward_there_is_no_plan() -> None:
    handle = offload(toy(3))
    with pytest.raises(OffloadError, match=r"^api: Toy: it has not run yet, and plans are made at the first call; call it once$"):
        handle.get_plan()


def test_how_a_handle_prints() -> None:
    model = toy(3)
    handle = offload(model)
    assert repr(handle) == "<LayerwiseOffloadHandle Toy: 3 modules, cpu to cpu, budget 17.50 KiB>"
    handle.remove()
    assert repr(handle) == "<LayerwiseOffloadHandle Toy: removed>"
    assert repr(offload(model, memory_budget="auto")).endswith("budget 'auto'>")


@torch.no_grad()
def test_explain_without_a_compiler() -> None:
    model = toy(5)
    handle = offload(model)
    with pytest.raises(OffloadError, match=r"^api: Toy: it has not run yet, .* the inputs of one call$"):
        handle.explain()
    assert handle.explain(rows(0)).plan.budget_nbytes == BUDGET
    run(model)
    explanation = handle.explain()
    assert explanation.plan is handle.plan
    assert explanation.head.startswith("Toy  27.50 KiB of weights  5 segments, 6 buckets\nmachine  cpu")
    assert "1 GiB more would save" in str(explanation)
    assert fxoffload.explain(handle, memory_budget="1MiB").plan.streamed_nbytes == 0
    assert handle.plan is explanation.plan
    with pytest.raises(OffloadError) as error:
        _ = explanation.facts
    assert str(error.value) == (
        "report: Toy: it runs without a compiler and was not traced; give fxoffload.explain the inputs of a call"
    )
    with pytest.raises(OffloadError, match=r"^api: Toy: no compiled graph of it has run, "):
        fxoffload.measure(model, lambda: None)


def test_spans_of_indices() -> None:
    assert spans([]) == ()
    assert spans([3, 0, 1, 5, 6]) == ((0, 2), (3, 4), (5, 7))


# -- the way back ------------------------------------------------------------------------------------------------------


def test_remove_gives_a_normal_model_back_with_all_updates() -> None:
    model, plain = toy(6), toy(6)
    kind, names = type(model), [*vars(model)]
    handle = offload(model)
    run(model)
    with torch.no_grad():
        for edited in (model, plain):
            edited.blocks[2].up.weight.data.add_(0.5)
            edited.inp.weight.mul_(2)
    handle.remove()
    assert handle.is_removed
    assert_state(model, snapshot(plain))
    assert_equal(run(model), run(plain))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert (type(model), [*vars(model)]) == (kind, names)
    handle.remove()
    assert fxoffload.remove_layerwise_offload(model) == 0
    assert (handle.persistent_spans, handle.plan) == ((), None)
    with pytest.raises(OffloadError) as error:
        handle.stats()
    assert str(error.value) == "handle: Toy: its offloading was removed; call fxoffload.layerwise_offload on it again"


def test_remove_waits_for_copies_under_way() -> None:
    model, plain = toy(6), toy(6)
    handle = offload(model)
    handle.engine.transfer.delay_s = 0.05
    run(model, 1)
    handle.remove()
    with torch.no_grad():
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            p.add_(1)
            q.add_(1)
    assert_equal(run(model), run(plain))


def test_remove_to_a_device() -> None:
    model = toy(3)
    offload(model).remove(device="meta")
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model = toy(3)
    offload(model)
    assert fxoffload.remove_layerwise_offload(model, device="cpu") == 1


def test_a_with_block_removes_also_when_it_raises() -> None:
    model, wanted = toy(3), run(toy(3))
    with offload(model) as handle:
        assert_equal(run(model), wanted)
    assert handle.is_removed
    with pytest.raises(RuntimeError, match="stop"), offload(model) as handle:
        raise RuntimeError("stop")
    assert handle.is_removed
    assert_equal(run(model), wanted)


# -- the compiler ------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_a_compiled_model_takes_the_settings_over_and_the_handle_stays_good() -> None:
    model, wanted = toy(6), run(toy(6))
    handle = offload(model, segment_compiler="eager")
    assert_equal(run(model), wanted)
    compiled = torch.compile(model, backend=fxoffload.layerwise, fullgraph=True)
    for got, expected in zip(run(compiled), wanted, strict=True):
        torch.testing.assert_close(got, expected)
    (binding,) = api.bindings_of(model)
    assert handle.plan is binding.plan is not None
    assert binding.plan.budget_nbytes == BUDGET
    assert handle.stats().nbytes_copied == binding.plan.streamed_nbytes > 0
    handle.set_memory_budget("1MiB")
    run(compiled)
    assert handle.persistent_spans == ((0, 6),)
    handle.remove()
    assert_equal(run(model), wanted)
