"""Weights that were all replaced leave nothing in the host store: neither memory, nor pins, nor what was planned with them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from tests.capturing import capturer_of, captures
from tests.checks import attached, halve, offload
from tests.models import Block, rows, seeded, toy
from tests.pinning import Driver, pinning

__all__ = ["captures"]
AMPLE = 1 << 30
HOWS = pytest.mark.parametrize("how", ["eager", "compiled"])


class Adapted(nn.Module):
    """A layer, and beside it the adapter that is on, as PEFT has them: by name."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.lower, self.upper = nn.ParameterDict(), nn.ParameterDict()
        self.is_on = True

    def put(self, name: str, seed: int) -> None:
        """This adapter alone."""
        generator = torch.Generator().manual_seed(seed)
        for of, shape in ((self.lower, (4, self.base.in_features)), (self.upper, (self.base.out_features, 4))):
            of.clear()
            of[name] = nn.Parameter(torch.randn(shape, generator=generator) * 0.1, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.base(x)
        for name in self.lower if self.is_on else ():
            y = y + x @ self.lower[name].T @ self.upper[name].T
        return y


def adapted() -> Any:
    model: Any = toy(3)
    for block in model.blocks:
        block.up = Adapted(block.up)
    return model


def put(model: Any, name: str, seed: int) -> None:
    for i, block in enumerate(model.blocks):
        block.up.put(name, 10 * seed + i)


def switch(models: Iterable[Any], is_on: bool) -> None:
    for block in (block for model in models for block in model.blocks):
        block.up.is_on = is_on


def assign(model: nn.Module, factor: float) -> None:
    model.load_state_dict({k: v * factor for k, v in model.state_dict().items()}, assign=True)


def run_by(how: str, model: Any) -> Any:
    """What to call: a model that streams most of its weights."""
    if how == "eager":
        attached(model, 0.5)
        return model
    compiled = offload(model)
    with torch.no_grad():
        compiled(rows(0))
    fxoffload.set_memory_budget(model, fxoffload.smallest_budget(model))
    return compiled


def host_memory(model: Any) -> list[weakref.ref[torch.Tensor]]:
    return [weakref.ref(bucket.flat) for bucket in api.engine_of(model).store.buckets.values()]


def gone(memory: list[weakref.ref[torch.Tensor]]) -> list[bool]:
    return [flat() is None for flat in memory]


def check_host(model: Any, driver: Driver, nbytes: int) -> None:
    stats = fxoffload.stats(model)
    assert (stats.nbytes_host, stats.nbytes_pinned) == (nbytes, nbytes)
    assert {b.region.address for b in api.engine_of(model).store.buckets.values()} == set(driver.pinned)


@contextmanager
def without_collector() -> Generator[None, None, None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@torch.no_grad()
@HOWS
def test_a_model_that_is_assigned_again_and_again(how: str) -> None:
    model, plain = toy(3), toy(3)
    with pinning(AMPLE) as driver:
        call = run_by(how, model)
        call(rows(0))
        nbytes = fxoffload.stats(model).nbytes_host
        for k in range(3):
            with without_collector():
                former = host_memory(model)
                for m in (model, plain):
                    assign(m, 1.25)
                torch.testing.assert_close(call(rows(k)), plain(rows(k)))
                call(rows(k))
                check_host(model, driver, nbytes)
                # A compiled model takes them into the places of those that they replace.
                assert how == "compiled" or all(gone(former))
        del model, call


@torch.no_grad()
def test_blocks_that_are_replaced() -> None:
    model, plain = toy(3), toy(3)
    with pinning(AMPLE) as driver:
        call = run_by("eager", model)
        call(rows(0))
        nbytes = fxoffload.stats(model).nbytes_host
        for k in range(3):
            for m in (model, plain):
                m.blocks[k] = seeded(lambda: Block(16), k)
            assert torch.equal(call(rows(k)), plain(rows(k)))
            check_host(model, driver, nbytes)
        del model, call


@torch.no_grad()
@HOWS
def test_adapters_under_new_names(how: str) -> None:
    model, plain = adapted(), adapted()
    with pinning(AMPLE) as driver:
        call = run_by(how, model)
        # Put on a model that has run, they lie in buckets of their own.
        put(model, "first", 0)
        call(rows(0))
        nbytes = fxoffload.stats(model).nbytes_host
        for k in range(3):
            former = [weakref.ref(p.parts[0].bucket.flat) for p in adapters(model)]
            assert len(former) == 6
            with without_collector():
                for m in (model, plain):
                    put(m, f"style{k}", k)
                torch.testing.assert_close(call(rows(k)), plain(rows(k)))
                call(rows(k))
                check_host(model, driver, nbytes)
                assert all(gone(former))
        del model, call


@torch.no_grad()
@HOWS
def test_what_the_user_keeps_has_its_values(how: str) -> None:
    """A parameter keeps its bucket; what is no parameter of the model keeps memory that is pinned no more."""
    model, plain = toy(3), toy(3)
    with pinning(AMPLE) as driver:
        call = run_by(how, model)
        call(rows(0))
        nbytes = fxoffload.stats(model).nbytes_host
        kept = [model.blocks[1].up.weight]
        if how == "eager":
            # The places of a compiled model stay its own.
            kept.append(model.blocks[2].up.weight.detach()[3:])
        values = [tensor.clone() for tensor in kept]
        for k in range(2):
            for m in (model, plain):
                assign(m, 1.25)
            torch.testing.assert_close(call(rows(k)), plain(rows(k)))
            assert all(map(torch.equal, kept, values))
        for tensor in kept:
            tensor.zero_()
        torch.testing.assert_close(call(rows(2)), plain(rows(2)))
        more = fxoffload.stats(model).nbytes_host - nbytes
        assert 0 < more < nbytes / 3 if how == "eager" else more == 0
        del kept, tensor
        assign(model, 1.0)
        call(rows(0))
        check_host(model, driver, nbytes)
        del model, call


@torch.no_grad()
def test_graphs_without_the_adapters_stay_and_those_with_them_go() -> None:
    model, plain = adapted(), adapted()
    both = (model, plain)
    with pinning(AMPLE) as driver:
        switch(both, False)
        call = run_by("compiled", model)
        (without,) = api.bindings_of(model)
        switch(both, True)
        nbytes = 0
        for k in range(3):
            for m in both:
                put(m, f"style{k}", k)
            for n in (3, 5):
                torch.testing.assert_close(call(rows(k, n=n)), plain(rows(k, n=n)))
            assert len(api.bindings_of(model)) == 3
            nbytes = nbytes or fxoffload.stats(model).nbytes_host
            check_host(model, driver, nbytes)
            switch(both, False)
            torch.testing.assert_close(call(rows(k)), plain(rows(k)))
            assert without in api.bindings_of(model)
            assert api.engine_of(model).current is without
            switch(both, True)
        del model, plain, both, m, call, without


@torch.no_grad()
@pytest.mark.usefixtures("captures")
def test_captured_forwards_go_with_their_weights() -> None:
    model, plain = adapted(), adapted()
    compiled = offload(model, cuda_graph=True)
    compiled(rows(0))
    for k in range(3):
        former = [weakref.ref(p.parts[0].bucket.flat) for p in adapters(model)] if k else []
        for m in (model, plain):
            put(m, f"style{k}", k)
        for j in range(3):
            torch.testing.assert_close(compiled(rows(j)), plain(rows(j)))
        assert len(capturer_of(model).graphs) == 1, "that of the former adapters was given back"
        assert all(gone(former))


def adapters(model: Any) -> list[Any]:
    return [p for name, p in api.engine_of(model).store.by_name().items() if ".lower." in name or ".upper." in name]


def started(how: str) -> tuple[Any, Any, Any]:
    """A model that has run with half of its weights streamed, what calls it, and a plain one with other weights."""
    model, other = toy(4), toy(4, seed=1)
    run: Any = model
    if how == "eager":
        attached(model, 0.5)
    else:
        run = offload(model, memory_budget=AMPLE)
    with torch.no_grad():
        run(rows(0))
        if how == "compiled":
            halve(model)
        run(rows(0))
    return model, run, other


@HOWS
@torch.no_grad()
def test_weights_that_were_set_aside_by_reference_keep_their_values(how: str) -> None:
    model, run, other = started(how)
    plain = toy(4)
    wanted, others = plain(rows(1)), other(rows(1))
    for _ in range(2):
        aside = model.state_dict()
        model.load_state_dict({name: value.clone() for name, value in other.state_dict().items()}, assign=True)
        torch.testing.assert_close(run(rows(1)), others)
        assert all(torch.equal(value, plain.state_dict()[name]) for name, value in aside.items())
        model.load_state_dict(aside, assign=True)
        torch.testing.assert_close(run(rows(1)), wanted)
    assert fxoffload.stats(model).nbytes_copied > 0


@HOWS
@torch.no_grad()
def test_memory_that_two_models_exchange_through_data(how: str) -> None:
    """As weights that are averaged over training are swapped in and out."""
    model, run, other = started(how)
    wanted = [plain(rows(1)) for plain in (toy(4), other)]
    for _ in range(3):
        for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
            mine.data, theirs.data = theirs.data, mine.data
        wanted.reverse()
        torch.testing.assert_close(run(rows(1)), wanted[0])
        torch.testing.assert_close(other(rows(1)), wanted[1])
    weights = sum(p.nbytes for p in model.parameters())
    assert weights <= api.engine_of(model).store.nbytes < 1.5 * weights


@HOWS
@torch.no_grad()
def test_edits_of_weights_that_were_put_into_shared_memory(how: str) -> None:
    model, run, other = started(how)
    plain = toy(4)
    model.share_memory()
    torch.testing.assert_close(run(rows(1)), plain(rows(1)))
    for of in (model, plain):
        of.blocks[1].up.weight.mul_(1.5)
    torch.testing.assert_close(run(rows(1)), plain(rows(1)))
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(rows(1)), other(rows(1)))
    before = [bucket.flat.data_ptr() for bucket in api.engine_of(model).store.buckets.values()]
    run(rows(2))
    assert before == [bucket.flat.data_ptr() for bucket in api.engine_of(model).store.buckets.values()], "packed once"
