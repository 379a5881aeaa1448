"""Debug switches: environment variables, read here and nowhere else.

| variable | value | effect |
|---|---|---|
| `FXOFFLOAD_LOG` | `0`, `1`, `2` | log to stderr: warnings; also what was decided (plan, budget, takeovers); also each step |
| `FXOFFLOAD_DUMP` | a directory | write numbered graphs, the plan and a trace there |
| `FXOFFLOAD_PLAN` | a plan file | run this plan instead of the planner's; it is judged all the same, by the budget at hand |
| `FXOFFLOAD_POISON` | `0`, `1` | overwrite evicted bytes with NaN on every device, so that a read after an eviction shows |

Unset or empty: off. Without `FXOFFLOAD_LOG` the logger `fxoffload` is left to the application.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fxoffload.errors import ConfigError

logger = logging.getLogger("fxoffload")
"""The only logger of the package."""

_LEVELS = {"0": logging.WARNING, "1": logging.INFO, "2": logging.DEBUG}
_FLAGS = {"0": False, "1": True}


@dataclass(frozen=True, slots=True)
class Switches:
    """The debug switches at one moment. `log_level` is a level of the `logging` module."""

    log_level: int | None = None
    dump: Path | None = None
    plan: Path | None = None
    poison: bool = False


def switches(environ: Mapping[str, str] | None = None) -> Switches:
    """Read the switches from `environ` (`os.environ` as it is now, if left out). Raises ConfigError for a bad value."""
    env = os.environ if environ is None else environ
    dump, plan = env.get("FXOFFLOAD_DUMP"), env.get("FXOFFLOAD_PLAN")
    if dump and Path(dump).exists() and not Path(dump).is_dir():
        raise ConfigError(f"debug: FXOFFLOAD_DUMP: {dump!r} is not a directory; give a directory, or one to be made")
    if plan and not Path(plan).is_file():
        raise ConfigError(f"debug: FXOFFLOAD_PLAN: there is no file {plan!r}; give a file that Plan.save wrote")
    return Switches(
        log_level=_pick(env, "FXOFFLOAD_LOG", _LEVELS),
        dump=Path(dump) if dump else None,
        plan=Path(plan) if plan else None,
        poison=bool(_pick(env, "FXOFFLOAD_POISON", _FLAGS)),
    )


def start_logging(chosen: Switches) -> None:
    """Set the logger `fxoffload` to the chosen level, with one handler to stderr. Does nothing when no level is chosen."""
    if chosen.log_level is None:
        return
    logger.setLevel(chosen.log_level)
    if not logger.hasHandlers():
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)


def _pick(env: Mapping[str, str], name: str, values: Mapping[str, int]) -> int | None:
    text = env.get(name, "").strip()
    if not text:
        return None
    if text not in values:
        raise ConfigError(f"debug: {name}: {text!r} is not accepted; give one of {', '.join(values)}, or unset it")
    return values[text]
