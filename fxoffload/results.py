"""Results of `fxoffload bench`: one JSON file, written anew behind every row, so that a run that is cut short can go on.

    {
      "format": 1,
      "commands": [...],            every command that added rows
      "machine": {...}, "versions": {...},
      "options": {"compiler", "steps", "warmup"},
      "note": "...",                what to know before reading the times, or ""
      "workloads": [{"workload", "batch", "what", "weight_nbytes", "bounds"}],
      "rows": [...]                 as `trial` describes them, one a contender, setting and repeat
    }

Rows of one file are of one machine, one set of versions and one set of options. A package may be installed later.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fxoffload.errors import ConfigError

Row = dict[str, Any]
FORMAT = 1
CPU_NOTE = (
    "Measured on the CPU as the device: these times say nothing about a GPU. They show that every contender runs and is right."
)
MEASURED = ("ok", "wrong")
"""Statuses of rows that have times."""
FINAL = ("ok", "wrong", "refused")
"""Statuses of rows that another try would not change."""
_MEDIANS = (
    "setup_s", "first_call_s", "step_ms", "host_ms", "reserved_nbytes", "first_reserved_nbytes", "allocated_nbytes",
    "host_peak_nbytes", "pinned_nbytes", "planned_nbytes", "copied_nbytes", "error",
)  # fmt: skip


def key_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a row is about: workload, batch, contender, setting, repeat."""
    return (row["workload"], row["batch"], row["contender"], json.dumps(row["setting"], sort_keys=True), row["repeat"])


class Results:
    """The file and what is in it."""

    def __init__(self, path: Path | None, data: dict[str, Any] | None = None) -> None:
        self.path = path
        self.data: dict[str, Any] = data or {"format": FORMAT, "commands": [], "note": "", "workloads": [], "rows": []}

    @classmethod
    def open(cls, path: Path) -> Results:
        """What the file has; nothing yet, where there is none. Raises ConfigError for a folder, and a file of another kind."""
        check_name(path, "--out")
        try:
            is_there = path.exists()
        except OSError as error:
            raise cannot_write(path, error) from error
        return cls(path, read(path) if is_there else None)

    @property
    def rows(self) -> list[Row]:
        return self.data["rows"]

    def found(self, key: tuple[Any, ...]) -> Row | None:
        """The row with this key."""
        return next((row for row in self.rows if key_of(row) == key), None)

    def keep_options(self, options: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        """Take in the options that all rows share; `defaults` are those of a file of an earlier version, which does not name any.

        Raises ConfigError for options other than those of the rows.
        """
        before = self.data.get("options", defaults) if self.rows else options
        other = next((name for name in options if before.get(name) != options[name]), None)
        if other is not None:
            raise ConfigError(
                f"bench: {self.path}: its rows were measured with --{other} {before.get(other)}, here {options[other]}; "
                "give another file with --out"
            )
        self.data["options"] = dict(options)

    def add(self, record: dict[str, Any]) -> None:
        """Take a row in (instead of an earlier one of its key), or what is known of the machine or of a workload; and write.

        Raises ConfigError for a machine or versions other than the file's, and for a file that cannot be written.
        """
        if "status" in record:
            self.data["rows"] = [row for row in self.rows if key_of(row) != key_of(record)] + [record]
        elif "machine" in record:
            self._check_same(record)
            self.data |= record
        else:
            entry = self.workload(record["workload"], record["batch"])
            entry |= record
        self.write()

    def workload(self, name: str, batch: int) -> dict[str, Any]:
        """What is known of a workload."""
        for entry in self.data["workloads"]:
            if (entry["workload"], entry["batch"]) == (name, batch):
                return entry
        self.data["workloads"].append({"workload": name, "batch": batch})
        return self.data["workloads"][-1]

    def write(self) -> None:
        """Write the file: whole or not at all. Raises ConfigError where that is not possible."""
        if self.path is None:
            return
        part = self.path.with_name(f"{self.path.name}.part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            part.write_text(json.dumps(self.data, indent=1) + "\n")
            part.replace(self.path)
        except OSError as error:
            raise cannot_write(self.path, error) from error
        finally:
            with suppress(OSError):
                part.unlink()

    def _check_same(self, record: Mapping[str, Any]) -> None:
        for what in ("machine", "versions"):
            before, now = self.data.get(what), record[what]
            if before is None:
                continue
            # A package that was not installed may be now: `--retry` measures what needs it.
            known = [name for name in {**before, **now} if what == "machine" or before.get(name) is not None]
            name = next((name for name in known if before.get(name) != now.get(name)), None)
            if name is not None:
                raise ConfigError(
                    f"bench: {self.path}: its rows are of another {what.removesuffix('s')} ({name} {before.get(name)!r}, here "
                    f"{now.get(name)!r}); give another file with --out"
                )


def check_name(path: Path, option: str) -> None:
    """Raises ConfigError for a name that the report has, which is written beside the JSON."""
    if path.suffix.lower() == ".md":
        raise ConfigError(f"bench: {option}: {path}: the report has this name; give {path.with_suffix('.json').name}")


def cannot_write(path: Path, error: OSError) -> ConfigError:
    return ConfigError(f"bench: {path}: it cannot be written ({error.strerror}); give a file elsewhere")


def read(path: Path) -> dict[str, Any]:
    """The data of a file. Raises ConfigError where it has none of this format."""
    try:
        data: Any = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"bench: {path}: {error.strerror}; give a file that fxoffload bench wrote") from error
    except ValueError as error:
        raise ConfigError(f"bench: {path}: this is no JSON ({error}); give a file that fxoffload bench wrote") from error
    lists = ("commands", "workloads", "rows")
    if not isinstance(data, dict) or data.get("format") != FORMAT or not all(isinstance(data.get(n), list) for n in lists):
        raise ConfigError(f"bench: {path}: it was not written by this version of fxoffload bench; give another file")
    return data


@dataclass(frozen=True, slots=True)
class Point:
    """All repeats of one contender with one setting. Medians over repeats; times in ms and s, sizes in bytes."""

    contender: str
    setting: Mapping[str, Any]
    status: str
    """That of the worst repeat: one that is not measured, before one that is wrong."""
    reason: str
    values: Mapping[str, Any]
    """The fields of a row."""
    repeats: int

    @property
    def memory_nbytes(self) -> int | None:
        """What it took on the device: the reserved peak, or, where nobody counts that, what was planned."""
        return self.values.get("reserved_nbytes") or self.values.get("planned_nbytes")

    @property
    def step_ms(self) -> float:
        return self.values["step_ms"]

    @property
    def is_measured(self) -> bool:
        return self.status in MEASURED


def combine(rows: Sequence[Row]) -> list[Point]:
    """Repeats of one workload together, in the order in which contenders and settings first appear."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key_of({**row, "repeat": 0}), []).append(row)
    return [_point(group) for group in groups.values()]


def _point(rows: Sequence[Row]) -> Point:
    measured = [row for row in rows if row["status"] in MEASURED]
    worst = next((row for row in rows if row["status"] not in MEASURED), None)
    worst = worst or next((row for row in rows if row["status"] == "wrong"), rows[0])
    values: Row = dict(measured[0]) if measured else {}
    for name in _MEDIANS:
        known = [row[name] for row in measured if row.get(name) is not None]
        if known:
            values[name] = statistics.median(known)
    if measured:
        values["step_min_ms"] = min(row["step_min_ms"] for row in measured)
        values["step_max_ms"] = max(row["step_max_ms"] for row in measured)
        # The first call is cold in the first repeat only.
        values["first_call_s"] = measured[0]["first_call_s"]
    status = worst["status"] if not measured or worst["status"] == "wrong" else "ok"
    reason = worst["reason"]
    if measured and worst["status"] not in MEASURED:
        reason = f"{len(rows) - len(measured)} of {len(rows)} repeats: {worst['status']}: {reason}"
    return Point(rows[0]["contender"], rows[0]["setting"], status, reason, values, len(measured))
