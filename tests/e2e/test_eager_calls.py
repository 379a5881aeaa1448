"""Calls of a model that is offloaded without a compiler: interrupted ones, other ways in than its forward, several at once."""

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.errors import GradientError, OffloadError
from tests.checks import assert_state, snapshot
from tests.models import Toy, toy
from tests.twins import call_under_no_grad, check, inputs, nbytes_of, twins

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
        thread.join(60)
        assert torch.equal(results[0], call_under_no_grad(plain, given))


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


# -- inputs, modes and threads -----------------------------------------------------------------------------------------


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


def test_gradients_of_inputs_are_an_error_and_inputs_that_could_have_some_are_none() -> None:
    with twins(lambda: Toy(5), part=0.5) as (model, plain):
        check(model, plain, inputs(2))
        given = inputs(1)[0].requires_grad_()
        for part in (model, model.blocks[1]):
            with pytest.raises(
                GradientError, match=r"Toy: its inputs require gradients, .* torch\.no_grad\(\) or torch\.inference"
            ):
                part(given)
        check(model, plain, [given])
        check(model.blocks[1], plain.blocks[1], [given], streams=False)


class Prompted(Toy):
    """Adds what it has from elsewhere, which is no input and no parameter."""

    prompt = (torch.ones(16, requires_grad=True),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.prompt[0])


def test_gradients_of_what_comes_from_elsewhere_are_an_error() -> None:
    with twins(lambda: Prompted(5), part=0.5) as (model, plain):
        with pytest.raises(GradientError, match=r"Prompted: its results require gradients, .* call the model under"):
            model(inputs(1)[0])
        check(model, plain, inputs(2))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
@pytest.mark.parametrize("ran", [False, True])
def test_vmap_is_the_transform_of_torch_func_that_works(ran: bool) -> None:
    with twins(lambda: Toy(5), part=0.5, eager_offload=False) as (model, plain):
        given = inputs(1)[0]
        if ran:
            check(model, plain, inputs(2))
        for part in (model, model.blocks[1]):
            with pytest.raises(GradientError, match=r"transform of torch\.func that is not vmap calls it, and fxoffload streams"):
                torch.func.grad(lambda x, part=part: part(x).sum())(given)
            with pytest.raises(GradientError, match=r"transform of torch\.func that is not vmap"):
                torch.func.jvp(part, (given,), (given,))
        check(torch.vmap(model), torch.vmap(plain), inputs(2), streams=False)
        check(model, plain, inputs(2))


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
