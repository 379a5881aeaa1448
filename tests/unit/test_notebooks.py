"""The notebooks run, and their kept output is what they print. `EXPECTTEST_ACCEPT=1` keeps what they print now."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
MOST_CELLS = 15
SECONDS_A_CELL = 60


def printed(notebook: Any) -> list[str]:
    """What every code cell wrote to stdout and stderr, or showed, as text."""
    return ["".join(map(text_of, cell.outputs)) for cell in notebook.cells if cell.cell_type == "code"]


def text_of(output: Any) -> str:
    return output.text if output.output_type == "stream" else output.get("data", {}).get("text/plain", "")


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS][:1] == ["00_quickstart.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_short_and_public(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert len(notebook.cells) < MOST_CELLS
    code = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    private = [
        word for word in ("fxoffload._", "fxoffload.api", "fxoffload.engine", "fxoffload.binding", "torch._") if word in code
    ]
    assert private == []


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_prints_what_is_kept(path: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [name for name in os.environ if name.startswith("FXOFFLOAD_")]:
        monkeypatch.delenv(name)
    notebook = nbformat.read(path, as_version=4)
    kept = printed(notebook)
    # What it writes goes to a folder beside which the committed results are, as they are beside the notebooks.
    folder = tmp_path / "notebooks"
    folder.mkdir()
    (tmp_path / "tests").symlink_to(ROOT / "tests")
    client = nbclient.NotebookClient(
        notebook,
        timeout=SECONDS_A_CELL,
        resources={"metadata": {"path": str(folder)}},
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()  # raises CellExecutionError, with the cell and its traceback
    if os.environ.get("EXPECTTEST_ACCEPT"):
        nbformat.write(notebook, path)
        return
    assert printed(notebook) == kept
