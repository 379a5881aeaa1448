"""The results file: what it takes in, that a cut run can go on, and repeats as points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fxoffload.errors import ConfigError
from fxoffload.results import Results, combine, key_of
from tests.unit.bench_cases import MACHINE, VERSIONS, missing, row


def test_every_row_is_on_disk_when_it_is_added(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "r.json"
    results = Results.open(path)
    for i in range(3):
        results.add(row("two-block-hooks", repeat=i))
        assert len(json.loads(path.read_text())["rows"]) == i + 1
    assert [file.name for file in path.parent.iterdir()] == ["r.json"]
    assert Results.open(path).rows == results.rows


def test_a_row_takes_the_place_of_an_earlier_one_of_its_key(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "r.json")
    results.add(missing("cache-dit-sync"))
    results.add(row("cache-dit-sync", step_ms=7.0))
    results.add(row("cache-dit-sync", step_ms=8.0, setting={"transfer_buckets": 1}))
    assert [r["step_ms"] for r in results.rows] == [7.0, 8.0]
    found = results.found(key_of(row("cache-dit-sync")))
    assert found is not None
    assert found["step_ms"] == 7.0
    assert results.found(key_of(row("cache-dit-sync", repeat=1))) is None


def test_keys_do_not_depend_on_the_order_of_flags() -> None:
    assert key_of(row("x", setting={"a": 1, "b": 2})) == key_of(row("x", setting={"b": 2, "a": 1}))


def test_what_is_known_of_a_workload_adds_up(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "r.json")
    results.add({"workload": "flux", "batch": 1, "what": "FLUX"})
    results.add({"workload": "flux", "batch": 1, "bounds": {"nbytes": []}})
    results.add({"workload": "flux", "batch": 3, "what": "FLUX, three"})
    assert results.data["workloads"] == [
        {"workload": "flux", "batch": 1, "what": "FLUX", "bounds": {"nbytes": []}},
        {"workload": "flux", "batch": 3, "what": "FLUX, three"},
    ]


def test_another_machine_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results = Results.open(path)
    results.add({"machine": MACHINE, "versions": VERSIONS})
    results.add({"machine": dict(MACHINE), "versions": dict(VERSIONS)})
    with pytest.raises(ConfigError) as caught:
        Results.open(path).add({"machine": {**MACHINE, "device": "cpu"}, "versions": VERSIONS})
    assert str(caught.value) == (
        f"bench: {path}: its rows are of another machine (device 'NVIDIA H200', here 'cpu'); give another file with --out"
    )
    with pytest.raises(ConfigError, match=r"another version \(torch '2.11.0', here '2.13.0'\)"):
        results.add({"machine": MACHINE, "versions": {**VERSIONS, "torch": "2.13.0"}})


def test_a_package_may_be_installed_later_and_not_go(tmp_path: Path) -> None:
    results = Results.open(tmp_path / "r.json")
    results.add({"machine": MACHINE, "versions": VERSIONS})
    results.add({"machine": MACHINE, "versions": {**VERSIONS, "diffusers": "0.42.1", "cache-dit": "1.5.3"}})
    assert results.data["versions"] == {**VERSIONS, "diffusers": "0.42.1", "cache-dit": "1.5.3"}
    with pytest.raises(ConfigError, match=r"another version \(diffusers '0.42.1', here None\)"):
        results.add({"machine": MACHINE, "versions": VERSIONS})
    with pytest.raises(ConfigError, match="another machine"):
        results.add({"machine": {**MACHINE, "more": 1}, "versions": results.data["versions"]})


def test_rows_of_one_file_share_their_options(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    given = {"compiler": "inductor", "steps": 6, "warmup": 2}
    results = Results.open(path)
    results.keep_options({**given, "steps": 1}, given)
    results.keep_options(given, {**given, "steps": 2})
    results.add(row("two-block-hooks"))
    again = Results.open(path)
    assert again.data["options"] == given
    again.keep_options(given, {**given, "steps": 2})
    with pytest.raises(ConfigError) as caught:
        again.keep_options({**given, "steps": 3}, given)
    assert str(caught.value) == f"bench: {path}: its rows were measured with --steps 6, here 3; give another file with --out"


def test_a_name_that_the_report_has(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Results.open(tmp_path / "mine.md")
    assert str(caught.value) == f"bench: --out: {tmp_path}/mine.md: the report has this name; give mine.json"


def test_where_nothing_can_be_written(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        Results.open(tmp_path)
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file" / "r.json", Path("/proc/x/r.json")):
        with pytest.raises(ConfigError) as caught:
            Results.open(path).write()
        assert str(caught.value).startswith(f"bench: {path}: it cannot be written (")
        assert str(caught.value).endswith("); give a file elsewhere")
    became = Results.open(tmp_path / "r.json")
    (tmp_path / "r.json").mkdir()
    with pytest.raises(ConfigError, match="it cannot be written"):
        became.write()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "r.json"], "no part of a file is left"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{", "this is no JSON"),
        ("[]", "it was not written by this version"),
        ('{"format": 1, "rows": []}', "it was not written by this version"),
    ],
)
def test_a_damaged_file(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=what):
        Results.open(path)


def test_repeats_make_a_point_of_medians() -> None:
    times = (100.0, 90.0, 104.0)
    (point,) = combine([row("x", repeat=i, step_ms=ms, step_max_ms=ms + 1) for i, ms in enumerate(times)])
    assert (point.step_ms, point.values["step_max_ms"], point.repeats, point.status) == (100.0, 105.0, 3, "ok")


def test_a_point_with_a_failed_repeat_says_so() -> None:
    (point,) = combine([row("x"), missing("x", "it was ended after 60 s", repeat=1, status="timeout")])
    assert (point.status, point.repeats) == ("ok", 1)
    assert point.reason == "1 of 2 repeats: timeout: it was ended after 60 s"


def test_one_wrong_repeat_makes_the_point_wrong() -> None:
    (point,) = combine([row("x"), row("x", repeat=1, status="wrong", reason="differs")])
    assert (point.status, point.reason) == ("wrong", "differs")


def test_a_point_without_times() -> None:
    (point,) = combine([missing("x")])
    assert (point.is_measured, point.status, point.memory_nbytes) == (False, "missing", None)
