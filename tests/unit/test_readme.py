"""What the README shows is true: its lines run and print what stands below them, its tables are those of the code.

`EXPECTTEST_ACCEPT=1` writes the plan that is printed now into the README.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fxoffload import debug
from fxoffload.config import OffloadConfig

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"


@pytest.fixture(scope="module")
def readme_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "tests" / "bench" / "readme_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_block(text: str, language: str) -> re.Match[str]:
    found = re.search(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert found is not None, language
    return found


def table_rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("| `")]


def section(title: str) -> str:
    return README.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def test_the_example_has_eight_lines() -> None:
    assert len([line for line in first_block(README.read_text(), "python")[1].splitlines() if line]) == 8


@pytest.mark.slow
def test_the_example_prints_the_plan(tmp_path: Path) -> None:
    code = first_block(README.read_text(), "python")[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("FXOFFLOAD_")}
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    if os.environ.get("EXPECTTEST_ACCEPT"):
        text = README.read_text()
        block = first_block(text, "text")
        README.write_text(text[: block.start(1)] + ran.stdout + text[block.end(1) :])
    assert ran.stdout == first_block(README.read_text(), "text")[1]


def test_the_measured_table_is_that_of_the_results(readme_table: ModuleType) -> None:
    assert readme_table.read_reports()
    assert readme_table.main(["--check"]) == 0, "run: python tests/bench/readme_table.py"


def test_debug_switches() -> None:
    assert debug.__doc__ is not None
    assert table_rows(section("Debug switches")) == table_rows(debug.__doc__)


def test_every_option_is_listed_once() -> None:
    cells = [line.split("|")[1] for line in table_rows(section("Options"))]
    listed = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(OffloadConfig))


def report(**changes: Any) -> dict[str, Any]:
    row = {
        "budget": "8GiB", "budget_gib": 8.0, "step_ms": 290.12, "bound_ms": 281.0, "naive_bound_ms": 279.9, "ratio": 1.03246,
        "reserved_gib": 7.91, "under_budget": True, "equal_to_resident": True, "streamed_gib": 15.2, "predicted_ms": 292.0,
        "host_ms": 91.2,
    }  # fmt: skip
    machine = {"device": "NVIDIA H200", "driver": "570.1", "torch": "2.13.0", "python": "3.12"}
    return {
        "machine": machine, "model": "FLUX.1-dev size", "command": "python sweep.py flux", "link_gb_s": 55.42,
        "first_call_s": 38.2, "stages_s": {"compile": 20.0, "pack, beyond compile": 0.04}, "rows": [row], **changes,
    }  # fmt: skip


def test_a_table(readme_table: ModuleType) -> None:
    everything = {**report()["rows"][0], "budget": "all", "budget_gib": 100.0, "streamed_gib": 0.0, "ratio": 1.004}
    smallest = {
        **report()["rows"][0],
        "budget": "smallest",
        "budget_gib": 1.253,
        "under_budget": False,
        "equal_to_resident": False,
    }
    refused = {"budget": "1GiB", "error": "planner: budget 1.00 GiB: ..."}
    table = readme_table.render(
        [
            report(
                rows=[everything, refused, *report()["rows"], smallest],
                setup_alone_s=3.21,
                per_block_compile={
                    "step_ms": 131.0,
                    "reserved_gib": 23.5,
                    "host_ms": 30.4,
                    "resident_step_ms": 132.2,
                    "whole_blocks_step_ms": 132.0,
                    "resident_over_per_block": 1.0085,
                    "resident_over_whole_blocks": 1.001,
                    "rounds": [{"resident": 132.0, "per_block": 131.0}, {"resident": 132.4, "per_block": 131.1}],
                },
            )
        ]
    )
    expected = """\
FLUX.1-dev size. NVIDIA H200, link 55.4 GB/s, driver 570.1, torch 2.13.0. First call 38 s, of which 0.0 s are \
packing and pinning the weights (3.2 s alone). `python sweep.py flux`

| budget | step ms | bound ms | naive bound ms | step / bound | predicted ms | host ms | reserved peak GiB | streamed GiB | \
equal to resident |
| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |
| 1.25 GiB (smallest with overlap) | 290.1 | 281.0 | 279.9 | 1.032 | 292.0 | 91 | 7.91 (over) | 15.20 | NO |
| 8 GiB | 290.1 | 281.0 | 279.9 | 1.032 | 292.0 | 91 | 7.91 | 15.20 | yes |
| everything resident | 290.1 | 281.0 | 279.9 | 1.004 | 292.0 | 91 | 7.91 | 0.00 | yes |
| per-block `torch.compile` | 131.0 |  |  |  |  | 30 | 23.50 | 0 |  |

In 2 rounds that take turns, everything resident: 132.2 ms, per-block `torch.compile` 131.0 ms, ratio 1.008 (1.008 to 1.010); \
the same with blocks that are not cut 132.0 ms, ratio 1.001."""
    assert table == expected


def test_tables_of_graphs_and_weights(readme_table: ModuleType) -> None:
    machine = {"device": "NVIDIA H200", "driver": "570.1", "torch": "2.11.0"}
    row = {"budget": "4GiB", "cuda_graph": True, "step_ms": 290.06, "ratio": 1.0111, "host_ms": 2.5, "host_unguarded_ms": 1.9}
    row |= {"reserved_gib": 3.9, "under_budget": True, "equal_to_resident": False}
    graph = {"model": "FLUX", "machine": machine, "command": "python -m tests.bench.graph flux", "calls_us": {}, "rows": [row]}
    assert readme_table.render([graph]).splitlines()[-1] == (
        "| 4GiB | yes | 290.060 | 1.011 | 2.500 | 1.900 | 3.900 | yes | no |"
    )
    rows = [
        {"way": "load_safetensors", "load_s": 5.5, "peak_gib": 22.7, "equal": True},
        {"way": "cold", "error": "OSError: full"},
    ]
    command = "python -m tests.bench.weights loading --out loading.json"
    loading = {"model": "FLUX", "machine": machine, "versions": {"torch": "2.11.0"}, "command": command, "rows": rows}
    assert readme_table.render([loading]).splitlines()[-2:] == [
        "| load_safetensors | 5.500 |  |  | 22.700 |  | yes |",
        "| cold |  |  |  |  |  | OSError: full |",
    ]


def test_the_image_that_others_are_compared_with_has_an_empty_cell(readme_table: ModuleType) -> None:
    machine = {"device": "NVIDIA H200", "driver": "570.1", "torch": "2.11.0"}
    known = {"transformer": "eager", "seconds": 9.0, "peak_gib": 5.9, "first_peak_gib": 6.1}
    rows = [{"budget": "6GiB", **known, "equal": equal} for equal in (None, True, False)]
    found = {"model": "FLUX", "machine": machine, "command": "python pipeline.py", "weights_gib": 31.4, "rows": rows}
    cells = [line.split(" | ")[-1] for line in readme_table._pipeline(found).splitlines()[-3:]]
    assert cells == [" |", "yes |", "NO |"]


def test_reports_are_read_in_the_order_of_their_names(readme_table: ModuleType, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / f"{name}.json").write_text(json.dumps(report(model=name)))
    assert [found["model"] for found in readme_table.read_reports(tmp_path, "*.json")] == ["a", "b"]


def test_rewriting(readme_table: ModuleType) -> None:
    text = f"before\n{readme_table.START}\nold\n{readme_table.END}\nafter\n"
    once = readme_table.rewrite(text, "new")
    assert once == f"before\n{readme_table.START}\n\nnew\n\n{readme_table.END}\nafter\n"
    assert readme_table.rewrite(once, "new") == once
    with pytest.raises(ValueError, match="once each"):
        readme_table.rewrite("no marks", "new")
