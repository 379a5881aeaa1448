"""Scripts that a GPU runs now and then, here on the CPU device, so that they still run when they are needed."""

from __future__ import annotations

import argparse
import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.bench import measure_forwards, sweep, weights
from tests.gpu import sanitize


@torch.no_grad()
def test_what_a_sanitizer_watches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FXOFFLOAD_POISON", "1")
    assert sanitize.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == list(sanitize.WAYS)
    assert [line.endswith("all equal to the resident model's") for line in said] == [True, False, True]
    assert said[1] == "captured: left out: only CUDA captures"
    with pytest.raises(SystemExit, match="'other' is none of uncaptured, captured, hooks"):
        sanitize.main(["--ways", "other", "--device", "cpu"])


def test_a_sweep_counts_what_new_budgets_compile_and_not_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    def row(self: sweep.Sweep, budget: str) -> dict[str, Any]:
        del self
        stats["unique_graphs"] += budget == "smallest"
        return {"budget": budget, "steps_ms": [1.0], "link_gb_s": 55.0}

    stats = {"unique_graphs": 1}
    cost = SimpleNamespace(activation_nbytes=1, compute_ms=1.0)
    blocks, prices = SimpleNamespace(segments=()), (SimpleNamespace(cost=cost),)
    program = SimpleNamespace(seconds={}, blocks=blocks, distinct=1, prices=prices)
    engine = SimpleNamespace(store=SimpleNamespace(seconds=0.0))
    monkeypatch.setattr(torch._dynamo.utils, "counters", {"stats": stats, "inductor": {}})
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(sweep.api, "bindings_of", lambda _: [SimpleNamespace(program=program, activation_nbytes=1)])
    monkeypatch.setattr(sweep.api, "engine_of", lambda _: engine)
    monkeypatch.setattr(sweep.api, "profile", lambda *_: SimpleNamespace(segments=(cost,)))
    for name, does in (("row", row), ("call", lambda _: torch.empty(0))):
        monkeypatch.setattr(sweep.Sweep, name, does)
    for name, found in (("add_bounds", None), ("kinds", [])):
        monkeypatch.setattr(sweep, name, lambda *_, found=found: found)
    args = argparse.Namespace(budgets="all,smallest", lock=None, max_bucket_bytes="auto", cuda_graph=False)
    swept = sweep.Sweep(torch.nn.Identity(), {}, args)
    assert [swept.report()["compiled_by_new_budgets"] for _ in swept.run()] == [0, 0, 1, 1]
    stats["unique_graphs"] += 2
    assert (swept.report()["graphs_compiled"], swept.report()["compiled_by_new_budgets"]) == (2, 1)


def test_the_first_image_of_a_transformer_is_compared_with_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(sweep.__file__).parent))
    pipeline = importlib.import_module("tests.bench.pipeline")
    images = iter([torch.zeros(2)] * 4 + [torch.ones(2)] * 4)
    monkeypatch.setattr(pipeline, "image", lambda *_: (next(images), {"seconds": 1.0}, 0))
    reference: dict[str, torch.Tensor] = {}
    runs = (("6GiB", "eager"), ("8GiB", "eager"), ("6GiB", "compiled"), ("none", "eager"))
    assert [pipeline.row(None, *run, 28, reference)["equal"] for run in runs] == [None, True, None, False]


def tiny(measurement: str, tmp_path: Path, *more: str, workload: str = "t5-xxl-tiny") -> dict[str, Any]:
    """The data of one measurement of a tiny model, which is what its file has."""
    out = tmp_path / "out.json"
    with torch.no_grad():
        rows = weights.main([measurement, "--workload", workload, "--device", "cpu", "--out", str(out), *more])
    assert json.loads(out.read_text()) == json.loads(json.dumps(rows.data))
    return rows.data


@pytest.mark.slow
def test_loading(tmp_path: Path) -> None:
    data = tiny("loading", tmp_path, "--shard-bytes", "4000000", "--ways", "cold,other", "--folder", str(tmp_path))
    row, other = data["rows"]
    assert data["shards"] > 3
    assert row["equal"]
    assert row["finite"]
    assert 0.9 * data["weight_nbytes"] < row["peak_nbytes"] - row["before_nbytes"]
    assert other == {"way": "other", "error": "not one of load_safetensors, cold, from_pretrained"}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"], "the checkpoint is gone"


@pytest.mark.slow
def test_forwards(tmp_path: Path) -> None:
    given = ("--marks", "3,10,30", "--compiler", "eager", "--ways", "uncaptured,captured,hooks")
    data = tiny("forwards", tmp_path, *given)
    assert [row.get("forwards") for row in data["rows"]] == [3, 10, 30, None, 3, 10, 30]
    assert data["rows"][3] == {"way": "captured", "error": "only CUDA captures"}
    for way in ("uncaptured", "hooks"):
        marks = [row for row in data["rows"] if row["way"] == way]
        assert all(row["equal_to_resident"] and row["tensors"] and row["events"] for row in marks)
        assert data["flat"][way]["streamed_nbytes"] > 0
        grew = data["flat"][way]["grew"]
        assert all(grew[name] <= 0 for name in measure_forwards.EXACT), grew


@pytest.mark.slow
@pytest.mark.parametrize("way", ["peft", "plain"])
def test_lora(way: str, tmp_path: Path) -> None:
    given = ("--way", way, "--swaps", "2", "--steps", "1", "--rank", "4", "--budget", "half", "--compiler", "eager")
    data = tiny("lora", tmp_path, *given, workload="flux-tiny")
    assert (data["way"], data["projections"], data["dtypes"]) == (way, 28, ["float32"])
    assert len(data["rows"]) == 2
    for row in data["rows"]:
        assert row["compiled_by_swap"] == row["compiled_by_next"] == 0
        assert row["equal_to_resident"]
        assert row["equal_to_next"]
        assert row["streamed_gib"] > 0
        assert row["changed"] > 1e-3
    assert data["rows"][-1]["relative_difference"] < 1e-5


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # what torchao says when it is imported
@pytest.mark.skipif(importlib.util.find_spec("fxoffload.wrappers") is None, reason="quantized weights are refused")
def test_quantized(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("--schemes", "int8,other", "--budgets", "half", "--steps", "1", "--warmup", "1", "--compiler", "eager")
    data = tiny("quantized", tmp_path, *given, workload="flux-tiny")
    resident, streamed, other = data["rows"]
    assert other == {"scheme": "other", "error": "ValueError: 'other' is none of none, int8, float8, float8-dynamic"}
    assert "Traceback" in capsys.readouterr().err
    assert resident["streamed_nbytes"] == 0
    assert resident["ratio"] == pytest.approx(1)
    assert resident["equal_to_resident"]
    assert streamed["equal_to_resident"]
    # Weights of the blocks have a byte instead of four.
    nbytes = data["schemes"]["int8"]["weights_gib"] * 2**30
    assert nbytes / 2 < streamed["streamed_nbytes"] <= nbytes < 12 * 2**20
    assert streamed["bound_ms"] >= resident["step_ms"] * 0.99
