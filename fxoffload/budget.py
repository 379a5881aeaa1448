"""One memory budget for several models that run in turn, such as a text encoder and a transformer, or Wan's two transformers.

    budget = fxoffload.Budget("12GiB")
    encoder = torch.compile(encoder, backend="layerwise", options={"memory_budget": budget})
    transformer = torch.compile(transformer, backend="layerwise", options={"memory_budget": budget})

The model that runs gets the whole budget. A model that is idle keeps its arena as long as that fits beside the one that runs,
and gives it back when it does not; it is filled again when that model runs next. So the peak is that of the larger model, not the
sum.
"""

from __future__ import annotations

import threading
import weakref
from typing import Protocol

from fxoffload import forks


class Member(Protocol):
    """A model under a shared budget."""

    @property
    def arena_nbytes(self) -> int: ...

    def give_up_arena(self) -> None: ...

    def free_cached(self) -> None: ...


class Budget:
    """A budget to pass to several models as `memory_budget`.

    Takes what that option takes: bytes, a size string, a fraction of the device, or `"auto"`. The last two are settled once, when
    the first of the models is planned. One model runs at a time: calls from other threads wait. Raises ConfigError and TypeError
    as that option does.

    >>> Budget("12GiB")
    Budget(12884901888)
    """

    def __init__(self, memory_budget: int | float | str = "auto") -> None:
        from fxoffload.config import check_budget

        self.memory_budget: int | float | str = check_budget("memory_budget", memory_budget)
        self.after_fork()
        self._nbytes: int | None = None
        self._members: weakref.WeakSet[Member] = weakref.WeakSet()
        self._last: weakref.ref[Member] | None = None
        forks.tell(self)

    def after_fork(self) -> None:
        """In a forked child nobody holds the lock that a thread of the parent may have held."""
        self.lock = threading.RLock()

    def settle(self, nbytes: int) -> int:
        """The budget in bytes: `nbytes` at the first call, and the same ever after."""
        if self._nbytes is None:
            self._nbytes = nbytes
        return self._nbytes

    def make_room(self, runner: Member, peak_nbytes: int, budget_nbytes: int) -> None:
        """Before `runner` allocates: idle models whose arenas do not fit beside `peak_nbytes` of the budget give them up.

        What the allocator kept of the model that ran before is freed too: pieces of it fit another model's activations badly.
        """
        self._members.add(runner)
        spare = budget_nbytes - peak_nbytes
        # The smallest first: more models keep theirs.
        for member in sorted((m for m in self._members if m is not runner), key=lambda m: m.arena_nbytes):
            if member.arena_nbytes <= spare:
                spare -= member.arena_nbytes
            else:
                member.give_up_arena()
        if self._last is not None and self._last() is not runner:
            runner.free_cached()
        self._last = weakref.ref(runner)

    def __repr__(self) -> str:
        return f"Budget({self.memory_budget!r})"
