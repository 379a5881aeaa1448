"""Reports for notebooks: the tables that print, as HTML, and a picture where matplotlib is installed."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from fxoffload.errors import OffloadError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 80


def explanation_html(head: str, words: Sequence[str], tables: Mapping[str, str], picture: Callable[[], Figure] | None) -> str:
    """Head and sentences as text, `tables` (as they print) under their titles, and the picture."""
    parts = [f"<p>{'<br>'.join(map(escape, head.splitlines()))}</p>"]
    parts += [f"<ul>{''.join(f'<li>{escape(sentence)}</li>' for sentence in words)}</ul>"] if words else []
    parts += [f"<h4>{escape(title)}</h4>\n{table_html(text)}" for title, text in tables.items()]
    image = picture_html(picture) if picture is not None else ""
    return "\n".join([*parts, *([image] if image else [])])


def table_html(text: str) -> str:
    """A printed table: lines before and behind it as they are, columns where two spaces or more part them."""
    before: list[str] = []
    rows: list[list[str]] = []
    after: list[str] = []
    lines = [(line, re.split(r"\s{2,}", line.strip())) for line in text.splitlines()]
    # The table is the longest run of lines with as many cells as its header.
    start, end = _longest_run([len(cells) for _, cells in lines])
    for i, (line, cells) in enumerate(lines):
        if start <= i < end:
            rows.append(cells)
        else:
            (before if i < start else after).append(line)
    parts = [f"<pre>{escape(chr(10).join(before))}</pre>"] if before else []
    if rows:
        header, *body = rows
        parts.append(f"<table>\n<tr>{_cells('th', header)}</tr>")
        parts += [f"<tr>{_cells('td', row)}</tr>" for row in body]
        parts.append("</table>")
    return "\n".join([*parts, *([f"<pre>{escape(chr(10).join(after))}</pre>"] if after else [])])


def picture_html(draw: Callable[[], Figure]) -> str:
    """A picture in the page, or nothing without matplotlib."""
    try:
        figure = draw()
    except OffloadError:
        return ""
    data = io.BytesIO()
    figure.savefig(data, format="png", dpi=_DPI)
    return f'<img alt="predicted timeline" src="data:image/png;base64,{base64.b64encode(data.getvalue()).decode()}">'


def _cells(tag: str, cells: Sequence[str]) -> str:
    return "".join(f'<{tag} style="text-align: left">{escape(cell)}</{tag}>' for cell in cells)


def _longest_run(counts: Sequence[int]) -> tuple[int, int]:
    """(start, end) of the longest run of equal counts of 3 and more; the first of several. (0, 0) if there is none."""
    best, start = (0, 0), 0
    for i in range(1, len(counts) + 1):
        if i == len(counts) or counts[i] != counts[start]:
            if counts[start] > 2 and i - start > best[1] - best[0]:
                best = (start, i)
            start = i
    return best
