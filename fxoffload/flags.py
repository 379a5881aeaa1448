"""Flags of layerwise offload on the command line, under the names that Cache-DiT gave them, and the settings that they stand for.

Each is there twice: `--layerwise-NAME` for every component, `--layerwise-text-NAME` for text encoders instead.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import dataclass
from typing import Any, Literal

from fxoffload.config import check_budget
from fxoffload.errors import ConfigError
from fxoffload.sizes import parse_size

NONE = "none"
"""As the value of a flag: no limit, or left to the planner, whatever the same flag for every component says."""
_FRACTION = re.compile(r"0?\.\d+|1\.0*", re.ASCII)


@dataclass(frozen=True, slots=True)
class Flag:
    """A field of `OffloadConfig` as a flag. `least`: of a count."""

    setting: str
    kind: Literal["switch", "count", "size"]
    help: str
    least: int = 1

    def option(self, *, text: bool) -> str:
        return f"--layerwise-{'text-' if text else ''}{self.setting.replace('_', '-')}"

    def value(self, arguments: argparse.Namespace, *, text: bool) -> Any:
        """What was given, as text or a bool; None where nothing was."""
        return getattr(arguments, self.option(text=text)[2:].replace("-", "_"))


FLAGS = (
    Flag("async_transfer", "switch", "copies overlap compute; left out: wherever the device can"),
    Flag(
        "transfer_buckets",
        "count",
        "how many buckets may be on their way or ready; left out: the planner chooses",
    ),
    Flag("persistent_buckets", "count", "how many buckets of a component stay on the device; left out: the planner chooses", 0),
    Flag("persistent_bins", "count", "over how many evenly spaced ranges the persistent buckets are spread"),
    Flag("prefetch_limit", "switch", "cap prefetched but unused buckets at min(4 * transfer buckets, 8)"),
    Flag("max_copy_streams", "count", "at most so many streams that copy; one fills the link, and no more are used"),
    Flag("max_inflight_prefetch_bytes", "size", "cap on pending and ready prefetches together, such as 2GiB; left out: no cap"),
)
_OFFLOAD = "keep weights in host memory and stream them to the device; without it the whole pipeline is moved to the device"
_BUDGET = (
    "device memory for the whole pipeline, which its components share: a size such as 8GiB, a part of the device such as 0.5, or "
    "auto, what is free (the default with --layerwise-offload); asks for --layerwise-offload by itself"
)


@dataclass(frozen=True, slots=True)
class Layerwise:
    """Settings of every component, and those that text encoders have instead."""

    settings: dict[str, Any]
    text: dict[str, Any]


def add_flags(parser: argparse.ArgumentParser) -> None:
    about = f"Text encoders take what is set for all, unless the -text- form says otherwise. {NONE!r} sets no limit."
    group = parser.add_argument_group("layerwise offload", about)
    group.add_argument("--layerwise-offload", action="store_true", help=_OFFLOAD)
    group.add_argument("--memory-budget", metavar="SIZE", help=_BUDGET)
    for flag in FLAGS:
        for text in (False, True):
            about = "the same for text encoders" if text else flag.help
            if flag.kind == "switch":
                group.add_argument(flag.option(text=text), action=argparse.BooleanOptionalAction, help=about)
            else:
                group.add_argument(flag.option(text=text), metavar="N" if flag.kind == "count" else "SIZE", help=about)


def layerwise_settings(arguments: argparse.Namespace) -> Layerwise | None:
    """The settings that the flags ask for; None where nothing is to be offloaded.

    Raises ConfigError for a value that is not accepted, and for a flag that would have no effect.
    """
    given = [(flag, text, v) for flag in FLAGS for text in (False, True) if (v := flag.value(arguments, text=text)) is not None]
    if not arguments.layerwise_offload and arguments.memory_budget is None:
        if given:
            option = given[0][0].option(text=given[0][1])
            raise ConfigError(f"cli: {option}: no weights are offloaded; add --layerwise-offload or --memory-budget SIZE")
        return None
    common, texts = (
        {flag.setting: _parsed(flag, flag.option(text=text), value) for flag, text, value in given if text is wanted}
        for wanted in (False, True)
    )
    if arguments.memory_budget is not None:
        common["memory_budget"] = parse_budget("--memory-budget", arguments.memory_budget)
    return Layerwise(common, texts)


def parse_budget(option: str, text: str) -> int | float | str:
    """A size, a fraction of the device, or `auto`. Raises ConfigError for anything else."""
    return check_budget(option, float(text) if _FRACTION.fullmatch(text) else text)


def parse_count(option: str, text: str, *, least: int = 1) -> int:
    """An int of at least `least`. Raises ConfigError for anything else."""
    if not re.fullmatch(r"\d{1,9}", text, re.ASCII) or int(text) < least:
        raise ConfigError(f"cli: {option}: {text!r} is not accepted; give an int >= {least}")
    return int(text)


def _parsed(flag: Flag, option: str, value: Any) -> Any:
    if flag.kind == "switch":
        return value
    if value == NONE:
        return None
    return parse_size(value, what=option) if flag.kind == "size" else parse_count(option, value, least=flag.least)
