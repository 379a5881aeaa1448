"""Parts of a model offloaded without a compiler, compiled on their own: by another backend they stream, by ours they must not."""

# pyright: reportPrivateUsage=false, reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import OffloadError
from fxoffload.transfer import ThreadTransfer
from tests.checks import DELAY_S, assert_state, snapshot
from tests.models import rows, toy

pytestmark = [
    pytest.mark.filterwarnings("ignore:eager. an offloaded model is compiled by another backend"),
    pytest.mark.filterwarnings("ignore:backend. graph break"),
]

OPTIONS = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"}


def in_place(model: Any, **how: Any) -> None:
    for block in model.blocks:
        block.compile(**how)


def wrapped(model: Any, **how: Any) -> None:
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, **how)


def inside(model: Any, **how: Any) -> None:
    """A part of each block."""
    for block in model.blocks:
        block.up.compile(**how)


WAYS: dict[str, Callable[..., None]] = {"in place": in_place, "wrapped": wrapped, "inside": inside}


def offload(model: nn.Module, **settings: Any) -> Any:
    nbytes = sum(p.nbytes for p in model.parameters())
    handle = fxoffload.layerwise_offload(model, **{"onload_device": "cpu", "memory_budget": nbytes // 2, **settings})
    assert isinstance(handle.engine.transfer, ThreadTransfer)
    handle.engine.transfer.delay_s = DELAY_S
    return handle


def check(model: Any, plain: Any, n: int) -> list[int]:
    """Every call is equal. Returns the bytes that each copied."""
    copied: list[int] = []
    with torch.no_grad():
        for k in range(n):
            assert torch.equal(model(rows(k)), plain(rows(k)))
            copied.append(fxoffload.stats(model).nbytes_copied)
    return copied


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["before the offload", "before the first call", "later"])
def test_another_backend_compiles_parts(way: str, when: str) -> None:
    model, plain = toy(6), toy(6)
    state = snapshot(plain)
    if when == "before the offload":
        WAYS[way](model, backend="aot_eager")
    handle = offload(model)
    if when == "later":
        check(model, plain, 2)
    if when != "before the offload":
        WAYS[way](model, backend="aot_eager")
    assert min(check(model, plain, 6)) > 0
    plan, stats = handle.get_plan(), handle.stats()
    assert stats.nbytes_copied == plan.streamed_nbytes
    assert stats.restores <= 3
    handle.set_memory_budget(handle.smallest_budget())
    check(model, plain, 3)
    handle.remove()
    with torch.no_grad():
        assert torch.equal(model(rows(1)), plain(rows(1)))
    if way != "wrapped":
        assert_state(model, state)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("when", ["before the offload", "called before", "before the first call", "later"])
@pytest.mark.parametrize("options", [OPTIONS, {"segment_compiler": "eager"}], ids=["options", "those of the model"])
def test_our_backend_refuses_parts_inside_of_a_call(way: str, when: str, options: dict[str, Any]) -> None:
    if options is not OPTIONS and when in ("before the offload", "called before"):
        pytest.skip("there are none yet")
    model, plain = toy(6), toy(6)
    state = snapshot(plain)
    if when in ("before the offload", "called before"):
        WAYS[way](model, backend="layerwise", options=options)
    if when == "called before":
        with torch.no_grad():
            model(rows(0))
    handle = offload(model)
    if when == "later":
        check(model, plain, 2)
    if when in ("before the first call", "later"):
        WAYS[way](model, backend="layerwise", options=options)
    for _ in range(3):
        with torch.no_grad(), pytest.raises(OffloadError, match=r"Toy: a part of it is compiled with backend='layerwise'.*whole"):
            model(rows(0))
    # On their own they may run, in turn with the model's blocks.
    with torch.no_grad():
        for k in (1, 2, 1):
            got, wanted = (m.blocks[k].up(rows(k)) if way == "inside" else m.blocks[k](rows(k)) for m in (model, plain))
            assert torch.equal(got, wanted)
    with torch.no_grad(), pytest.raises(OffloadError, match="Toy"):
        model(rows(0))
    # What the error says works.
    for module in model.modules():
        module._compiled_call_impl = None
    for i, block in enumerate(model.blocks):
        model.blocks[i] = getattr(block, "_orig_mod", block)
    assert min(check(model, plain, 4)) > 0
    run = torch.compile(model, backend="layerwise", fullgraph=True, options={"segment_compiler": "eager"})
    with torch.no_grad():
        for k in range(3):
            assert torch.equal(run(rows(k)), plain(rows(k)))
            assert handle.stats().nbytes_copied > 0
    handle.remove()
    assert_state(model, state)


def test_parts_compiled_by_our_backend_work_when_the_offload_is_removed() -> None:
    model, plain = toy(6), toy(6)
    handle = offload(model)
    in_place(model, backend="layerwise", options=OPTIONS)
    with torch.no_grad(), pytest.raises(OffloadError, match="a part of it"):
        model(rows(0))
    handle.remove()
    with torch.no_grad():
        for k in range(3):
            assert torch.equal(model(rows(k)), plain(rows(k)))


@pytest.mark.parametrize("backend", ["aot_eager", "layerwise"])
def test_compile_repeated_blocks_of_diffusers(backend: str) -> None:
    from fxoffload.tiny import tiny_pipeline

    pipeline, plain = tiny_pipeline("flux"), tiny_pipeline("flux")

    def generate(pipe: Any) -> torch.Tensor:
        pipe.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(1)
        how = {"height": 32, "width": 32, "num_inference_steps": 2, "generator": generator, "output_type": "pt"}
        return pipe(prompt="a cat", **how).images

    wanted = generate(plain)
    with fxoffload.layerwise_offload(pipeline, onload_device="cpu", memory_budget="600KiB") as group:
        pipeline.transformer.compile_repeated_blocks(backend=backend)
        if backend == "layerwise":
            with pytest.raises(OffloadError, match=r"FluxTransformer2DModel: a part of it is compiled"):
                generate(pipeline)
        else:
            for _ in range(2):
                torch.testing.assert_close(generate(pipeline), wanted, rtol=1e-4, atol=1e-4)
            assert group["transformer"].stats().nbytes_copied > 0
