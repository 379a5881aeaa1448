"""The command line. What a user can act on is one line on stderr and exit code 2; a bug of ours is a traceback."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fxoffload import benchargs, generate, plancmd
from fxoffload.errors import ConfigError, OffloadError

if TYPE_CHECKING:
    import torch

_REFUSED = 2
_INTERRUPTED = 130
_UNREAD = 141
"""As a shell has them for SIGINT and SIGPIPE."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code.

    0, 1 where a demo's results differ, 2 for an error that a user can act on, 130 where a benchmark was interrupted, 141 where
    what reads the output has ended.
    """
    arguments = _parser().parse_args(argv)
    arguments.argv = sys.argv[1:] if argv is None else list(argv)
    try:
        code = int(arguments.run(arguments))
        sys.stdout.flush()
        return code
    except OffloadError as error:
        print(f"fxoffload: {error}", file=sys.stderr)
        return _REFUSED
    except BrokenPipeError:
        # The interpreter would try to write the rest, too, when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _UNREAD


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fxoffload", description="Stream a transformer's weights from host memory, by plan.")
    parser.add_argument("--version", action="version", version=f"fxoffload {_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")

    demo = commands.add_parser("demo", help="run two small models from host memory, and draw what was planned")
    _add_device(demo)
    demo.add_argument("--out", type=Path, default=Path("fxoffload-demo"), metavar="DIR", help="where pictures go (%(default)s)")
    demo.set_defaults(run=_demo)

    about = "run a pipeline of diffusers, its weights streamed within a budget"
    generating = commands.add_parser("generate", help=about, description=f"{about[0].upper()}{about[1:]}.")
    generate.add_arguments(generating)
    _add_device(generating)
    generating.set_defaults(run=_generate)

    plan = commands.add_parser("plan", help="plan a model from its config.json, without weights; or print a saved plan")
    plancmd.add_arguments(plan)
    plan.set_defaults(run=_plan)

    bench = commands.add_parser("bench", help="measure this project and others on the same model, each in a process of its own")
    benchargs.add_arguments(bench)
    _add_device(bench)
    bench.set_defaults(run=_bench)

    calibrate = commands.add_parser("calibrate", help="print this machine's constants, measured at the first use")
    _add_device(calibrate)
    calibrate.add_argument("--force", action="store_true", help="measure again, and keep the result")
    calibrate.set_defaults(run=_calibrate)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("fxoffload")
    except importlib.metadata.PackageNotFoundError:
        return "from a folder, not installed"


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"), help="auto: an accelerator if there is one")


def choose_device(name: str) -> torch.device:
    """`auto`, `cpu` or `cuda` as a device. Raises ConfigError for one that this machine does not have."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return torch.device("cpu") if current is None else current
    if name != "cpu" and (current is None or current.type != name):
        there = "no accelerator" if current is None else repr(current.type)
        raise ConfigError(f"cli: --device: {name!r} is not available, this machine has {there}; give --device auto")
    return torch.device(name)


def _demo(arguments: argparse.Namespace) -> int:
    from fxoffload import demo

    return 0 if demo.run(choose_device(arguments.device), arguments.out) else 1


def _generate(arguments: argparse.Namespace) -> int:
    generate.run(arguments, choose_device(arguments.device))
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    plancmd.run(arguments)
    return 0


def _bench(arguments: argparse.Namespace) -> int:
    try:
        from fxoffload import bench

        bench.run(arguments, choose_device(arguments.device))
    except KeyboardInterrupt:
        print("fxoffload: interrupted; the same command goes on where this one was", file=sys.stderr)
        return _INTERRUPTED
    return 0


def _calibrate(arguments: argparse.Namespace) -> int:
    from fxoffload import calibrate

    device = choose_device(arguments.device)
    if device.type == "cpu":
        print(calibrate.machine_of(device))
        print("nominal constants, the same everywhere: on the CPU device nothing is measured")
        return 0
    path = calibrate.cache_path(device)
    if arguments.force:
        path.unlink(missing_ok=True)
        calibrate.machine_of.cache_clear()
    print(calibrate.machine_of(device))
    print(f"kept in {path}" if path.is_file() else f"{path} cannot be written: measured again at the next use")
    return 0
