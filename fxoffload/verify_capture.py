"""The judge of a captured forward: runs what was recorded, several replays in a row, and refuses it where a byte could be wrong.

Like `verify` it shares no code with what it judges. A recording is a list of steps on lines, which stand for streams:

- steps of one line happen in their order; steps of different lines happen in any order that events allow;
- an event carries all that its line has done when it is recorded; who waits for it comes behind that;
- `compute` is the stream that replays are launched on: a replay begins behind all that is before it there;
- a replay has a second line inside, `copies`, which is part of it once it waits for an event of `compute` (fork). The replay ends
  with `compute`, so all of `copies` must lie before an event that `compute` waits for (join);
- `outside` is the stream of the copies that the host issues around replays: those that a forward issues for the next one.

So every step has a clock: for each line, how many of its steps are surely done. A copy must come behind everything that read,
wrote or evicted the bytes that it overwrites, and so must an eviction, which writes too where it poisons, and must find its load
there; a segment must come behind the copy of each load that it reads, and find it there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NoReturn

from fxoffload.errors import PlanError
from fxoffload.plan import Load, Plan

COMPUTE, COPIES, OUTSIDE = "compute", "copies", "outside"
REPLAYS = 3

What = Literal["run", "copy", "evict", "record", "wait"]
Clock = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Step:
    """One call on a line: `name` is a segment (run), a load (copy, evict) or an event (record, wait)."""

    line: str
    what: What
    name: str


@dataclass(frozen=True, slots=True)
class Recording:
    """What the host issues right before each replay, what the graph holds, and what the host issues right behind it."""

    before: tuple[Step, ...]
    inside: tuple[Step, ...]
    behind: tuple[Step, ...]

    def __str__(self) -> str:
        from fxoffload.show import table

        parts = (("before", self.before), ("inside", self.inside), ("behind", self.behind))
        return table(
            ("", "line", "", "name"), [(part, s.line, s.what, s.name) for part, steps in parts for s in steps], fold=False
        )


def check_capture(plan: Plan, recording: Recording) -> None:
    """Return if replays of this recording, in a row, read the right bytes. Raises PlanError that names what does not."""
    ran = tuple(step.name for step in recording.inside if step.what == "run")
    if ran != plan.segments:
        _refuse(f"segments: {len(ran)} were recorded {ran[:3]}..., the plan has {len(plan.segments)} {plan.segments[:3]}...")
    copied = sorted(s.name for s in (*recording.before, *recording.inside, *recording.behind) if s.what == "copy")
    if copied != sorted(load.name for load in plan.loads):
        _refuse(
            f"copies: a replay makes {len(copied)} copies of loads, the plan has {len(plan.loads)}: {_difference(plan, copied)}"
        )
    _Replays(plan, recording).run()


def _refuse(what: str) -> NoReturn:
    raise PlanError(f"judge: captured forward: {what}; run without cuda_graph, and report this as a bug")


def _difference(plan: Plan, copied: list[str]) -> str:
    planned = {load.name for load in plan.loads}
    odd = sorted(planned.symmetric_difference(copied) or {name for name in copied if copied.count(name) > 1})
    return ", ".join(odd[:3])


@dataclass
class _Event:
    clock: Clock
    inside: bool


@dataclass
class _Bytes:
    """What touched the bytes of a load since its last copy: (line, how many steps of it), and who. `whole`: it is still there."""

    touched: list[tuple[str, int, str]] = field(default_factory=list[tuple[str, int, str]])
    whole: bool = False


@dataclass
class _Replays:
    plan: Plan
    recording: Recording
    clocks: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    events: dict[str, _Event] = field(default_factory=dict[str, _Event])
    inside: bool = False
    forked: bool = False

    def __post_init__(self) -> None:
        loads = self.plan.loads
        self.loads = {load.name: load for load in loads}
        self.bytes = {load.name: _Bytes() for load in loads}
        self.sharing = {a.name: [b.name for b in loads if a is b or _overlap(a, b)] for a in loads}
        self.reads = {name: [load.name for load in loads if index in load.uses] for index, name in enumerate(self.plan.segments)}

    def run(self) -> None:
        # A first replay finds what `restore` left: the copies that a replay makes for the next one, waited for by nothing yet.
        for step in self.recording.behind:
            if step.what != "wait":
                self._step(step)
        for _ in range(REPLAYS):
            for step in self.recording.before:
                self._step(step)
            self._replay()
            for step in self.recording.behind:
                self._step(step)

    def _replay(self) -> None:
        self.inside, self.forked = True, False
        # Where no line forks off, nothing that the line did in an earlier replay is known to be done but by way of `compute`.
        self.clocks[COPIES] = {COPIES: self.clocks.get(COPIES, {}).get(COPIES, 0)}
        for step in self.recording.inside:
            self._step(step)
        copies = self.clocks[COPIES][COPIES]
        if self.forked and self.clocks.get(COMPUTE, {}).get(COPIES, 0) < copies:
            last = [step for step in self.recording.inside if step.line == COPIES][-1]
            _refuse(f"{last.what} {last.name}: on line {COPIES}, which is not joined before the end")
        self.inside = False

    def _step(self, step: Step) -> None:
        clock = self.clocks.setdefault(step.line, {})
        if step.what == "wait":
            self._wait(step, clock)
        elif self.inside and step.line == COPIES and not self.forked:
            _refuse(f"{step.what} {step.name}: on line {COPIES}, which is not forked from the capture")
        clock[step.line] = clock.get(step.line, 0) + 1
        if step.what == "record":
            self.events[step.name] = _Event(dict(clock), self.inside)
        elif step.what == "copy":
            self._copy(step, clock)
        elif step.what == "run":
            self._run(step, clock)
        elif step.what == "evict":
            self._evict(step, clock)

    def _wait(self, step: Step, clock: dict[str, int]) -> None:
        event = self.events.get(step.name)
        if event is None:
            _refuse(f"{step.line} waits for event {step.name!r}, which nothing has recorded")
        if self.inside and step.line == COPIES:
            if not self.forked and not event.inside:
                _refuse(f"wait {step.name}: on line {COPIES}, which is not forked from the capture")
            self.forked = True
        for line, count in event.clock.items():
            clock[line] = max(clock.get(line, 0), count)

    def _copy(self, step: Step, clock: dict[str, int]) -> None:
        self._overwrite(step, clock)
        self.bytes[step.name] = _Bytes([(step.line, clock[step.line], f"the copy of {step.name}")], whole=True)

    def _evict(self, step: Step, clock: dict[str, int]) -> None:
        there = self.bytes[step.name]
        if not there.whole:
            _refuse(f"evict {step.name}: its bytes hold something else")
        self._overwrite(step, clock)
        there.touched.append((step.line, clock[step.line], f"the eviction of {step.name}"))

    def _overwrite(self, step: Step, clock: dict[str, int]) -> None:
        for name in self.sharing[step.name]:
            there = self.bytes[name]
            for line, count, who in there.touched:
                if clock.get(line, 0) < count:
                    what = f"{step.what} {step.name}: on line {step.line}"
                    _refuse(f"{what} it overwrites bytes of {name} and does not wait for {who}")
            there.whole = False

    def _run(self, step: Step, clock: dict[str, int]) -> None:
        for name in self.reads[step.name]:
            there = self.bytes[name]
            if not there.whole:
                _refuse(f"run {step.name}: it reads {name}, whose bytes hold something else")
            line, count, _ = there.touched[0]
            if clock.get(line, 0) < count:
                _refuse(f"run {step.name}: it reads {name} and does not wait for its copy")
            there.touched.append((step.line, clock[step.line], f"segment {step.name}"))


def _overlap(a: Load, b: Load) -> bool:
    return a.offset < b.offset + b.nbytes and b.offset < a.offset + a.nbytes
