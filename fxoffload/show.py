"""How stage values print: fixed columns, totals first, repeats folded. No addresses, no clock, so that prints can be compared.

Rows that repeat fold into one, or into one period: `blocks.4-7 (x4)`. Rows repeat if their numbers are equal and every number in
their names either stays the same or goes up by one each time, so that the folded row says what each of them says: `blocks.4:0`,
`blocks.4:1`, `blocks.5:0`, `blocks.5:1` become `blocks.4-5:0 (x2)`, `blocks.4-5:1 (x2)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fxoffload.sizes import GIB, KIB, MIB, show_size

if TYPE_CHECKING:
    from fxoffload.cost import Costs
    from fxoffload.plan import Plan
    from fxoffload.timeline import Timeline

Cell = str | int | float
_LONGEST_PERIOD = 16
_CHART_SEGMENTS = 24
_CHART_WIDTH = 100
_NUMBER = re.compile(r"\d+")
_FLOAT = re.compile(r"-?\d+\.\d+")


def table(headers: Sequence[str], rows: Sequence[Sequence[Cell]], *, fold: bool = True) -> str:
    """Columns as wide as their widest cell: numbers to the right, text to the left. Floats should come formatted, as text.

    `fold`: fold repeats; the first column then names the rows.
    """
    lines = fold_rows(rows) if fold else [tuple(map(str, row)) for row in rows]
    columns = list(zip(headers, *lines, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [any(map(_is_number, column[1:])) and all(map(_is_number_or_none, column[1:])) for column in columns]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width) for cell, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in [tuple(headers), *lines]
    )


def fold_rows(rows: Sequence[Sequence[Cell]]) -> list[tuple[str, ...]]:
    """Rows as text, repeats folded. Only text counts up; ints and floats, also formatted ones, have to be equal."""
    folded: list[tuple[str, ...]] = []
    i = 0
    while i < len(rows):
        period, times = _longest_repeat(rows, i)
        if times == 1:
            folded.append(tuple(map(str, rows[i])))
            i += 1
            continue
        for k in range(period):
            group = rows[i + k : i + period * times : period]
            name, *others = (fold_names([str(row[c]) for row in group]) for c in range(len(group[0])))
            folded.append((f"{name} (x{times})", *others))
        i += period * times
    return folded


def fold_names(names: Sequence[str]) -> str:
    """`blocks.4-7` for `blocks.4` ... `blocks.7`: names that differ in numbers which count up together, or are all equal."""
    first, last = names[0], names[-1]
    ends = iter(_NUMBER.findall(last))

    def span(match: re.Match[str]) -> str:
        end = next(ends)
        return match[0] if match[0] == end else f"{match[0]}-{end}"

    return _NUMBER.sub(span, first)


def _longest_repeat(rows: Sequence[Sequence[Cell]], start: int) -> tuple[int, int]:
    """(period, times) that cover most rows from `start` on; the shortest such period."""
    best, covered = (1, 1), 1
    for period in range(1, min(_LONGEST_PERIOD, (len(rows) - start) // 2) + 1):
        times = 1
        while start + period * (times + 1) <= len(rows) and all(
            _follows(rows[i], rows[i + period], rows[i + period * times], times) for i in range(start, start + period)
        ):
            times += 1
        if times > 1 and period * times > covered:
            best, covered = (period, times), period * times
    return best


def _follows(row: Sequence[Cell], second: Sequence[Cell], later: Sequence[Cell], times: int) -> bool:
    """Whether `later` is what `row` is after so many repeats, of which `second` is the first."""
    return all(a == b == c or _counts_up(a, b, c, times) for a, b, c in zip(row, second, later, strict=True))


def _counts_up(first: Cell, second: Cell, later: Cell, times: int) -> bool:
    """Texts that are equal but for numbers; each of these is the same in all repeats, or one higher in every one."""
    if not (isinstance(first, str) and isinstance(second, str) and isinstance(later, str)) or _is_float(first):
        return False
    if not _NUMBER.sub("#", first) == _NUMBER.sub("#", second) == _NUMBER.sub("#", later):
        return False
    numbers = zip(*(map(int, _NUMBER.findall(text)) for text in (first, second, later)), strict=True)
    return all(b - a in (0, 1) and c - a == times * (b - a) for a, b, c in numbers)


def _is_float(text: str) -> bool:
    return _FLOAT.fullmatch(text) is not None


def _is_number(text: str) -> bool:
    return _is_float(text) or text.isdigit()


def _is_number_or_none(text: str) -> bool:
    return text in ("", "-") or _is_number(text)


def plan_table(plan: Plan, costs: Costs | None = None) -> str:
    """Totals, then a row per bucket. With the costs: rows in graph order, copy and stall times, and the chart of a small plan."""
    head = _plan_totals(plan)
    if not plan.residents and not plan.loads:
        return head
    headers = ["bucket", "size", "state", "prefetch before", "wait before", "evict after"]
    headers[1], size = _size_format([*(r.nbytes for r in plan.residents), *(load.nbytes for load in plan.loads)])
    rows: dict[str, list[list[Cell]]] = {}
    for resident in plan.residents:
        rows.setdefault(resident.bucket, []).append([resident.bucket, size(resident.nbytes), "persistent", "-", "-", "-"])
    for load in plan.loads:
        at = [plan.segments[i] for i in (load.prefetch_before, load.wait_before, load.evict_after)]
        state = "streamed, wraps" if load.wraps else "streamed"
        rows.setdefault(load.bucket, []).append([load.name, size(load.nbytes), state, *at])
    if costs is None:
        return f"{head}\n{table(headers, [row for several in rows.values() for row in several])}"
    return f"{head}\n{_with_times(plan, costs, headers, rows)}"


def _plan_totals(plan: Plan) -> str:
    ms = _ms_format([plan.step_ms])
    persistent, staging = plan.resident_nbytes, plan.arena_nbytes - plan.resident_nbytes
    totals = (
        f"plan  budget {show_size(plan.budget_nbytes)}  peak {show_size(plan.peak_nbytes)}  step {ms(plan.step_ms)} ms = "
        f"{ms(plan.compute_ms)} compute + {ms(plan.stall_ms)} stall  (bound {ms(plan.bound_ms)} ms)\n"
        f"arena {show_size(plan.arena_nbytes)} = {show_size(persistent)} persistent + {show_size(staging)} staging  "
        f"activations {show_size(plan.activation_nbytes)}  streamed {show_size(plan.streamed_nbytes)} a forward"
    )
    return totals if plan.async_transfer else f"{totals}  copies on the compute stream"


def _with_times(plan: Plan, costs: Costs, headers: list[str], rows: dict[str, list[list[Cell]]]) -> str:
    from fxoffload.timeline import simulate

    timeline = simulate(plan, costs)
    stall_ms = {load.name: timeline.segments[load.wait_before].stall_ms for load in plan.loads}
    copy_ms = {bucket.name: bucket.copy_ms for bucket in costs.buckets}
    ms = _ms_format([*copy_ms.values(), *stall_ms.values()])
    for name, several in rows.items():
        for row in several:
            row += [ms(copy_ms[name]), ms(stall_ms[str(row[0])])] if row[2] != "persistent" else ["-", "-"]
    ordered = [row for bucket in costs.buckets for row in rows.get(bucket.name, [])]
    text = table([*headers, "copy ms", "stall ms"], ordered)
    return text if len(plan.segments) > _CHART_SEGMENTS else f"{text}\n{chart(timeline)}"


def costs_table(costs: Costs) -> str:
    """Totals, then a row per segment with the buckets that it reads."""
    compute_ms = [segment.compute_ms for segment in costs.segments]
    copy_ms, nbytes = [0.0] * len(compute_ms), [0] * len(compute_ms)
    for bucket in costs.buckets:
        for use in bucket.uses:
            copy_ms[use] += bucket.copy_ms
            nbytes[use] += bucket.nbytes
    total_copy_ms = sum(bucket.copy_ms for bucket in costs.buckets)
    total, ms = _ms_format([sum(compute_ms), total_copy_ms]), _ms_format([*compute_ms, *copy_ms])
    head = (
        f"costs  {len(costs.segments)} segments, {total(sum(compute_ms))} ms compute  "
        f"{len(costs.buckets)} buckets, {show_size(sum(b.nbytes for b in costs.buckets))}, {total(total_copy_ms)} ms copy  "
        f"link {costs.link_bytes_per_ms / 1e6:.3g} GB/s"
    )
    weights_unit, size = _size_format(nbytes)
    activations = [segment.activation_nbytes for segment in costs.segments]
    activations_unit, activation = _size_format(activations)
    rows = [
        (segment.name, ms(segment.compute_ms), ms(copy_ms[i]), size(nbytes[i]), activation(segment.activation_nbytes))
        for i, segment in enumerate(costs.segments)
    ]
    headers = ("segment", "compute ms", "copy ms", f"weights {weights_unit}", f"activations {activations_unit}")
    return f"{head}\n{table(headers, rows)}" if rows else head


def timeline_table(timeline: Timeline) -> str:
    """Totals, a row per segment, and the chart of a small one."""
    ms = _ms_format([timeline.step_ms])
    compute_ms = sum(segment.end_ms - segment.start_ms for segment in timeline.segments)
    head = (
        f"timeline  step {ms(timeline.step_ms)} ms = {ms(compute_ms)} compute + {ms(timeline.step_ms - compute_ms)} stall  "
        f"copy engine busy {ms(timeline.copy_ms)} ms"
    )
    rows = [(s.name, ms(s.end_ms - s.start_ms), ms(s.stall_ms)) for s in timeline.segments]
    if not rows:
        return head
    text = f"{head}\n{table(('segment', 'compute ms', 'stall ms'), rows)}"
    return text if len(rows) > _CHART_SEGMENTS else f"{text}\n{chart(timeline)}"


def chart(timeline: Timeline, *, width: int = _CHART_WIDTH) -> str:
    """One forward in steady state, both engines, to scale. A copy for the next forward shows where it happens: at the end."""
    step_ms = timeline.step_ms or 1.0
    lines = {"copy": [" "] * width, "compute": [" "] * width}
    for engine, spans in (("copy", timeline.loads), ("compute", timeline.segments)):
        labels = _short_labels([span.name for span in spans])
        for span in spans:
            first = round(span.start_ms / step_ms * width)
            last = max(round(span.end_ms / step_ms * width), first + 1)
            text = f"[{labels[span.name]}".ljust(last - first, "=")[: last - first]
            for column, character in enumerate(text, first):
                lines[engine][column % width] = character
    return "\n".join(f"{engine:<8}|{''.join(line).rstrip()}" for engine, line in lines.items())


def _short_labels(names: Sequence[str]) -> dict[str, str]:
    """Names without the dotted prefix that all of those with a number share: `3` for `blocks.3`."""
    labels: dict[str, str] = {}
    for name in names:
        match = re.search(r"\d.*$", name)
        labels[name] = match[0] if match else name
    return labels if len(set(labels.values())) == len(labels) else {name: name for name in names}


class _Format:
    """A fixed number of decimals after a division: one form for a whole column."""

    def __init__(self, unit: float, decimals: int) -> None:
        self.unit = unit
        self.decimals = decimals

    def __call__(self, value: float) -> str:
        text = f"{value / self.unit:.{self.decimals}f}"
        return text.lstrip("-") if float(text) == 0 else text


def _ms_format(values: Sequence[float]) -> _Format:
    most = max(values, default=0.0)
    return _Format(1, 1 if most >= 100 else 2 if most >= 1 else 4 if most >= 0.01 or most == 0 else 6)


def _size_format(values: Sequence[int]) -> tuple[str, _Format]:
    """The unit of a column of bytes, and its form: one decimal where the largest is a small number of units."""
    most = max(values, default=0)
    unit, name = (GIB, "GiB") if most >= 100 * GIB else (MIB, "MiB") if most >= MIB else (KIB, "KiB") if most >= KIB else (1, "B")
    return name, _Format(unit, 0 if unit == 1 or most >= 1000 * unit else 1)
