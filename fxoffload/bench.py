"""`fxoffload bench`: every contender on the same work in the same run, each in a process of its own.

    fxoffload bench                                          flux-tiny on what is here, under two minutes on a CPU
    fxoffload bench --workload flux,wan --out h200.json      real sizes, all contenders
    fxoffload bench --workload flux --contenders 'fxoffload-*,group-block-streams*'
    fxoffload bench --render h200.json                       the table and the pictures again, from the JSON

For each workload the resident eager model runs first: its output is what all others are compared with. Then come the contenders,
`--repeats` times, each time from another one on, so that none has the coldest or the warmest device. A row is written when it is
measured: a run that is cut short, or that `--stop-after` ends, goes on where it was with the same command. All rows of a file are
of the same steps, warm-up and compiler; with others, give another file.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import shlex
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxoffload import benchreport
from fxoffload.benchargs import REPEATS, REPEATS_CPU, add_arguments
from fxoffload.benchreport import show_setting
from fxoffload.contenders import CONTENDERS, CORE, REFERENCE, Contender, find_contenders
from fxoffload.errors import ConfigError
from fxoffload.launch import Launch, Launcher, rows_of
from fxoffload.results import CPU_NOTE, FINAL, MEASURED, Results, key_of
from fxoffload.sessions import BUDGETS, FLAGS, Setting
from fxoffload.show import table
from fxoffload.sizes import ACCEPTED_SIZES, parse_size
from fxoffload.trial import Task
from fxoffload.workloads import WORKLOADS, Workload, find_workload

_WORTH_S = 60.0
"""No process is started that has to end so soon because the run ends."""


@dataclass(frozen=True, slots=True)
class Run:
    """What one command measures."""

    workloads: tuple[Workload, ...]
    contenders: tuple[Contender, ...]
    budgets: tuple[str, ...] | None
    repeats: int
    base: Task
    """A task with all that is the same for every process."""
    retry: bool = False


def run(arguments: argparse.Namespace, device: torch.device) -> None:
    """Measure, or render. Raises ConfigError for what a user can act on."""
    if arguments.list:
        print(listing())
        return
    if arguments.render is not None:
        print(benchreport.render(arguments.render))
        return
    chosen = plan_run(arguments, device)
    results = Results.open(arguments.out)
    keep_options(chosen.base, results)
    # A file that cannot be written is to be known before hours are spent.
    results.write()
    if device.type == "cpu":
        results.data["note"] = CPU_NOTE
        print(f"{CPU_NOTE}\n")
    command = shown_command(arguments.argv)
    if command not in results.data["commands"]:
        results.data["commands"].append(command)
    launcher = Launcher(preload=[workload.module for workload in chosen.workloads])
    stop_s = None if arguments.stop_after is None else time.monotonic() + arguments.stop_after
    left = measure(chosen, results, launcher, limit_s=arguments.time_limit, stop_s=stop_s)
    print(benchreport.render(arguments.out))
    if left:
        print(f"\n{left} processes are left; the same command goes on with them")


def keep_options(base: Task, results: Results) -> None:
    """Raises ConfigError where the file has rows that were measured with other options."""
    results.keep_options(
        {"compiler": base.compiler, "steps": base.steps, "warmup": base.warmup},
        defaults=options_of(results.data["commands"][-1] if results.data["commands"] else "", base.device),
    )


def options_of(command: str, device: str) -> dict[str, Any]:
    """The options that all rows share of a command as results have it.

    >>> options_of("fxoffload bench --workload wan --steps 2 --out h200-wan.json", "cuda")
    {'compiler': 'inductor', 'steps': 2, 'warmup': 2}
    """
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    given, _ = parser.parse_known_args(shlex.split(command)[2:])
    return {"compiler": given.compiler or default_compiler(device), "steps": given.steps, "warmup": given.warmup}


def default_compiler(device: str) -> str:
    return "aot_eager" if device == "cpu" else "inductor"


def shown_command(argv: Sequence[str]) -> str:
    """The command that was run, without folders and locks: they are nobody else's.

    >>> shown_command(["bench", "--out", "here/h200.json", "--work", "/scratch", "--budgets", "2GiB"])
    'fxoffload bench --out h200.json --budgets 2GiB'
    """
    shown: list[str] = []
    joined = ("--out=", "--work=", "--lock=")
    words = iter([part for word in argv for part in (word.split("=", 1) if word.startswith(joined) else [word])])
    for word in words:
        if word == "--out":
            shown += [word, Path(next(words, "")).name]
        elif word in ("--work", "--lock"):
            next(words, "")
        else:
            shown.append(word)
    return shlex.join(["fxoffload", *shown])


def plan_run(arguments: argparse.Namespace, device: torch.device) -> Run:
    """What the command line asks for, checked."""
    _check_times(arguments.time_limit, arguments.stop_after)
    workloads = tuple(find_workload(name) for name in _names("workload", arguments.workload))
    on_cpu = device.type == "cpu"
    large = next((w.name for w in workloads if on_cpu and not w.is_tiny), None)
    if large is not None:
        raise ConfigError(
            f"bench: {large}: models of real size need an accelerator; give {large}-tiny to try the harness on the CPU"
        )
    for name in ("batch", "steps", "warmup", "repeats"):
        value = getattr(arguments, name)
        least = 0 if name == "warmup" else 1
        if value is not None and value < least:
            raise ConfigError(f"bench: --{name}: {value} is not accepted; give a whole number of at least {least}")
    base = Task(
        "", "", (), batch=arguments.batch, device=device.type, steps=arguments.steps, warmup=arguments.warmup,
        compiler=arguments.compiler or default_compiler(device.type), folder=str(_folder(arguments)),
        lock=None if arguments.lock is None else _lock(arguments.lock),
    )  # fmt: skip
    return Run(
        workloads,
        tuple(find_contenders(_names("contenders", arguments.contenders))),
        None if arguments.budgets is None else tuple(map(_budget, _names("budgets", arguments.budgets))),
        arguments.repeats or (REPEATS_CPU if on_cpu else REPEATS),
        base,
        arguments.retry,
    )


def _check_times(limit_s: float, stop_s: float | None) -> None:
    if not limit_s > 0:
        raise ConfigError(f"bench: --time-limit: {limit_s:g} is not accepted; give more than 0 seconds")
    least_s = min(limit_s, _WORTH_S)
    if stop_s is not None and not stop_s > least_s:
        raise ConfigError(
            f"bench: --stop-after: {stop_s:g} is not accepted, no process is started that has less than {least_s:g} seconds; "
            "give more, or leave it out"
        )


def _names(option: str, text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise ConfigError(f"bench: --{option}: {text!r} names none; give at least one, or leave it out")
    return names


def _budget(text: str) -> str:
    """One budget as `sessions.Ours` reads it."""
    try:
        if text.endswith("%"):
            if not 0 < float(text[:-1]) <= 100:
                raise ValueError(text)
        elif text not in BUDGETS:
            parse_size(text)
    except ValueError as error:  # A ConfigError is one.
        words = ", ".join(map(repr, BUDGETS))
        accepted = f"{words}, a part of the weights above 0% and at most 100%, or {ACCEPTED_SIZES}"
        raise ConfigError(f"bench: --budgets: {text!r} is not accepted; give {accepted}") from error
    return text


def _folder(arguments: argparse.Namespace) -> Path:
    """One for each results file, so that the next run finds what this one compiled. Made here, where it is refused in time."""
    if arguments.work is not None:
        folder = arguments.work.resolve()
    else:
        key = hashlib.sha256(str(arguments.out.resolve()).encode()).hexdigest()[:12]
        folder = Path(tempfile.gettempdir()) / f"fxoffload-bench-{key}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"bench: --work: {folder}: {error.strerror}; give a folder that can be made and written") from error
    return folder


def _lock(path: Path) -> Path:
    """Made here, where it is refused in time."""
    try:
        path.open("a").close()
    except OSError as error:
        raise ConfigError(f"bench: --lock: {path}: {error.strerror}; give a file that can be made and written") from error
    return path.resolve()


def measure(chosen: Run, results: Results, launch: Launch, *, limit_s: float, stop_s: float | None = None) -> int:
    """Run what is not in the results yet; returns how many processes are left because `stop_s` (of the monotonic clock) came."""
    todo = tasks(chosen, results)
    for i, task in enumerate(todo):
        left_s = limit_s if stop_s is None else min(limit_s, stop_s - time.monotonic())
        if left_s < min(limit_s, _WORTH_S):
            return len(todo) - i
        start = time.monotonic()
        for record in rows_of(task, launch, left_s, cut_short=left_s < limit_s):
            results.add(record)
            if "status" in record:
                print(f"[{i + 1}/{len(todo)}] {_line(record, time.monotonic() - start)}", flush=True)
    return 0


def tasks(chosen: Run, results: Results) -> list[Task]:
    """The processes that are still to run, in their order."""
    found: list[Task] = []
    for workload in chosen.workloads:
        base = dataclasses.replace(chosen.base, workload=workload.name)
        own = [
            task
            for repeat in range(chosen.repeats)
            for contender in in_turn(chosen.contenders, repeat, chosen.repeats)
            for task in _tasks_of(contender, dataclasses.replace(base, repeat=repeat), workload, chosen, results)
        ]
        if own and not base.reference.is_file():
            reference = dataclasses.replace(base, contender=REFERENCE, settings=({},))
            own = [reference, *(task for task in own if task != reference)]
        found += own
    return found


def in_turn(contenders: Sequence[Contender], repeat: int, repeats: int) -> list[Contender]:
    """The contenders of one repeat: each repeat starts with another one."""
    start = repeat * len(contenders) // repeats
    return [*contenders[start:], *contenders[:start]]


def _tasks_of(contender: Contender, base: Task, workload: Workload, chosen: Run, results: Results) -> list[Task]:
    base = dataclasses.replace(base, contender=contender.name)
    settings = contender.settings_for(chosen.budgets or workload.budgets)
    todo = [setting for setting in settings if not _is_done(results.found(key_of(base.row(setting))), retry=chosen.retry)]
    if not todo:
        return []
    if contender.needs_first and settings[0] not in todo:
        todo.insert(0, settings[0])
    todo = [_with_flags(setting, results.found(key_of({**base.row(setting), "repeat": 0}))) for setting in todo]
    groups = [todo] if contender.together else [[setting] for setting in todo]
    return [dataclasses.replace(base, settings=tuple(group)) for group in groups]


def _is_done(row: Mapping[str, Any] | None, *, retry: bool) -> bool:
    return row is not None and (row["status"] in FINAL or not retry)


def _with_flags(setting: Setting, row: Mapping[str, Any] | None) -> Setting:
    """Flags that the first repeat found serve the others."""
    return setting if row is None or FLAGS not in row else {**setting, FLAGS: row[FLAGS]}


def _line(row: Mapping[str, Any], seconds: float) -> str:
    """One row for people who wait."""
    about = f"{row['workload']}  {row['contender']}  {show_setting(row['setting'])}".rstrip()
    if row["status"] in MEASURED:
        return f"{about}: {row['step_ms']:.1f} ms a step{_shouted(row)} ({seconds:.0f} s)"
    return f"{about}: {row['status']}: {row['reason']} ({seconds:.0f} s)"


def _shouted(row: Mapping[str, Any]) -> str:
    return f", WRONG: {row['reason']}" if row["status"] == "wrong" else ""


def listing() -> str:
    """Workloads and contenders, for people."""
    workloads = [(w.name, w.what, ", ".join(w.budgets)) for w in WORKLOADS.values()]
    contenders = [(c.name, "core" if c.name in CORE else "", c.what, ", ".join(c.needs)) for c in CONTENDERS.values()]
    tables = (("workload", "what", "budgets"), workloads), (("contender", "", "what", "needs"), contenders)
    return "\n\n".join(table(head, rows) for head, rows in tables)
