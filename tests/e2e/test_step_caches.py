"""Caches that skip blocks in some steps, as cache-dit's does: they stand over the model's forward, and put blocks of their own there."""

from __future__ import annotations

import copy
import functools
import inspect
import unittest.mock
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.eager import attachment_of
from tests.checks import assert_state, halve, snapshot
from tests.models import Toy, rows, toy


class CachedBlocks(nn.Module):
    """Stands for all blocks: runs the first, and the others in every other step; in between it adds what they added last."""

    def __init__(self, blocks: nn.ModuleList, model: nn.Module) -> None:
        super().__init__()
        self.blocks = blocks
        self.model = model
        """The whole model, which is above it."""
        self.steps = 0
        self.added: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        self.steps += 1
        if self.steps % 2 == 0 and self.added is not None:
            return x + self.added
        before = x
        for block in list(self.blocks)[1:]:
            x = block(x)
        self.added = x - before
        return x


def enable_cache(model: Any) -> None:
    """Over the model's forward on the instance, as cache-dit does it."""
    cached = nn.ModuleList([CachedBlocks(model.blocks, model)])
    original = model.forward

    def new_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with unittest.mock.patch.object(self, "blocks", cached):
            return original(*args, **kwargs)

    model.forward = functools.update_wrapper(functools.partial(new_forward, model), new_forward)


def check(model: Any, plain: Any, n: int) -> list[int]:
    """Every call is equal. Returns the bytes that each copied."""
    copied: list[int] = []
    with torch.no_grad():
        for k in range(n):
            torch.testing.assert_close(model(rows(k)), plain(rows(k)), rtol=1e-5, atol=1e-6)
            copied.append(fxoffload.stats(model).nbytes_copied)
    return copied


@pytest.mark.parametrize("order", ["cache first", "offloaded first"])
def test_a_cache_over_an_eager_model(order: str) -> None:
    model, plain = toy(6), toy(6)
    enable_cache(plain)
    if order == "cache first":
        enable_cache(model)
    theirs = vars(model).get("forward")
    nbytes = sum(p.nbytes for p in model.parameters())
    handle = fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes // 2)
    assert "forward" in vars(model)
    if order == "offloaded first":
        enable_cache(model)
        theirs = vars(model)["forward"]
    copied = check(model, plain, 8)
    # A step is one forward, and a step that skips blocks copies little.
    assert fxoffload.stats(model).forwards == 8
    assert fxoffload.stats(model).restores <= 3
    full, skipping = copied[4::2], copied[5::2]
    assert min(full) > 2 * max(skipping) > 0
    handle.remove()
    assert vars(model)["forward"] is theirs
    assert attachment_of(model) is None
    with torch.no_grad():
        assert torch.equal(model(rows(1)), plain(rows(1)))
    assert_state(model, snapshot(plain))
    # What is left of a stand-in in somebody's hands does nothing.
    again = fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes // 2)
    check(model, plain, 4)
    again.remove()


def test_a_cache_over_a_compiled_model() -> None:
    """A cache decides by data and swaps modules, so the graph breaks; what is compiled streams nevertheless."""
    model, plain = toy(6), toy(6)
    for m in (model, plain):
        enable_cache(m)
    options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"}
    model.compile(backend=fxoffload.layerwise, options=options, dynamic=False)
    with torch.no_grad():
        model(rows(9)), plain(rows(9))
    halve(model)
    copied = check(model, plain, 8)
    assert max(copied) > 0


def test_a_forward_that_was_replaced_before_is_there_again_after() -> None:
    model, plain = toy(4), toy(4)

    def forward(x: torch.Tensor, *, times: int = 1) -> torch.Tensor:
        return Toy.forward(model, x) * times

    model.forward = forward
    with fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="16KiB"), torch.no_grad():
        assert inspect.signature(model.forward) == inspect.signature(forward)
        for k in range(3):
            assert torch.equal(model(rows(k), times=2), plain(rows(k)) * 2)
        assert fxoffload.stats(model).forwards == 3
        assert fxoffload.stats(model).nbytes_copied > 0
        twin = copy.deepcopy(model)
        assert twin.forward is forward
    assert model.forward is forward


class EarlyExit(Toy):
    """Stops at the block that it is told to, or where the data says so."""

    last = 99

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i == self.last:
                break
        return self.out(x)


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_early_exit(how: str) -> None:
    torch.manual_seed(0)
    model = EarlyExit(6).eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    nbytes = sum(p.nbytes for p in model.parameters())
    with torch.no_grad():
        if how == "eager":
            fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes // 2)
        else:
            options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"}
            model.compile(backend=fxoffload.layerwise, options=options, fullgraph=True, dynamic=False)
            model(rows(0))
            halve(model)
        for last in (99, 2, 99, 0, 4, 2, 99, 99):
            model.last = plain.last = last
            for k in range(2):
                torch.testing.assert_close(model(rows(k)), plain(rows(k)), rtol=1e-5, atol=1e-6)
            stats = fxoffload.stats(model)
            assert stats.nbytes_arena <= nbytes
            if last >= 4:
                assert stats.nbytes_copied > 0


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(how: str, dtype: torch.dtype) -> None:
    model, plain = toy(6), toy(6)
    nbytes = sum(p.nbytes for p in model.parameters())
    run: Any = model
    with torch.no_grad():
        if how == "eager":
            fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes // 2)
        else:
            options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"}
            model.compile(backend=fxoffload.layerwise, options=options, fullgraph=True, dynamic=False)
            model(rows(0))
            halve(model)
        for k in range(6):
            with torch.autocast("cpu", dtype, enabled=k % 3 != 2):
                got, wanted = run(rows(k)), plain(rows(k))
            assert got.dtype == wanted.dtype
            torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
            assert fxoffload.stats(model).nbytes_copied > 0
            if k == 3:
                # An edit counts where a cast was cached, too.
                for m in (model, plain):
                    m.blocks[2].up.weight.mul_(1.5)
