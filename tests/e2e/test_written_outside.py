"""Tensors that a forward writes while their unit does not run: every write reaches the host, from the first forward on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.errors import WeightError
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


class Giving(Written):
    """Gives the buffer of a unit other memory before anything reads it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        cache = self.memory.cache
        self.memory.cache.data = torch.full_like(cache, float(x.sum()))
        x = self.memory(x) if self.calls else x
        return super().forward(x)


class Assigning(Toy):
    """Gives a weight of a block other memory, and lets only the block read it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        self.blocks[2].up.weight.data = torch.eye(2 * D, D) * x.mean()  # type: ignore[union-attr]
        for block in self.blocks:
            x = block(x)
        return self.out(x)


def add(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def add_and_assign(tensor: torch.Tensor) -> None:
    tensor.data += 1


def set_row(tensor: torch.Tensor) -> None:
    tensor.data[3] = tensor.data[3] + 1


def add_to_a_view(tensor: torch.Tensor) -> None:
    tensor.data[0].add_(1)


def write_out(tensor: torch.Tensor) -> None:
    torch.add(tensor.data, 1, out=tensor.data)


WRITES = (add, add_and_assign, set_row, add_to_a_view, write_out)


class Unseen(Toy):
    """Writes through `data`, which raises no version counter: a buffer from outside or inside of its unit."""

    def __init__(self, write: Callable[[torch.Tensor], None], *, inside: bool) -> None:
        super().__init__(3, D)
        self.memory = Memory()
        self.write, self.inside = write, inside
        if inside:
            self.memory.register_forward_pre_hook(lambda module, _: write(module.cache))  # type: ignore[arg-type]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.inside:
            self.write(self.memory.cache)
        return self.memory(super().forward(x))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "buffer": lambda: Written(calls=0),
    "buffer, then its unit": lambda: Written(calls=1),
    "buffer around its unit": lambda: Written(calls=3),
    "buffer with gaps": lambda: Written(calls=1, step=2),
    "parameter": lambda: Scaling(4, D),
    "nested": lambda: Nested(alone=""),
    "nested, then alone": lambda: Nested(alone="after"),
    "alone, then nested": lambda: Nested(alone="before"),
    "other memory": lambda: Giving(calls=0),
    "other memory, then its unit": lambda: Giving(calls=1),
    "other memory of a parameter": lambda: Assigning(4, D),
    **{f"data, {write.__name__}, outside": functools.partial(Unseen, write, inside=False) for write in WRITES},
    **{f"data, {write.__name__}, inside": functools.partial(Unseen, write, inside=True) for write in WRITES},
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


class Growing(Written):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory.cache.data = torch.zeros(2 * D, D)
        return self.memory(x)


def test_other_memory_of_another_layout_is_refused() -> None:
    model, _ = twins(lambda: Growing(calls=1), 0.8)
    text = r"^managed: memory\.cache: the model made it torch\.float32 \[1024, 512\] while it ran, and it is"
    for _ in range(2):
        with torch.no_grad(), pytest.raises(WeightError, match=text):
            model(inputs(1)[0])
    assert model.memory.cache.shape == (D, D)


class Resizing(Toy):
    """Gives a small buffer, which is on the device until the forward ends, another shape if it is told to."""

    resizes = False

    def __init__(self) -> None:
        super().__init__(4)
        self.register_buffer("total", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x) + self.total.sum()
        if self.resizes:
            self.total.data = torch.ones(8)
        return x


def test_a_forward_whose_last_writes_are_refused_is_over() -> None:
    model, plain = seeded(Resizing), seeded(Resizing)
    attached(model, 0.6)
    given = [torch.randn(3, 16) for _ in range(3)]
    with torch.no_grad():
        model(given[0])
        model.resizes = True
        with pytest.raises(WeightError, match=r"^managed: total: the model made it torch\.float32 \[8\] while it ran"):
            model(given[0])
        model.resizes = False
        assert not any(one.running for one in api.planned_of(model))
        fxoffload.set_memory_budget(model, "1MiB")
        assert model.total.shape == (4,)
        for x in given:
            assert torch.equal(model(x), plain(x))


def refuse(*_: Any) -> None:
    raise ValueError("stop")
