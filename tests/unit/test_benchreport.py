"""The report of a results file: tables as text, matched memory, reasons, pictures."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import expecttest
import pytest

from fxoffload import benchdraw
from fxoffload.benchreport import points_of, render, report
from fxoffload.errors import ConfigError
from tests.unit.bench_cases import GIB, missing, ours, results, row

PNG = b"\x89PNG"


class TestGolden(expecttest.TestCase):
    """`EXPECTTEST_ACCEPT=1` writes the text that is printed now."""

    def test_text(self) -> None:
        self.assertExpectedInline(
            report(results()),
            """\
NVIDIA H200, driver 580.1, 16 cores of Some CPU, Linux x86_64; python 3.12.3, fxoffload 0.1.0, torch 2.11.0, triton 3.6.0

`fxoffload bench --workload flux`

## FLUX.1-dev size, batch 1, 22.17 GiB bfloat16

Resident and compiled, 130.0 ms a step; link 55.0 GB/s; activations 512.00 MiB.

| contender | setting | step ms | least to most | device GiB | allocated GiB | host GiB | copied GiB | host ms | set-up s | first call s | output |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |
| resident-eager |  | 230.0 | 99.0 to 102.0 | 24.00 | 3.00 | 30.00 |  | 20.0 | 1.0 | 2.0 | bit-equal to the reference |
| fxoffload-compiled | 2GiB | 402.0 | 401.0 to 403.0 | 2.00 | 3.00 | 30.00 | 9.00 | 20.0 | 1.0 | 0.5 | bit-equal to resident, within 1.0e-02 |
| fxoffload-compiled | 4GiB | 370.0 | 369.0 to 371.0 | 4.00 | 3.00 | 30.00 | 9.00 | 20.0 | 1.0 | 0.5 | bit-equal to resident, within 1.0e-02 |
| fxoffload-compiled | all | 132.0 | 131.0 to 133.0 | 23.00 | 3.00 | 30.00 | 9.00 | 20.0 | 1.0 | 2.0 | bit-equal to resident, within 1.0e-02 |
| group-block-streams |  | 564.0 | 99.0 to 102.0 | 2.40 | 3.00 | 30.00 |  | 20.0 | 1.0 | 2.0 | within 1.0e-02 |
| two-block-hooks |  | 500.0 | 99.0 to 102.0 | 1.90 | 3.00 | 30.00 |  | 20.0 | 1.0 | 2.0 | bit-equal to the reference |

- resident-eager: resident, eager
- fxoffload-compiled: fxoffload, compiled
- group-block-streams: diffusers groups by block, streams
- two-block-hooks: two-block hooks (vLLM-Omni's scheme, our code)

| budget | bound ms | fxoffload | ms | fastest other | ms | device GiB | other / fxoffload |
| --- | ---: | --- | ---: | --- | ---: | ---: | ---: |
| 2.00 GiB | 397.3 | fxoffload-compiled | 402.0 | two-block-hooks | 500.0 | 1.90 | 1.24 |
| 4.00 GiB | 371.8 | fxoffload-compiled | 370.0 | two-block-hooks | 500.0 | 1.90 | 1.35 |

- not measured, missing: cache_dit is not installed: cache-dit-sync; cache-dit-fitted 4GiB
- not measured, timeout: it was ended after 60 s: accelerate-sequential""",
        )


def section(*rows) -> str:
    return report(results(list(rows)))


def test_flags_that_were_found_stand_beside_the_budget() -> None:
    text = section(row("cache-dit-fitted", setting={"budget": "4GiB"}, flags={"persistent_buckets": 7}))
    assert "| 4GiB (persistent_buckets=7) |" in text


def test_repeats_are_one_line_with_the_spread_over_all() -> None:
    text = section(
        row("two-block-hooks", step_ms=100.0, first_call_s=9.0),
        row("two-block-hooks", repeat=1, step_ms=110.0, step_min_ms=90.0, step_max_ms=130.0, first_call_s=3.0),
    )
    (line,) = [line for line in text.splitlines() if line.startswith("| two-block")]
    assert "| 105.0 | 90.0 to 130.0 |" in line
    assert "| 9.0 |" in line, "the first call of the first repeat, whose caches are cold"


def test_a_wrong_output_is_shouted_and_never_the_fastest() -> None:
    wrong = row("two-block-hooks", step_ms=1.0, reserved_nbytes=GIB, status="wrong", reason="the output differs")
    text = section(wrong, row("group-block", step_ms=500.0, reserved_nbytes=GIB), ours("4GiB", 4 * GIB, 370.0))
    assert "| WRONG |" in text
    assert "- the output differs: two-block-hooks" in text
    assert "| 4.00 GiB | 371.8 | fxoffload-compiled | 370.0 | group-block | 500.0 | 1.00 | 1.35 |" in text


def test_a_faster_peer_is_not_hidden() -> None:
    text = section(row("group-block", step_ms=185.0, reserved_nbytes=GIB), ours("4GiB", 4 * GIB, 370.0))
    assert "| fxoffload-compiled | 370.0 | group-block | 185.0 | 1.00 | 0.50 |" in text


def test_ours_over_its_budget_does_not_count_there() -> None:
    over = ours("4GiB", 4 * GIB, 370.0, reserved_nbytes=4 * GIB + 1)
    text = section(over, row("group-block", step_ms=500.0, reserved_nbytes=GIB))
    assert "| 4.00 GiB | 371.8 | none within it |  | group-block |" in text


def test_where_nobody_counts_memory_nothing_is_matched() -> None:
    text = section(row("resident-eager", reserved_nbytes=None), ours("4GiB", 4 * GIB, 370.0, reserved_nbytes=None))
    assert "nothing to compare at matched memory" in text
    assert "4.00 (planned)" in text


def test_a_contender_of_another_version_is_shown_by_its_name() -> None:
    assert "| some-other |" in section(row("some-other"))


def test_files_beside_the_json(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(results()))
    text = render(path)
    files = sorted(file.name for file in tmp_path.iterdir())
    assert files == ["h200-flux-b1-first-calls.png", "h200-flux-b1-steps.png", "h200.json", "h200.md"]
    assert (tmp_path / "h200-flux-b1-steps.png").read_bytes().startswith(PNG)
    page = (tmp_path / "h200.md").read_text()
    assert page.startswith(text)
    assert "![h200-flux-b1-steps](h200-flux-b1-steps.png)" in page


def test_without_matplotlib_there_is_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(results()))
    render(path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["h200.json", "h200.md"]
    assert "![" not in (tmp_path / "h200.md").read_text()


def test_a_workload_whose_model_was_never_made_has_its_rows_with_their_reasons(tmp_path: Path) -> None:
    late = missing("two-block-hooks", "it was ended after 60 s", status="timeout")
    data = {**results([late, missing("resident-eager", "diffusers cannot be imported")]), "workloads": []}
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(data))
    text = render(path)
    assert text.endswith(
        "## flux, batch 1\n\n"
        "- not measured, missing: diffusers cannot be imported: resident-eager\n"
        "- not measured, timeout: it was ended after 60 s: two-block-hooks"
    )
    assert sorted(file.name for file in tmp_path.iterdir()) == ["h200.json", "h200.md"], "nothing to draw"


def test_results_are_not_overwritten_by_their_report(tmp_path: Path) -> None:
    path = tmp_path / "mine.md"
    path.write_text(json.dumps(results()))
    with pytest.raises(ConfigError, match=r"--render: .*mine.md: the report has this name; give mine.json"):
        render(path)
    assert json.loads(path.read_text()) == results()


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    path.write_text(json.dumps(results()))
    path.with_suffix(".md").mkdir()
    with pytest.raises(ConfigError, match=r"h200.md: it cannot be written \(Is a directory\)"):
        render(path)


def test_a_file_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text('{"rows": []}')
    with pytest.raises(ConfigError) as caught:
        render(path)
    assert str(caught.value) == f"bench: {path}: it was not written by this version of fxoffload bench; give another file"


def test_the_picture_of_steps_has_a_curve_a_contender_and_the_bound() -> None:
    data = results()
    entry = data["workloads"][0]
    points = [point for point in points_of(data, entry) if point.is_measured]
    (axes,) = benchdraw.steps_figure(entry, points).axes
    lines = {line.get_label(): line for line in axes.lines}
    measured = ["resident-eager", "fxoffload-compiled", "group-block-streams", "two-block-hooks"]
    assert list(lines) == [*measured, "bound of any schedule"]
    curve = lines["fxoffload-compiled"]
    assert [round(float(x)) for x in curve.get_xdata()] == [2, 4, 23]
    assert list(curve.get_ydata()) == [402.0, 370.0, 132.0]
    assert axes.get_xlabel() == "reserved peak, GiB"


def test_the_picture_of_first_calls_takes_the_setting_that_compiled() -> None:
    data = results()
    entry = data["workloads"][0]
    points = [point for point in points_of(data, entry) if point.contender == "fxoffload-compiled"]
    (axes,) = benchdraw.first_calls_figure(entry, points).axes
    assert [bar.get_width() for bar in axes.patches] == [1.0, 2.0]


def test_steps_far_apart_are_drawn_on_a_logarithmic_axis() -> None:
    data = results([row("resident-eager", step_ms=10.0), row("two-block-hooks", step_ms=1000.0)])
    entry = data["workloads"][0]
    (axes,) = benchdraw.steps_figure(entry, points_of(data, entry)).axes
    assert axes.get_yscale() == "log"


COMMITTED = sorted((Path(__file__).parents[1] / "bench" / "results" / "contenders").glob("*.json"))


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_committed_pages_are_made_from_their_json(path: Path) -> None:
    page = path.with_suffix(".md").read_text()
    text = report(json.loads(path.read_text()))
    assert page.startswith(f"{text}\n"), f"run: fxoffload bench --render {path.name}"
    pictures = re.findall(r"\]\((.+\.png)\)", page)
    assert pictures
    assert all((path.parent / name).is_file() for name in pictures)
