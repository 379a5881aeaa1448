"""Caches that skip blocks in some steps, as cache-dit does: they replace a model's forward, and put their own blocks there."""

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false, reportArgumentType=false
# pyright: reportUnusedExpression=false, reportIndexIssue=false
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
from fxoffload.attached import attachment_of
from tests.checks import assert_state, halve, snapshot
from tests.models import Toy, rows, seeded, toy


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
    assert fxoffload.stats(model).restores <= (3 if order == "cache first" else 4)
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


class Stop(Toy):
    """Raises behind its first block when it is told to."""

    error: type[BaseException] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return their_forward(self, x)


def their_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """What a library writes in a model's stead, and calls nothing that was there before. Reads a weight outside its block."""
    x = self.inp(x) * self.blocks[1].up.weight.mean()
    for block in self.blocks:
        x = block(x)
        if self.error is not None:
            raise self.error("stop")
    return self.out(x)


@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("late", [0, 3])
def test_a_forward_that_takes_the_place_of_the_entry(late: int, error: type[BaseException] | None) -> None:
    model, plain = seeded(lambda: Stop(6)), seeded(lambda: Stop(6))
    nbytes = sum(p.nbytes for p in model.parameters())
    handle = fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes // 2)
    check(model, plain, late)
    theirs = their_forward.__get__(model)
    model.forward = theirs  # type: ignore[method-assign]
    if error is not None:
        model.error = error
        with pytest.raises(error), torch.no_grad():
            model(rows(0))
        model.error = None
    copied = check(model, plain, 5)
    assert fxoffload.stats(model).forwards == late + 5
    assert fxoffload.stats(model).restores <= 5
    assert copied[-1] == fxoffload.get_plan(model).streamed_nbytes > 0
    # Found in the forward that somebody put there.
    assert "blocks.1.up" in {r.bucket for r in fxoffload.get_plan(model).residents}
    del model.forward
    check(model, plain, 3)
    assert fxoffload.stats(model).forwards == late + 8
    model.forward = theirs  # type: ignore[method-assign]
    check(model, plain, 3)
    handle.remove()
    assert vars(model)["forward"] is theirs
    assert [len(model._forward_pre_hooks), len(model._forward_hooks)] == [0, 0]
    assert torch.overrides._get_current_function_mode() is None
    check_plain(model, plain)


def check_plain(model: Any, plain: Any) -> None:
    with torch.no_grad():
        assert torch.equal(model(rows(1)), plain(rows(1)))
    assert_state(model, snapshot(plain))


@pytest.mark.parametrize("order", ["cache first", "offloaded first"])
def test_cache_dit(order: str) -> None:
    """Its FLUX has a forward of its own, which takes the place of the model's."""
    cache_dit = pytest.importorskip("cache_dit")
    from fxoffload.tiny import tiny_pipeline

    def enable(pipeline: Any) -> Any:
        settings = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 2, "residual_diff_threshold": 0.5}
        cache_dit.enable_cache(pipeline, cache_config=cache_dit.DBCacheConfig(**settings))
        return pipeline

    def generate(pipeline: Any) -> torch.Tensor:
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(1)
        how = {"height": 32, "width": 32, "num_inference_steps": 6, "generator": generator, "output_type": "pt"}
        return pipeline(prompt="a cat", **how).images

    wanted, pipeline = generate(enable(tiny_pipeline("flux"))), tiny_pipeline("flux")
    assert not torch.equal(generate(pipeline), wanted)
    if order == "cache first":
        enable(pipeline)
    with fxoffload.layerwise_offload(pipeline, onload_device="cpu", memory_budget="160KiB") as group:
        if order == "offloaded first":
            enable(pipeline)
        for k in (1, 2):
            assert torch.equal(generate(pipeline), wanted)
            stats = group["transformer"].stats()
            assert stats.forwards == 6 * k
            assert stats.restores <= 5
            assert stats.nbytes_copied > 0
    assert torch.equal(generate(pipeline), wanted)


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


@torch.no_grad()
def offload_half(model: nn.Module, how: str) -> None:
    """Within half of its weights, by hooks or compiled."""
    if how == "eager":
        fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=sum(p.nbytes for p in model.parameters()) // 2)
        return
    options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"}
    model.compile(backend=fxoffload.layerwise, options=options, fullgraph=True, dynamic=False)
    model(rows(0))
    halve(model)


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("at_first", [99, 1])
def test_early_exit(at_first: int, how: str) -> None:
    """Also where the first call leaves blocks out, which are packed when they are used."""
    torch.manual_seed(0)
    model = EarlyExit(6).eval().requires_grad_(False)
    plain = copy.deepcopy(model)
    model.last = at_first
    nbytes = sum(p.nbytes for p in model.parameters())
    offload_half(model, how)
    with torch.no_grad():
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
    run: Any = model
    offload_half(model, how)
    with torch.no_grad():
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
