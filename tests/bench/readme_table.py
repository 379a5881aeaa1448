"""Write the measured tables from the committed results: tests/bench/results/*.json of sweep.py, and of pipeline.py, graph.py and
weights.py in folders beside them.

The README has those of FLUX, tests/bench/results/README.md has all.

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

from fxoffload.sizes import parse_size

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
START, END = "<!-- measured table -->", "<!-- end of measured table -->"
HEADERS = (
    "budget",
    "step ms",
    "bound ms",
    "naive bound ms",
    "step / bound",
    "predicted ms",
    "host ms",
    "reserved peak GiB",
    "streamed GiB",
    "equal to resident",
)
SHOWN = "flux*.json"
ALL = ("*.json", "pipelines/*.json", "graphs/*.json", "weights/*.json")
GRAPH = {
    "budget": "budget",
    "cuda_graph": "captured",
    "step_ms": "step ms",
    "ratio": "step / bound",
    "host_ms": "host ms",
    "host_unguarded_ms": "host ms without guards",
    "reserved_gib": "reserved peak GiB",
    "under_budget": "under budget",
    "equal_to_resident": "equal to resident",
}
WEIGHTS = {
    "loading": {
        "way": "way",
        "load_s": "load s",
        "offload_s": "offload s",
        "first_call_s": "first call s",
        "peak_gib": "host peak GiB",
        "ratio": "peak / weights",
        "equal": "equal",
    },
    "lora": {
        "swap": "swap",
        "swap_s": "swap s",
        "compiled_by_swap": "compiled by it",
        "compiled_by_next": "by the next call",
        "next_ms": "next call ms",
        "step_ms": "step ms",
        "equal_to_resident": "equal to resident",
    },
    "forwards": {
        "way": "way",
        "forwards": "forwards",
        "seconds": "seconds",
        "allocated_nbytes": "allocated bytes",
        "reserved_nbytes": "reserved bytes",
        "anon_nbytes": "host bytes",
        "tensors": "tensors",
        "events": "events",
        "equal_to_resident": "equal to resident",
    },
    "quantized": {
        "scheme": "scheme",
        "budget": "budget",
        "step_ms": "step ms",
        "ratio": "step / bound",
        "streamed_gib": "streamed GiB",
        "reserved_gib": "reserved peak GiB",
        "equal_to_resident": "equal to resident",
    },
}
"""Keys of rows and the headers of their columns: of graph.py, and of each measurement of weights.py."""
NONE_YET = "No results are committed yet."


def read_reports(folder: Path = RESULTS, *patterns: str) -> list[dict[str, Any]]:
    """The reports in a folder, in the order of their file names; those that the README shows, or that fit the patterns."""
    return [json.loads(path.read_text()) for pattern in patterns or (SHOWN,) for path in sorted(folder.glob(pattern))]


def render(reports: Sequence[dict[str, Any]]) -> str:
    """All tables, each under a line that names the model and the machine."""
    return "\n\n".join(map(_table, reports)) or NONE_YET


def _table(report: dict[str, Any]) -> str:
    if "calls_us" in report:
        return _plain(report, GRAPH)
    if ".weights " in report["command"]:
        return _plain(report, WEIGHTS[report["command"].partition(".weights ")[2].split()[0]])
    return _sweep(report) if "link_gb_s" in report else _pipeline(report)


def _plain(report: dict[str, Any], columns: dict[str, str]) -> str:
    """Some keys of every row."""
    machine, versions = report["machine"], report.get("versions", report["machine"])
    place = f"{machine['device']}, driver {machine['driver']}, torch {versions['torch']}"
    lines = [
        f"{report['model']}. {place}. `{report['command']}`",
        "",
        _line(list(columns.values())),
        _line(["---"] * len(columns)),
    ]
    for row in report["rows"]:
        cells = [_cell(row.get(key)) for key in columns]
        lines.append(_line([*cells[:-1], row.get("error", cells[-1])]))
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else "" if value is None else str(value)


def _pipeline(report: dict[str, Any]) -> str:
    """Whole images: every row one image after one that warmed up."""
    machine = report["machine"]
    place = f"{machine['device']}, driver {machine['driver']}, torch {machine['torch']}"
    headers = ("budget", "transformer", "seconds an image", "reserved peak GiB", "of the first image, GiB", "equal images")
    lines = [
        f"{report['model']}, {report['weights_gib']:.2f} GiB of weights. {place}. `{report['command']}`",
        "",
        _line(headers),
        _line(["---", "---", "---:", "---:", "---:", "---"]),
    ]
    for row in report["rows"]:
        peaks = [f"{row[key]:.2f}" + (" (over)" if _is_over(row, key) else "") for key in ("peak_gib", "first_peak_gib")]
        equal = {None: "", True: "yes", False: "NO"}[row["equal"]]
        lines.append(_line([row["budget"], row["transformer"], f"{row['seconds']:.1f}", *peaks, equal]))
    return "\n".join(lines)


def _is_over(row: dict[str, Any], key: str) -> bool:
    return row["budget"] != "none" and row[key] * 2**30 > parse_size(row["budget"], what="budget")


def _sweep(report: dict[str, Any]) -> str:
    machine = report["machine"]
    place = f"{machine['device']}, link {report['link_gb_s']:.1f} GB/s, driver {machine['driver']}, torch {machine['torch']}"
    lines = [
        f"{report['model']}. {place}. First call {report['first_call_s']:.0f} s, of which {_added_s(report):.1f} s are packing "
        f"and pinning the weights{_alone(report)}. `{report['command']}`",
        "",
        _line(HEADERS),
        _line(["---", *["---:"] * (len(HEADERS) - 2), "---"]),
    ]
    ran = [row for row in report["rows"] if "error" not in row]
    lines += [_line(_cells(row)) for row in sorted(ran, key=lambda row: (row["budget"] == "all", row["budget_gib"]))]
    if baseline := report.get("per_block_compile"):
        lines.append(
            _line(
                [
                    "per-block `torch.compile`",
                    f"{baseline['step_ms']:.1f}",
                    *("", "", "", ""),
                    f"{baseline['host_ms']:.0f}",
                    f"{baseline['reserved_gib']:.2f}",
                    *("0", ""),
                ]
            )
        )
        lines += ["", _comparison(baseline)] if "rounds" in baseline else []
    return "\n".join(lines)


def _comparison(baseline: dict[str, Any]) -> str:
    """Resident against per-block compile, step by step in turns, and against the same program with blocks that are not cut."""
    ratios = [r["resident"] / r["per_block"] for r in baseline["rounds"]]
    return (
        f"In {len(ratios)} rounds that take turns, everything resident: {baseline['resident_step_ms']:.1f} ms, per-block "
        f"`torch.compile` {baseline['step_ms']:.1f} ms, ratio {baseline['resident_over_per_block']:.3f} ({min(ratios):.3f} to "
        f"{max(ratios):.3f}); the same with blocks that are not cut {baseline['whole_blocks_step_ms']:.1f} ms, ratio "
        f"{baseline['resident_over_whole_blocks']:.3f}."
    )


def _alone(report: dict[str, Any]) -> str:
    """Where it was measured, what packing takes while nothing else runs."""
    return f" ({report['setup_alone_s']:.1f} s alone)" if "setup_alone_s" in report else ""


def _added_s(report: dict[str, Any]) -> float:
    """What packing adds to the first call: it runs beside compilation."""
    return dict(report["stages_s"])["pack, beyond compile"]


def _cells(row: dict[str, Any]) -> list[str]:
    size = f"{row['budget_gib']:.2f} GiB"
    names = {"all": "everything resident", "smallest": f"{size} (smallest with overlap)", "least": f"{size} (least that runs)"}
    return [
        names.get(row["budget"], f"{row['budget_gib']:.3g} GiB"),
        f"{row['step_ms']:.1f}",
        f"{row['bound_ms']:.1f}",
        f"{row['naive_bound_ms']:.1f}",
        f"{row['ratio']:.3f}",
        f"{row['predicted_ms']:.1f}",
        f"{row['host_ms']:.0f}",
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
    stale = False
    for page, patterns in ((ROOT / "README.md", (SHOWN,)), (RESULTS / "README.md", ALL)):
        before = page.read_text()
        after = rewrite(before, render(read_reports(RESULTS, *patterns)))
        stale = stale or before != after
        if not check:
            page.write_text(after)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
