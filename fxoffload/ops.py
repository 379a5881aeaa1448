"""The three nodes that a plan adds to a graph. They mark places; `lower` turns each into a call of the runtime.

They are plain functions with a side effect as far as FX is concerned, and never reach Inductor: inside one compiled graph
prefetches are hoisted, slots cloned, and evictions run before compute.
"""

from __future__ import annotations

import torch.fx as fx


@fx.has_side_effect
def prefetch(load: str, after: str | None) -> None:
    """Issue the copy of a load; on the copy stream it waits until the load named `after` is evicted."""


@fx.has_side_effect
def wait(load: str) -> None:
    """Compute from here on waits for the copy of a load."""


@fx.has_side_effect
def evict(load: str) -> None:
    """The last reader of a load is launched: its bytes may be overwritten once that is done."""
