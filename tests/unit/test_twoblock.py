"""The two-block scheme: right results, two blocks on the device at a time, all bytes once a forward, and away again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxoffload.errors import ConfigError
from fxoffload.twoblock import TwoBlockHooks
from tests.models import Toy, rows, toy

CPU = torch.device("cpu")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    assert isinstance(model, Toy)
    return list(model.blocks)


@torch.no_grad()
def test_equal_and_counted() -> None:
    model = toy(5)
    inputs = [rows(k, 16, 4) for k in range(3)]
    expected = [model(x) for x in inputs]
    nbytes = sum(p.nbytes for block in blocks_of(model) for p in block.parameters())
    hooks = TwoBlockHooks(model, blocks_of(model), CPU)
    for x, wanted in zip(inputs, expected, strict=True):
        assert torch.equal(model(x), wanted)
        assert hooks.nbytes_copied == nbytes


@torch.no_grad()
def test_two_blocks_at_a_time() -> None:
    model = toy(5)
    present: list[list[int]] = []
    for block in blocks_of(model):
        block.up.register_forward_hook(
            lambda *_: present.append([i for i, b in enumerate(blocks_of(model)) if b.up.weight.numel() > 1])
        )
    TwoBlockHooks(model, blocks_of(model), CPU)
    model(rows(0, 16, 4))
    assert present == [[0, 1], [1, 2], [2, 3], [3, 4], [0, 4]]


@torch.no_grad()
def test_removed() -> None:
    model = toy(4)
    before = {name: p.clone() for name, p in model.named_parameters()}
    hooks = TwoBlockHooks(model, blocks_of(model), CPU)
    model(rows(0, 16, 4))
    hooks.remove()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@torch.no_grad()
def test_blocks_of_several_dtypes() -> None:
    model = toy(3)
    for block in blocks_of(model):
        block.norm.double()
        block.norm.register_forward_pre_hook(lambda _, args: (args[0].double(),))
        block.norm.register_forward_hook(lambda *args: args[2].float())
    x = rows(0, 16, 4)
    expected = model(x)
    TwoBlockHooks(model, blocks_of(model), CPU)
    assert torch.equal(model(x), expected)


def test_one_block_is_too_few() -> None:
    model = toy(1)
    with pytest.raises(ConfigError) as caught:
        TwoBlockHooks(model, blocks_of(model), CPU)
    assert str(caught.value) == "twoblock: Toy: it has 1 blocks, and the scheme needs two"
