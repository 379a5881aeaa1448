"""Tensors that a forward writes while their unit does not run: every write reaches the host, from the first forward on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from tests.checks import assert_state, attached, snapshot
from tests.models import Block, Toy, seeded

D = 512
"""A matrix of so many rows and columns is too large for a buffer that is resident from the start."""


class Memory(nn.Module):
    """A unit with a large buffer, which it reads, and which it counts its calls in if it `counts`."""

    def __init__(self, *, counts: bool = False, step: int = 1) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(D, D * step)[:, ::step])
        self.weight = nn.Parameter(torch.randn(D, D) / 16)
        self.counts = counts
        self.pointers: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.pointers.append(self.cache.data_ptr())
        if self.counts:
            self.cache += 1
        return x @ self.weight + self.cache[0]


class Written(Toy):
    """Writes the buffer of a unit from outside, around as many calls of the unit as it is told to make."""

    def __init__(self, *, calls: int, step: int = 1) -> None:
        super().__init__(3, D)
        self.memory = Memory(step=step)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.memory.cache.add_(1)
        for _ in range(self.calls):
            x = self.memory(x)
            self.memory.cache[0] += 1
        return x + self.memory.cache.mean()


class Scaling(Toy):
    """Reads and writes a parameter of a block, then calls the block, then reads what it wrote."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        weight: Any = self.blocks[1].up.weight  # type: ignore[union-attr]
        x = x + weight.mean()
        weight.mul_(1.1)
        for block in self.blocks:
            x = block(x)
        return self.out(x) + weight.mean()


class Calling(Block):
    """A block that calls another unit, which is registered elsewhere."""

    def __init__(self, d: int, callee: nn.Module) -> None:
        super().__init__(d)
        self.callee = [callee]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.callee[0](super().forward(x))


class Nested(nn.Module):
    """A unit that counts its calls runs inside others, and in some orders on its own before or after."""

    def __init__(self, *, alone: str) -> None:
        super().__init__()
        self.memory = Memory(counts=True)
        self.blocks = nn.ModuleList(Calling(D, self.memory) for _ in range(3))
        self.alone = alone

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.alone == "before":
            x = self.memory(x)
        for block in self.blocks:
            x = block(x)
        return self.memory(x) if self.alone == "after" else x


class Repeating(Toy):
    """Calls a unit as often as it is told to."""

    def __init__(self) -> None:
        super().__init__(3, D)
        self.memory = Memory()
        self.calls = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for _ in range(self.calls):
            x = self.memory(x)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "buffer": lambda: Written(calls=0),
    "buffer, then its unit": lambda: Written(calls=1),
    "buffer around its unit": lambda: Written(calls=3),
    "buffer with gaps": lambda: Written(calls=1, step=2),
    "parameter": lambda: Scaling(4, D),
    "nested": lambda: Nested(alone=""),
    "nested, then alone": lambda: Nested(alone="after"),
    "alone, then nested": lambda: Nested(alone="before"),
}


def twins(make: Callable[[], nn.Module], part: float) -> tuple[Any, Any]:
    """The model offloaded in a part of its weights, and one like it that is not."""
    model, plain = seeded(make), seeded(make)
    attached(model, part)
    return model, plain


def inputs(n: int) -> list[torch.Tensor]:
    return [torch.randn(2, D, generator=torch.Generator().manual_seed(k)) for k in range(n)]


@pytest.mark.parametrize("part", [0.8, 2.0], ids=["streamed", "resident"])
@pytest.mark.parametrize("name", MODELS)
def test_every_forward_equals_the_plain_model(name: str, part: float) -> None:
    model, plain = twins(MODELS[name], part)
    with torch.no_grad():
        for x in inputs(4):
            assert torch.equal(model(x), plain(x))
            assert_state(model, snapshot(plain))
    fxoffload.remove_layerwise_offload(model)
    assert_state(model, snapshot(plain))


@pytest.mark.parametrize("name", MODELS)
def test_what_a_forward_wrote_before_it_raised_is_kept(name: str) -> None:
    model, plain = twins(MODELS[name], 0.8)
    for m in (model, plain):
        handle = m.register_forward_hook(refuse)
        with torch.no_grad(), pytest.raises(ValueError, match="stop"):
            m(inputs(1)[0])
        handle.remove()
    assert_state(model, snapshot(plain))
    with torch.no_grad():
        for x in inputs(3):
            assert torch.equal(model(x), plain(x))
    assert_state(model, snapshot(plain))


def test_a_unit_that_wrote_is_on_the_device_when_it_is_called_again() -> None:
    """The second call is not in the plan, and what it reads is not looked at any more."""
    model, plain = twins(Repeating, 0.8)
    with torch.no_grad():
        for x in inputs(3):
            assert torch.equal(model(x), plain(x))
        for m in (model, plain):
            m.calls, m.memory.counts = 2, True
        assert torch.equal(model(inputs(1)[0]), plain(inputs(1)[0]))
    assert_state(model, snapshot(plain))
    assert len(model.memory.pointers) == 5
    assert model.memory.cache.data_ptr() not in model.memory.pointers


def refuse(*_: Any) -> None:
    raise ValueError("stop")
