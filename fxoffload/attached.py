"""Which models are offloaded without a compiler, found by the model or by its weights, and whether one runs now."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fxoffload.engine import find_engine
from fxoffload.errors import OffloadError

if TYPE_CHECKING:
    from fxoffload.eager import Attachment

_attachment_of: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()
"""Weak on both sides: the model's hooks hold its attachment."""


def remember(attachment: Attachment) -> None:
    """From now on this is what offloads its model."""
    _attachment_of[attachment.root] = weakref.ref(attachment)


def forget(attachment: Attachment, root: torch.nn.Module) -> None:
    """This offloads the model no more, if it did."""
    if attachment_of(root) is attachment:
        del _attachment_of[root]


def attachment_of(root: torch.nn.Module) -> Attachment | None:
    """What offloads this model without a compiler, or None."""
    found = _attachment_of.get(root)
    return found() if found is not None else None


@contextmanager
def held(weights: Sequence[torch.Tensor]) -> Generator[bool, None, None]:
    """Keep the model that has these weights from running, or False where it runs now, in this thread or in another.

    Does not wait: the caller holds Dynamo's lock, which a call of the model may be waiting for.
    """
    engine = find_engine(weights)
    if engine is None:
        yield True
    elif not engine.lock.acquire(blocking=False):
        yield False
    else:
        try:
            attachment = attachment_with(weights)
            yield attachment is None or not attachment.runs_here()
        finally:
            engine.lock.release()


def refuse_inside(weights: Sequence[torch.Tensor]) -> None:
    """Raises OffloadError in a call of a model that is offloaded without a compiler and has these weights.

    The arena is in the state of its plan, and a compiled graph of a part would run by a plan of its own in there.
    """
    attachment = attachment_with(weights)
    if attachment is not None and attachment.runs_here():
        raise OffloadError(
            f"eager: {type(attachment.root).__name__}: a part of it is compiled with backend='layerwise', and it runs without a "
            "compiler around that; compile the whole model with torch.compile(model, backend='layerwise'), or its parts with "
            "another backend"
        )


def attachment_with(weights: Sequence[torch.Tensor]) -> Attachment | None:
    """What offloads the model that these weights belong to without a compiler, or None."""
    engine = find_engine(weights)
    root = engine.root() if engine is not None and engine.root is not None else None
    return attachment_of(root) if root is not None else None
