"""Odd weights with and without a compiler: laid out oddly, shared by all blocks or by two models, never used, never written."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.buckets import align
from fxoffload.errors import OffloadWarning
from tests.checks import assert_state, assert_streams, attached, call, halve, offload, snapshot
from tests.e2e.test_weights import CHANGES, INPUTS, Conv, Everywhere, Mixed, images, make_odd
from tests.models import Counting, Toy, rows, seeded, toy

D = 16
HOWS = pytest.mark.parametrize("how", ["eager", "compiled"])


@torch.no_grad()
def offloaded(model: nn.Module, how: str, given: torch.Tensor, *, part: float = 0.6) -> Any:
    """A model that has run with a part of its weights on the device, and late copies; what to call."""
    if how == "eager":
        attached(model, part)
        model(given)
        return model
    run = offload(model)
    run(given)
    halve(model)
    return run


@torch.no_grad()
def right(run: Any, plain: Any, given: torch.Tensor) -> None:
    torch.testing.assert_close(run(given), plain(given), rtol=1e-4, atol=1e-5)


# -- layouts without a compiler ----------------------------------------------------------------------------------------


def layouts(model: nn.Module) -> list[Any]:
    return [(p.shape, p.stride(), p.dtype) for p in model.parameters()]


@torch.no_grad()
def check_eager(make: Callable[[], nn.Module], inputs: list[Any], part: float, *, streams: bool = True) -> None:
    model, plain = make(), make()
    attachment = attached(model, part)
    for given in inputs:
        assert torch.equal(call(model, given), call(plain, given))
    assert (fxoffload.stats(model).nbytes_copied > 0) is streams
    assert layouts(model) == layouts(plain)
    assert_state(model, snapshot(plain))
    attachment.detach()
    assert layouts(model) == layouts(plain)
    assert_state(model, snapshot(plain))


@pytest.mark.parametrize("change", CHANGES)
def test_tied_viewed_and_strided_without_a_compiler(change: Callable[[Any], None]) -> None:
    check_eager(lambda: make_odd(change), INPUTS, 0.5)


@pytest.mark.parametrize("make", [Mixed, Everywhere])
def test_dtypes_and_places_without_a_compiler(make: Callable[[], nn.Module]) -> None:
    # A unit of which something is read outside it stays on the device, and that is each one where there is everything.
    check_eager(lambda: seeded(make), INPUTS, 0.7 if make is Mixed else 1.2, streams=make is Mixed)


def test_channels_last_without_a_compiler() -> None:
    check_eager(lambda: seeded(lambda: Conv().to(memory_format=torch.channels_last)), [images(k) for k in range(3)], 0.7)


# -- shared and unused -------------------------------------------------------------------------------------------------


class Roped(nn.Module):
    """Every block has the same buffer object, which is saved nowhere."""

    def __init__(self) -> None:
        super().__init__()
        rope = torch.randn(D)
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(6))
        for block in self.blocks:
            block.register_buffer("rope", rope, persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x * block.rope)
        return x


@HOWS
def test_one_buffer_of_all_blocks(how: str) -> None:
    model, plain = (seeded(Roped) for _ in range(2))
    run = offloaded(model, how, rows(0))
    for k in range(3):
        right(run, plain, rows(k))
    assert_streams(model)
    assert len({id(block.rope) for block in model.blocks}) == 1
    packed = api.engine_of(model).store.by_name()
    assert [name for name in packed if "rope" in name] == ["blocks.0.rope"], "one copy of it"
    for m in (model, plain):
        m.blocks[3].rope.data *= 1.5
    for k in range(3):
        right(run, plain, rows(k))


class Sparing(Toy):
    """Has a block in the middle, a layer and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__(5)
        self.spare = nn.Linear(64, 64)
        self.unread = nn.Parameter(torch.randn(1000))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = block(x) if i != 2 else x
        return self.out(x)


@HOWS
def test_weights_that_nothing_uses(how: str) -> None:
    model, plain = (seeded(Sparing) for _ in range(2))
    before = snapshot(model)
    run = offloaded(model, how, rows(0))
    for k in range(4):
        right(run, plain, rows(k))
    used = sum(p.nbytes + 256 for name, p in plain.named_parameters() if not name.startswith(("spare", "unread", "blocks.2")))
    assert 0 < fxoffload.stats(model).nbytes_copied < used
    assert_state(model, before)
    with torch.no_grad():
        for m in (model, plain):
            m.spare.weight.mul_(2)
            m.blocks[2].up.weight.data = m.blocks[2].up.weight * 3
    right(run, plain, rows(1))
    fxoffload.remove_layerwise_offload(model)
    assert_state(model, snapshot(plain))


# -- two models with a weight in common --------------------------------------------------------------------------------


def in_common() -> tuple[Toy, Toy]:
    one, other = toy(4, seed=1), toy(4, seed=2)
    other.inp.weight = one.inp.weight
    other.blocks[2].up.weight = one.blocks[1].up.weight
    return one, other


class Pipeline:
    def __init__(self, *modules: nn.Module) -> None:
        self.text_encoder, self.transformer = modules


@pytest.mark.parametrize("how", ["eager", "compiled", "pipeline"])
def test_a_weight_of_two_models(how: str) -> None:
    models, plains = in_common(), in_common()
    nbytes = sum(p.nbytes for p in models[0].parameters())
    host = sum(align(p.nbytes) for p in {p for model in models for p in model.parameters()})
    if how == "pipeline":
        fxoffload.layerwise_offload(Pipeline(*models), onload_device="cpu", memory_budget=int(nbytes * 0.6))
        runs: list[Any] = list(models)
    else:
        runs = [offloaded(model, how, rows(0)) for model in models]
    for k in range(3):
        for model, run, plain in zip(models, runs, plains, strict=True):
            right(run, plain, rows(k))
            assert fxoffload.stats(model).nbytes_copied > 0
            assert fxoffload.stats(model).nbytes_host == host, "one copy of all that they have"
        with torch.no_grad():
            for one, other in (models, plains):
                one.inp.weight.data += 0.25
                other.blocks[2].up.weight.mul_(1.1)
    assert models[0].inp.weight is models[1].inp.weight
    # What one of them gets instead is its own.
    for one, _ in (models, plains):
        one.inp.weight = nn.Parameter(torch.full_like(one.inp.weight, 0.1), requires_grad=False)
    for run, plain in zip(runs, plains, strict=True):
        right(run, plain, rows(3))
    # The other one goes on when the first is removed.
    fxoffload.remove_layerwise_offload(models[0])
    with torch.no_grad():
        for one, _ in (models, plains):
            one.blocks[1].up.weight.mul_(1.1)
    for model, run, plain in zip(models, runs, plains, strict=True):
        right(run, plain, rows(4))
        assert_state(model, snapshot(plain))


@torch.no_grad()
def test_two_parameters_over_one_memory_in_two_models() -> None:
    """The values are right, and each model has its own from then on, as where one is moved to a device: README, Limits."""
    models = in_common()
    models[1].blocks[2].up.weight = nn.Parameter(models[0].blocks[1].up.weight.data, requires_grad=False)
    plains = in_common()
    for model, plain in zip(models, plains, strict=True):
        run = offloaded(model, "eager", rows(0))
        right(run, plain, rows(1))
    models[0].blocks[1].up.weight.mul_(2)
    right(models[1], plains[1], rows(2))


@torch.no_grad()
def test_two_parameters_over_one_memory_in_a_pipeline() -> None:
    models, plains = in_common(), in_common()
    models[1].blocks[2].up.weight = nn.Parameter(models[0].blocks[1].up.weight.data, requires_grad=False)
    plains[1].blocks[2].up.weight = nn.Parameter(plains[0].blocks[1].up.weight.clone(), requires_grad=False)
    what = r"^pipelines: text_encoder\.blocks\.1\.up\.weight and transformer\.blocks\.2\.up\.weight share memory"
    with pytest.warns(OffloadWarning, match=what) as warned:
        fxoffload.layerwise_offload(Pipeline(*models), onload_device="cpu", memory_budget="1MiB")
    assert len(warned) == 1, "the weight that both have as one Parameter stays tied"
    models[0].blocks[1].up.weight.mul_(2)
    plains[0].blocks[1].up.weight.mul_(2)
    for model, plain in zip(models, plains, strict=True):
        right(model, plain, rows(1))


# -- what goes back to the host ----------------------------------------------------------------------------------------


def writes(model: Any) -> dict[str, int]:
    """How often the host's memory of each weight was written to, by torch's own counters."""
    return {name: packed.view._version for name, packed in api.engine_of(model).store.by_name().items()}


@HOWS
def test_only_what_the_model_writes_is_copied_back(how: str) -> None:
    model = toy(6).train()
    run = offloaded(model, how, rows(0))
    before = writes(model)
    for k in range(3):
        with torch.no_grad():
            run(rows(k))
    assert_streams(model)
    assert writes(model) == before
    counting = seeded(Counting)
    run = offloaded(counting, how, rows(0))
    before = writes(counting)
    with torch.no_grad():
        run(rows(1))
    assert {name.rpartition(".")[2] for name, count in writes(counting).items() if count != before[name]} == {"n", "last"}
