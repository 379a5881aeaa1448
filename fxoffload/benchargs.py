"""The arguments of `fxoffload bench`, apart from what it does: reading them loads no library."""

from __future__ import annotations

import argparse
from pathlib import Path

from fxoffload.config import SEGMENT_COMPILERS

DEFAULT_WORKLOAD = "flux-tiny"
REPEATS, REPEATS_CPU = 2, 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", default=DEFAULT_WORKLOAD, metavar="NAME,...", help="what to run (%(default)s)")
    parser.add_argument(
        "--contenders", default="*", metavar="PATTERN,...", help="who runs it, such as 'fxoffload-*' or core (all)"
    )
    parser.add_argument("--list", action="store_true", help="list workloads and contenders, and end")
    budgets = "such as 2GiB,8GiB,smallest; left out: those of the workload"
    parser.add_argument("--budgets", metavar="SIZE,...", help=budgets)
    for name, default, text in (
        ("batch", 1, "inputs at once"),
        ("steps", 6, "forwards that are timed"),
        ("warmup", 2, "forwards before these, behind the first"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{text} (%(default)s)")
    repeats = f"processes a contender and setting; left out: {REPEATS}, on the CPU {REPEATS_CPU}"
    parser.add_argument("--repeats", type=int, metavar="N", help=repeats)
    compiler = "what everything compiled is compiled with; left out: inductor, on the CPU aot_eager, which takes seconds"
    parser.add_argument("--compiler", choices=SEGMENT_COMPILERS, help=compiler)
    parser.add_argument("--time-limit", type=float, default=600.0, metavar="S", help="seconds a process may take (%(default)s)")
    parser.add_argument(
        "--stop-after", type=float, metavar="S", help="seconds after which the run ends, to be gone on with later"
    )
    parser.add_argument("--retry", action="store_true", help="measure again what failed, ran out of time or was not installed")
    parser.add_argument(
        "--out", type=Path, default=Path("fxoffload-bench.json"), metavar="FILE", help="where results go (%(default)s)"
    )
    parser.add_argument("--work", type=Path, metavar="DIR", help="where compile caches and logs go; left out: a temporary folder")
    parser.add_argument(
        "--lock",
        type=Path,
        metavar="FILE",
        help="runs on one host that give the same file time steps, and make first calls that compile nothing, in turn",
    )
    parser.add_argument(
        "--render", type=Path, metavar="FILE", help="measure nothing; print the table of a results file, and draw"
    )
