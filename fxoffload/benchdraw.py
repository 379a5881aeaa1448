"""The two pictures of a workload: the step over the memory that it took, and the time until the first result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fxoffload.draw import figure_of, frame
from fxoffload.results import Point
from fxoffload.sizes import GIB, MIB

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDE = 8.0
"""Steps that differ by more than this factor are drawn on a logarithmic axis."""
_ROOM = 1.08
"""How far an axis goes beyond the largest value."""
_OURS = "fxoffload-"
_MARKERS = "osv^D<>pPX*hd"


def figures(entry: Mapping[str, Any], points: Sequence[Point]) -> Iterator[tuple[str, Figure]]:
    """Each picture with its name, where there is something to draw. Raises OffloadError where matplotlib is missing."""
    placed = [point for point in points if point.memory_nbytes is not None]
    if placed:
        yield "steps", steps_figure(entry, placed)
    if points:
        yield "first-calls", first_calls_figure(entry, points)


def steps_figure(entry: Mapping[str, Any], points: Sequence[Point]) -> Figure:
    """The step (ms) over the peak of the device's memory, one curve a contender, with the bound that no schedule beats."""
    unit, size = ("GiB", GIB) if entry.get("weight_nbytes", 0) >= GIB else ("MiB", MIB)
    figure = figure_of((9.0, 5.4))
    axes = figure.subplots()
    curves: dict[str, list[Point]] = {}
    for point in points:
        curves.setdefault(point.contender, []).append(point)
    for i, (name, curve) in enumerate(curves.items()):
        curve.sort(key=lambda point: point.memory_nbytes or 0)
        ours = name.startswith(_OURS)
        axes.plot(
            [(point.memory_nbytes or 0) / size for point in curve],
            [point.step_ms for point in curve],
            marker=_MARKERS[i % len(_MARKERS)],
            linewidth=2.2 if ours else 1.0,
            zorder=3 if ours else 2,
            label=name,
        )
    bounds = entry.get("bounds")
    if bounds:
        memory = [nbytes / size for nbytes in bounds["nbytes"]]
        axes.plot(memory, bounds["bound_ms"], "k--", linewidth=1, label="bound of any schedule")
    measured = any(point.values.get("reserved_nbytes") for point in points)
    what = "reserved peak" if measured else "planned peak, as nobody counts what this device holds"
    axes.set(title=entry.get("what", entry["workload"]), xlabel=f"{what}, {unit}", ylabel="ms a step")
    steps = [point.step_ms for point in points]
    if max(steps) > _WIDE * min(steps):
        axes.set_yscale("log")
    else:
        axes.set_ylim(0, _ROOM * max(steps))
    axes.set_xlim(0)
    axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
    frame(axes)
    return figure


def first_calls_figure(entry: Mapping[str, Any], points: Sequence[Point]) -> Figure:
    """Seconds from a model on the host to its first result, stacked: set-up, and the first call with its compilation.

    Of contenders that measure several settings in one process, the first counts: later ones find things done.
    """
    first: dict[str, Point] = {}
    for point in points:
        if point.contender not in first or point.values.get("first"):
            first[point.contender] = point
    chosen = sorted(first.values(), key=lambda point: -_until_first(point))
    figure = figure_of((9.0, 0.8 + 0.3 * len(chosen)))
    axes = figure.subplots()
    names = [point.contender for point in chosen]
    setup = [point.values["setup_s"] for point in chosen]
    axes.barh(names, setup, label="set-up", color="#7f8c8d")
    axes.barh(names, [point.values["first_call_s"] for point in chosen], left=setup, label="first call", color="#2e86c1")
    axes.set(title=entry.get("what", entry["workload"]), xlabel="seconds until the first result")
    axes.legend(fontsize=8, frameon=False)
    frame(axes)
    return figure


def _until_first(point: Point) -> float:
    return point.values["setup_s"] + point.values["first_call_s"]
