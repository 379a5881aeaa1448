"""Measure what becomes of weights: loaded from a checkpoint, kept over many forwards, swapped for adapters, quantized.

    python -m tests.bench.weights loading   --out tests/bench/results/weights/loading.json
    python -m tests.bench.weights forwards  --out tests/bench/results/weights/forwards.json
    python -m tests.bench.weights lora      --out tests/bench/results/weights/lora.json
    python -m tests.bench.weights quantized --out tests/bench/results/weights/quantized.json

Each has a module `measure_<name>`, whose docstring says what its numbers mean. Weights are random. The file is written anew
behind every row. `--device cpu` with a `-tiny` workload shows that a measurement runs; times there say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from fxoffload.workloads import WORKLOADS
from tests.bench import measure_forwards, measure_loading, measure_lora, measure_quantized
from tests.bench.rowfile import RowFile

MEASUREMENTS = {
    "loading": measure_loading,
    "forwards": measure_forwards,
    "lora": measure_lora,
    "quantized": measure_quantized,
}


def main(argv: Sequence[str]) -> RowFile:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="measurement", required=True)
    for name, module in MEASUREMENTS.items():
        command = commands.add_parser(name, description=module.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
        command.add_argument("--workload", choices=WORKLOADS, default="flux")
        command.add_argument("--device", default="cuda")
        command.add_argument("--out", type=Path)
        module.arguments(command)
    args = parser.parse_args(argv)
    torch.set_grad_enabled(False)
    return MEASUREMENTS[args.measurement].run(args, "python -m tests.bench.weights " + " ".join(argv))


if __name__ == "__main__":
    main(sys.argv[1:])
