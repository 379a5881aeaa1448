"""The predicted timeline of a plan: as a value, as a picture, as a trace for Perfetto; and the step over the budget as a picture.

The picture shows one forward in steady state. Above, the copy engine and the compute engine: a segment has the colour of the
copy that it waits for, or is grey where all of its weights are persistent; a stall is hatched. A copy for the next forward stands
where it happens, at the end. Below, the arena: who owns which of its bytes, from the start of a copy to the eviction.
"""

from __future__ import annotations

import colorsys
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxoffload import api
from fxoffload.curve import Curve, Point
from fxoffload.errors import OffloadError
from fxoffload.plan import Plan
from fxoffload.sizes import GIB, MIB, show_size
from fxoffload.timeline import Timeline, chrome_trace, simulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Colour = tuple[float, float, float]
_GREY: Colour = (0.78, 0.78, 0.78)
_STALL_COLOUR = "#c0392b"
_COPY, _COMPUTE = 1.15, 0.0
_BAR = 0.8
_INCHES_PER_CHARACTER = 0.075
_WIDTH_INCHES = 14.0
"""Of the figure; the axes take most of it."""
_AXES_INCHES = 12.6


def timeline_of(model: Any) -> Timeline:
    """The predicted timeline of the graph that ran last. Prints as a table, with a chart where it is small."""
    plan = api.get_plan(model)
    return simulate(plan, api.planned_of(model)[-1].costs)


def save_trace(model: Any, path: str | Path) -> None:
    """Write the predicted timeline as Chrome trace events: open the file at ui.perfetto.dev."""
    Path(path).write_text(json.dumps(chrome_trace(timeline_of(model))) + "\n")


def save_picture(model: Any, path: str | Path) -> None:
    """Write the predicted timeline as a picture (the suffix of `path` names the format). Needs matplotlib."""
    picture(api.get_plan(model), timeline_of(model)).savefig(path)


def picture(plan: Plan, timeline: Timeline) -> Figure:
    """Draw `timeline`, which has to be the plan's. Raises OffloadError where matplotlib is missing."""
    figure = figure_of((_WIDTH_INCHES, 6.0))
    figure.suptitle(_title(plan, timeline), fontsize=11)
    engines, arena = figure.subplots(2, 1, sharex=True, height_ratios=[1, 1.5])
    colours = _colours(plan)
    _draw_engines(engines, plan, timeline, colours)
    _draw_arena(arena, plan, timeline, colours)
    arena.set_xlim(0, timeline.step_ms)
    arena.set_xlabel("ms from the start of a forward in steady state (predicted)")
    return figure


def curve_picture(curve: Curve, *, here: Point, title: str) -> Figure:
    """The step over the budget, with both bounds, the knee of the naive one, and the point of one plan.

    Raises OffloadError where matplotlib is missing.
    """
    figure = figure_of((8.0, 4.8))
    axes = figure.subplots()
    budgets = [point.budget_nbytes / GIB for point in curve.points]
    axes.plot(budgets, [point.step_ms for point in curve.points], "o-", label="step, as planned", zorder=3)
    axes.plot(budgets, [point.bound_ms for point in curve.points], "--", label="windowed bound")
    axes.plot(budgets, [point.naive_ms for point in curve.points], ":", label="naive bound")
    axes.axhline(curve.compute_ms, color=_GREY, linewidth=1, label=f"compute alone, {curve.compute_ms:.3g} ms", zorder=0)
    if budgets[0] <= curve.knee_nbytes / GIB <= budgets[-1]:
        knee_gib = curve.knee_nbytes / GIB
        axes.axvline(knee_gib, color=_GREY, linewidth=1, linestyle="-.", label=f"knee, {show_size(curve.knee_nbytes)}", zorder=0)
    label = f"this plan, {show_size(here.budget_nbytes)}"
    axes.plot([min(here.budget_nbytes / GIB, budgets[-1])], [here.step_ms], "s", color=_STALL_COLOUR, label=label, zorder=4)
    axes.set(title=title, xlabel="budget, GiB", ylabel="ms a step (predicted)")
    axes.set_ylim(0)
    axes.legend(fontsize=8, frameon=False)
    frame(axes)
    return figure


def figure_of(inches: tuple[float, float]) -> Figure:
    """An empty figure of so many inches. Raises OffloadError where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise OffloadError("draw: matplotlib is not installed; run: pip install 'fxoffload[demo]'") from error
    return Figure(figsize=inches, dpi=110, layout="constrained")


def _title(plan: Plan, timeline: Timeline) -> str:
    over = timeline.step_ms / plan.bound_ms if plan.bound_ms else 1.0
    return (
        f"step {timeline.step_ms:.3g} ms = {plan.compute_ms:.3g} compute + {timeline.step_ms - plan.compute_ms:.3g} stall, "
        f"{over:.2f} x the bound of {plan.bound_ms:.3g} ms\n"
        f"budget {show_size(plan.budget_nbytes)}, {show_size(plan.resident_nbytes)} persistent, "
        f"{show_size(plan.streamed_nbytes)} streamed a forward"
    )


def _colours(plan: Plan) -> dict[str, Colour]:
    """A colour a load. Neighbours in time differ: the hue goes round in steps that never come back to the same place."""
    return {load.name: colorsys.hls_to_rgb(i * 0.381966 % 1.0, 0.68, 0.55) for i, load in enumerate(plan.loads)}


def _pieces(start_ms: float, end_ms: float, step_ms: float) -> Iterator[tuple[float, float, bool]]:
    """(start, duration, for the next forward) of a span; what lies before 0 moves to the end of the forward."""
    if start_ms < 0:
        yield start_ms + step_ms, min(end_ms, 0.0) - start_ms, True
    if end_ms > 0:
        start_ms = max(start_ms, 0.0)
        yield start_ms, end_ms - start_ms, False


def _short_labels(names: list[str]) -> dict[str, str]:
    """`3:1` for `blocks.3:1`; where several kinds of blocks are numbered, with the initials of what stands before: `stb.3`."""
    found = {name: re.fullmatch(r"(\D*)(\d.*)", name) for name in names}
    several = len({match[1] for match in found.values() if match}) > 1
    labels: dict[str, str] = {}
    for name, match in found.items():
        initials = "".join(word[0] for word in re.findall(r"[^\W_]+", match[1])) if match else ""
        labels[name] = name if match is None else f"{initials}.{match[2]}" if several else match[2]
    return labels


def _draw_engines(axes: Axes, plan: Plan, timeline: Timeline, colours: dict[str, Colour]) -> None:
    labels = _short_labels([s.name for s in timeline.segments] + [load.name for load in timeline.loads])
    waited_for = {load.wait_before: load.name for load in sorted(plan.loads, key=lambda load: load.nbytes)}
    for time in timeline.loads:
        for start, duration, ahead in _pieces(time.start_ms, time.end_ms, timeline.step_ms):
            _bar(
                axes,
                (start, duration),
                _COPY,
                colours[time.name],
                labels[time.name],
                timeline.step_ms,
                hatch="...." if ahead else "",
            )
    for i, segment in enumerate(timeline.segments):
        if segment.stall_ms > timeline.step_ms * 1e-6:
            span = [(segment.start_ms - segment.stall_ms, segment.stall_ms)]
            axes.broken_barh(span, (_COMPUTE, _BAR), facecolor="white", edgecolor=_STALL_COLOUR, hatch="////", linewidth=0.4)
        colour = colours[waited_for[i]] if i in waited_for else _GREY
        span = (segment.start_ms, segment.end_ms - segment.start_ms)
        _bar(axes, span, _COMPUTE, colour, labels[segment.name], timeline.step_ms)
    axes.set_ylim(-0.15, _COPY + _BAR + 0.15)
    axes.set_yticks([_COPY + _BAR / 2, _COMPUTE + _BAR / 2], ["copy", "compute"])
    frame(axes)
    _draw_legend(axes)


def _bar(
    axes: Axes,
    span: tuple[float, float],
    bottom: float,
    colour: Colour,
    label: str,
    step_ms: float,
    *,
    hatch: str = "",
    height: float = _BAR,
) -> None:
    start, duration = span
    axes.broken_barh([span], (bottom, height), facecolor=colour, edgecolor="white", hatch=hatch, linewidth=0.6)
    if len(label) * _INCHES_PER_CHARACTER < duration / (step_ms or 1.0) * _AXES_INCHES:
        axes.text(start + duration / 2, bottom + height / 2, label, ha="center", va="center", fontsize=8, clip_on=True)


def _draw_legend(axes: Axes) -> None:
    from matplotlib.patches import Patch

    colour = colorsys.hls_to_rgb(0.58, 0.68, 0.55)
    entries = [
        Patch(facecolor=colour, label="a copy, and the segment that waits for it"),
        Patch(facecolor=colour, edgecolor="white", hatch="....", label="a copy for the next forward"),
        Patch(facecolor=_GREY, label="weights are persistent"),
        Patch(facecolor="white", edgecolor=_STALL_COLOUR, hatch="////", label="stall: compute waits for a copy"),
    ]
    axes.legend(handles=entries, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(entries), fontsize=8, frameon=False)


def _draw_arena(axes: Axes, plan: Plan, timeline: Timeline, colours: dict[str, Colour]) -> None:
    step_ms = timeline.step_ms
    labels = _short_labels([load.name for load in plan.loads] + [r.bucket for r in plan.residents])
    tall = plan.arena_nbytes / 30
    for resident in plan.residents:
        label = labels[resident.bucket] if resident.nbytes > tall else ""
        _bar(axes, (0.0, step_ms), resident.offset / MIB, _GREY, label, step_ms, height=resident.nbytes / MIB)
    for load, time in zip(plan.loads, timeline.loads, strict=True):
        until = timeline.segments[load.evict_after].end_ms
        label = labels[load.name] if load.nbytes > tall else ""
        for start, duration, ahead in _pieces(time.start_ms, until, step_ms):
            hatch = "...." if ahead else ""
            span = (start, duration)
            _bar(axes, span, load.offset / MIB, colours[load.name], label, step_ms, hatch=hatch, height=load.nbytes / MIB)
    axes.set_ylim(0, max(plan.arena_nbytes / MIB, 1e-6))
    axes.set_ylabel("arena, MiB")
    frame(axes)


def frame(axes: Axes) -> None:
    """The look that all axes have."""
    axes.tick_params(labelsize=9)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
