"""One life of a model, twice: offloaded, compiled and eager in turn, and plain. Whatever is done to one is done to the other."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.transfer import ThreadTransfer
from tests.models import Block, seeded

D = 8
BLOCKS = 4
DELAY_S = 0.0002
Change = Callable[[Any], object]


class Net(nn.Module):
    """Blocks, two ends that share a weight, a buffer that counts calls in every block, and one that is saved nowhere."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(D, D)
        self.blocks = nn.ModuleList(_Counted(D) for _ in range(BLOCKS))
        self.out = nn.Linear(D, D)
        self.out.weight = self.inp.weight
        self.register_buffer("shift", torch.randn(D), persistent=False)
        self.fails = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class _Counted(Block):
    def __init__(self, d: int) -> None:
        super().__init__(d)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) + 0.1 * self.calls


class Adapted(nn.Module):
    """A linear layer with a low-rank part beside it, as PEFT injects."""

    def __init__(self, base: nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        make = torch.Generator().manual_seed(seed)
        dtype = base.weight.dtype
        self.a = nn.Parameter(torch.randn(2, base.in_features, generator=make).to(dtype) * 0.3, requires_grad=False)
        self.b = nn.Parameter(torch.randn(base.out_features, 2, generator=make).to(dtype) * 0.3, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


# -- what can be done to a model ---------------------------------------------------------------------------------------


def linear(model: Any, i: int, name: str) -> nn.Linear:
    layer = getattr(model.blocks[i % len(model.blocks)], name)
    return layer.base if isinstance(layer, Adapted) else layer


def _replace(layer: nn.Linear, value: torch.Tensor) -> None:
    layer.weight = nn.Parameter(value, requires_grad=False)


def _swap(model: Any, i: int) -> None:
    a, b = linear(model, i, "up"), linear(model, i + 1, "up")
    a.weight, b.weight = b.weight, a.weight


def _swap_data(model: Any, i: int) -> None:
    a, b = linear(model, i, "down").weight, linear(model, i + 2, "down").weight
    a.data, b.data = b.data, a.data


def _swap_blocks(model: Any, i: int) -> None:
    j, k = i % len(model.blocks), (i + 1) % len(model.blocks)
    model.blocks[j], model.blocks[k] = model.blocks[k], model.blocks[j]


def _data_plus(weight: torch.Tensor) -> None:
    weight.data += 0.25


def _set_data(weight: torch.Tensor, value: torch.Tensor) -> None:
    weight.data = value


def _tie(model: Any, i: int) -> None:
    linear(model, i, "up").weight = linear(model, i + 1, "up").weight


def _share(model: Any, i: int) -> None:
    """Two parameters over one memory, as `p.data = other.data` makes them."""
    linear(model, i, "down").weight.data = linear(model, i + 1, "down").weight.data


def _share_part(model: Any, i: int) -> None:
    """A parameter that is a view of rows of another one."""
    layer = linear(model, i, "up")
    linear(model, i, "down").bias = nn.Parameter(layer.weight.data[1], requires_grad=False)


def _untie(model: Any, i: int) -> None:
    del i
    model.out.weight = nn.Parameter(model.out.weight.clone() * 1.1, requires_grad=False)


def _adapt(model: Any, i: int) -> None:
    block = model.blocks[i % len(model.blocks)]
    block.up = block.up.base if isinstance(block.up, Adapted) else Adapted(block.up, i)


def _swap_adapters(model: Any, i: int) -> None:
    for layer in model.modules():
        if isinstance(layer, Adapted):
            layer.a.copy_(Adapted(layer.base, i).a)
            layer.b.data.copy_(Adapted(layer.base, i + 1).b)


def _merge(model: Any, i: int) -> None:
    for layer in model.modules():
        if isinstance(layer, Adapted):
            layer.base.weight.data += 0.5 * (layer.b @ layer.a)


def _through_a_file(model: Any, i: int) -> None:
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        save_file({name: value.contiguous().clone() for name, value in model.state_dict().items()}, path)
        state = {name: value * 0.9 for name, value in load_file(path).items()}
        model.load_state_dict(state, strict=False, assign=bool(i % 2))


def _load_some(model: Any, i: int) -> None:
    state = {name: value.clone() * 1.1 for name, value in model.state_dict().items() if name.startswith(f"blocks.{i % 4}.")}
    model.load_state_dict(state, strict=False, assign=bool(i % 2))


def _refuse_loading(model: Any, i: int) -> None:
    """A strict load of part of a state raises; what it had of names that are there is loaded all the same, as torch does."""
    state = {"nothing": torch.zeros(1), "out.bias": torch.full_like(model.out.bias, 0.1 * i)}
    with contextlib.suppress(RuntimeError):
        model.load_state_dict(state)


def _load_all(model: Any, i: int) -> None:
    model.load_state_dict({name: value.clone() * 0.95 for name, value in model.state_dict().items()}, assign=bool(i % 2))


def _shorten(model: Any, i: int) -> None:
    if len(model.blocks) > 2:
        model.blocks.pop(i % len(model.blocks))


def _lengthen(model: Any, i: int) -> None:
    if len(model.blocks) < 6:
        model.blocks.append(seeded(lambda: _Counted(D), i).to(model.inp.weight.dtype))


CHANGES: dict[str, Callable[[Any, int], object]] = {
    "in place": lambda m, i: linear(m, i, "up").weight.mul_(1.25),
    "bias": lambda m, i: linear(m, i, "down").bias.add_(0.5),
    "one row": lambda m, i: linear(m, i, "up").weight[1].fill_(0.3),
    "detached": lambda m, i: linear(m, i, "down").weight.detach().mul_(0.8),
    "data in place": lambda m, i: linear(m, i, "up").weight.data.add_(0.2),
    "data +=": lambda m, i: _data_plus(linear(m, i, "down").weight),
    "data =": lambda m, i: _set_data(linear(m, i, "up").weight, linear(m, i, "up").weight * 1.1),
    "new parameter": lambda m, i: _replace(linear(m, i, "up"), linear(m, i, "up").weight * 0.9),
    "transposed": lambda m, i: _replace(linear(m, i, "up"), linear(m, i, "up").weight.t().contiguous().t()),
    "shared end": lambda m, i: m.out.weight.mul_(1.05),
    "hidden buffer": lambda m, i: m.shift.add_(0.1),
    "counter": lambda m, i: m.blocks[i % len(m.blocks)].calls.zero_(),
    "new buffer": lambda m, i: setattr(m.blocks[i % len(m.blocks)], "calls", torch.full((), 2.0, dtype=m.inp.weight.dtype)),
    "swap": _swap,
    "swap data": _swap_data,
    "swap blocks": _swap_blocks,
    "tie": _tie,
    "share": _share,
    "share part": _share_part,
    "untie": _untie,
    "adapt": _adapt,
    "swap adapters": _swap_adapters,
    "merge": _merge,
    "file": _through_a_file,
    "load some": _load_some,
    "load nothing": _refuse_loading,
    "load all": _load_all,
    "shorten": _shorten,
    "lengthen": _lengthen,
    "double": lambda m, i: m.double(),
    "float": lambda m, i: m.float(),
    "gradients": lambda m, i: m.requires_grad_(bool(i % 2)),
    "train": lambda m, i: m.train(bool(i % 2)),
    "zero_grad": lambda m, i: m.zero_grad(),
}


class Life:
    """A model and its plain twin. Each method is one step, and leaves both equal."""

    def __init__(self) -> None:
        self.model: Any = seeded(Net)
        self.plain: Any = seeded(Net)
        self._compile()

    def _compile(self) -> None:
        options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"}
        self.compiled = torch.compile(self.model, backend=fxoffload.layerwise, fullgraph=True, dynamic=False, options=options)

    def change(self, name: str, i: int) -> None:
        with torch.no_grad():
            CHANGES[name](self.model, i)
            CHANGES[name](self.plain, i)

    def forward(self, how: str, i: int) -> None:
        """One call. `how`: `compiled`, or `module`, which is eager where the model is attached."""
        x = torch.randn(1 + i % 2, D, generator=torch.Generator().manual_seed(i)).to(self.plain.inp.weight.dtype)
        run = self.compiled if how == "compiled" else self.model
        self._delay()
        with torch.no_grad() if i % 3 else torch.inference_mode():
            try:
                got = run(x)
            except fxoffload.BudgetError as error:
                fxoffload.set_memory_budget(self.model, error.smallest_nbytes)
                got = run(x)
            assert torch.equal(got, self.plain(x))

    def refuse(self, how: str) -> None:
        """An input of a wrong shape, which some layer refuses."""
        x = torch.randn(2, D + 1, dtype=self.plain.inp.weight.dtype)
        run = self.compiled if how == "compiled" else self.model
        with torch.no_grad(), pytest.raises(RuntimeError):
            run(x)

    def refresh(self, i: int) -> None:
        """An edit of one element that leaves no trace, and is told of."""
        for model in (self.model, self.plain):
            linear(model, i, "up").weight.data[1, i] += 0.5
        with contextlib.suppress(fxoffload.OffloadError):
            fxoffload.refresh(self.model)

    def budget(self, part: float) -> None:
        nbytes = sum(p.nbytes for p in self.plain.parameters())
        with contextlib.suppress(fxoffload.OffloadError):
            fxoffload.set_memory_budget(self.model, int(nbytes * part) + 4096)

    def attach(self, part: float) -> None:
        nbytes = sum(p.nbytes for p in self.plain.parameters())
        with contextlib.suppress(fxoffload.OffloadError):
            fxoffload.layerwise_offload(self.model, onload_device="cpu", memory_budget=int(nbytes * part) + 4096)

    def remove(self) -> None:
        fxoffload.remove_layerwise_offload(self.model)

    def copies(self) -> None:
        """A copy is a plain model with the same weights, and no part of the first."""
        twin = copy.deepcopy(self.model)
        assert not differences(twin, self.plain)
        with torch.no_grad():
            for p in twin.parameters():
                p.zero_()

    def check(self) -> None:
        """The two have the same weights, under the same names and in the same layout."""
        assert not differences(self.model, self.plain)

    def _delay(self) -> None:
        with contextlib.suppress(fxoffload.OffloadError):
            transfer = api.engine_of(self.model).transfer
            assert isinstance(transfer, ThreadTransfer)
            transfer.delay_s = DELAY_S


def differences(model: nn.Module, plain: nn.Module) -> list[str]:
    """Where the state of a model differs from its twin's: in names, values, layouts or kinds."""
    a, b = model.state_dict(keep_vars=True), plain.state_dict(keep_vars=True)
    found = [] if list(a) == list(b) else [f"names {list(a)} {list(b)}"]
    for name in [name for name in a if name in b]:
        mine, other = (t[name].detach() for t in (a, b))
        kinds = [(t[name].shape, t[name].stride(), t[name].dtype, t[name].requires_grad, type(t[name])) for t in (a, b)]
        if kinds[0] != kinds[1]:
            found.append(f"{name}: {kinds[0]} {kinds[1]}")
        elif not torch.equal(mine, other):
            found.append(f"{name}: {mine.flatten()[:4].tolist()} {other.flatten()[:4].tolist()}")
    return found
