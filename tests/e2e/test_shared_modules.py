"""Models that are offloaded without a compiler and have modules in common, as a draft model has its target's embeddings."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload.errors import OffloadError
from tests.checks import EVERYTHING, assert_state, snapshot
from tests.models import Toy, seeded
from tests.twins import call_under_no_grad, check, inputs, offload

EAGER = [True, False]


def pair() -> tuple[Any, Any]:
    """Two models; the second has two blocks of the first, one of them in another place."""
    a, b = seeded(lambda: Toy(5)), seeded(lambda: Toy(4), seed=1)
    b.blocks[1], b.blocks[3] = a.blocks[1], a.blocks[4]  # type: ignore[index]
    return a, b


def checked(models: tuple[Any, Any], plain: tuple[Any, Any]) -> None:
    """Runs of both, and of what they share, in turn; then edits of that."""
    for k in (0, 1, 1, 0, 0, 1):
        check(models[k], plain[k], inputs(1), streams=False)
        check(models[0].blocks[1], plain[0].blocks[1], inputs(1), streams=False)
        with torch.no_grad():
            for a, _ in (models, plain):
                a.blocks[4].up.weight.mul_(1.1)
    for model, twin in zip(models, plain, strict=True):
        assert_state(model, snapshot(twin))


@pytest.mark.parametrize("eager_offload", EAGER)
@pytest.mark.parametrize("parts", [(0.5, 0.5), (0.5, 2.0), (2.0, 0.5)])
def test_models_that_share_blocks_run_in_turn(parts: tuple[float, float], eager_offload: bool) -> None:
    models, plain = pair(), pair()
    attachments = [offload(m, part=part, eager_offload=eager_offload) for m, part in zip(models, parts, strict=True)]
    checked(models, plain)
    for k in (0, 1):
        attachments[k].detach()
        checked(models, plain)
        attachments[k] = offload(models[k], eager_offload=eager_offload)
        checked(models, plain)
    for attachment in attachments:
        attachment.detach()
    checked(models, plain)


def test_units_of_different_sizes() -> None:
    """What is a block of one model is cut into its layers in the other one."""
    models, plain = pair(), pair()
    offload(models[0])
    offload(models[1], module_filter=lambda _, module: isinstance(module, nn.Linear))
    checked(models, plain)


def test_a_block_is_shared_later() -> None:
    models, plain = pair(), pair()
    for model in models:
        offload(model)
    check(models[0], plain[0], inputs(1))
    for a, b in (models, plain):
        b.blocks[0] = a.blocks[2]
    checked(models, plain)


def test_models_that_share_blocks_and_two_threads() -> None:
    """Each under a budget of its own, which is a lock of its own."""
    models, plain = pair(), pair()
    for model in models:
        offload(model, memory_budget=fxoffload.Budget(40_000))
    failed: list[BaseException] = []

    def work(k: int) -> None:
        try:
            check(models[k], plain[k], inputs(20), streams=False)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(k,), daemon=True) for k in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failed
    assert not any(thread.is_alive() for thread in threads)


def test_a_call_that_is_interrupted_lends_nothing_to_the_next() -> None:
    models, plain = pair(), pair()
    attachments = [offload(model, part=2.0) for model in models]
    for unit in (0, 1):
        # What is behind the call never runs.
        attachments[1].enter(unit, (), {})
        assert attachments[1]._alone is models[1].blocks[unit]
        checked(models, plain)


def test_a_block_that_comes_to_be_shared_by_models_offloaded_apart_is_refused() -> None:
    a, b, twin = seeded(lambda: Toy(3)), seeded(lambda: Toy(3), seed=1), seeded(lambda: Toy(3))
    attachments = [offload(model) for model in (a, b)]
    former, b.blocks[1] = b.blocks[1], a.blocks[1]  # type: ignore[index]
    refused = (
        r"Toy: Toy, which was offloaded apart from it, has its blocks\.1 too; call fxoffload\.remove_layerwise_offload on both"
    )
    for _ in range(2):
        with pytest.raises(OffloadError, match=refused):
            call_under_no_grad(b, inputs(1)[0])
        check(a, twin, inputs(1))
    b.blocks[1] = former  # type: ignore[index]
    check(b, seeded(lambda: Toy(3), seed=1), inputs(1))
    b.blocks[1] = a.blocks[1]  # type: ignore[index]
    for attachment in attachments:
        attachment.detach()
    for model in (a, b):
        offload(model)
    check(a, twin, inputs(2))
    twin_b = seeded(lambda: Toy(3), seed=1)
    twin_b.blocks[1] = twin.blocks[1]  # type: ignore[index]
    check(b, twin_b, inputs(2))


class Calling(Toy):
    """Calls another model that is none of its modules."""

    inner: tuple[nn.Module, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        for model in self.inner:
            x = model(x)
        return x


def test_a_model_in_a_forward_of_one_with_blocks_in_common_is_refused() -> None:
    a, b = seeded(lambda: Calling(3)), seeded(lambda: Toy(3), seed=1)
    b.blocks[1] = a.blocks[1]  # type: ignore[index]
    for model in (a, b):
        offload(model, memory_budget=EVERYTHING)
    a.inner = (b,)
    with pytest.raises(
        OffloadError, match="Toy: a forward of Calling calls it, and both are offloaded with weights in common; call"
    ):
        call_under_no_grad(a, inputs(1)[0])
    a.inner = ()
    check(a, seeded(lambda: Calling(3)), inputs(2), streams=False)
