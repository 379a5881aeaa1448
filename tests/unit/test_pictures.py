"""The picture of the measured budgets can be made from the committed results, and shows what is in them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

BENCH = Path(__file__).parents[1] / "bench"


@pytest.fixture(scope="module")
def pictures() -> ModuleType:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("pictures", BENCH / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_result_has_a_panel_with_all_its_budgets(pictures: ModuleType) -> None:
    reports = pictures.read()
    assert reports
    panels = [axes for axes in pictures.draw(reports).axes if axes.axison]
    assert [axes.get_title() for axes in panels] == [pictures.title(report) for report in reports]
    for axes, report in zip(panels, reports, strict=True):
        lines = {line.get_label(): line for line in axes.lines}
        measured = {row["budget_gib"]: row for row in report["rows"][1:] if "error" not in row}
        for key, _, label in pictures.LINES:
            assert list(lines[label].get_xdata()) == sorted(measured)
            assert list(lines[label].get_ydata()) == [measured[budget][key] for budget in sorted(measured)]


def test_the_picture_is_committed_and_shown(pictures: ModuleType, tmp_path: Path) -> None:
    pictures.draw(pictures.read()).savefig(tmp_path / "sweep.png")
    assert (tmp_path / "sweep.png").stat().st_size > 10_000
    assert pictures.PICTURE.is_file()
    assert f"]({pictures.PICTURE.name})" in (pictures.RESULTS / "README.md").read_text()
