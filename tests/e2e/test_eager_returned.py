"""Without a compiler: what modules return of their own weights stays right, and is the caller's to keep."""

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from tests.models import Block, Toy, rows
from tests.twins import LEVELS, call_under_no_grad, check, inputs, twins
from tests.wrapped import Scaled

D = 16


@dataclass
class Gated:
    x: torch.Tensor
    gate: torch.Tensor


RESULTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "tuple": lambda x, gate: (x, gate),
    "nested": lambda x, gate: [x, {"gate": [gate, gate]}],
    "mapping": lambda x, gate: OrderedDict(x=x, gate=gate),
    "dataclass": Gated,
}


def parts_of(result: Any) -> list[torch.Tensor]:
    if isinstance(result, Gated):
        return [result.x, result.gate]
    x, gate = result.values() if isinstance(result, dict) else result
    return [x, gate["gate"][1] if isinstance(gate, dict) else gate]


class Returning(nn.Module):
    """A block that returns a view of its gate beside its result."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block = Block(D)
        self.gate = nn.Parameter(torch.randn(2, D))
        self.kind = kind

    def forward(self, x: torch.Tensor) -> Any:
        return RESULTS[self.kind](self.block(x), self.gate[1])


class Gates(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Returning(kind) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        for block in self.blocks:
            result = block(x)
            assert type(result) is type(RESULTS[block.kind](x, x))  # type: ignore[index]
            y, gate = parts_of(result)
            kept.append(gate)
            x = x + y.tanh() * gate
        return x * torch.stack(kept).sum(0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", RESULTS)
def test_views_that_blocks_return(kind: str, level: str) -> None:
    with twins(lambda: Gates(kind), part=0.6, **LEVELS[level]) as (model, plain):
        check(model, plain, inputs(4))


class Positions(nn.Embedding):
    """As the learned positions of Whisper."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.weight[: len(input)]


class Listening(Toy):
    def __init__(self) -> None:
        super().__init__(4)
        self.positions = Positions(40_000, D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.positions(x))


def test_a_view_of_a_large_leaf_that_streams() -> None:
    with twins(Listening, part=1.1, persistent_buckets=0) as (model, plain):
        check(model, plain, inputs(4))
        assert fxoffload.get_plan(model).streamed_nbytes > model.positions.weight.nbytes


class Rooted(Toy):
    """Returns views of a weight of its own, and that weight."""

    def __init__(self) -> None:
        super().__init__(4)
        self.table = nn.Parameter(torch.randn(8, D))

    def forward(self, x: torch.Tensor) -> Any:
        rest = self.table[2:].t()
        return super().forward(x), self.table[:3], {"rest": rest, "again": rest}, self.table


def test_results_of_the_model_are_kept() -> None:
    with twins(Rooted, part=0.6) as (model, plain):
        for k in range(4):
            _, top, named, itself = call_under_no_grad(model, rows(k))  # type: ignore[misc]
            wanted = call_under_no_grad(plain, rows(k))
            kept = [t.clone() for t in (wanted[1], wanted[2]["rest"])]
            assert itself is model.table
            assert named["rest"] is named["again"]
            assert named["rest"].stride() == wanted[2]["rest"].stride()
            assert torch.equal(itself, plain.table)
            with torch.no_grad():
                for m in (model, plain):
                    m.table.mul_(1.5)
            call_under_no_grad(model, rows(k))
            assert all(map(torch.equal, (top, named["rest"]), kept))
            assert torch.equal(itself, plain.table)
        fxoffload.remove_layerwise_offload(model)
        assert all(map(torch.equal, (top, named["rest"]), kept))


def test_results_of_a_block_alone_are_kept() -> None:
    with twins(lambda: Gates("tuple"), part=0.6) as (model, plain):
        for k in range(5):
            got, wanted = (call_under_no_grad(m.blocks[k], rows(k)) for m in (model, plain))
            check(model, plain, inputs(2))
            assert all(map(torch.equal, got, wanted))


def test_results_of_a_forward_that_stands_in_are_kept() -> None:
    """Some library put its own forward in place of ours."""
    with twins(Rooted, part=0.6) as (model, plain):
        call_under_no_grad(model, rows(0))
        forward = vars(model).pop("forward")
        model.forward = lambda x: Rooted.forward(model, x)
        got, wanted = (call_under_no_grad(m, rows(1)) for m in (model, plain))
        vars(model)["forward"] = forward
        with torch.no_grad():
            model.table.fill_(3)
            plain.table.fill_(3)
        call_under_no_grad(model, rows(2))
        assert torch.equal(got[0], wanted[0])
        assert not (got[1] == 3).any()


class Quantized(nn.Module):
    """Returns a wrapper of its weight's kind, and what the caller brought, of kinds that we do not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(Scaled.of(torch.randn(D, D)), requires_grad=False)

    def forward(self, brought: Any) -> Any:
        return self.weight.detach(), brought


class Wrapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Quantized() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            brought = [x, torch.eye(3).to_sparse(), object()]
            weight, back = block(brought)
            assert type(weight) is Scaled
            assert back is brought
            x = (x @ weight.value()).tanh()
        return x


def test_wrappers_and_what_is_passed_through() -> None:
    with twins(Wrapping, persistent_buckets=0) as (model, plain):
        check(model, plain, inputs(4))


class Itself(nn.Module):
    """A module that returns its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, D))

    def forward(self) -> torch.Tensor:
        return self.weight


class Prompted(Toy):
    def __init__(self) -> None:
        super().__init__(5)
        self.prompt = Itself()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        prompt = self.prompt()
        assert prompt is self.prompt.weight
        return super().forward(x) @ prompt


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_that_its_module_returns(level: str) -> None:
    """It is read outside its unit, so it stays on the device."""
    with twins(Prompted, part=0.6, **LEVELS[level]) as (model, plain):
        check(model, plain, inputs(4))
        held = {id(kept.tensor()) for kept in api.planned_of(model)[-1]._managed.rest}
        assert id(model.prompt.weight) in held
        # And it is the host's between the calls.
        packed = api.engine_of(model).store.find(model.prompt.weight)
        assert packed is not None
        assert packed.view.data_ptr() == model.prompt.weight.data_ptr()


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), self.counts[1:3]


class Counted(nn.Module):
    """Writes through a view of a block's small buffer, which the block returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counter() for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, counts = block(x)
            counts += 1
            x = x + block.counts.sum()  # type: ignore[operator]
        return x


def test_what_is_written_to_a_returned_view_of_a_buffer_reaches_it() -> None:
    with twins(Counted, part=0.6) as (model, plain):
        check(model, plain, inputs(4))
        assert model.blocks[4].counts.tolist() == [0, 4, 4, 0]


@pytest.mark.parametrize("how", ["forward", "alone"])
def test_what_lies_elsewhere_is_returned_as_it_is(how: str) -> None:
    with twins(lambda: Toy(4), part=0.6) as (toy, _):
        kept: list[Any] = []
        toy.blocks[1].register_forward_hook(lambda *args: kept.append(args[-1]), prepend=True)
        toy.blocks[1].register_forward_hook(lambda *args: kept.append(args[-1]))
        call_under_no_grad(toy if how == "forward" else toy.blocks[1], rows(0))
        assert kept[0] is kept[1]
