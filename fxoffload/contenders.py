"""Contenders of `fxoffload bench` by name: how each is set up on a model, and with which settings it is measured.

    resident-*           every weight on the device; eager, and compiled block by block
    fxoffload-*          this project without and with a compiler, and with each forward captured as a CUDA graph, over budgets
    cache-dit-*          Cache-DiT's layerwise offload: its published flags, and flags that fit the budgets
    group-*              diffusers' group offloading by blocks or leaves, without streams, with streams, with `record_stream`
    two-block-*          the scheme of vLLM-Omni's layerwise offloading, our code from its description (`twoblock`)
    accelerate-sequential, model-offload     accelerate's `cpu_offload`, and diffusers' offloading of whole models

Matched memory. Ours take the budget as it is, and a row counts where its reserved peak is within it. Peers have no budget:

    Cache-DiT            `cache-dit-fitted` looks for flags. The first try keeps nothing resident, and its reserved peak says
                         what the rest takes; further tries keep as many targets as the budget has room for by their mean size,
                         or, where that misleads, bisect. Look-ahead is capped at two of the largest targets in these tries;
                         further ones, from the count found on, have the published look-ahead, which has no such cap, or that
                         of one target where nothing was within the budget. Residents are spread as evenly as its bins allow.
                         The fastest try within the budget counts; where there is none, that with the smallest peak.
    diffusers' groups    with streams, the number of blocks in a group is fixed at one: there is no knob, hence one row.
    two-block hooks      two blocks are on the device, always: one row.
    accelerate           no knob: one row each.

A row without a knob is compared with every budget that its reserved peak is within.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fxoffload import peers, sessions
from fxoffload.accepted import nearest
from fxoffload.errors import ConfigError
from fxoffload.sessions import Session, Setting

RESIDENT = "all"
"""The budget that holds everything."""
REFERENCE = "resident-eager"
"""The contender whose output all others are compared with."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to run a model."""

    name: str
    what: str
    """For people."""
    session: type[Session]
    options: Mapping[str, Any]
    """What the session is made with, such as `compiled`."""
    settings: tuple[Setting, ...] = ({},)
    """What is measured; where `by_budget`, a setting is made of each budget instead."""
    by_budget: bool = False
    needs: tuple[str, ...] = ()
    """Packages besides torch."""
    together: bool = False
    """All settings are measured in one process, the first of them first."""
    starts_resident: bool = False
    """The model is made on the device."""

    @property
    def needs_first(self) -> bool:
        """The other settings are compared with the first, so that it is measured in every process."""
        return self.session.equals_itself

    def settings_for(self, budgets: Sequence[str]) -> tuple[Setting, ...]:
        """What is measured where these budgets are asked for."""
        if not self.by_budget:
            return self.settings
        first = (RESIDENT,) if self.needs_first else ()
        return tuple({"budget": budget} for budget in (*first, *(b for b in budgets if b not in first)))


def find_contenders(patterns: Iterable[str]) -> list[Contender]:
    """Contenders whose names match one of the patterns, such as `fxoffload-*`, or that are `core`, in the order of `CONTENDERS`.

    Raises ConfigError for a pattern that none matches.
    """
    chosen: set[str] = set()
    for pattern in patterns:
        found = CORE if pattern == "core" else fnmatch.filter(CONTENDERS, pattern)
        if not found:
            raise ConfigError(f"contenders: {pattern!r} matches none; {nearest(pattern, CONTENDERS)}")
        chosen.update(found)
    return [contender for name, contender in CONTENDERS.items() if name in chosen]


def _cache_dit(name: str, what: str, *settings: Setting, **options: Any) -> Contender:
    what = f"Cache-DiT, {what}"
    return Contender(name, what, peers.CacheDit, options, settings, needs=("cache_dit",), together="compiled" not in options)


def _groups() -> list[Contender]:
    found: list[Contender] = []
    for level in ("block", "leaf"):
        for streams, record in ((False, False), (True, False), (True, True)):
            for compiled in (False, True):
                name = f"group-{level}{'-streams' * streams}{'-record' * record}{'-compiled' * compiled}"
                words = [f"diffusers groups by {level}", *["streams"] * streams, *["record_stream"] * record]
                options = {"level": level, "streams": streams, "record": record, "compiled": compiled}
                what = ", ".join([*words, *["compiled"] * compiled])
                found.append(Contender(name, what, peers.Groups, options, needs=("diffusers",)))
    return found


_PUBLISHED: tuple[Setting, ...] = (
    {"async_transfer": True, "transfer_buckets": 1},
    {"async_transfer": True, "transfer_buckets": 4, "persistent_buckets": 8},
    {
        "async_transfer": True, "transfer_buckets": 4, "persistent_buckets": 32, "persistent_bins": 4, "prefetch_limit": True,
    },
    {
        "async_transfer": True, "transfer_buckets": 2, "persistent_buckets": 32, "persistent_bins": 4, "prefetch_limit": True,
        "max_copy_streams": 4, "max_inflight_prefetch_bytes": "4gib",
    },
)  # fmt: skip
"""Of its page on layerwise offloading: three rows of the table, and the example in Python."""
_PUBLISHED_COMPILED: Setting = {
    "async_transfer": True, "transfer_buckets": 4, "persistent_buckets": 32, "persistent_bins": 4, "prefetch_limit": True,
    "max_inflight_prefetch_bytes": "8gib",
}  # fmt: skip
"""Of its example on the command line, which compiles."""

CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        Contender(REFERENCE, "resident, eager", sessions.Resident, {}, starts_resident=True),
        Contender(
            "resident-compiled", "resident, compiled blocks", sessions.Resident, {"compiled": True}, starts_resident=True
        ),
        Contender("fxoffload-compiled", "fxoffload, compiled", sessions.Compiled, {}, by_budget=True, together=True),
        Contender(
            "fxoffload-captured", "fxoffload, compiled, a whole forward as one CUDA graph", sessions.Compiled,
            # Where nothing can be captured there is no row that says that it was.
            {"cuda_graph": "strict"}, by_budget=True, together=True,
        ),
        Contender("fxoffload-eager", "fxoffload, eager", sessions.Eager, {}, by_budget=True, together=True),
        _cache_dit("cache-dit-sync", "its defaults", {}),
        _cache_dit("cache-dit-published", "its published flags", *_PUBLISHED),
        _cache_dit("cache-dit-compiled", "its published flags, compiled", _PUBLISHED_COMPILED, compiled=True),
        Contender(
            "cache-dit-fitted", "Cache-DiT, flags that fit the budget", peers.CacheDitFitted, {}, by_budget=True,
            needs=("cache_dit",), together=True,
        ),
        *_groups(),
        Contender("two-block-hooks", "two-block hooks (vLLM-Omni's scheme, our code)", peers.TwoBlocks, {}),
        Contender(
            "two-block-hooks-compiled", "two-block hooks (vLLM-Omni's scheme, our code), compiled blocks", peers.TwoBlocks,
            {"compiled": True},
        ),
        Contender(
            "accelerate-sequential", "accelerate cpu_offload, module by module", peers.Sequential, {}, needs=("accelerate",)
        ),
        Contender(
            "model-offload", "diffusers model offload: the whole model, once a run", peers.WholeModel, {}, needs=("accelerate",)
        ),
    )
}  # fmt: skip

CORE = (
    REFERENCE, "resident-compiled", "fxoffload-compiled", "fxoffload-eager", "cache-dit-published", "cache-dit-fitted",
    "group-block-streams", "group-block-streams-compiled", "group-block-streams-record", "group-leaf-streams", "two-block-hooks",
    "two-block-hooks-compiled", "accelerate-sequential", "model-offload",
)  # fmt: skip
"""Each way once, at its best: what takes about twenty minutes for a model of FLUX.1-dev's size, where all take twice that."""
