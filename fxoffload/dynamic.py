"""What segments cost at other sizes than those that were traced: prices are expressions of the dynamic dimensions."""

# Private names of torch: its functions of integers in sympy. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import sympy
from torch.utils._sympy.printers import PythonPrinter

from fxoffload.cost import SegmentCost
from fxoffload.price import SegmentPrice


def price_function(
    prices: Sequence[SegmentPrice], symbols: Sequence[sympy.Symbol], hints: Mapping[sympy.Symbol, int]
) -> Callable[..., tuple[SegmentCost, ...]]:
    """A function from the values of `symbols`, in order, to the segments' costs at these sizes; other symbols as in `hints`."""
    # Equal segments have equal expressions: each distinct one is evaluated once.
    distinct = list(dict.fromkeys(e for p in prices for e in (p.compute_ms, p.activation_nbytes)))
    place = {expression: i for i, expression in enumerate(distinct)}
    others: Any = {symbol: size for symbol, size in hints.items() if symbol not in symbols}
    evaluate = _function(symbols, [expression.subs(others) for expression in distinct])

    def costs(*sizes: int) -> tuple[SegmentCost, ...]:
        values = evaluate(*sizes)
        return tuple(
            SegmentCost(p.cost.name, float(values[place[p.compute_ms]]), int(values[place[p.activation_nbytes]])) for p in prices
        )

    return costs


def knee(prices: Sequence[SegmentPrice], symbol: sympy.Symbol, copy_ms: float, hints: Mapping[sympy.Symbol, int]) -> int | None:
    """The least size of a dynamic dimension from which compute takes longer than copying everything.

    From there on streaming is free where the budget has room for all copies to run beside compute, which a small one has not.
    Solves `sum of compute_ms(size) = copy_ms`, the other symbols as in `hints`. None if no size up to 2**31 does.
    """
    others: Any = {s: v for s, v in hints.items() if s != symbol}
    total: Any = sympy.Add(*[p.compute_ms for p in prices]).subs(others)
    if symbol not in total.free_symbols:
        return None
    # Rooflines are piecewise but grow with the size, so bisection finds the solution whichever piece holds there.
    at = _function([symbol], total)
    low, high = 1, 2**31
    if at(high) < copy_ms:
        return None
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if at(middle) >= copy_ms else (middle + 1, high)
    return low


class _Printer(PythonPrinter):
    """Python for sizes: sympy knows nothing of torch's functions of integers, such as the division of a strided convolution."""

    def _print_Pow(self, expr: sympy.Expr) -> str:
        # torch's own takes whole exponents only.
        base, exponent = map(self._print, expr.args)
        return f"(({base}) ** ({exponent}))"


def _function(symbols: Sequence[sympy.Symbol], expressions: Any) -> Any:
    """A Python function of the symbols' values, in order."""
    return sympy.lambdify(list(symbols), expressions, modules=[{"math": math}], printer=_Printer)
