"""Write the measured table of the README from the committed results: every tests/bench/results/*.json that sweep.py wrote.

python tests/bench/readme_table.py          # rewrites README.md between the two marks
python tests/bench/readme_table.py --check  # exit code 1 if README.md is not what this script makes
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
START, END = "<!-- measured table -->", "<!-- end of measured table -->"
HEADERS = ("budget", "step ms", "bound ms", "step / bound", "reserved peak GiB", "streamed GiB", "equal to resident")
NONE_YET = "No results are committed yet."


def read_reports(folder: Path = RESULTS) -> list[dict[str, Any]]:
    """The reports in a folder, in the order of their file names."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def render(reports: Sequence[dict[str, Any]]) -> str:
    """All tables, each under a line that names the model and the machine."""
    return "\n\n".join(map(_table, reports)) or NONE_YET


def _table(report: dict[str, Any]) -> str:
    machine = report["machine"]
    place = f"{machine['device']}, link {report['link_gb_s']:.1f} GB/s, driver {machine['driver']}, torch {machine['torch']}"
    lines = [
        f"{report['model']}. {place}. First call {report['first_call_s']:.0f} s.",
        "",
        _line(HEADERS),
        _line(["---", *["---:"] * (len(HEADERS) - 2), "---"]),
    ]
    lines += [_line(_cells(row)) for row in sorted(report["rows"], key=lambda row: (row["budget"] == "all", row["budget_gib"]))]
    if baseline := report.get("per_block_compile"):
        lines.append(
            _line(["per-block `torch.compile`", f"{baseline['step_ms']:.1f}", "", "", f"{baseline['reserved_gib']:.2f}", "0", ""])
        )
    return "\n".join(lines)


def _cells(row: dict[str, Any]) -> list[str]:
    size = f"{row['budget_gib']:.2f} GiB"
    names = {"all": "everything resident", "smallest": f"{size} (smallest with overlap)", "least": f"{size} (least that runs)"}
    return [
        names.get(row["budget"], f"{row['budget_gib']:.3g} GiB"),
        f"{row['step_ms']:.1f}",
        f"{row['bound_ms']:.1f}",
        f"{row['ratio']:.3f}",
        f"{row['reserved_gib']:.2f}" + ("" if row["under_budget"] else " (over)"),
        f"{row['streamed_gib']:.2f}",
        "yes" if row["equal_to_resident"] else "NO",
    ]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def rewrite(text: str, table: str) -> str:
    """`text` with `table` between the two marks. Raises ValueError where they do not stand once each, in order."""
    if text.count(START) != 1 or text.count(END) != 1 or text.index(END) < text.index(START):
        raise ValueError(f"the text must hold {START} and {END}, once each, in this order")
    return f"{text[: text.index(START)]}{START}\n\n{table}\n\n{text[text.index(END) :]}"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing")
    check = parser.parse_args(argv).check
    readme = ROOT / "README.md"
    before = readme.read_text()
    after = rewrite(before, render(read_reports()))
    if not check:
        readme.write_text(after)
    return int(check and before != after)


if __name__ == "__main__":
    sys.exit(main())
