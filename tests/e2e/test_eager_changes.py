"""What changes between the calls of a model that is offloaded without a compiler: its weights, its budget, its compiler."""

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
import gc
import inspect
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.attached import attachment_of
from fxoffload.engine import find_engine
from fxoffload.errors import BudgetError, GradientError, OffloadError, OffloadWarning
from fxoffload.handle import LayerwiseOffloadHandle
from tests.checks import assert_state, snapshot
from tests.models import Block, Toy, seeded, toy
from tests.twins import call_under_no_grad, check, inputs, nbytes_of, offload, twins

# -- edits and structure -----------------------------------------------------------------------------------------------


EDITS: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.blocks[2].up.weight.mul_(2),
    "data +=": lambda m: m.blocks[2].up.weight.data.add_(0.5),
    "data =": lambda m: setattr(m.blocks[1].down.weight, "data", torch.full((16, 32), 0.01)),
    "another parameter": lambda m: setattr(m.blocks[3].up, "weight", nn.Parameter(torch.full((32, 16), 0.02), False)),
    "swapped": lambda m: swap(m.blocks[0].up, m.blocks[3].up),
    "another block": lambda m: m.blocks.__setitem__(1, seeded(lambda: Block(16), 7)),
    "a block more": lambda m: m.blocks.append(seeded(lambda: Block(16), 8)),
    "a block less": lambda m: m.blocks.pop(1),
    "loaded": lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v.clone() * 1.5 for k, v in m.state_dict().items()}, assign=True),
    "wrapped": lambda m: setattr(m.blocks[2], "up", nn.Sequential(m.blocks[2].up, nn.Linear(32, 32).requires_grad_(False))),
}


def swap(a: nn.Linear, b: nn.Linear) -> None:
    a.weight, b.weight = b.weight, a.weight


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("part", [0.5, 2.0])
def test_edits_count_at_the_next_call(edit: str, part: float) -> None:
    with twins(lambda: Toy(5), part=part) as (model, plain):
        check(model, plain, inputs(3), streams=False)
        with torch.no_grad():
            for m in (model, plain):
                torch.manual_seed(3)
                EDITS[edit](m)
        check(model, plain, inputs(3), streams=False)
        assert_state(model, snapshot(plain))


def test_dtype_changes() -> None:
    with twins(lambda: Toy(5), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        model.double()
        plain.double()
        check(model, plain, [v.double() for v in inputs(2)], streams=False)


def test_budget_changes() -> None:
    with twins(lambda: Toy(6), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        for part in (0.3, 0.9, 0.4):
            fxoffload.set_memory_budget(model, int(nbytes_of(model) * part))
            check(model, plain, inputs(3))
            assert fxoffload.stats(model).nbytes_arena <= nbytes_of(model) * part


@pytest.mark.parametrize("ran", [0, 2])
@pytest.mark.parametrize("between", [True, False])
def test_a_smaller_budget_splits_blocks(ran: int, between: bool) -> None:
    with twins(lambda: Toy(6, 32), part=0.9) as (model, plain):
        check(model, plain, inputs(ran, 32), streams=False)
        attachment = attachment_of(model)
        assert attachment is not None
        blocks = attachment.module_names
        assert "blocks.0" in blocks
        with pytest.raises(BudgetError, match="raise the budget to at least") as refused:
            fxoffload.set_memory_budget(model, "1KiB")
        assert attachment.module_names == blocks
        if between:
            check(model, plain, inputs(2, 32), streams=False)
        smallest = refused.value.smallest_nbytes
        # Less than two blocks, since the leaves of one are copied in turn.
        assert smallest < nbytes_of(model.blocks[0]) * 2
        fxoffload.set_memory_budget(model, smallest)
        assert "blocks.0.up" in attachment.module_names
        check(model, plain, inputs(4, 32))
        assert fxoffload.stats(model).nbytes_arena <= smallest
        assert fxoffload.stats(model).nbytes_copied == fxoffload.get_plan(model).streamed_nbytes
        assert fxoffload.smallest_budget(model, overlap=False) == smallest
        for part in (0.9, 0.5):
            fxoffload.set_memory_budget(model, int(nbytes_of(model) * part))
            check(model, plain, inputs(3, 32))


def test_persistent_buckets_are_whole_blocks() -> None:
    model = toy(10, 64)
    block, outside = nbytes_of(model.blocks[0]), nbytes_of(model.inp) + nbytes_of(model.out)
    handle = fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=outside + 3 * block - 1, persistent_buckets=1)
    assert handle.module_names == tuple(f"blocks.{i}" for i in range(10))
    with torch.no_grad():
        model(torch.ones(3, 64))
    assert [resident.bucket for resident in fxoffload.get_plan(model).residents if resident.bucket != "rest"] == ["blocks.0"]


def test_a_smaller_budget_before_anything_is_packed() -> None:
    with twins(lambda: Toy(6, 32), part=0.9, eager_offload=False) as (model, plain):
        attachment = attachment_of(model)
        assert attachment is not None
        LayerwiseOffloadHandle(attachment).set_memory_budget(nbytes_of(model.blocks[0]) * 2)
        assert "blocks.0.up" in attachment.module_names
        check(model, plain, inputs(4, 32))


# -- the model itself ------------------------------------------------------------------------------------------------


def test_signatures_and_classes_stay() -> None:
    model = toy(3)
    before = [(type(m), inspect.signature(m.forward)) for m in model.modules()]
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    attachment = offload(model)
    assert [(type(m), inspect.signature(m.forward)) for m in model.modules()] == before
    attachment.detach()
    attachment.detach()
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()] == hooks
    assert "forward" not in vars(model)


def test_copies_and_pickles_are_plain_models() -> None:
    with twins(lambda: Toy(4), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert attachment_of(twin) is None
            forwards = fxoffload.stats(model).forwards
            check(twin, plain, inputs(1), streams=False)
            assert fxoffload.stats(model).forwards == forwards
            with torch.no_grad():
                twin.out.weight.zero_()
        check(model, plain, inputs(1))


def test_detached_models_keep_edits_and_can_be_attached_again() -> None:
    plain, model = seeded(lambda: Toy(4)), seeded(lambda: Toy(4))
    for _ in range(2):
        attachment = offload(model)
        check(model, plain, inputs(2))
        with torch.no_grad():
            for m in (model, plain):
                m.blocks[1].up.weight.mul_(1.1)  # type: ignore[union-attr]
        attachment.detach()
        check(model, plain, inputs(1), streams=False)
        assert_state(model, snapshot(plain))


def test_a_model_that_is_detached_while_a_call_waits_for_its_turn() -> None:
    plain = seeded(lambda: Toy(4))
    for entered in ("forward", "a block", "another forward"):
        model = seeded(lambda: Toy(4))
        attachment = offload(model, part=2.0)
        check(model, plain, inputs(2), streams=False)
        turn = attachment.engine.turn

        def late(config: Any, attachment: Any = attachment, turn: Any = turn) -> Any:
            """The turn comes when another thread has detached the model."""
            attachment.detach()
            return turn(config)

        attachment.engine.turn = late
        part, twin = (model.blocks[1], plain.blocks[1]) if entered == "a block" else (model, plain)  # type: ignore[index]
        if entered == "another forward":
            model.forward = type(model).forward.__get__(model)
        check(part, twin, inputs(1), streams=False)
        assert attachment._running is None
        assert find_engine([*model.parameters()]) is None
        offload(model)
        check(model, plain, inputs(2))


def test_nothing_is_held_when_the_model_is_gone() -> None:
    model = toy(4)
    attachment = offload(model)
    call_under_no_grad(model, inputs(1)[0])
    engine, probe = attachment.engine, model.out.weight
    alive = [weakref.ref(model), weakref.ref(engine)]
    del model, attachment, engine, probe
    gc.collect()
    assert [weak() for weak in alive] == [None, None]


def test_errors() -> None:
    model = toy(3)
    with pytest.raises(BudgetError, match="raise the budget to at least") as refused:
        offload(model, memory_budget="1KiB")
    assert attachment_of(model) is None
    assert "forward" not in vars(model)
    attachment = offload(model, memory_budget=refused.value.smallest_nbytes)
    with pytest.raises(OffloadError, match=r"offloaded already; call fxoffload\.remove_layerwise_offload"):
        offload(model)
    model.requires_grad_(True)
    with pytest.raises(GradientError, match=r"torch\.no_grad\(\) or torch\.inference_mode\(\)"):
        model(inputs(1)[0])
    call_under_no_grad(model, inputs(1)[0])
    attachment.detach()


# -- with a compiler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["attached", "compiled"])
@pytest.mark.parametrize("how", ["function", "method"])
def test_attach_and_compile_in_either_order(first: str, how: str) -> None:
    plain, model = seeded(lambda: Toy(5)), seeded(lambda: Toy(5))
    options = {"segment_compiler": "eager"}
    if first == "attached":
        attachment = offload(model, part=0.5)
        check(model, plain, inputs(2))
        run = compiled(model, how, options)
    else:
        run = compiled(model, how, {**options, "onload_device": "cpu"})
        attachment = offload(model, part=0.5)
    check(run, plain, inputs(3))
    (binding,) = api.bindings_of(model)
    assert binding.config.memory_budget == attachment.config.memory_budget or first == "compiled"
    assert fxoffload.get_plan(model) is binding.plan
    if how == "function":
        # The module itself still runs without the compiler, by the same weights.
        for _ in range(2):
            check(model, plain, inputs(2))
            check(run, plain, inputs(2))
    attachment.detach()
    assert_state(model, snapshot(plain))
    if first == "compiled":
        # Its own settings hold again.
        check(run, plain, inputs(2), streams=False)


def compiled(model: Any, how: str, options: dict[str, Any]) -> Any:
    if how == "method":
        model.compile(backend=fxoffload.layerwise, options=options)
        return model
    return torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, options=options)


def test_another_backend_computes_the_same_and_is_warned_of() -> None:
    with twins(lambda: Toy(4), part=0.5) as (model, plain):
        run = torch.compile(model, backend="aot_eager")
        check(model, plain, inputs(1))
        with pytest.warns(OffloadWarning, match="compiled by another backend"):
            check_close(run, plain, inputs(1)[0])
        for value in inputs(3):
            check_close(run, plain, value)
            assert fxoffload.stats(model).nbytes_copied > 0


def check_close(run: Any, plain: Any, value: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(run(value), plain(value))
