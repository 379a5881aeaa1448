"""Offload without a compiler: equal to the plain model, with late copies and poisoned evictions, whatever a forward calls."""

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import copy
import gc
import inspect
import pickle
import threading
import weakref
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.attached import attachment_of
from fxoffload.config import OffloadConfig
from fxoffload.eager import attach
from fxoffload.errors import BudgetError, GradientError, OffloadError, OffloadWarning
from fxoffload.handle import LayerwiseOffloadHandle
from fxoffload.transfer import ThreadTransfer
from tests.checks import DELAY_S, assert_state, snapshot
from tests.models import Block, Reversed, Towers, Toy, seeded, toy


def leaf(_: str, module: nn.Module) -> bool:
    return next(module.children(), None) is None


LEVELS: dict[str, dict[str, Any]] = {"blocks": {}, "leaves": {"module_filter": leaf}}


def nbytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())


def offload(model: nn.Module, *, part: float = 0.5, **settings: Any) -> Any:
    """Attach with a part of the weights as the budget, or what is given, and late copies."""
    settings = {"onload_device": "cpu", "memory_budget": int(nbytes_of(model) * part), **settings}
    attachment = attach(model, OffloadConfig(**settings))
    assert isinstance(attachment.engine.transfer, ThreadTransfer)
    attachment.engine.transfer.delay_s = DELAY_S
    return attachment


def inputs(n: int, d: int = 16) -> list[torch.Tensor]:
    torch.manual_seed(n)
    return [torch.randn(3, d) for _ in range(n)]


def check(model: nn.Module, plain: Callable[..., Any], given: list[Any], *, streams: bool = True) -> None:
    """Every call of the offloaded model equals the plain one's, and it copies in each."""
    for value in given:
        with torch.no_grad():
            wanted = plain(value)
            assert torch.equal(model(value), wanted)
        if streams:
            assert fxoffload.stats(model).nbytes_copied > 0


@contextmanager
def twins(make: Callable[[], nn.Module], **settings: Any) -> Generator[tuple[Any, Any], None, None]:
    """An offloaded model, and one like it that is not."""
    plain, model = seeded(make), seeded(make)
    attachment = offload(model, **settings)
    yield model, plain
    attachment.detach()
    assert attachment_of(model) is None
    assert_state(model, snapshot(plain))


# -- orders ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("make", [lambda: Toy(6), lambda: Reversed(6), Towers], ids=["toy", "reversed", "towers"])
def test_equal_to_the_plain_model(make: Callable[[], nn.Module], level: str, overlap: bool) -> None:
    part = 0.7 if make is Towers else 0.5
    with twins(make, part=part, async_transfer=overlap, **LEVELS[level]) as (model, plain):
        check(model, plain, inputs(5))
        stats, plan = fxoffload.stats(model), fxoffload.get_plan(model)
        assert plan.async_transfer == overlap
        assert plan.streamed_nbytes == stats.nbytes_copied > 0
        assert plan.peak_nbytes <= plan.budget_nbytes
        # In steady state nothing is brought back: the end of a forward is the beginning of the next.
        assert stats.restores <= 2


@pytest.mark.parametrize("n", range(1, 8))
@pytest.mark.parametrize("part", [0.35, 0.6, 0.9])
def test_every_number_of_blocks_and_budget(n: int, part: float) -> None:
    with twins(lambda: Toy(n), part=part, module_filter=leaf) as (model, plain):
        check(model, plain, inputs(4))


def test_all_resident_copies_nothing() -> None:
    with twins(lambda: Toy(3), part=2) as (model, plain):
        check(model, plain, inputs(3), streams=False)
        assert fxoffload.stats(model).nbytes_copied == 0


class Skipping(Toy):
    """Leaves out the blocks that it is told to; `again` are called a second time at the end."""

    skip: frozenset[int] = frozenset()
    again: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            if i not in self.skip:
                x = block(x)
        for i in self.again:
            x = self.blocks[i](x)
        return self.out(x)


def test_blocks_left_out_now_and_then() -> None:
    with twins(lambda: Skipping(8), part=0.4) as (model, plain):
        for skip in [(), (1, 2, 3, 4), (), (0,), (7,), (0, 1, 2, 3, 4, 5, 6, 7), (1, 2, 3, 4), (), (6, 7), ()]:
            model.skip = plain.skip = frozenset(skip)
            check(model, plain, inputs(1), streams=len(skip) < 8)


def test_left_out_blocks_are_not_copied() -> None:
    with twins(lambda: Skipping(8), part=0.4) as (model, plain):
        check(model, plain, inputs(3))
        every = fxoffload.stats(model).nbytes_copied
        model.skip = plain.skip = frozenset(range(2, 8))
        check(model, plain, inputs(2))
        assert fxoffload.stats(model).nbytes_copied < every / 2
        # Leaving blocks out is no reason to fill the arena anew.
        restores = fxoffload.stats(model).restores
        check(model, plain, inputs(3))
        assert fxoffload.stats(model).restores == restores


def test_a_block_skipped_at_first_and_used_later() -> None:
    with twins(lambda: Skipping(6), part=0.5) as (model, plain):
        model.skip = plain.skip = frozenset({2, 3})
        check(model, plain, inputs(3))
        model.skip = plain.skip = frozenset()
        check(model, plain, inputs(3))


def test_blocks_called_twice() -> None:
    with twins(lambda: Skipping(6), part=0.5) as (model, plain):
        for again in [(), (1, 2), (5, 5), (), (0, 5, 3), (1, 2)]:
            model.again = plain.again = again
            check(model, plain, inputs(3))
        # Orders that were seen are followed: nothing is restored any more.
        before = fxoffload.stats(model).restores
        check(model, plain, inputs(3))
        assert fxoffload.stats(model).restores == before


class Mapped(nn.Module):
    """Arguments and results in containers of all kinds; a parameter on the container, one on the root, a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.blocks.register_parameter("shift", nn.Parameter(torch.randn(4, 16)))
        self.scale = nn.Parameter(torch.randn(16))
        self.offset = torch.linspace(0, 1, 16)

    def forward(self, x: dict[str, Any], *, more: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        y = x["x"] * self.scale + self.offset
        for i, block in enumerate(self.blocks):
            y = block(y) + self.blocks.shift[i]  # type: ignore[index]
        return {"y": y, "more": (*more, y), "none": None}


def test_weights_on_containers_and_plain_attributes() -> None:
    with twins(Mapped, part=0.6) as (model, plain):
        for value in inputs(4):
            with torch.no_grad():
                got, wanted = (m({"x": value}, more=(value,)) for m in (model, plain))
            assert type(got) is dict
            assert type(got["more"]) is tuple
            assert torch.equal(got["y"], wanted["y"])
            assert fxoffload.stats(model).nbytes_copied > 0


class Reader(Toy):
    """Reads weights of its blocks outside of their calls, one of them only when it is told to."""

    late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * sum(block.up.weight.abs().mean() for block in self.blocks[:2])  # type: ignore[union-attr]
        x = super().forward(x)
        return nn.functional.linear(x, self.blocks[3].up.weight) if self.late else x  # type: ignore[union-attr,arg-type]


def test_weights_read_outside_their_units() -> None:
    with twins(lambda: Reader(6), part=0.8) as (model, plain):
        check(model, plain, inputs(4))
        resident = {r.bucket for r in fxoffload.get_plan(model).residents}
        assert {"blocks.0", "blocks.1"} <= resident


class Tied(nn.Module):
    """An embedding whose weight is the head's, and a block that is in two containers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(Block(16) for _ in range(4))
        self.more = nn.ModuleList([self.blocks[0], Block(16)])
        self.more[1].up.weight = self.blocks[2].up.weight  # type: ignore[union-attr]
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.empty = nn.Parameter(torch.empty(0, 16))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in (*self.blocks, *self.more):
            x = block(x)
        return self.head(torch.cat([x, self.empty]))


def test_tied_and_empty_weights() -> None:
    with twins(Tied, part=0.8) as (model, plain):
        check(model, plain, [torch.arange(7) + k for k in range(4)])
        assert model.head.weight is model.embedding.weight
        unique = {id(p): p for p in model.parameters()}.values()
        packed = fxoffload.stats(model).nbytes_host
        assert packed <= sum(p.numel() * 4 + 256 for p in unique)


class Strided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(4))
        for block in self.blocks:
            block.weight.data = block.weight.data.to(memory_format=torch.channels_last)  # type: ignore[union-attr]
        self.linear = nn.Linear(8, 8)
        self.linear.weight.data = torch.randn(8, 8).t()
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen.append((self.blocks[0].weight.stride(), self.linear.weight.stride()))
        return self.linear(x)


def test_strides_are_kept() -> None:
    with twins(Strided, part=0.6, module_filter=leaf) as (model, plain):
        check(model, plain, [torch.randn(2, 4, 8, 8) for _ in range(3)])
        assert model.seen == plain.seen


class Counting(nn.Module):
    """Buffers that a block and the root write; batch norm in training mode."""

    class Part(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(64, 64)
            self.norm = nn.BatchNorm1d(64)
            self.register_buffer("count", torch.zeros((), dtype=torch.long))
            self.register_buffer("hidden", torch.zeros(64), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count += 1
            self.hidden.add_(x.mean(0))
            return self.norm(self.linear(x)) + self.hidden

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Counting.Part() for _ in range(4))
        self.register_buffer("total", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.total += x.sum()
        return x


def test_buffers_that_change() -> None:
    plain, model = seeded(Counting).train(), seeded(Counting).train()
    attachment = offload(model, part=0.6)
    check(model, plain, inputs(5, 64))
    assert model.blocks[2].count.item() == 5  # type: ignore[union-attr,operator]
    assert_state(model, snapshot(plain))
    attachment.detach()
    assert_state(model, snapshot(plain))


class Writing(Toy):
    """A block's weight is written by the forward itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.out.weight.mul_(1.01)
        return x


def test_a_weight_that_the_forward_writes() -> None:
    with twins(lambda: Writing(4), part=0.6, module_filter=leaf) as (model, plain):
        check(model, plain, inputs(4))


# -- edits and structure -----------------------------------------------------------------------------------------------


EDITS: dict[str, Callable[[Any], object]] = {
    "in place": lambda m: m.blocks[2].up.weight.mul_(2),
    "data +=": lambda m: m.blocks[2].up.weight.data.add_(0.5),
    "data =": lambda m: setattr(m.blocks[1].down.weight, "data", torch.full((16, 32), 0.01)),
    "another parameter": lambda m: setattr(m.blocks[3].up, "weight", nn.Parameter(torch.full((32, 16), 0.02), False)),
    "swapped": lambda m: swap(m.blocks[0].up, m.blocks[3].up),
    "another block": lambda m: m.blocks.__setitem__(1, seeded(lambda: Block(16), 7)),
    "a block more": lambda m: m.blocks.append(seeded(lambda: Block(16), 8)),
    "a block less": lambda m: m.blocks.pop(1),
    "loaded": lambda m: m.load_state_dict({k: v * 1.5 for k, v in m.state_dict().items()}),
    "assigned": lambda m: m.load_state_dict({k: v.clone() * 1.5 for k, v in m.state_dict().items()}, assign=True),
    "wrapped": lambda m: setattr(m.blocks[2], "up", nn.Sequential(m.blocks[2].up, nn.Linear(32, 32).requires_grad_(False))),
}


def swap(a: nn.Linear, b: nn.Linear) -> None:
    a.weight, b.weight = b.weight, a.weight


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("part", [0.5, 2.0])
def test_edits_count_at_the_next_call(edit: str, part: float) -> None:
    with twins(lambda: Toy(5), part=part) as (model, plain):
        check(model, plain, inputs(3), streams=False)
        with torch.no_grad():
            for m in (model, plain):
                torch.manual_seed(3)
                EDITS[edit](m)
        check(model, plain, inputs(3), streams=False)
        assert_state(model, snapshot(plain))


def test_dtype_changes() -> None:
    with twins(lambda: Toy(5), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        model.double()
        plain.double()
        check(model, plain, [v.double() for v in inputs(2)], streams=False)


def test_budget_changes() -> None:
    with twins(lambda: Toy(6), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        for part in (0.3, 0.9, 0.4):
            fxoffload.set_memory_budget(model, int(nbytes_of(model) * part))
            check(model, plain, inputs(3))
            assert fxoffload.stats(model).nbytes_arena <= nbytes_of(model) * part


@pytest.mark.parametrize("ran", [0, 2])
@pytest.mark.parametrize("between", [True, False])
def test_a_smaller_budget_splits_blocks(ran: int, between: bool) -> None:
    with twins(lambda: Toy(6, 32), part=0.9) as (model, plain):
        check(model, plain, inputs(ran, 32), streams=False)
        attachment = attachment_of(model)
        assert attachment is not None
        blocks = attachment.module_names
        assert "blocks.0" in blocks
        with pytest.raises(BudgetError, match="raise the budget to at least") as refused:
            fxoffload.set_memory_budget(model, "1KiB")
        assert attachment.module_names == blocks
        if between:
            check(model, plain, inputs(2, 32), streams=False)
        smallest = refused.value.smallest_nbytes
        # Less than two blocks, since the leaves of one are copied in turn.
        assert smallest < nbytes_of(model.blocks[0]) * 2
        fxoffload.set_memory_budget(model, smallest)
        assert "blocks.0.up" in attachment.module_names
        check(model, plain, inputs(4, 32))
        assert fxoffload.stats(model).nbytes_arena <= smallest
        assert fxoffload.stats(model).nbytes_copied == fxoffload.get_plan(model).streamed_nbytes
        assert fxoffload.smallest_budget(model, overlap=False) == smallest
        for part in (0.9, 0.5):
            fxoffload.set_memory_budget(model, int(nbytes_of(model) * part))
            check(model, plain, inputs(3, 32))


def test_a_smaller_budget_before_anything_is_packed() -> None:
    with twins(lambda: Toy(6, 32), part=0.9, eager_offload=False) as (model, plain):
        attachment = attachment_of(model)
        assert attachment is not None
        LayerwiseOffloadHandle(attachment).set_memory_budget(nbytes_of(model.blocks[0]) * 2)
        assert "blocks.0.up" in attachment.module_names
        check(model, plain, inputs(4, 32))


# -- interruptions -----------------------------------------------------------------------------------------------------


class Failing(Toy):
    fails: int | None = None
    error: type[BaseException] = ValueError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            if i == self.fails:
                block.norm.register_forward_pre_hook(self.interrupt)
            x = block(x)
        return self.out(x)

    def interrupt(self, module: nn.Module, _: Any) -> None:
        module._forward_pre_hooks.popitem()
        raise self.error("stop")


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("fails", range(5))
def test_the_call_after_an_exception(fails: int, error: type[BaseException]) -> None:
    with twins(lambda: Failing(5), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        state = snapshot(plain)
        model.fails, model.error = fails, error
        with pytest.raises(error), torch.no_grad():
            model(inputs(1)[0])
        assert_state(model, state)
        model.fails = None
        check(model, plain, inputs(3))
        # The lock is free for other threads.
        results: list[torch.Tensor] = []
        given = inputs(1)[0]
        thread = threading.Thread(target=lambda: results.append(call_under_no_grad(model, given)))
        thread.start()
        thread.join(20)
        assert torch.equal(results[0], call_under_no_grad(plain, given))


def call_under_no_grad(model: Any, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(value)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_block_alone_that_raises(error: type[BaseException]) -> None:
    with twins(lambda: Failing(5), part=0.5) as (model, plain):
        model.error = error
        model.blocks[1].norm.register_forward_pre_hook(model.interrupt)
        with pytest.raises(error), torch.no_grad():
            model.blocks[1](inputs(1)[0])
        for block in (1, 1, 3):
            check(model.blocks[block], plain.blocks[block], inputs(1), streams=False)
        check(model, plain, inputs(3))


def test_blocks_called_on_their_own() -> None:
    with twins(lambda: Toy(5), part=0.5) as (model, plain):
        check(model.blocks[1], plain.blocks[1], inputs(2), streams=False)
        check(model, plain, inputs(2))
        check(model.blocks[4], plain.blocks[4], inputs(2), streams=False)
        check(model, plain, inputs(2))


class Autoencoder(nn.Module):
    """Called by `decode`, as VAEs are."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Toy(3)
        self.decoder = Toy(3)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.encoder(x)

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(x)


def test_other_methods_than_forward_stream_too() -> None:
    with twins(Autoencoder, part=0.4) as (model, plain):
        for _ in range(3):
            for way in ("decode", "encode"):
                check_method(model, plain, way)
        restores = fxoffload.stats(model).restores
        for _ in range(3):
            check_method(model, plain, "decode")
        assert fxoffload.stats(model).nbytes_copied > 0
        assert fxoffload.stats(model).restores <= restores + 1


def check_method(model: Any, plain: Any, way: str) -> None:
    given = inputs(1)[0]
    with torch.no_grad():
        assert torch.equal(getattr(model, way)(given), getattr(plain, way)(given))


# -- the module stays a normal one -------------------------------------------------------------------------------------


def test_signatures_and_classes_stay() -> None:
    model = toy(3)
    before = [(type(m), inspect.signature(m.forward)) for m in model.modules()]
    hooks = [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()]
    attachment = offload(model)
    assert [(type(m), inspect.signature(m.forward)) for m in model.modules()] == before
    attachment.detach()
    attachment.detach()
    assert [(len(m._forward_pre_hooks), len(m._forward_hooks)) for m in model.modules()] == hooks
    assert "forward" not in vars(model)


def test_copies_and_pickles_are_plain_models() -> None:
    with twins(lambda: Toy(4), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert attachment_of(twin) is None
            forwards = fxoffload.stats(model).forwards
            check(twin, plain, inputs(1), streams=False)
            assert fxoffload.stats(model).forwards == forwards
            with torch.no_grad():
                twin.out.weight.zero_()
        check(model, plain, inputs(1))


def test_detached_models_keep_edits_and_can_be_attached_again() -> None:
    plain, model = seeded(lambda: Toy(4)), seeded(lambda: Toy(4))
    for _ in range(2):
        attachment = offload(model)
        check(model, plain, inputs(2))
        with torch.no_grad():
            for m in (model, plain):
                m.blocks[1].up.weight.mul_(1.1)  # type: ignore[union-attr]
        attachment.detach()
        check(model, plain, inputs(1), streams=False)
        assert_state(model, snapshot(plain))


def test_nothing_is_held_when_the_model_is_gone() -> None:
    model = toy(4)
    attachment = offload(model)
    call_under_no_grad(model, inputs(1)[0])
    engine, probe = attachment.engine, model.out.weight
    alive = [weakref.ref(model), weakref.ref(engine)]
    del model, attachment, engine, probe
    gc.collect()
    assert [weak() for weak in alive] == [None, None]


def test_errors() -> None:
    model = toy(3)
    with pytest.raises(BudgetError, match="raise the budget to at least") as refused:
        offload(model, memory_budget="1KiB")
    assert attachment_of(model) is None
    assert "forward" not in vars(model)
    attachment = offload(model, memory_budget=refused.value.smallest_nbytes)
    with pytest.raises(OffloadError, match=r"offloaded already; call fxoffload\.remove_layerwise_offload"):
        offload(model)
    model.requires_grad_(True)
    with pytest.raises(GradientError, match=r"torch\.no_grad\(\) or torch\.inference_mode\(\)"):
        model(inputs(1)[0])
    call_under_no_grad(model, inputs(1)[0])
    attachment.detach()


def test_an_input_without_bytes_is_an_error_and_the_next_right_call_works() -> None:
    """Inputs of other devices are moved to the onload device; these cannot be."""
    with twins(lambda: Toy(5), part=0.5) as (model, plain):
        wrong = inputs(1)[0].to("meta")
        for _ in range(3):
            for part in (model, model.blocks[1]):
                with pytest.raises(OffloadError, match="Toy: an input is on the meta device, without bytes; give one that is"):
                    call_under_no_grad(part, wrong)
            check(model, plain, inputs(2))
            check(model.blocks[1], plain.blocks[1], inputs(1), streams=False)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_modes_in_turn(mode: Callable[[], Any]) -> None:
    with twins(lambda: Toy(5), part=0.5) as (model, plain):
        given = inputs(6)
        for k, value in enumerate(given):
            with mode() if k % 2 else torch.no_grad():
                got = model(value)
            with torch.no_grad():
                assert torch.equal(got, plain(value))


def test_two_models_and_two_threads() -> None:
    with twins(lambda: Toy(5), part=0.5) as (a, plain_a), twins(lambda: Toy(4), part=0.5) as (b, plain_b):
        failed: list[BaseException] = []

        def work(model: Any, plain: Any) -> None:
            try:
                check(model, plain, inputs(6), streams=False)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=pair) for pair in [(a, plain_a), (b, plain_b), (a, plain_a)]]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed


def test_models_under_one_budget_run_in_turn() -> None:
    budget = fxoffload.Budget(int(nbytes_of(toy(5)) * 0.6))
    with twins(lambda: Toy(5), memory_budget=budget) as (a, plain_a), twins(lambda: Toy(5), memory_budget=budget) as (b, plain_b):
        for _ in range(2):
            check(a, plain_a, inputs(2))
            check(b, plain_b, inputs(2))
            assert fxoffload.stats(a).nbytes_arena + fxoffload.stats(b).nbytes_arena <= nbytes_of(a) * 0.6


# -- with a compiler ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", ["attached", "compiled"])
@pytest.mark.parametrize("how", ["function", "method"])
def test_attach_and_compile_in_either_order(first: str, how: str) -> None:
    plain, model = seeded(lambda: Toy(5)), seeded(lambda: Toy(5))
    options = {"segment_compiler": "eager"}
    if first == "attached":
        attachment = offload(model, part=0.5)
        check(model, plain, inputs(2))
        run = compiled(model, how, options)
    else:
        run = compiled(model, how, {**options, "onload_device": "cpu"})
        attachment = offload(model, part=0.5)
    check(run, plain, inputs(3))
    (binding,) = api.bindings_of(model)
    assert binding.config.memory_budget == attachment.config.memory_budget or first == "compiled"
    assert fxoffload.get_plan(model) is binding.plan
    if how == "function":
        # The module itself still runs without the compiler, by the same weights.
        for _ in range(2):
            check(model, plain, inputs(2))
            check(run, plain, inputs(2))
    attachment.detach()
    assert_state(model, snapshot(plain))
    if first == "compiled":
        # Its own settings hold again.
        check(run, plain, inputs(2), streams=False)


def compiled(model: Any, how: str, options: dict[str, Any]) -> Any:
    if how == "method":
        model.compile(backend=fxoffload.layerwise, options=options)
        return model
    return torch.compile(model, backend=fxoffload.layerwise, fullgraph=True, options=options)


def test_another_backend_computes_the_same_and_is_warned_of() -> None:
    with twins(lambda: Toy(4), part=0.5) as (model, plain):
        run = torch.compile(model, backend="aot_eager")
        check(model, plain, inputs(1))
        with pytest.warns(OffloadWarning, match="compiled by another backend"):
            check_close(run, plain, inputs(1)[0])
        for value in inputs(3):
            check_close(run, plain, value)
            assert fxoffload.stats(model).nbytes_copied > 0


def check_close(run: Any, plain: Any, value: torch.Tensor) -> None:
    with torch.no_grad():
        torch.testing.assert_close(run(value), plain(value))
