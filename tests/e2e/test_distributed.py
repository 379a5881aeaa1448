"""Weights that are spread over ranks: what lies on this one streams, and results are those of the whole model."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.select import tensors_below
from tests.checks import assert_streams, attached, halve, offload
from tests.models import Toy, seeded

D = 64


def given(k: int) -> torch.Tensor:
    return torch.randn(3, D, generator=torch.Generator().manual_seed(k))


def whole() -> nn.Module:
    return seeded(lambda: Toy(4, D))


def sharded(mesh: Any) -> nn.Module:
    """Every weight is cut by rows."""
    from torch.distributed.tensor import Shard, distribute_tensor

    model = whole()
    for module in model.modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(parameter.data, mesh, [Shard(0)])
            setattr(module, key, nn.Parameter(shard, requires_grad=False))
    return model


def gathered(model: Any, mesh: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A call with an input that every rank has, and the whole result on every rank."""
    from torch.distributed.tensor import Replicate, distribute_tensor

    return lambda x: model(distribute_tensor(x, mesh, [Replicate()])).full_tensor()


@pytest.fixture
def mesh() -> Iterator[Any]:
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def test_one_rank(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor

    model, plain = sharded(mesh), sharded(mesh)
    attachment = attached(model, 0.6)
    with torch.no_grad():
        for k in range(3):
            assert torch.equal(gathered(model, mesh)(given(k)), gathered(plain, mesh)(given(k)))
            assert fxoffload.stats(model).nbytes_copied > 0
        attachment.detach()
        compiled = gathered(offload(model, segment_compiler="aot_eager"), mesh)
        expected = [compiled(given(k)) for k in range(3)]
        halve(model)
        for k in range(3):
            assert torch.equal(compiled(given(k)), expected[k])
            torch.testing.assert_close(expected[k], gathered(plain, mesh)(given(k)))
    assert_streams(model)
    assert type(model.get_parameter("inp.weight")) is DTensor
    assert {w.name for w in api.bindings_of(model)[-1].program.facts.weights} == {name for name, _ in tensors_below(model)}


RANK = """
import sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from tests.e2e.test_distributed import run_on_a_rank
torch.set_num_threads(1)
rank, how, path = int(sys.argv[1]), *sys.argv[2:]
dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
run_on_a_rank(how, init_device_mesh("cpu", (2,)))
dist.barrier()
dist.destroy_process_group()
"""


@torch.no_grad()
def run_on_a_rank(how: str, mesh: Any) -> None:
    model, reference = sharded(mesh), whole()
    if how == "hooks":
        attached(model, 0.6)
        call = gathered(model, mesh)
    else:
        call = gathered(offload(model, segment_compiler=how), mesh)
        call(given(0))
        halve(model)
    for k in range(3):
        torch.testing.assert_close(call(given(k)), reference(given(k)))
    assert_streams(model)
    # Half of every weight, and no more than half of what streams in a step.
    own = {name: 2 * tensor.numel() for name, tensor in tensors_below(model)}
    assert own == {f"{name}._local_tensor": p.numel() for name, p in reference.named_parameters()}
    assert fxoffload.stats(model).nbytes_host < 0.55 * sum(p.nbytes for p in reference.parameters())
    if how != "hooks":
        # Blocks are one program, whatever the ends are placed like.
        program = api.bindings_of(model)[-1].program
        assert program.distinct < len(program.blocks.segments) == 6


@pytest.mark.parametrize("how", ["hooks", "eager", "aot_eager"])
def test_two_ranks(how: str, tmp_path: Path) -> None:
    """What crosses from block to block is placed over the ranks in one way or another, and compiled for just that."""
    argv = [sys.executable, "-c", RANK]
    ranks = [
        subprocess.Popen(
            [*argv, str(k), how, str(tmp_path / "store")], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for k in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(said)
