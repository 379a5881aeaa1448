"""Other sizes of a graph with dynamic dimensions: its costs are priced again, and its plan made again where that pays.

One compiled graph serves all sizes. Its prices are expressions of the dimensions, so at other sizes the schedule is planned with
other numbers, without compiling anything. A plan is kept while it is good: activations still fit, and a fresh plan would not be
`WORTH` faster. What activations were measured at some sizes says what they are at others (`Activations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxoffload.cost import Costs
from fxoffload.dynamic import price_function
from fxoffload.program import Program
from fxoffload.warmup import SLACK_NBYTES

CHANGE = 0.1
"""Relative change of compute time or activations from which a plan is looked at again, unless activations do not fit before."""
WORTH = 0.03
"""Part of the step that a fresh plan must save."""
_MOST_GROWTH = 2.0
"""Activations grow by no more than so many times their estimate."""


class Sizes:
    """The sizes of the dynamic dimensions of one binding, call by call."""

    def __init__(self, program: Program) -> None:
        position_of = {placeholder: position for position, placeholder, _ in program.inputs}
        self._places = tuple((position_of[placeholder], dim) for _, placeholder, dim in program.facts.symbols)
        symbols = [symbol for symbol, _, _ in program.facts.symbols]
        hints = dict(program.facts.hints)
        self._traced = tuple(hints[symbol] for symbol in symbols)
        self._price = price_function(program.prices, symbols, hints) if symbols else None
        self._last = self._traced

    def changed(self, args: Sequence[Any]) -> bool:
        """Whether a call comes with other sizes than the one before."""
        if not self._places:
            return False
        sizes = tuple(int(args[i] if dim is None else args[i].shape[dim]) for i, dim in self._places)
        changed, self._last = sizes != self._last, sizes
        return changed

    def costs(self, costs: Costs) -> Costs:
        """These costs at the sizes of the last call. Times that were measured at other sizes give way to the expressions."""
        assert self._price is not None
        return Costs(self._price(*self._last), costs.buckets, costs.link_bytes_per_ms)


class Activations:
    """What forwards of one program take besides the arena, in bytes: by their estimate, and by what was measured at some sizes.

    Between a size that was measured and another one, they change by the growth of the estimate times what was measured, without
    slack, over the estimate: at most 2, at least 1 where the size becomes larger. No size takes more than a larger one did.
    A plain proportion would make gigabytes of the library's workspaces, which every size has.
    """

    def __init__(self) -> None:
        self._measured: dict[int, int] = {}

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._measured)

    def learn(self, estimate_nbytes: int, nbytes: int) -> None:
        self._measured[estimate_nbytes] = nbytes

    def at(self, estimate_nbytes: int) -> int:
        """Bytes at a size with this estimate."""
        measured = self._measured
        below = max((known for known in measured if known <= estimate_nbytes), default=None)
        above = min((known for known in measured if known > estimate_nbytes), default=None)
        if below is not None:
            larger = measured[below] + int((estimate_nbytes - below) * max(self._growth(below), 1.0))
            return larger if above is None else min(larger, measured[above])
        if above is None:
            return estimate_nbytes
        smaller = measured[above] - int((above - estimate_nbytes) * self._growth(above))
        return max(smaller, min(SLACK_NBYTES, measured[above]))

    def _growth(self, known: int) -> float:
        return min(max(self._measured[known] - SLACK_NBYTES, 0) / max(known, 1), _MOST_GROWTH)


def estimate(costs: Costs) -> int:
    """Activations of a forward, in bytes, by the expressions."""
    return max((s.activation_nbytes for s in costs.segments), default=0)


def much_other(one: Costs, other: Costs) -> bool:
    """Whether two prices of a graph differ by more than `CHANGE`."""
    return _differ(_total_ms(one), _total_ms(other)) or _differ(estimate(one), estimate(other))


def _total_ms(costs: Costs) -> float:
    return sum(s.compute_ms for s in costs.segments)


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > CHANGE * max(a, b)
