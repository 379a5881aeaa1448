"""Rows of a run that never was, for tests of what `fxoffload bench` makes of its results."""

from __future__ import annotations

from typing import Any

from fxoffload.results import FORMAT

GIB = 2**30
MACHINE = {"device": "NVIDIA H200", "driver": "580.1", "processor": "Some CPU", "cores": 16, "system": "Linux x86_64"}
VERSIONS = {"python": "3.12.3", "fxoffload": "0.1.0", "torch": "2.11.0", "triton": "3.6.0", "diffusers": None}


def row(contender: str, *, setting: dict[str, Any] | None = None, repeat: int = 0, **changes: Any) -> dict[str, Any]:
    """A measured row of the workload `flux` at batch 1."""
    return {
        "workload": "flux", "batch": 1, "contender": contender, "setting": setting or {}, "repeat": repeat, "status": "ok",
        "reason": "", "setup_s": 1.0, "first_call_s": 2.0, "step_ms": 100.0, "step_min_ms": 99.0, "step_max_ms": 102.0,
        "host_ms": 20.0, "first_reserved_nbytes": 5 * GIB, "reserved_nbytes": 4 * GIB, "allocated_nbytes": 3 * GIB,
        "host_peak_nbytes": 30 * GIB, "pinned_nbytes": 0, "error": 0.01, "equal_to_reference": False, "seconds": 9.0,
        "first": True, "cache": "cold", **changes,
    }  # fmt: skip


def missing(contender: str, reason: str = "cache_dit is not installed", **changes: Any) -> dict[str, Any]:
    """A row without times."""
    known = row(contender, **changes)
    kept = ("workload", "batch", "contender", "setting", "repeat")
    return {**{name: known[name] for name in kept}, "status": changes.get("status", "missing"), "reason": reason}


def ours(budget: str, nbytes: int, step_ms: float, **changes: Any) -> dict[str, Any]:
    """A row of the compiled backend within a budget, a little below it."""
    known: dict[str, Any] = {
        "budget_nbytes": nbytes, "planned_nbytes": nbytes, "copied_nbytes": 9 * GIB, "equal_to_resident": True,
        "reserved_nbytes": nbytes - 2**20,
    }  # fmt: skip
    times = {"step_ms": step_ms, "step_min_ms": step_ms - 1, "step_max_ms": step_ms + 1}
    setting = {"budget": budget}
    return row("fxoffload-compiled", setting=setting, **{**known, **times, **changes})


def results(rows: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    """A whole file."""
    bounds = {
        "resident_ms": 130.0, "link_gb_s": 55.0, "activation_nbytes": GIB // 2, "nbytes": [1 * GIB, 23 * GIB],
        "bound_ms": [410.0, 130.0],
    }  # fmt: skip
    entry = {
        "workload": "flux", "batch": 1, "what": "FLUX.1-dev size, batch 1, 22.17 GiB bfloat16", "weight_nbytes": 22 * GIB,
        "bounds": bounds,
    }  # fmt: skip
    reference = row("resident-eager", step_ms=230.0, reserved_nbytes=24 * GIB, error=0.0, equal_to_reference=True)
    made = [
        reference,
        ours("all", 2**40, 132.0, reserved_nbytes=23 * GIB),
        ours("4GiB", 4 * GIB, 370.0, first=False, first_call_s=0.5),
        ours("2GiB", 2 * GIB, 402.0, first=False, first_call_s=0.5),
        row("group-block-streams", step_ms=564.0, reserved_nbytes=int(2.4 * GIB)),
        row("two-block-hooks", step_ms=500.0, reserved_nbytes=int(1.9 * GIB), equal_to_reference=True, error=0.0),
        missing("cache-dit-sync"),
        missing("cache-dit-fitted", setting={"budget": "4GiB"}),
        missing("accelerate-sequential", "it was ended after 60 s", status="timeout"),
    ]
    return {
        "format": FORMAT, "commands": ["fxoffload bench --workload flux"], "note": "", "machine": MACHINE, "versions": VERSIONS,
        "workloads": [entry], "rows": made if rows is None else rows,
    }  # fmt: skip
