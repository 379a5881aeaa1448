"""Draw the step over the budget, one panel a result: tests/bench/results/sweep.png from the JSON files beside it.

python tests/bench/pictures.py
"""

from __future__ import annotations

import json
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

RESULTS = Path(__file__).parent / "results"
PICTURE = RESULTS / "sweep.png"
COLUMNS = 2
LINES = (
    ("step_ms", "o-", "measured"),
    ("predicted_ms", "x", "predicted"),
    ("bound_ms", "--", "windowed bound"),
    ("naive_bound_ms", ":", "naive bound"),
)
"""Key of a row, style and label."""


def draw(reports: Sequence[dict[str, Any]]) -> Figure:
    """One panel for each report, in their order."""
    figure = Figure(figsize=(6.0 * COLUMNS, 3.6 * math.ceil(len(reports) / COLUMNS)), dpi=110, layout="constrained")
    panels = list(figure.subplots(math.ceil(len(reports) / COLUMNS), COLUMNS, squeeze=False).flat)
    for axes in panels[len(reports) :]:
        axes.set_axis_off()
    for axes, report in zip(panels, reports, strict=False):
        rows = shown(report)
        for key, style, label in LINES:
            axes.plot([row["budget_gib"] for row in rows], [row[key] for row in rows], style, label=label, markersize=5)
        resident = report["rows"][0]["step_ms"]
        axes.axhline(resident, color="0.75", linewidth=1, label=f"everything resident, {resident:.4g} ms", zorder=0)
        axes.set(xlabel="budget, GiB", ylabel="ms a step", xlim=(0, None))
        axes.set_ylim(0)
        axes.set_title(title(report), fontsize=9)
        axes.legend(fontsize=7, frameon=False)
    return figure


def title(report: dict[str, Any]) -> str:
    settings, _, _ = report["command"].partition("python ")
    return "\n".join([report["model"], *textwrap.wrap(settings, 80)])


def shown(report: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows that were measured, by budget; without the resident one, whose budget is none."""
    return sorted((row for row in report["rows"][1:] if "error" not in row), key=lambda row: row["budget_gib"])


def read(folder: Path = RESULTS) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


if __name__ == "__main__":
    draw(read()).savefig(PICTURE)
