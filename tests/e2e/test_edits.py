"""Weights that change between calls: replaced, swapped, edited, loaded. The next call uses them, nothing recompiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from tests.checks import Trio, assert_streams, budgets, offload
from tests.models import Toy, rows, toy


@pytest.fixture(autouse=True)
def no_recompile() -> Iterator[None]:
    """Two models of one class share one graph here, whatever is done to their weights."""
    stats = torch._dynamo.utils.counters["stats"]
    before = stats["unique_graphs"]
    yield
    assert stats["unique_graphs"] == before + 1


def state_of(model: Any, weight: str) -> str:
    """Where a weight is when no forward runs: "resident", "live" (in a slot already) or "host"."""
    binding = api.bindings_of(model)[-1]
    plan = binding.plan
    assert plan is not None
    bucket = api.engine_of(model).store.find(model.get_parameter(weight)).parts[0].bucket.name
    if any(r.bucket == bucket for r in plan.residents):
        return "resident"
    return "live" if any(load.bucket == bucket for load in plan.live_at_start()) else "host"


def test_weights_are_found_in_all_three_states() -> None:
    trio = Trio(lambda: toy(8), rows(0))
    trio.check(rows(1))
    states = {state_of(trio.streamed, f"blocks.{i}.up.weight") for i in range(8)}
    assert states == {"resident", "live", "host"}


def _in_place(p: nn.Parameter) -> None:
    p.add_(0.5)


def _in_place_on_data(p: nn.Parameter) -> None:
    p.data.add_(0.5)


def _augmented_data(p: nn.Parameter) -> None:
    p.data += 0.5


def _assign_data(p: nn.Parameter) -> None:
    p.data = p.detach() * 1.5


def _assign_row(p: nn.Parameter) -> None:
    p[0] = 3.0


def _copy(p: nn.Parameter) -> None:
    p.copy_(torch.ones_like(p))


def _on_detached(p: nn.Parameter) -> None:
    p.detach().mul_(2.0)


@pytest.mark.parametrize(
    "change", [_in_place, _in_place_on_data, _augmented_data, _assign_data, _assign_row, _copy, _on_detached]
)
def test_an_edit_of_any_weight_counts_at_the_next_call(change: Callable[[nn.Parameter], None]) -> None:
    trio = Trio(lambda: toy(8), rows(0))
    trio.check(rows(1))
    for i in range(8):
        before = trio.check(rows(2))
        trio.edit(lambda m, i=i: change(m.blocks[i].up.weight))
        assert not torch.equal(trio.check(rows(2)), before), i
        trio.check_state()
    trio.check(rows(3))
    assert_streams(trio.streamed)


def test_a_data_edit_while_everything_is_resident() -> None:
    model, reference = toy(2), toy(2)
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0))
        for m in (model, reference):
            m.blocks[1].up.weight.data.add_(0.5)
        torch.testing.assert_close(compiled(rows(1)), reference(rows(1)))


def _new_parameter(model: Toy, i: int) -> None:
    model.blocks[i].up.weight = nn.Parameter(model.blocks[i].up.weight * 1.5, requires_grad=False)


def _swap_weights(model: Toy, i: int) -> None:
    a, b = model.blocks[i].up, model.blocks[(i + 3) % 8].up
    a.weight, b.weight = b.weight, a.weight


def _swap_data(model: Toy, i: int) -> None:
    a, b = model.blocks[i].up.weight, model.blocks[(i + 3) % 8].up.weight
    a.data, b.data = b.data, a.data


def _swap_blocks(model: Toy, i: int) -> None:
    j = (i + 3) % 8
    model.blocks[i], model.blocks[j] = model.blocks[j], model.blocks[i]


def _swap_modules(model: Toy, i: int) -> None:
    a, b = model.blocks[i], model.blocks[(i + 3) % 8]
    a.up, b.up = b.up, a.up


@pytest.mark.parametrize("change", [_new_parameter, _swap_weights, _swap_data, _swap_blocks, _swap_modules])
def test_a_replaced_or_swapped_weight_counts_at_the_next_call(change: Callable[[Toy, int], None]) -> None:
    trio = Trio(lambda: toy(8), rows(0))
    host = fxoffload.stats(trio.streamed).nbytes_host
    for i in range(8):
        before = trio.check(rows(2))
        trio.edit(lambda m, i=i: change(m, i))
        assert not torch.equal(trio.check(rows(2)), before), i
        trio.check_state()
        trio.check(rows(3))
        assert_streams(trio.streamed)
    assert fxoffload.stats(trio.streamed).nbytes_host == host
    assert len(api.engine_of(trio.streamed).planned) == 1


def test_what_replaced_weights_leave_behind_keeps_its_value() -> None:
    model = toy(4)
    old = [block.up.weight for block in model.blocks]
    values = [p.clone() for p in old]
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0))
        for block in model.blocks:
            block.up.weight = nn.Parameter(torch.zeros_like(block.up.weight), requires_grad=False)
        compiled(rows(1))
    assert all(torch.equal(p, value) for p, value in zip(old, values, strict=True))


def test_state_dict_between_calls_is_true() -> None:
    trio = Trio(lambda: toy(5), rows(0))
    for k in range(1, 4):
        trio.check(rows(k))
        trio.check_state()
        state = trio.streamed.state_dict()
        assert all(state[name].shape == tensor.shape for name, tensor in toy(5).state_dict().items())


@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_into_the_running_model(assign: bool) -> None:
    trio = Trio(lambda: toy(5), rows(0))
    trio.check(rows(1))
    for seed in (7, 8):
        other = toy(5, seed=seed).state_dict()
        trio.edit(lambda m, other=other: m.load_state_dict({k: v.clone() for k, v in other.items()}, assign=assign))
        for k in range(3):
            got = trio.check(rows(k))
            torch.testing.assert_close(got, toy(5, seed=seed)(rows(k)), rtol=1e-4, atol=1e-5)
        assert_streams(trio.streamed)
        trio.check_state()


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_load_state_dict_of_other_names(strict: bool, assign: bool) -> None:
    """What there is of the model's names is loaded, whether the rest is an error or not."""
    trio = Trio(lambda: toy(5), rows(0))

    def load(model: Any, block: int) -> None:
        other = toy(5, seed=7).state_dict()
        state = {k: v.clone() for k, v in other.items() if k.startswith(f"blocks.{block}.")} | {"nothing": torch.zeros(1)}
        if strict:
            with pytest.raises(RuntimeError, match="Missing key"):
                model.load_state_dict(state, assign=assign)
        else:
            assert model.load_state_dict(state, strict=False, assign=assign).unexpected_keys == ["nothing"]

    for block in range(5):
        before = trio.check(rows(1))
        trio.edit(lambda m, block=block: load(m, block))
        assert not torch.equal(trio.check(rows(1)), before), block
        trio.check_state()
    trio.check(rows(2))
    assert_streams(trio.streamed)


def test_edits_survive_another_budget() -> None:
    trio = Trio(lambda: toy(6), rows(0))
    for label in ("smallest", "all", "half", "quarter"):
        trio.edit(lambda m: m.blocks[3].down.weight.mul_(1.25))
        fxoffload.set_memory_budget(trio.streamed, budgets(trio.streamed)[label])
        trio.check(rows(1))
        trio.edit(lambda m: m.inp.bias.add_(0.25))
        trio.check(rows(2))
        trio.check_state()


def test_refresh_serves_an_edit_through_an_alias_taken_earlier() -> None:
    trio = Trio(lambda: toy(6), rows(0))
    trio.check(rows(1))
    aliases = [[block.up.weight.data for block in m.blocks] for m in (trio.streamed, trio.resident, trio.eager)]
    for alias in aliases:
        for data in alias:
            data.add_(0.5)
    fxoffload.refresh(trio.streamed)
    fxoffload.refresh(trio.resident)
    trio.check(rows(1))
    trio.check(rows(2))
    assert_streams(trio.streamed)
