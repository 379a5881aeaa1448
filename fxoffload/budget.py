"""One memory budget for several models that run in turn, such as a text encoder and a transformer, or Wan's two transformers.

    budget = fxoffload.Budget("12GiB")
    encoder = torch.compile(encoder, backend="layerwise", options={"memory_budget": budget})
    transformer = torch.compile(transformer, backend="layerwise", options={"memory_budget": budget})

The model that runs gets the whole budget, and one that is idle keeps what there is to spare: of what does not fit beside the one
that runs it gives back its captures and its staging area first, then residents, in pieces of about 1 GiB (`pieces`). That much is
filled again when it runs next. So the peak is that of the larger model, not the sum. Beside the first forwards of a model, which
measure what it takes, idle ones keep nothing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from fxoffload import forks
from fxoffload.errors import OffloadError


class Member(Protocol):
    """A model under a shared budget."""

    @property
    def arena_nbytes(self) -> int: ...

    def is_under(self, budget: Budget) -> bool: ...

    def shrink_arena(self, most_nbytes: int) -> None: ...

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
        self._lock = threading.RLock()
        self._runners: list[Member] = []
        """Whose forwards are under way, the innermost last: the later ones are called by the earlier ones."""

    @contextmanager
    def turn(self) -> Generator[None]:
        """In here no other thread runs a model under this budget.

        Whoever needs the lock of a model, too, takes it in here: its forward may call another model under the budget, which a
        thread that had taken that model's lock first, and waits for its turn, would keep from running for good.
        """
        with self._lock:
            yield

    def begin(self, runner: Member) -> None:
        """A forward of a model begins. Waits until no other thread runs a model under this budget."""
        self._lock.acquire()
        self._runners.append(runner)

    def end(self) -> None:
        """The forward that began last is over."""
        self._runners.pop()
        self._lock.release()

    @contextmanager
    def running(self, runner: Member) -> Generator[None]:
        """From `begin` to `end`."""
        self.begin(runner)
        try:
            yield
        finally:
            self.end()

    def settle(self, member: Member, nbytes: int) -> int:
        """The budget in bytes: `nbytes` at the first call, and the same ever after. From now on `member` is known."""
        self._members.add(member)
        if self._nbytes is None:
            self._nbytes = nbytes
        return self._nbytes

    def make_room(self, runner: Member, peak_nbytes: int, budget_nbytes: int) -> None:
        """Before `runner` allocates: idle models give back what does not fit beside `peak_nbytes` of the budget.

        What the allocator kept of the model that ran before is freed too: pieces of it fit another model's activations badly.
        Raises OffloadError where one that is called by another model's forward would need that one's memory.
        """
        spare = budget_nbytes - peak_nbytes
        idle = [member for member in self._members if member is not runner and member.is_under(self)]
        # The smallest first: more models keep all that they have.
        for member in sorted(idle, key=lambda member: member.arena_nbytes):
            if member in self._runners and member.arena_nbytes > max(spare, 0):
                raise OffloadError(
                    f"budget: {self!r}: a model is called by another one's forward, and the weights of both do not fit into the "
                    "budget that they share; give the inner one a memory_budget of its own"
                )
            member.shrink_arena(max(spare, 0))
            spare -= member.arena_nbytes
        if self._last is not None and self._last() is not runner:
            runner.free_cached()
        self._last = weakref.ref(runner)

    def __repr__(self) -> str:
        return f"Budget({self.memory_budget!r})"
