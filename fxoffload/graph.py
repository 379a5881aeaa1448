"""Whole forwards as captured graphs (`options={"cuda_graph": True}`): when one is made, used, given back, and given up.

A forward is captured when inputs of one kind (shapes, strides, dtypes) come for the second time under one plan: by then its
kernels are compiled and loaded. From then on a call copies its inputs into those of the capture, replays it, and hands out copies
of its results. The warm-up sees captures too, so what they hold counts among the plan's activations.

A capture whose first replays take longer than planned is made again, some times (`pace`).

A capture is good for one plan in one arena. Of the model it reads residents, slots and, at the time of the replay, host memory:
edits need nothing here, for `engine.present` and `engine.current` make the next forward restore what has to be restored.

Captures hold memory between forwards. They are given back when an uncaptured graph of the model, or another model under the same
budget, needs it. If that happens again and again, or a forward cannot be captured at all, the generated program runs instead, and
one warning says why; with `cuda_graph="strict"` it is an error.
"""

from __future__ import annotations

import enum
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fxoffload.capture import Capturer, CaptureTransfer, SegmentRecorder
from fxoffload.captured import Capture, result_of, twin
from fxoffload.debug import logger, switches
from fxoffload.errors import OffloadError, OffloadWarning, PlanError
from fxoffload.names import identifier
from fxoffload.pace import Pace, is_bound_by_copies, is_good
from fxoffload.plan import Plan
from fxoffload.program import Program
from fxoffload.sizes import show_size
from fxoffload.staged import Staged, Watcher
from fxoffload.transfer import StreamTransfer, Transfer
from fxoffload.verify_capture import check_capture
from fxoffload.wrappers import is_wrapper

if TYPE_CHECKING:
    from fxoffload.engine import Engine

MOST = 8
"""Kinds of inputs that are captured under one plan; further ones run uncaptured."""
WORTH = 8
"""Replays that pay for a capture."""
STRIKES = 3
"""How often captures may be lost before they have paid."""

Key = tuple[Any, ...]
MakeStaged = Callable[[Transfer, Watcher], Staged]

_warned: weakref.WeakSet[Engine] = weakref.WeakSet()


def capturer_for(engine: Engine) -> Capturer | str:
    """What captures for this engine, or why nothing does."""
    if engine.device.type != "cuda" or not isinstance(engine.transfer, StreamTransfer):
        return f"the onload device is {engine.device.type!r}, and only CUDA captures"
    from fxoffload.cuda import CudaCapturer

    return CudaCapturer(engine.transfer)


def idle_elsewhere(engine: Engine) -> int:
    """Device memory that captures of other models, and the user's own, hold without using it now."""
    if engine.device.type != "cuda":
        return 0
    from fxoffload.cuda import CudaCapturer, idle_nbytes

    return idle_nbytes(engine.device, engine.capturer if isinstance(engine.capturer, CudaCapturer) else None)


class _Kind(enum.Enum):
    """What an input is to a capture: copied in, used where it lies because the graph writes to it, or just handed through."""

    GIVEN = enum.auto()
    WRITTEN = enum.auto()
    WEIGHT = enum.auto()


class Graphs:
    """The captures of one program with the weights of one engine."""

    def __init__(self, program: Program, engine: Engine, *, strict: bool) -> None:
        """Raises OffloadError where nothing can be captured, if `strict`."""
        self._engine = weakref.ref(engine)
        self._strict = strict
        self._device = program.onload
        self._inputs = [(name, _kind(program, placeholder)) for _, placeholder, name in program.inputs]
        self._captures: dict[Key, Capture] = {}
        self._seen: set[Key] = set()
        self.times_ms: dict[Key, list[float]] = {}
        """Of each kind of inputs, under the plan: how long replays took, capture by capture."""
        self._plan: Plan | None = None
        self._outlived = 0
        """Replays of captures that were made again, since captures were lost last."""
        self._staged: Staged | None = None
        self._strikes = 0
        self._lost = ""
        self._failed = ""
        self.refused = ""
        """Why nothing is captured any more."""
        if engine.capturer is None:
            engine.capturer = capturer_for(engine)
        if isinstance(engine.capturer, str):
            self._refuse(engine.capturer)

    def find(self, inputs: Sequence[Any], plan: Plan, make_staged: MakeStaged) -> Capture | None:
        """The capture for these inputs, made now if it is time; None if the forward is to run uncaptured."""
        self._failed = ""
        if self._strikes >= STRIKES:
            self._refuse(self._lost)
        if self.refused:
            self._raise_if_strict()
            return None
        key = self._key(inputs)
        if key is None:
            return None
        if plan is not self._plan:
            self._plan = plan
            self.times_ms.clear()
        found = self._captures.get(key)
        if found is not None and found.pace is not None and (step_ms := found.pace.step_ms()) is not None:
            found = self._judge(key, found, step_ms, plan.step_ms)
        if found is None and key in self._seen and len(self._captures) < MOST:
            found = self._capture(inputs, plan, make_staged)
            if found is not None:
                self._captures[key] = found
            elif key in self.times_ms:
                # It can be captured, and was: what failed may be gone at the next call.
                self._strikes += 1
                self._lost, self._failed = self._failed, ""
        if len(self._seen) < 8 * MOST:
            self._seen.add(key)
        return found

    def _judge(self, key: Key, found: Capture, step_ms: float, planned_ms: float) -> Capture | None:
        """Keep a capture that was timed, or give it back to be made again."""
        times_ms = self.times_ms.setdefault(key, [])
        times_ms.append(step_ms)
        if is_good(times_ms, planned_ms):
            found.pace = None
            return found
        logger.info("graph: a replay takes %.1f ms, planned were %.1f: captured again", step_ms, planned_ms)
        self._outlived += found.replays
        self._give_back([self._captures.pop(key)])
        return None

    def restored(self) -> None:
        """The next replay waits for copies that no other one waits for."""
        for capture in self._captures.values():
            if capture.pace is not None:
                capture.pace.skip()

    def ran_uncaptured(self) -> None:
        """An uncaptured forward went well. If its capture had failed, the fault is not the model's: captures are given up."""
        if self._failed:
            self._refuse(self._failed)

    @property
    def held(self) -> bool:
        """Whether there are captures, which hold memory."""
        return bool(self._captures)

    @property
    def settled(self) -> bool:
        """Whether there are captures, none of which may still be made again because it is slow; or there will be none."""
        return bool(self.refused) or (self.held and all(capture.pace is None for capture in self._captures.values()))

    def lose(self, why: str) -> None:
        """Others need the memory: give the captures back for now. The next call says so if that was once too often."""
        if not self.refused and self._seen:
            self._strikes += self._outlived + sum(capture.replays for capture in self._captures.values()) < WORTH
            self._lost, self._outlived = why, 0
            self._drop()

    def release(self) -> None:
        """The plan or the arena goes: nothing that was captured is good any more."""
        self._drop()
        self._seen.clear()
        self._staged = None

    def _drop(self) -> None:
        captures = list(self._captures.values())
        self._captures.clear()
        self._give_back(captures)

    def _give_back(self, captures: Sequence[Capture]) -> None:
        engine = self._engine()
        if not captures or engine is None:
            return
        capturer = _capturer_of(engine)
        capturer.wait()
        graphs = [capture.clear() for capture in captures]
        capturer.release(graphs)

    def _refuse(self, why: str) -> None:
        self.refused, self._failed, self._strikes = why, "", 0
        self.release()
        self._raise_if_strict()
        engine = self._engine()
        if engine is not None and engine not in _warned:
            _warned.add(engine)
            warnings.warn(
                f"{self._complaint()}; the host issues its segments and copies one by one, with the same results; "
                "leave cuda_graph out for this model",
                OffloadWarning,
                stacklevel=2,
            )

    def _raise_if_strict(self) -> None:
        if self._strict:
            raise OffloadError(f"{self._complaint()}; pass cuda_graph=True to run it uncaptured, or leave cuda_graph out")

    def _complaint(self) -> str:
        engine = self._engine()
        root = engine.root() if engine is not None and engine.root is not None else None
        return f"graph: {type(root).__name__ if root is not None else 'a graph without a module'}: not captured: {self.refused}"

    def _key(self, inputs: Sequence[Any]) -> Key | None:
        """Equal for inputs that one capture serves."""
        key: list[Any] = []
        for value, (name, kind) in zip(inputs, self._inputs, strict=True):
            if not isinstance(value, torch.Tensor):
                key.append(value)
            elif kind is _Kind.WEIGHT:
                key.append(None)
            elif is_wrapper(value):
                self._failed = f"its input {name!r} is a {type(value).__name__}, which has no memory of its own to copy into"
                return None
            elif value.device == self._device:
                address = value.data_ptr() if kind is _Kind.WRITTEN else None
                key.append((value.shape, value.stride(), value.dtype, address))
            elif value.dim() == 0:
                # Such as a float that Dynamo passes as a tensor: kernels get its value.
                key.append(value.item())
            else:
                self._failed = f"its input {name!r} is on {str(value.device)!r}"
                return None
        return tuple(key)

    def _capture(self, inputs: Sequence[Any], plan: Plan, make_staged: MakeStaged) -> Capture | None:
        """None, and a reason in `_failed`, if it does not work."""
        engine = self._engine()
        assert engine is not None
        capturer = _capturer_of(engine)
        if self._staged is None:
            wraps = [load.name for load in plan.loads if load.wraps]
            transfer = CaptureTransfer(capturer, engine.transfer.counters, wraps, poison=switches().poison)
            names = {identifier(name): name for name in plan.segments}
            self._staged = make_staged(transfer, SegmentRecorder(transfer, names))
        staged, transfer = self._staged, self._staged.transfer
        assert isinstance(transfer, CaptureTransfer)
        own = {
            i: twin(value)
            for i, (value, (_, kind)) in enumerate(zip(inputs, self._inputs, strict=True))
            if isinstance(value, torch.Tensor) and kind is _Kind.GIVEN and value.device == self._device
        }
        arguments = [own.get(i, value) for i, value in enumerate(inputs)]

        def work() -> Any:
            transfer.start()
            outputs = staged.top.forward(*arguments)
            transfer.join()
            return outputs

        try:
            graph, outputs = capturer.capture(work)
        except Exception as error:
            reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no text'}"
            where = f"segment {transfer.segment} cannot be captured" if transfer.segment else "the capture cannot begin"
            self._failed = f"{where} ({reason})"
            return None
        finally:
            recording, behind = transfer.finish()
        try:
            check_capture(plan, recording)
        except PlanError:
            capturer.release([graph])
            raise
        logger.info("graph: captured a forward of %d segments; captures hold %s", len(plan.segments), show_size(capturer.nbytes))
        results = [result_of(value, arguments) for value in outputs]
        pace = Pace(capturer) if is_bound_by_copies(plan) else None
        return Capture(staged, transfer, graph, behind, list(own.items()), results, pace)


def _kind(program: Program, placeholder: str) -> _Kind:
    if any(w.placeholder == placeholder for w in program.facts.weights):
        return _Kind.WEIGHT
    return _Kind.WRITTEN if placeholder in program.facts.written_inputs else _Kind.GIVEN


def _capturer_of(engine: Engine) -> Capturer:
    assert engine.capturer is not None
    assert not isinstance(engine.capturer, str)
    return engine.capturer
