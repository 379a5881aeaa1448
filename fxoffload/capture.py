"""The transfer of a forward that is captured as one graph, and replayed: the same four calls, made part of the graph.

A plan is cyclic: what one replay needs at its start, the replay before has issued. But all that is captured must be joined before
the capture ends. Were the copies for the next replay captured too, each replay would end with a wait for them, and then the link
would be idle until the next one has evicted something: 2.4% of the step of FLUX.1-dev in 16 GiB, by the timeline. So those copies
stay outside, but for those that the planner can leave to the next forward (`planner.AS_SHORT`). With W such a load and L another:

                 in the graph                                     issued by the host behind each launch
    prefetch L   copies:  wait free; copy; record ready L (; record mark (external))
    prefetch W   copies:  wait free; record go W (external)       outside:  wait go W; copy; record ready W
    wait L       compute: wait ready L
    wait W       compute: wait ready W (external)

An external event is a node of the graph: recorded by each launch, and waited for as the host recorded it last before a launch.
The graph's own copies begin behind `sent`, the end of all that was issued outside before the launch: copies keep one order.
Where a plan streams nothing there is no fork: a graph of one line is launched faster than one with a branch.

The driver lays the nodes of a graph on streams of its own. It goes on with what was captured first behind a node, and begins
another stream with the rest: where compute waits for a copy before the next copy is captured, compute goes on, and the copies
begin anew, each time. Llama's decode in 3 GiB came to lie on 16 streams, of which those that are waiting hold the others up:
copies ran 2 to 5 % slower, the more so the more replays were queued. A mark behind such a copy, an external event that nothing
waits for, keeps the copies in one row: 2 streams and the whole link (`tests/bench/results/README.md`).

An eviction that a prefetch waits for and that this forward has not come to is that of the forward before: the fork covers it.
Everything that is recorded is kept as steps, too, for the judge (`verify_capture`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from fxoffload.arena import POISON
from fxoffload.pace import Clocks
from fxoffload.profile import Compiled
from fxoffload.transfer import Counters, Slot, copy_without_blocking
from fxoffload.verify_capture import COMPUTE, COPIES, OUTSIDE, Recording, Step

T = TypeVar("T")


class Graph(Protocol):
    """Work that was captured."""

    def replay(self) -> None:
        """Launch it on the current stream."""
        ...

    def reset(self) -> None: ...


class Capturer(Clocks, Protocol):
    """What a device offers to capture with, for one engine: streams, events and graphs. `cuda.CudaCapturer` is the real one.

    `compute` and `copies` are streams inside a capture, one and the same where copies do not overlap compute.
    """

    compute: Any
    copies: Any
    nbytes: int
    """Device memory that the captures of this engine hold."""

    def outside(self) -> Any:
        """The stream of the engine's own copies."""
        ...

    def event(self, *, external: bool) -> Any:
        """With `record(stream)` and `wait(stream)`. An external one counts as recorded."""
        ...

    def on(self, stream: Any) -> Any:
        """A context in which work goes to a stream."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[Graph, T]:
        """Record what `work` launches on `compute`. Raises what `work` raises, or the device; nothing of it is left then."""
        ...

    def wait(self) -> None:
        """Return when nothing that was launched is under way."""
        ...

    def release(self, graphs: Sequence[Graph]) -> None:
        """Destroy graphs that are not under way. Their tensors must be gone, for the memory to be given back."""
        ...


@dataclass(frozen=True, slots=True)
class Call:
    """A step around a replay, with what issues it on the stream that is given, which is the current one."""

    step: Step
    issue: Callable[[Any], None]


class CaptureTransfer:
    """Between captures, for `Slots.restore`, it copies outside; within one (`start` to `finish`) it records."""

    def __init__(self, capturer: Capturer, counters: Counters, wraps: Collection[str], *, poison: bool) -> None:
        """`wraps`: names of the loads that a forward issues for the next one."""
        self.counters = counters
        self.copy = copy_without_blocking
        self._capturer = capturer
        self._wraps = frozenset(wraps)
        self._poison = poison
        self._overlap = capturer.copies is not capturer.compute
        self._sent = capturer.event(external=True)
        self._go = {load: capturer.event(external=True) for load in self._wraps}
        self._mark = capturer.event(external=True)
        self._last = ""
        """The load whose copy is the last that was captured on the line of copies, if it is."""
        self._capturing = False
        self._fork: Any = None
        self._forked = False
        self._inside: list[Step] = []
        self._behind: list[Call] = []
        self._evicted: set[str] = set()

    # -- around a capture --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """A capture begins, and copies fork off here, should there be any."""
        self._capturing, self._forked, self._last = True, False, ""
        self._inside, self._behind, self._evicted = [], [], set()
        if self._overlap:
            self._fork = self._capturer.event(external=False)
            self._record(COMPUTE, self._fork, "fork")

    def join(self) -> None:
        """All that is to be captured was issued."""
        if self._overlap and self._forked:
            join = self._capturer.event(external=False)
            self._record(COPIES, join, "join")
            self._wait(COMPUTE, join, "join")

    def finish(self) -> tuple[Recording, tuple[Call, ...]]:
        """The capture is over, well or not. What was recorded, and what to issue behind each replay (`launch`)."""
        self._capturing = False
        before = Step(self._line(OUTSIDE), "record", "sent")
        # Taken out of here: calls hold this object, which must not hold them, or the arena would wait for the garbage collector.
        behind, self._behind = tuple(self._behind), []
        return Recording((before,), tuple(self._inside), tuple(call.step for call in behind)), behind

    def ran(self, segment: str) -> None:
        """A segment is about to be launched."""
        if self._capturing:
            self._inside.append(Step(COMPUTE, "run", segment))

    @property
    def segment(self) -> str:
        """The segment that was launched last in this capture, `""` before the first."""
        return next((step.name for step in reversed(self._inside) if step.what == "run"), "")

    def launch(self, graph: Graph, behind: Collection[Call]) -> None:
        """Replay on the current stream, and issue the copies for the next replay."""
        outside = self._capturer.outside()
        self._sent.record(outside)
        graph.replay()
        if behind:
            with self._capturer.on(outside):
                for call in behind:
                    call.issue(outside)

    # -- the protocol of transfers -----------------------------------------------------------------------------------

    def slot(self, host: torch.Tensor, device: torch.Tensor, load: str = "") -> Slot:
        ready = self._capturer.event(external=load in self._wraps)
        return Slot(host, device, load, ready=ready, free=self._capturer.event(external=False))

    def begin(self) -> None:
        pass

    def prefetch(self, slot: Slot, after: Slot | None = None) -> None:
        if not self._capturing:
            outside = self._capturer.outside()
            self._copy_to(outside, slot)
            slot.ready.record(outside)
            self.counters.prefetches += 1
            self.counters.nbytes_copied += slot.nbytes
            return
        self._begin_copies()
        if after is not None and after.load in self._evicted:
            self._wait(COPIES, after.free, f"free {after.load}")
        if slot.load in self._wraps:
            self._prefetch_outside(slot)
            return
        self._inside.append(Step(self._line(COPIES), "copy", slot.load))
        self._copy_to(self._capturer.copies, slot)
        self._record(COPIES, slot.ready, f"ready {slot.load}")
        self._last = slot.load if self._overlap else ""

    def wait(self, slot: Slot) -> None:
        if self._capturing:
            if slot.load == self._last:
                self._record(COPIES, self._mark, "mark")
                self._last = ""
            self._wait(COMPUTE, slot.ready, f"ready {slot.load}")
        else:
            slot.ready.wait(self._capturer.caller())

    def evict(self, slot: Slot) -> None:
        assert self._capturing
        if self._poison:
            slot.device.fill_(POISON)
        self._inside.append(Step(COMPUTE, "evict", slot.load))
        self._record(COMPUTE, slot.free, f"free {slot.load}")
        self._evicted.add(slot.load)

    def drain(self) -> None:
        """Copies issued from here on wait for all compute launched so far, replays too."""
        launched = self._capturer.event(external=False)
        launched.record(self._capturer.caller())
        launched.wait(self._capturer.outside())

    def after_fork(self) -> None:
        """Nothing: in a child the engine's own transfer refuses the forward first."""

    def close(self) -> None:
        pass

    # -- steps -------------------------------------------------------------------------------------------------------

    def _begin_copies(self) -> None:
        if self._forked:
            return
        self._forked = True
        if self._overlap:
            self._wait(COPIES, self._fork, "fork")
        self._wait(COPIES, self._sent, "sent")

    def _prefetch_outside(self, slot: Slot) -> None:
        go = self._go[slot.load]
        self._record(COPIES, go, f"go {slot.load}")
        self._last = ""
        line = self._line(OUTSIDE)
        self._behind += [
            Call(Step(line, "wait", f"go {slot.load}"), go.wait),
            Call(Step(line, "copy", slot.load), lambda _: self.copy(slot)),
            Call(Step(line, "record", f"ready {slot.load}"), slot.ready.record),
        ]

    def _record(self, line: str, event: Any, name: str) -> None:
        event.record(self._stream(line))
        self._inside.append(Step(self._line(line), "record", name))

    def _wait(self, line: str, event: Any, name: str) -> None:
        event.wait(self._stream(line))
        self._inside.append(Step(self._line(line), "wait", name))

    def _stream(self, line: str) -> Any:
        return self._capturer.compute if line == COMPUTE else self._capturer.copies

    def _line(self, line: str) -> str:
        """Without overlap all is one line."""
        return line if self._overlap else COMPUTE

    def _copy_to(self, stream: Any, slot: Slot) -> None:
        with self._capturer.on(stream):
            self.copy(slot)


class SegmentRecorder:
    """Tells a transfer which segment is launched. `names` of the segments by identifier."""

    def __init__(self, transfer: CaptureTransfer, names: Mapping[str, str]) -> None:
        self._transfer = transfer
        self._names = names

    def wrap(self, programs: Mapping[str, Compiled]) -> dict[str, Compiled]:
        return {key: self._recorded(self._names[key], program) for key, program in programs.items()}

    def _recorded(self, name: str, program: Compiled) -> Compiled:
        def run(arguments: list[Any]) -> Any:
            self._transfer.ran(name)
            return program(arguments)

        return run
