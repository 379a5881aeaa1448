"""The plan: where every bucket lives on the device, and when it moves. Pure data, no torch.

A forward runs the segments `0 .. n-1` in order, again and again. The plan is cyclic: it says what happens
around each segment of *one* forward, and the next forward begins in the state in which this one ended.

At segment `i` the runtime does, in this order:

1. issue every prefetch with `prefetch_before == i` (in the order of `Plan.prefetches_before`),
2. wait for every load with `wait_before == i`,
3. launch segment `i`,
4. evict every load with `evict_after == i`.

A load whose `prefetch_before` lies after its `wait_before` is issued by the forward *before* the one that uses it
(wrap-around); so a load is live, in cyclic segment time, from `prefetch_before` through `evict_after`. Two live loads,
or a load and a resident bucket, never share a byte of the arena.

A prefetch overwrites bytes that an earlier load used: `after` names the load whose eviction it waits for, the latest one
that touches its bytes. Compute runs in order, so waiting for the latest is waiting for all. A load whose bytes no other load
uses waits for its own eviction, by the forward before: `after` is then its own name. `after` always means the eviction that
the host issued last, in this forward or else in the one before. Where a knob limits the look-ahead, `after` may name a later one.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from fxoffload.errors import PlanError

PLAN_FORMAT = 1
_LARGEST = 1e30
"""No plan has such a number, and not all that are larger have quotients."""


@dataclass(frozen=True, slots=True)
class Resident:
    """A bucket that stays in the arena for good, at `[offset, offset + nbytes)` bytes."""

    bucket: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Load:
    """One copy of a streamed bucket into the arena, once a forward.

    `name` is the bucket's name, or `bucket#k` for the k-th of several loads of one bucket in a forward.
    `uses` are the segment indices that read this copy, ascending; `wait_before == uses[0]`, `evict_after == uses[-1]`.
    """

    name: str
    bucket: str
    offset: int
    nbytes: int
    uses: tuple[int, ...]
    prefetch_before: int
    after: str | None

    @property
    def wait_before(self) -> int:
        return self.uses[0]

    @property
    def evict_after(self) -> int:
        return self.uses[-1]

    @property
    def wraps(self) -> bool:
        """Issued by the forward before the one that uses it: present, or on its way, at the start of a forward."""
        return self.prefetch_before > self.wait_before


@dataclass(frozen=True, slots=True)
class Plan:
    """A cyclic schedule for one graph. All sizes in bytes, all times in milliseconds."""

    segments: tuple[str, ...]
    residents: tuple[Resident, ...]
    loads: tuple[Load, ...]
    """In order of first use, and of issue where several are needed by one segment."""
    arena_nbytes: int
    """Residents and staging, the address space of all offsets."""
    activation_nbytes: int
    """Everything on the device that is not in the arena, at its peak."""
    budget_nbytes: int
    async_transfer: bool
    compute_ms: float
    """Predicted time of one forward with everything resident."""
    step_ms: float
    """Predicted time of one forward in steady state."""
    bound_ms: float
    """No schedule under this budget can be faster (`timeline.windowed_bound`)."""
    cuda_graph: bool = False
    """For forwards that are replayed as captured graphs: what one issues for itself starts when the one before has ended."""

    @property
    def peak_nbytes(self) -> int:
        """Most bytes of the device at once: the arena and the activations."""
        return self.arena_nbytes + self.activation_nbytes

    @property
    def stall_ms(self) -> float:
        """How long compute waits for copies in one forward, by the predicted times."""
        return self.step_ms - self.compute_ms

    @property
    def resident_nbytes(self) -> int:
        """Bytes of the buckets that stay."""
        return sum(r.nbytes for r in self.residents)

    @property
    def streamed_nbytes(self) -> int:
        """Bytes copied to the device in one forward."""
        return sum(load.nbytes for load in self.loads)

    def prefetches_before(self, segment: int) -> tuple[Load, ...]:
        """Loads issued right before `segment`: what is needed soonest first, for one segment in the order of `loads`."""
        n = len(self.segments)
        here = [load for load in self.loads if load.prefetch_before == segment]
        return tuple(sorted(here, key=lambda load: (load.wait_before - segment) % n))

    def live_at_start(self) -> tuple[Load, ...]:
        """Loads that a forward finds already issued, in the order in which the forward before issued them."""
        n = len(self.segments)
        wrapping = [load for load in self.loads if load.wraps]
        return tuple(sorted(wrapping, key=lambda load: (load.prefetch_before, (load.wait_before - load.prefetch_before) % n)))

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; `Plan.load` reads it back equal."""
        Path(path).write_text(json.dumps({"format": PLAN_FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. Raises PlanError, naming the file, for one that cannot be read or holds anything else.

        Every value has its type then, and every index names a segment. Whether the plan is right is for the judge to say.
        """
        try:
            data = json.loads(Path(path).read_text())
            found = data.pop("format", None) if isinstance(data, dict) else PLAN_FORMAT
            if type(found) is not int or found != PLAN_FORMAT:
                raise PlanError(f"plan: {path}: format {_shown(found)}, this version reads {PLAN_FORMAT}; plan the model again")
            plan: Plan = _typed(cls, data, "the plan")
            _check_indices(plan)
        except OSError as error:
            raise PlanError(f"plan: {path}: {error.strerror}; give a file that Plan.save wrote") from error
        except (ValueError, RecursionError) as error:
            raise PlanError(f"plan: {path}: this is no saved plan ({error}); give a file that Plan.save wrote") from error
        return plan

    def __str__(self) -> str:
        from fxoffload.show import plan_table

        return plan_table(self)


def _typed(kind: Any, value: Any, where: str) -> Any:
    """What JSON holds, as a `kind`: lists become tuples, dicts dataclasses. Raises ValueError that says where it is none."""
    if dataclasses.is_dataclass(kind):
        return _typed_fields(kind, value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{where} is {_shown(value)}, not a list")
        return tuple(_typed(get_args(kind)[0], item, f"{where}[{k}]") for k, item in enumerate(value))
    # By type, because True is an int to Python. A whole number of ms is one too, and NaN a number to Python's JSON.
    kinds = (int, float) if kind is float else get_args(kind) or (kind,)
    if type(value) not in kinds or (type(value) in (int, float) and not abs(value) < _LARGEST):
        raise ValueError(f"{where} is {_shown(value)}, not {_named(kind)}")
    return value


def _typed_fields(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{where} is {_shown(value)}, not an object with fields")
    hints = get_type_hints(kind)
    required = [f.name for f in dataclasses.fields(kind) if f.default is dataclasses.MISSING]
    if missing := [name for name in required if name not in value]:
        raise ValueError(f"{where} has no {', '.join(map(repr, missing))}")
    if unknown := [name for name in value if name not in hints]:
        raise ValueError(f"{where} has {', '.join(map(repr, unknown))}, which this version does not know")
    inside = "" if kind is Plan else f"{where}."
    return kind(**{name: _typed(hints[name], item, f"{inside}{name}") for name, item in value.items()})


def _shown(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _named(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", type(None): "null"}
    return " or ".join(names[one] for one in get_args(kind) or (kind,))


def _check_indices(plan: Plan) -> None:
    """A plan prints, and is judged, only if its loads name segments that it has."""
    n = len(plan.segments)
    for load in plan.loads:
        if not load.uses or not all(0 <= i < n for i in (*load.uses, load.prefetch_before)):
            raise ValueError(f"load {load.name!r} has no use, or names a segment outside 0 to {n - 1}")
