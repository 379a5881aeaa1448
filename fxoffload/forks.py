"""What must be done in a child process that was forked off a process with offloaded models.

A child has the memory of its parent, but none of its threads, no lock in a usable state, and no claim on its accelerator.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class Forked(Protocol):
    def after_fork(self) -> None: ...


_watched: weakref.WeakSet[Forked] = weakref.WeakSet()


def tell(what: Forked) -> None:
    """Call its `after_fork` in every child that is forked from now on."""
    _watched.add(what)


def _in_child() -> None:
    for what in list(_watched):
        what.after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
