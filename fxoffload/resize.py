"""Other sizes of a graph with dynamic dimensions: its costs are priced again, and its plan made again where that pays.

One compiled graph serves all sizes. Its prices are expressions of the dimensions, so at other sizes the schedule is planned with
other numbers, without compiling anything. A plan is kept while it is good: activations still fit, and a fresh plan would not be
`WORTH` faster. Activations that were measured at one size count at another in proportion to their estimates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fxoffload.cost import Costs
from fxoffload.price import price_function
from fxoffload.program import Program

CHANGE = 0.1
"""Relative change of compute time or activations from which costs are priced again."""
WORTH = 0.03
"""Part of the step that a fresh plan must save."""


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
        """These costs at the sizes of the last call; the same object if they differ little.

        Times that were measured at other sizes give way to the expressions.
        """
        assert self._price is not None
        now = Costs(self._price(*self._last), costs.buckets, costs.link_bytes_per_ms)
        if not _differ(_total_ms(now), _total_ms(costs)) and not _differ(estimate(now), estimate(costs)):
            return costs
        return now


def estimate(costs: Costs) -> int:
    """Activations of a forward, in bytes, by the expressions."""
    return max((s.activation_nbytes for s in costs.segments), default=0)


def _total_ms(costs: Costs) -> float:
    return sum(s.compute_ms for s in costs.segments)


def _differ(a: float, b: float) -> bool:
    return abs(a - b) > CHANGE * max(a, b)
