"""Weights that consist of several tensors stream by these: few bytes, the same results, and the objects stay what they were."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.buckets import align
from fxoffload.errors import OffloadWarning
from fxoffload.managed import Managed
from fxoffload.select import tensors_below
from tests.capturing import captures
from tests.checks import Trio, assert_state, assert_streams, attached, check_budgets, halve, offload, snapshot
from tests.models import Toy, seeded
from tests.pinning import pinning
from tests.wrapped import KINDS, D, Scaled, requantized, rows

__all__ = ["captures"]


def sizes(model: nn.Module) -> dict[str, int]:
    """Bytes of every plain tensor, by its name."""
    return {name: tensor.numel() * tensor.element_size() for name, tensor in tensors_below(model)}


def is_leaf(_: str, module: nn.Module) -> bool:
    return next(module.children(), None) is None


def objects(model: nn.Module) -> list[Any]:
    """Every weight, its class, and every plain tensor."""
    weights = list(model.parameters())
    return [*weights, *map(type, weights), *(tensor for _, tensor in tensors_below(model))]


def same(found: list[Any], expected: list[Any]) -> bool:
    return len(found) == len(expected) and all(a is b for a, b in zip(found, expected, strict=True))


@torch.no_grad()
def assert_equal_calls(model: Any, plain: Any, k: int, calls: int = 3) -> None:
    """Several calls give what the plain model gives, bit for bit."""
    for i in range(calls):
        given = rows(plain, k + i)
        assert torch.equal(model(given), plain(given))


# -- every kind, every budget ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_compiled_under_every_budget(kind: str) -> None:
    make, part = KINDS[kind]
    model = make()
    before, wanted = objects(model), sizes(make())
    check_budgets(model, [rows(model, k) for k in range(3)])
    assert same(objects(model), before)
    facts = {w.name: w.nbytes for w in api.bindings_of(model)[-1].program.facts.weights}
    assert facts == {name: nbytes for name, nbytes in wanted.items() if not name.endswith("state2.code")}
    plan = fxoffload.get_plan(model)
    assert plan.streamed_nbytes + plan.resident_nbytes == sum(map(align, facts.values()))
    elements = sum(m.in_features * m.out_features for m in model.modules() if isinstance(m, nn.Linear))
    linear = sum(nbytes for name, nbytes in facts.items() if "weight" in name and "norm" not in name)
    assert part * 4 * elements <= linear <= part * 4 * elements * 1.25


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("kind", ["int8", "nested"])
def test_segments_are_compiled_with_plain_inputs(kind: str, compiler: str) -> None:
    model = KINDS[kind][0]()
    check_budgets(model, [rows(model, k) for k in range(2)], segment_compiler=compiler)
    # Blocks are equal, whatever the objects that their wrappers are made with.
    assert api.bindings_of(model)[-1].program.distinct == 2


@pytest.mark.parametrize("level", ["blocks", "leaves"])
@pytest.mark.parametrize("kind", KINDS)
def test_without_a_compiler(kind: str, level: str) -> None:
    make, _ = KINDS[kind]
    model, plain = make(), make()
    before = objects(model)
    state = snapshot(plain)
    for part in (0.45, 0.8, 2.0):
        attachment = attached(model, part, **({"module_filter": is_leaf} if level == "leaves" else {}))
        assert_equal_calls(model, plain, 0)
        stats = fxoffload.stats(model)
        assert stats.nbytes_host == sum(map(align, sizes(model).values()))
        assert (stats.nbytes_copied > 0) == (part < 1)
        assert same(objects(model), before)
        assert_state(model, state)
        attachment.detach()
        assert_equal_calls(model, plain, 3, 1)
    assert_state(model, state)


class Unpinnable(Scaled):
    """Refuses to say whether it is pinned, and to be."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.Tensor.is_pinned, torch.Tensor.pin_memory)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_a_wrapper_is_never_asked_about_pinning(way: str) -> None:
    model, plain = (requantized(seeded(lambda: Toy(4, D)), Unpinnable.of) for _ in range(2))
    with pytest.raises(AssertionError):
        model.get_parameter("inp.weight").is_pinned()
    with pinning(1 << 30):
        run: Any = offload(model) if way == "compiled" else model
        if way == "eager":
            attached(model, 0.5)
        assert_close_calls(run, plain, 0)
        if way == "compiled":
            halve(model)
        assert_close_calls(run, plain, 1)
        stats = fxoffload.stats(model)
        assert stats.nbytes_copied > 0
        assert stats.nbytes_pinned == stats.nbytes_host == sum(map(align, sizes(model).values()))
        del model, run


# -- edits -------------------------------------------------------------------------------------------------------------


def up(model: Any, i: int) -> Any:
    return model.blocks[i].up


def swap(a: Any, b: Any) -> None:
    a.weight, b.weight = b.weight, a.weight


def other(values: int) -> Any:
    """A weight of other values."""
    return Scaled.of(torch.randn(2 * D, D, generator=torch.Generator().manual_seed(values)))


EDITS: dict[str, Callable[[Any], object]] = {
    "inner in place": lambda m: up(m, 1).weight.scale.mul_(2),
    "inner data +=": lambda m: up(m, 2).weight.data_.data.neg_(),
    "inner data =": lambda m: setattr(up(m, 0).weight.scale, "data", torch.full((2 * D, 1), 0.02)),
    "inner replaced": lambda m: setattr(up(m, 3).weight, "scale", torch.full((2 * D, 1), 0.03)),
    "copied into": lambda m: up(m, 2).weight.copy_(other(1)),
    "another parameter": lambda m: setattr(up(m, 2), "weight", nn.Parameter(other(2), requires_grad=False)),
    "swapped": lambda m: swap(up(m, 0), up(m, 3)),
    "loaded": lambda m: m.load_state_dict({**m.state_dict(), "blocks.1.up.weight": other(3)}),
    "assigned": lambda m: m.load_state_dict({**m.state_dict(), "blocks.1.up.weight": other(4)}, assign=True),
    "swapped by torch": lambda m: torch.utils.swap_tensors(up(m, 2).weight, nn.Parameter(other(5), requires_grad=False)),
}


def test_wrappers_that_say_that_they_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """To say so reads no weight: none becomes resident for it."""
    make = Managed.__init__

    def on_cuda(self: Managed, *args: Any) -> None:
        make(self, *args)
        self._device = torch.device("cuda", 0)

    monkeypatch.setattr(Managed, "__init__", on_cuda)
    model, reference = (KINDS["scaled"][0]() for _ in range(2))
    seen: list[str] = []
    model.blocks[1].up.register_forward_pre_hook(lambda module, _: seen.append(module.weight.device.type))
    fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="1GiB")
    with torch.no_grad():
        for k in range(3):
            assert torch.equal(model(rows(model, k)), reference(rows(model, k)))
    assert seen == ["cuda"] * 3
    assert model.blocks[1].up.weight.device.type == "cpu"
    assert {b.name for b in api.planned_of(model)[-1].costs.buckets if b.keep} == {"rest"}


def test_compiled_sees_edits() -> None:
    make = KINDS["scaled"][0]
    given = rows(make(), 0)
    trio = Trio(make, given)
    for k, (label, edit) in enumerate(EDITS.items()):
        before = trio.check(given)
        trio.edit(edit)
        assert not torch.equal(trio.check(given), before), label
        trio.check_state()
        trio.check(rows(trio.eager, k))
    assert_streams(trio.streamed)
    assert len(api.bindings_of(trio.streamed)[-1].program.facts.weights) == len(sizes(trio.eager))


@pytest.mark.parametrize("part", [0.5, 2.0])
def test_eager_sees_edits(part: float) -> None:
    model, plain = KINDS["scaled"][0](), KINDS["scaled"][0]()
    attachment = attached(model, part)
    assert_equal_calls(model, plain, 0)
    for k, edit in enumerate(EDITS.values()):
        with torch.no_grad():
            edit(model)
            edit(plain)
        assert_equal_calls(model, plain, 3 * k, 2)
        assert_state(model, snapshot(plain))
    attachment.detach()
    assert_equal_calls(model, plain, 1)


TIES: list[Callable[[Any], object]] = [
    lambda m: setattr(up(m, 0).weight.scale, "data", up(m, 2).weight.scale.data),
    lambda m: up(m, 2).weight.scale.mul_(2),
    lambda m: setattr(up(m, 0).weight.scale, "data", up(m, 0).weight.scale.data.clone()),
    lambda m: up(m, 2).weight.scale.data.add_(0.01),
    lambda m: up(m, 3).weight.scale.mul_(2),
]
"""Of inner tensors, which come and go; and an edit of one that was tied from the start."""


def tied() -> nn.Module:
    """Two wrappers over the same bytes."""
    model: Any = KINDS["scaled"][0]()
    weight = up(model, 1).weight
    up(model, 3).weight = nn.Parameter(Scaled(weight.data_.detach(), weight.scale.detach()), requires_grad=False)
    return model


def test_compiled_keeps_ties_of_inner_tensors() -> None:
    given = rows(tied(), 0)
    trio = Trio(tied, given)
    for change in TIES:
        trio.edit(change)
        trio.check(given)
        trio.check_state()


def test_eager_keeps_ties_of_inner_tensors() -> None:
    model, plain = tied(), tied()
    attached(model, 0.5)
    for k, change in enumerate(TIES):
        assert_equal_calls(model, plain, k, 1)
        with torch.no_grad():
            change(model)
            change(plain)
        assert_equal_calls(model, plain, k, 1)
        assert_state(model, snapshot(plain))


@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_edits_of_what_is_beside_a_weight(way: str) -> None:
    make = KINDS["packed"][0]
    model, plain = make(), make()
    run: Any = offload(model) if way == "compiled" else model
    attachment = attached(model, 0.5) if way == "eager" else None
    assert_close_calls(run, plain, 0)
    if way == "compiled":
        halve(model)
    for k, edit in enumerate(
        [
            lambda m: up(m, 1).weight.quant_state.absmax.fill_(7),
            lambda m: up(m, 2).weight.quant_state.state2.absmax.data.mul_(2),
            lambda m: setattr(up(m, 0).weight.quant_state, "absmax", up(m, 3).weight.quant_state.absmax.clone()),
            lambda m: setattr(up(m, 2).weight, "quant_state", copy.deepcopy(up(m, 3).weight.quant_state)),
        ]
    ):
        with torch.no_grad():
            edit(model)
            edit(plain)
        assert_close_calls(run, plain, k)
    assert fxoffload.stats(model).nbytes_copied > 0
    if attachment is not None:
        attachment.detach()


@torch.no_grad()
def assert_close_calls(model: Any, plain: Any, k: int) -> None:
    for i in range(2):
        torch.testing.assert_close(model(rows(plain, k + i)), plain(rows(plain, k + i)), rtol=1e-4, atol=1e-5)


# -- captured forwards -------------------------------------------------------------------------------------------------


@torch.no_grad()
@pytest.mark.usefixtures("captures")
@pytest.mark.parametrize("kind", ["int8", "nested", "packed"])
def test_captured(kind: str) -> None:
    make, _ = KINDS[kind]
    model, plain = make(), offload(make())
    compiled = offload(model, cuda_graph=True)
    compiled(rows(model, 0))
    halve(model)
    for k in range(4):
        assert torch.equal(compiled(rows(model, k)), plain(rows(model, k)))
    assert fxoffload.stats(model).replays == 3
    assert_streams(model)


@torch.no_grad()
@pytest.mark.usefixtures("captures")
def test_edits_of_captured_wrappers() -> None:
    given = rows(KINDS["scaled"][0](), 0)
    trio = Trio(KINDS["scaled"][0], given, cuda_graph=True)
    for label, edit in EDITS.items():
        before = trio.check(given)
        trio.edit(edit)
        assert not torch.equal(trio.check(given), before), label
    assert fxoffload.stats(trio.streamed).replays > len(EDITS)


@torch.no_grad()
@pytest.mark.usefixtures("captures")
def test_an_input_that_is_a_wrapper_is_not_captured() -> None:
    model = seeded(lambda: Toy(4, D))
    compiled, plain = offload(model, cuda_graph=True), offload(seeded(lambda: Toy(4, D)))
    for k in range(3):
        given = Scaled.of(rows(model, k))
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always", OffloadWarning)
            assert torch.equal(compiled(given), plain(given))
        text = "graph: Toy: not captured: its input 'x' is a Scaled, which has no memory of its own to copy into"
        assert [str(w.message).startswith(text) for w in seen] == [True] * (k == 0)
    assert fxoffload.stats(model).replays == 0


# -- the model stays a normal one --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["compiled", "eager"])
@pytest.mark.parametrize("kind", ["int8", "nested"])
def test_copies_saves_and_moves(kind: str, way: str) -> None:
    make = KINDS[kind][0]
    model, plain = make(), make()
    run: Any = offload(model) if way == "compiled" else model
    attachment = attached(model, 0.5) if way == "eager" else None
    assert_close_calls(run, plain, 0)
    twin = copy.deepcopy(model)
    assert_close_calls(twin, plain, 0)
    for (name, mine), (_, its) in zip(tensors_below(model), tensors_below(twin), strict=True):
        assert mine.data_ptr() != its.data_ptr(), name
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    assert len(file.getvalue()) < 1.6 * sum(sizes(plain).values())
    fresh = make()
    file.seek(0)
    fresh.load_state_dict(torch.load(file, weights_only=False), assign=True)
    assert_state(fresh, snapshot(plain))
    # torch swaps wrappers when a model is moved, and refuses where somebody holds one weakly.
    model.to("cpu")
    assert_close_calls(run, plain, 2)
    if attachment is not None:
        attachment.detach()
        assert_close_calls(run, plain, 3)
