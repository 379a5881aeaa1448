"""A model that is offloaded without a compiler beside one like it that is not, and the calls and checks of both."""

# pyright: reportPrivateUsage=false, reportCallIssue=false, reportAttributeAccessIssue=false
from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

import fxoffload
from fxoffload.attached import attachment_of
from tests.checks import assert_state, attached, snapshot
from tests.models import seeded


def leaf(_: str, module: nn.Module) -> bool:
    return next(module.children(), None) is None


LEVELS: dict[str, dict[str, Any]] = {"blocks": {}, "leaves": {"module_filter": leaf}}


def nbytes_of(model: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in {id(p): p for p in model.parameters()}.values())


def offload(model: nn.Module, *, part: float = 0.5, **settings: Any) -> Any:
    """Attach with a part of the weights as the budget, or what is given, and late copies."""
    return attached(model, part, **{"memory_budget": int(nbytes_of(model) * part), **settings})


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


def call_under_no_grad(model: Any, value: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(value)
