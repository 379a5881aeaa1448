"""The pages say what the code does: links lead somewhere, tables list the fields, the plan that is shown can be read."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from fxoffload.config import OffloadConfig
from fxoffload.contenders import CONTENDERS
from fxoffload.debug import switches
from fxoffload.flags import FLAGS
from fxoffload.plan import Load, Plan, Resident
from fxoffload.workloads import WORKLOADS

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def anchors(text: str) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in re.findall(r"\]\(([^)]+)\)", page.read_text()) if not link.startswith("http")]
    for link in links:
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target.read_text()), link


def test_readme_leads_to_every_page_and_notebook() -> None:
    text = (ROOT / "README.md").read_text()
    for path in (*PAGES[1:], *(ROOT / "notebooks").glob("*.ipynb")):
        assert f"]({path.relative_to(ROOT).as_posix()})" in text


def test_the_plan_that_is_shown_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "plan_format.md").read_text()
    (shown,) = blocks(text, "json")
    (printed,) = blocks(text, "text")
    path = tmp_path / "plan.json"
    path.write_text(shown)
    assert f"{Plan.load(path)}\n" == printed


def test_every_field_of_a_plan_is_explained() -> None:
    text = (ROOT / "docs" / "plan_format.md").read_text()
    for kind in (Plan, Resident, Load):
        table = text.split(f"\n| {kind.__name__.lower()} | meaning |\n")[1].split("\n\n")[0]
        names = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
        assert names == [field.name for field in dataclasses.fields(kind)]


def test_every_flag_of_a_peer_has_a_row() -> None:
    text = (ROOT / "docs" / "peers.md").read_text()
    named = set(re.findall(r"`(\w+)`", text))
    assert {flag.setting for flag in FLAGS} <= named
    assert {"module_names", "module_filter", "onload_device", "offload_device", "output_device", "eager_offload"} <= named


def test_what_the_tuning_page_names_is_there() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text()
    knobs = re.findall(r"^\| (`.+?) \|", text.split("## Which knob does what")[1].split("##")[0], re.MULTILINE)
    named = {name for row in knobs for name in re.findall(r"`(\w+)", row)} - {"eager"}
    assert named <= {field.name for field in dataclasses.fields(OffloadConfig)}
    assert dataclasses.is_dataclass(switches({"FXOFFLOAD_POISON": "1"}))
    commands = "\n".join(blocks(text, "sh"))
    assert set(re.findall(r"--workload (\S+)", commands)) <= set(WORKLOADS)
    assert all(any(pattern.rstrip("*") in name for name in CONTENDERS) for pattern in ("fxoffload-*", "resident-*"))
