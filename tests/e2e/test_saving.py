"""An offloaded model is saved, copied and pickled like any other, and what is saved has the weights as they are now."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import fxoffload
from tests.checks import assert_state, call, halve, offload, snapshot
from tests.models import CASES, first, rows, toy

HOWS = pytest.mark.parametrize("how", ["eager", "compiled", "in place"])
OPTIONS: dict[str, Any] = {"onload_device": "cpu", "segment_compiler": "eager"}


def offloaded(model: Any, how: str, given: Any) -> Any:
    """A model that has run in half of its weights; what to call."""
    nbytes = sum(p.nbytes for p in model.parameters())
    run = model
    if how == "eager":
        fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=int(nbytes * 0.8))
    elif how == "compiled":
        run = offload(model)
    else:
        model.compile(backend=fxoffload.layerwise, options=OPTIONS | {"memory_budget": "1GiB"})
    with torch.no_grad():
        call(run, given)
        if how != "eager":
            halve(model)
        call(run, given)
    assert fxoffload.stats(model).nbytes_copied > 0
    return run


@pytest.mark.parametrize("how", ["eager", "compiled"])
@pytest.mark.parametrize("name", ["flux", "llama"])
@pytest.mark.parametrize("shard", ["5GB", "20KB"])
def test_save_pretrained_and_back(name: str, how: str, shard: str, tmp_path: Path) -> None:
    case = CASES[name]
    model: Any = case.build()
    given = case.given(0)
    run = offloaded(model, how, given)
    with torch.no_grad():
        for p in model.parameters():
            p.data *= 1.25
        wanted = first(call(run, given)).clone()
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard == "20KB")
    again = type(model).from_pretrained(tmp_path).eval().requires_grad_(False)
    assert_state(again, snapshot(model))
    empty: Any = case.make().eval().requires_grad_(False)
    for module in empty.modules():
        for key, p in module._parameters.items():
            module._parameters[key] = None if p is None else torch.nn.Parameter(p.to("meta"), False)
    if hasattr(empty, "tie_weights"):
        empty.tie_weights()
    fxoffload.load_safetensors(empty, tmp_path)
    nbytes = sum(p.nbytes for p in empty.parameters())
    for other in (again, empty):
        with torch.no_grad(), fxoffload.layerwise_offload(other, onload_device="cpu", memory_budget=int(nbytes * 0.8)):
            torch.testing.assert_close(first(call(other, given)), wanted, rtol=1e-4, atol=1e-5)


@HOWS
def test_one_tensor_is_saved_with_its_own_bytes(how: str) -> None:
    model = toy(6, d=32)
    offloaded(model, how, rows(0, d=32))
    for tensor in (model.blocks[2].up.bias, model.blocks[3].up.weight, model.blocks[4].norm.weight.data[:3].clone()):
        file = io.BytesIO()
        torch.save(tensor, file)
        assert file.tell() < tensor.nbytes + 4096
        file.seek(0)
        assert torch.equal(torch.load(file), tensor)
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert file.tell() < 1.5 * sum(p.nbytes for p in model.parameters())


@HOWS
def test_copies_and_pickles_are_models_of_their_own(how: str) -> None:
    model, plain = toy(5), toy(5)
    run = offloaded(model, how, rows(0))
    with torch.no_grad():
        for m in (model, plain):
            m.blocks[1].up.weight.data += 0.5
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), pickle.loads(pickle.dumps(copy.copy(model)))):
            assert_state(twin, snapshot(plain))
            with pytest.raises(fxoffload.OffloadError, match="its weights are not offloaded yet"):
                fxoffload.stats(twin)
            # A copy can be offloaded beside the first one, and edited.
            twin_run = offloaded(twin, "eager", rows(1))
            assert torch.equal(twin_run(rows(2)), plain(rows(2)))
            for p in twin.parameters():
                p.zero_()
            assert torch.equal(run(rows(2)), plain(rows(2)))
        if how == "compiled":
            twin = copy.deepcopy(run)
            assert torch.equal(twin(rows(3)), plain(rows(3)))
            twin._orig_mod.out.weight.zero_()
        assert torch.equal(run(rows(3)), plain(rows(3)))


@HOWS
def test_requires_grad_can_change(how: str) -> None:
    model, plain = toy(4), toy(4)
    run = offloaded(model, how, rows(0))
    for wanted in (True, False, True):
        model.requires_grad_(wanted)
        assert all(p.requires_grad == wanted and p.is_leaf for p in model.parameters())
        with torch.no_grad():
            got = run(rows(1))
            assert not got.requires_grad
            assert torch.equal(got, plain(rows(1)))
    with pytest.raises(fxoffload.GradientError):
        run(rows(1))
    with torch.inference_mode():
        assert torch.equal(run(rows(2)), plain(rows(2)))
