"""`fxoffload plan`: a saved plan, or the plan of a model of which there is only a `config.json`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fxoffload.errors import ConfigError, OffloadError, PlanError
from fxoffload.plan import Plan

if TYPE_CHECKING:
    from fxoffload.machine import Machine
    from fxoffload.report import Explanation

_ACCEPTED = "give the config.json of a model, its folder, or a file that Plan.save wrote"
_SIZES = ("batch", "height", "width", "frames", "tokens")
_ABOUT_MODELS = ("budget", "machine", *_SIZES, "dtype", "out")
"""Options that say what to plan, or what to do with it."""

_BUDGET = (
    "device memory, such as 8GiB; left out: what is free, or, without an accelerator, the smallest with which copies overlap "
    "compute"
)
_MACHINE = (
    "a file that Machine.save wrote, or constants that differ from nominal ones, such as "
    "link_gb_s=55,memory_gb_s=4000,bfloat16=650; left out: this accelerator, or nominal without one"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=Path, metavar="CONFIG", help="a config.json of diffusers or transformers, or a saved plan")
    parser.add_argument("--budget", metavar="SIZE", help=_BUDGET)
    parser.add_argument("--machine", metavar="FILE|nominal|NAME=VALUE,...", help=_MACHINE)
    for name, text in zip(_SIZES, ("inputs at once", "pixels", "pixels", "of a video", "of the text"), strict=True):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), help="of the weights; left out: what the config says"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="also write the plan, a trace for Perfetto, and pictures there")


def run(arguments: argparse.Namespace) -> None:
    """Print the plan. Raises OffloadError for what a user can act on."""
    path, data = _read(arguments.path)
    from fxoffload import metamodel  # Slow to import, which the help need not wait for.

    if not metamodel.is_model_config(data):
        _print_saved(path, data, arguments)
        return
    explanation = _explain(path, data, arguments)
    print(explanation)
    if arguments.out is not None:
        _write(explanation, arguments.out)


def _print_saved(path: Path, data: Any, arguments: argparse.Namespace) -> None:
    if not isinstance(data, dict) or "format" not in data:
        raise PlanError(f"cli: {path}: this is neither the config of a model nor a saved plan; {_ACCEPTED}")
    plan = Plan.load(path)
    given = [f"--{name}" for name in _ABOUT_MODELS if getattr(arguments, name) is not None]
    if given:
        what = f"{path} is a saved plan, which is printed as it is"
        raise ConfigError(
            f"cli: {', '.join(given)}: {what}; leave {'it' if len(given) == 1 else 'them'} out, or give a config.json"
        )
    print(plan)


def parse_machine(text: str) -> Machine:
    """`nominal`, a file, or `NAME=VALUE,...` over the nominal constants. Raises ConfigError for anything else."""
    from fxoffload.machine import ATTENTION, MASKED_ATTENTION, Machine

    if text == "nominal":
        return Machine.nominal()
    if "=" not in text:
        try:
            return Machine.load(Path(text))
        except OSError as error:
            raise ConfigError(f"cli: --machine: {text}: {error.strerror}; give a file, 'nominal', or NAME=VALUE,...") from error
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ConfigError(
                f"cli: --machine: {text}: this is no saved machine ({error}); give what Machine.save wrote"
            ) from error
    machine = dataclasses.replace(Machine.nominal(), name=text)
    rates = dict(machine.tflop_s)
    constants = [f.name for f in dataclasses.fields(machine) if f.name not in ("name", "tflop_s")]
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        accepted = {*constants, *rates, *(rate + kernel for rate in rates for kernel in (ATTENTION, MASKED_ATTENTION))}
        if name not in accepted or not number > 0:
            known = ", ".join([*constants, *rates])
            raise ConfigError(f"cli: --machine: {part!r} is not accepted; give NAME=VALUE with a number > 0, NAME one of {known}")
        if name in constants:
            machine = dataclasses.replace(machine, **{name: number})
        else:
            rates[name] = number
    return dataclasses.replace(machine, tflop_s=tuple(rates.items()))


def _read(path: Path) -> tuple[Path, Any]:
    """The file that is meant, and what it holds; None where that is no JSON."""
    if path.is_dir():
        found = next((path / name for name in ("config.json", "model_index.json") if (path / name).is_file()), None)
        if found is None:
            raise ConfigError(f"cli: {path}: there is no config.json in this folder; {_ACCEPTED}")
        path = found
    try:
        return path, json.loads(path.read_text())
    except OSError as error:
        raise PlanError(f"cli: {path}: {error.strerror}; {_ACCEPTED}") from error
    except (ValueError, RecursionError):
        return path, None


def _explain(path: Path, data: dict[str, Any], arguments: argparse.Namespace) -> Explanation:
    import torch

    from fxoffload import metamodel, report, shapes
    from fxoffload.config import check_budget
    from fxoffload.machine import Machine

    budget: Any = None if arguments.budget is None else check_budget("--budget", arguments.budget)
    here = torch.accelerator.current_accelerator(check_available=True)
    machine = parse_machine(arguments.machine) if arguments.machine is not None else None
    if machine is None and here is None:
        machine = Machine.nominal()
    model = metamodel.build(data, path, dtype=arguments.dtype)
    inputs = shapes.example_inputs(model, **{n: v for n in _SIZES if (v := getattr(arguments, n)) is not None})
    if sys.stderr.isatty():
        print(
            f"tracing {type(model).__name__} without weights: seconds for small models, a minute for large ones", file=sys.stderr
        )
    device = here if here is not None else torch.device("cuda")
    if budget is None and here is None:
        everything = report.explain(model, inputs, machine=machine, memory_budget="1024TiB", onload_device=device)
        return everything.at(everything.landmarks.overlap.budget_nbytes)
    return report.explain(model, inputs, machine=machine, memory_budget=budget or "auto", onload_device=device)


def _write(explanation: Explanation, out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
        explanation.plan.save(out / "plan.json")
        explanation.save_trace(out / "timeline.json")
        explanation.save_picture(out / "timeline.png")
        explanation.save_curve(out / "curve.png")
    except OSError as error:
        raise OffloadError(f"cli: {out}: {error.strerror}; give a folder with --out") from error
    print(f"\nwritten to {out}: plan.json, timeline.json, timeline.png, curve.png")
