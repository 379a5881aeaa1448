"""What a model costs at other budgets: the curve of the step over the budget, and the budgets that stand out on it.

With W the bytes of all weights, A the activations, B the link and C the compute time of a forward, no schedule beats

    naive bound(budget)    = max(C, (W - (budget - A)) / B)
    windowed bound(budget) = timeline.windowed_bound, which also sees where along the model the weights are

and the knee of the naive bound is at `A + W - C * B`. The smallest budget at which streaming is free is found on plans: the step
is at most `FREE` times C. More memory never makes a plan slower by more than half a percent, so bisection finds it, from the
least budget at which the windowed bound allows it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from fxoffload.buckets import ALIGNMENT, align
from fxoffload.cost import Costs
from fxoffload.errors import ConfigError
from fxoffload.plan import Plan
from fxoffload.planner import Knobs, make_plan, smallest_budget
from fxoffload.show import table
from fxoffload.sizes import GIB, show_size
from fxoffload.timeline import windowed_bound

FREE = 1.01
"""A step of at most this many times its compute time streams for free."""
POINTS = 16
_RESOLUTION = 256
"""Into how many pieces the span of budgets is cut for the search."""


@dataclass(frozen=True, slots=True)
class Point:
    """One budget, planned. Sizes in bytes, times in milliseconds."""

    budget_nbytes: int
    step_ms: float
    bound_ms: float
    naive_ms: float
    streamed_nbytes: int
    """Bytes copied in one forward."""


@dataclass(frozen=True, slots=True)
class Landmarks:
    """The budgets that stand out, each with its plan."""

    smallest: Point
    """The model runs."""
    overlap: Point
    """Not slow: copies run beside compute."""
    here: Point
    """The budget of the plan that is explained."""
    more: Point
    """1 GiB more than here."""
    free: Point | None
    """The least budget at which streaming is free; None where the settings allow no budget to reach that."""
    everything: Point | None
    """All weights stay; None where the settings let no budget hold all of them."""

    def rows(self) -> list[tuple[str, Point]]:
        """By budget, ascending; names of equal budgets together."""
        named = [
            ("smallest that works", self.smallest),
            ("smallest with overlap", self.overlap),
            ("this plan", self.here),
            ("1 GiB more", self.more),
            ("streaming is free", self.free),
            ("everything stays", self.everything),
        ]
        found: dict[int, tuple[list[str], Point]] = {}
        for name, point in named:
            if point is not None:
                found.setdefault(point.budget_nbytes, ([], point))[0].append(name)
        return [(", ".join(names), point) for _, (names, point) in sorted(found.items())]


@dataclass(frozen=True, slots=True)
class Curve:
    """Points by budget, ascending, for one model under one set of knobs."""

    points: tuple[Point, ...]
    compute_ms: float
    knee_nbytes: int
    """Where the naive bound meets the compute time; 0 where it is compute at every budget."""

    def __str__(self) -> str:
        knee = f"  knee of the naive bound {show_size(self.knee_nbytes)}" if self.knee_nbytes else ""
        rows = [
            (
                show_size(p.budget_nbytes),
                *(f"{ms:.4g}" for ms in (p.step_ms, p.bound_ms, p.naive_ms)),
                show_size(p.streamed_nbytes),
            )
            for p in self.points
        ]
        names = ("budget", "step ms", "bound ms", "naive bound ms", "streamed a step")
        return f"curve  compute {self.compute_ms:.4g} ms{knee}\n{table(names, rows, fold=False)}"


@dataclass(frozen=True, slots=True)
class Study:
    """All that a plan depends on but the budget."""

    costs: Costs
    knobs: Knobs
    activation_nbytes: int

    @property
    def compute_ms(self) -> float:
        return sum(segment.compute_ms for segment in self.costs.segments)

    @property
    def everything_nbytes(self) -> int:
        """The least budget with room for all weights."""
        return self.activation_nbytes + sum(align(bucket.nbytes) for bucket in self.costs.buckets)

    def smallest_nbytes(self, *, overlap: bool) -> int:
        return smallest_budget(self.costs, self.knobs, activation_nbytes=self.activation_nbytes, overlap=overlap)

    def plan(self, budget_nbytes: int) -> Plan:
        """Raises BudgetError where the budget is too small."""
        return _plan(self, budget_nbytes)

    def bound_ms(self, budget_nbytes: int) -> float:
        return windowed_bound(self.costs, (budget_nbytes - self.activation_nbytes) // ALIGNMENT * ALIGNMENT)

    def naive_ms(self, budget_nbytes: int) -> float:
        streamed = self.everything_nbytes - budget_nbytes
        return max(self.compute_ms, streamed / self.costs.link_bytes_per_ms)

    def point(self, budget_nbytes: int) -> Point:
        plan = self.plan(budget_nbytes)
        return Point(budget_nbytes, plan.step_ms, plan.bound_ms, self.naive_ms(budget_nbytes), plan.streamed_nbytes)


@functools.lru_cache(maxsize=128)
def _plan(study: Study, budget_nbytes: int) -> Plan:
    return make_plan(study.costs, budget_nbytes, study.knobs, activation_nbytes=study.activation_nbytes)


@functools.lru_cache(maxsize=8)
def find_landmarks(study: Study, plan: Plan) -> Landmarks:
    """The landmarks around a plan. About ten plans are made."""
    here = Point(plan.budget_nbytes, plan.step_ms, plan.bound_ms, study.naive_ms(plan.budget_nbytes), plan.streamed_nbytes)
    free = find_free(study)
    everything = study.point(max(study.everything_nbytes, study.smallest_nbytes(overlap=False)))
    return Landmarks(
        smallest=study.point(study.smallest_nbytes(overlap=False)),
        overlap=study.point(study.smallest_nbytes(overlap=True)),
        here=here,
        more=study.point(plan.budget_nbytes + GIB),
        free=study.point(free) if free is not None else None,
        everything=everything if not everything.streamed_nbytes else None,
    )


def find_free(study: Study) -> int | None:
    """The least budget (bytes) with a step of at most `FREE` times the compute time, None if none has it."""
    target_ms = FREE * study.compute_ms
    low, high = study.smallest_nbytes(overlap=False), study.everything_nbytes

    def is_free(budget_nbytes: int) -> bool:
        return study.plan(budget_nbytes).step_ms <= target_ms

    if high <= low:
        return low if is_free(low) else None
    if not is_free(high):
        return None
    step = max((high - low) // _RESOLUTION, 1)
    # No plan beats its bound, and bounds are cheap.
    start = _first(low, high, step, lambda budget: study.bound_ms(budget) <= target_ms)
    found, width = start, step
    if not is_free(start):
        while start + width < high and not is_free(start + width):
            start, width = start + width, 2 * width
        found = _first(start, min(start + width, high), step, is_free)
    # What is found is as exact as `step`: this one may be just below it.
    overlap = study.smallest_nbytes(overlap=True)
    return overlap if overlap < found and is_free(overlap) else found


def _first(low: int, high: int, step: int, holds: Callable[[int], bool]) -> int:
    """The least value from which on `holds`, to within `step`; it holds at `high`."""
    if holds(low):
        return low
    while high - low > step:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@functools.lru_cache(maxsize=8)
def find_curve(study: Study, points: int = POINTS) -> Curve:
    """Plans at about `points` budgets, evenly spaced from the smallest that works to the one that holds everything.

    Raises ConfigError for fewer than two.
    """
    if points < 2:
        raise ConfigError(f"curve: points: {points} make no curve; give 2 or more")
    smallest, everything = study.smallest_nbytes(overlap=False), study.everything_nbytes
    everything = max(everything, smallest)
    budgets = {smallest + (everything - smallest) * i // (points - 1) for i in range(points)}
    budgets.add(study.smallest_nbytes(overlap=True))
    knee = everything - int(study.compute_ms * study.costs.link_bytes_per_ms)
    return Curve(tuple(study.point(budget) for budget in sorted(budgets)), study.compute_ms, max(knee, 0))
