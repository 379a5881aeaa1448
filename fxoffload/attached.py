"""Which models are offloaded without a compiler, found by the model or by its weights, and whether one runs now."""

from __future__ import annotations

import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from fxoffload.engine import Engine, find_engine
from fxoffload.errors import OffloadError
from fxoffload.select import nbytes_below, own_tensors

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


def attached_beside(root: torch.nn.Module) -> list[tuple[torch.nn.Module, Attachment]]:
    """Other offloaded models that have modules with weights in common with this one, and what offloads them."""
    mine = {module for module in root.modules() if any(own_tensors(module))}
    return [(other, found) for other, found in _attached() if other is not root and not mine.isdisjoint(other.modules())]


def running_beside(attachment: Attachment) -> list[Attachment]:
    """What offloads other models by the same engine, and is inside of a call."""
    engine = attachment.engine
    return [other for _, other in _attached() if other.engine is engine and other is not attachment and other.runs_here()]


def _attached() -> list[tuple[torch.nn.Module, Attachment]]:
    roots = [root for found in _attachment_of.keyrefs() if (root := found()) is not None]
    return [(root, attachment) for root in roots if (attachment := attachment_of(root)) is not None]


def refuse_apart(root: torch.nn.Module, engine: Engine) -> None:
    """Raises OffloadError where a model that another engine serves has modules of this one: each would move their weights."""
    for other, attachment in attached_beside(root):
        if attachment.engine is not engine:
            theirs = set(other.modules())
            name = next(name for name, module in root.named_modules() if module in theirs and nbytes_below(module))
            raise OffloadError(
                f"eager: {type(root).__name__}: {type(other).__name__}, which was offloaded apart from it, has its "
                f"{name or 'root'} too; call fxoffload.remove_layerwise_offload on both, then offload both to the same device"
            )


def refuse_nested(attachment: Attachment) -> None:
    """Raises OffloadError in a forward of another model of the same engine, whose arena is in the state of that one's plan."""
    for other in running_beside(attachment):
        raise OffloadError(
            f"eager: {type(attachment.root).__name__}: a forward of {type(other.root).__name__} calls it, and both are offloaded "
            "with weights in common; call fxoffload.remove_layerwise_offload on the inner one, or offload one model of both"
        )


def dissolve_parts(root: torch.nn.Module) -> None:
    """Parts of the model that were compiled for our backend and called before are offloaded with it from now on."""
    parts = {id(module) for module in root.modules() if module is not root}
    engines = [find_engine([tensor]) for tensor in (*root.parameters(), *root.buffers())]
    for engine in {id(engine): engine for engine in engines if engine is not None}.values():
        if engine.root is not None and id(engine.root()) in parts:
            with engine.lock:
                engine.dissolve()


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
