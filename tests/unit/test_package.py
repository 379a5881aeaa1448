"""The installed package: what `torch.compile` finds by name, the script, and passes/ inside the package."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def distribution() -> importlib.metadata.Distribution:
    try:
        return importlib.metadata.distribution("fxoffload")
    except importlib.metadata.PackageNotFoundError:
        pytest.fail("fxoffload is not installed in this environment; run: pip install --no-deps --editable .")


def test_entry_points(distribution: importlib.metadata.Distribution) -> None:
    found = {(entry.group, entry.name): entry.value for entry in distribution.entry_points}
    assert found == {
        ("torch_dynamo_backends", "layerwise"): "fxoffload.backend:layerwise",
        ("console_scripts", "fxoffload"): "fxoffload.cli:main",
    }


@pytest.mark.parametrize("group", ["torch_dynamo_backends", "console_scripts"])
def test_entry_points_load(distribution: importlib.metadata.Distribution, group: str) -> None:
    for entry in distribution.entry_points.select(group=group):
        assert callable(entry.load())


def test_torch_finds_the_backend(distribution: importlib.metadata.Distribution) -> None:
    import torch

    assert "layerwise" in torch.compiler.list_backends()


def test_passes_are_part_of_the_package() -> None:
    passes = importlib.import_module("fxoffload.passes")
    assert passes.__name__ == "fxoffload.passes"
    assert passes.__file__ is not None
    assert Path(passes.__file__).resolve() == (ROOT / "fxoffload" / "passes" / "__init__.py").resolve()


def test_the_package_is_typed() -> None:
    assert (ROOT / "fxoffload" / "py.typed").is_file()


def test_pins_name_no_place_and_no_build() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert "torch==2.13.0" in lines
    assert [line for line in lines if not re.fullmatch(r"[\w.-]+==[\w.]+", line)] == []
