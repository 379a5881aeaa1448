"""What `fxoffload bench` shows of its results, from the JSON alone: tables in Markdown, and two pictures a workload.

The first table has a row for each contender and setting, medians over repeats. The second compares at matched memory: for every
budget, our fastest row whose peak is within it, beside the fastest row of anybody else's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fxoffload.contenders import CONTENDERS
from fxoffload.errors import OffloadError
from fxoffload.results import Point, cannot_write, check_name, combine, read
from fxoffload.sizes import GIB, MIB, show_size

OURS = "fxoffload-"
_HEADERS = (
    "contender", "setting", "step ms", "least to most", "device {unit}", "allocated {unit}", "host {unit}", "copied {unit}",
    "host ms", "set-up s", "first call s", "output",
)  # fmt: skip
_MATCHED = ("budget", "bound ms", "fxoffload", "ms", "fastest other", "ms", "device {unit}", "other / fxoffload")
_NOTHING = "No row of this project is within a budget: nothing to compare at matched memory."
_UNCOUNTED = "Nobody counts the memory of this device: nothing to compare at matched memory."


def render(path: Path) -> str:
    """The report of a results file. Also written beside it, `.md`, with the pictures where matplotlib is installed.

    Raises ConfigError for a file that is no such results, and where the report cannot be written.
    """
    check_name(path, "--render")
    data = read(path)
    text = report(data)
    page = path.with_suffix(".md")
    drawn: list[Path] = []
    try:
        for entry in entries(data):
            name = f"{entry['workload']}-b{entry['batch']}"
            drawn += _draw(entry, points_of(data, entry), path.with_name(f"{path.stem}-{name}"))
        pictures = "\n".join(f"![{file.stem}]({file.name})" for file in drawn)
        page.write_text(f"{text}\n\n{pictures}".rstrip() + "\n")
    except OSError as error:
        raise cannot_write(page, error) from error
    return text


def report(data: Mapping[str, Any]) -> str:
    """All of it as Markdown."""
    head = [part for part in (data.get("note"), _place(data)) if part]
    return "\n\n".join([*head, *(_section(entry, points_of(data, entry)) for entry in entries(data))])


def entries(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """What is known of each workload: where no process could make the model, only what its rows say."""
    found = {(entry["workload"], entry["batch"]): entry for entry in data["workloads"]}
    for row in data["rows"]:
        name, batch = about = row["workload"], row["batch"]
        found.setdefault(about, {"workload": name, "batch": batch, "what": f"{name}, batch {batch}"})
    return list(found.values())


def points_of(data: Mapping[str, Any], entry: Mapping[str, Any]) -> list[Point]:
    """The points of one workload, in the order of `CONTENDERS`, and by memory."""
    about = (entry["workload"], entry["batch"])
    order = {name: i for i, name in enumerate(CONTENDERS)}
    points = combine([row for row in data["rows"] if (row["workload"], row["batch"]) == about])
    return sorted(points, key=lambda p: (order.get(p.contender, len(order)), p.is_measured, p.memory_nbytes or 0))


def show_setting(setting: Mapping[str, Any]) -> str:
    """`8GiB` for a budget, `transfer_buckets=1 ...` for flags."""
    return " ".join(str(value) if name == "budget" else f"{name}={value}" for name, value in setting.items())


def bound_at(bounds: Mapping[str, Any] | None, nbytes: int) -> float | None:
    """The windowed bound (ms) with so much memory, between the two nearest that are known; None for less than any.

    >>> bounds = {"nbytes": [100, 200, 300], "bound_ms": [9.0, 7.0, 5.0]}
    >>> bound_at(bounds, 150), bound_at(bounds, 1000), bound_at(bounds, 99)
    (8.0, 5.0, None)
    """
    if bounds is None or nbytes < bounds["nbytes"][0]:
        return None
    known, times = bounds["nbytes"], bounds["bound_ms"]
    i = bisect_left(known, nbytes)
    if i == len(known):
        return times[-1]
    if known[i] == nbytes:
        return times[i]
    share = (nbytes - known[i - 1]) / (known[i] - known[i - 1])
    return times[i - 1] + share * (times[i] - times[i - 1])


def _place(data: Mapping[str, Any]) -> str:
    machine, versions = data.get("machine"), data.get("versions")
    if machine is None or versions is None:
        return ""
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version is not None)
    where = f"{machine['device']}{driver}, {machine['cores']} cores of {machine['processor']}, {machine['system']}; {known}"
    return "\n\n".join([where, *(f"`{command}`" for command in data["commands"])])


def _section(entry: Mapping[str, Any], points: Sequence[Point]) -> str:
    title = f"## {entry.get('what', entry['workload'])}"
    unit, size = _unit(entry.get("weight_nbytes", 0))
    measured = [point for point in points if point.is_measured]
    parts = [title]
    if bounds := entry.get("bounds"):
        parts.append(
            f"Resident and compiled, {bounds['resident_ms']:.1f} ms a step; link {bounds['link_gb_s']:.1f} GB/s; "
            f"activations {show_size(bounds['activation_nbytes'])}."
        )
    if measured:
        headers = [header.format(unit=unit) for header in _HEADERS]
        parts.append(markdown(headers, [_cells(point, size) for point in measured], right=range(2, 11)))
        names = dict.fromkeys(point.contender for point in measured)
        parts.append("\n".join(f"- {name}: {CONTENDERS[name].what}" for name in names if name in CONTENDERS))
        parts.append(_matched(measured, entry.get("bounds"), unit, size))
    if reasons := _reasons(points):
        parts.append("\n".join(reasons))
    return "\n\n".join(parts)


def _cells(point: Point, size: int) -> list[str]:
    values = point.values
    memory = point.memory_nbytes
    planned = "" if memory is None or values.get("reserved_nbytes") else " (planned)"
    flags = values.get("flags")
    setting = show_setting(point.setting) + (f" ({show_setting(flags)})" if flags else "")
    return [
        point.contender,
        setting,
        f"{point.step_ms:.1f}",
        f"{values['step_min_ms']:.1f} to {values['step_max_ms']:.1f}",
        "" if memory is None else f"{memory / size:.2f}{planned}",
        *(_size(values.get(name), size) for name in ("allocated_nbytes", "host_peak_nbytes", "copied_nbytes")),
        f"{values['host_ms']:.1f}",
        *(f"{values[name]:.1f}" for name in ("setup_s", "first_call_s")),
        _output(point),
    ]


def _output(point: Point) -> str:
    if point.status == "wrong":
        return "WRONG"
    if point.values.get("equal_to_reference"):
        return "bit-equal to the reference"
    close = "not compared" if point.values.get("error") is None else f"within {point.values['error']:.1e}"
    return f"bit-equal to resident, {close}" if point.values.get("equal_to_resident") else close


def _matched(points: Sequence[Point], bounds: Mapping[str, Any] | None, unit: str, size: int) -> str:
    """The fastest of both sides at every budget that ours was measured with."""
    right = [point for point in points if point.status == "ok"]
    budgets = {
        point.values["budget_nbytes"]
        for point in right
        if point.contender.startswith(OURS) and point.setting.get("budget") != "all" and point.values.get("budget_nbytes")
    }
    others = [point for point in right if not point.contender.startswith(OURS)]
    if not any(point.memory_nbytes for point in others):
        return _UNCOUNTED
    rows: list[list[str]] = []
    for budget in sorted(budgets):
        within = [point for point in right if point.memory_nbytes is not None and point.memory_nbytes <= budget]
        ours = _fastest([point for point in within if point.contender.startswith(OURS)])
        other = _fastest([point for point in within if not point.contender.startswith(OURS)])
        bound = bound_at(bounds, budget)
        row = [show_size(budget), "" if bound is None else f"{bound:.1f}"]
        for point in (ours, other):
            row += [point.contender, f"{point.step_ms:.1f}"] if point is not None else ["none within it", ""]
        row.append("" if other is None or other.memory_nbytes is None else f"{other.memory_nbytes / size:.2f}")
        row.append("" if ours is None or other is None else f"{other.step_ms / ours.step_ms:.2f}")
        rows.append(row)
    headers = [header.format(unit=unit) for header in _MATCHED]
    return markdown(headers, rows, right=(1, 3, 5, 6, 7)) if rows else _NOTHING


def _fastest(points: Sequence[Point]) -> Point | None:
    return min(points, key=lambda point: point.step_ms, default=None)


def _reasons(points: Sequence[Point]) -> list[str]:
    """A line for each reason, with all rows that have it."""
    found: dict[str, list[str]] = {}
    for point in points:
        if point.is_measured and not point.reason:
            continue
        reason = point.reason if point.is_measured else f"not measured, {point.status}: {point.reason}"
        where = " ".join([point.contender, *([show_setting(point.setting)] if point.setting else [])])
        found.setdefault(reason, []).append(where)
    return [f"- {reason}: {'; '.join(where)}" for reason, where in found.items()]


def _unit(nbytes: int) -> tuple[str, int]:
    return ("GiB", GIB) if nbytes >= GIB else ("MiB", MIB)


def _size(nbytes: float | None, size: int) -> str:
    return "" if nbytes is None else f"{nbytes / size:.2f}"


def markdown(headers: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """A Markdown table; columns `right` are numbers."""
    rule = ["---:" if i in right else "---" for i in range(len(headers))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (headers, rule, *rows))


def _draw(entry: Mapping[str, Any], points: Sequence[Point], stem: Path) -> list[Path]:
    from fxoffload import benchdraw

    measured = [point for point in points if point.is_measured]
    files: list[Path] = []
    try:
        for name, figure in benchdraw.figures(entry, measured):
            files.append(stem.with_name(f"{stem.name}-{name}.png"))
            figure.savefig(files[-1])
    except OffloadError:
        return []
    return files
