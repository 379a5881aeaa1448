"""The engine of one model: its host store, its arena, its copies, and what the arena holds between forwards.

Graphs come and go (other shapes, a graph break, other options); the weights, the arena and the budget belong to the model. An
engine lives as long as the model, or one of the weights that it packed.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fxoffload import forks
from fxoffload.arena import Arena, Piece
from fxoffload.budget import Budget
from fxoffload.config import OffloadConfig, resolve_budget
from fxoffload.debug import logger, switches
from fxoffload.devices import device_memory, shares_host_memory, warn_of_unified_memory
from fxoffload.errors import ConfigError, OffloadError
from fxoffload.packed import HostTensor
from fxoffload.pieces import divide, find_spans
from fxoffload.sizes import show_size
from fxoffload.storages import nbytes_of, plain_tensors
from fxoffload.store import HostStore
from fxoffload.transfer import StreamTransfer, ThreadTransfer, Transfer

if TYPE_CHECKING:
    from fxoffload.capture import Capturer
    from fxoffload.plan import Plan
    from fxoffload.planned import Planned
    from fxoffload.program import Program
    from fxoffload.resize import Activations
    from fxoffload.slots import Slots

_engine_of_weight: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_engine_of_root: weakref.WeakKeyDictionary[torch.nn.Module, Engine] = weakref.WeakKeyDictionary()
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Stats:
    """Counters of one model. Bytes and counts of the last forward, except for `forwards`, which counts all of them.

    `stalls`: waits that found their copy unfinished when the host reached them. On an accelerator the host runs ahead, so
    that is an upper bound of the waits that held compute up.
    """

    nbytes_copied: int
    nbytes_resident: int
    nbytes_arena: int
    nbytes_host: int
    nbytes_pinned: int
    prefetches: int
    stalls: int
    forwards: int
    restores: int
    """How often a forward had to bring the arena into its plan's start state: first calls, edits, other graphs, exceptions."""
    replays: int
    """How many of the forwards were replays of a captured one."""


class Engine:
    """Everything of one model on one device. Not for direct use: `api` has the public functions."""

    def __init__(self, root: torch.nn.Module | None, device: torch.device, *, overlap: bool) -> None:
        self.root = weakref.ref(root) if root is not None else None
        self.device = device
        self.lock = threading.RLock()
        self.overlap = overlap
        unified = shares_host_memory(device)
        self.store = HostStore(device, pin=not unified)
        self.arena = Arena(device, poison=device.type == "cpu" or switches().poison)
        self.transfer: Transfer = (
            ThreadTransfer(overlap=overlap)
            if device.type == "cpu"
            else StreamTransfer(device, overlap=overlap, poison=switches().poison)
        )
        self.budget: OffloadConfig | None = None
        """Set by `set_memory_budget`: overrides the budget of every graph of this model."""
        self.present: dict[int, str] = {}
        """Residents that the arena holds for sure: bucket names by offset."""
        self.current: Planned | None = None
        """Whose end state the arena is in."""
        self.filled: weakref.ref[Planned] | None = None
        """Who saw to `present` last. The arena has these weights as it saw them then."""
        self.planned: list[Planned] = []
        self._fitted: Plan | None = None
        """The plan that the arena was last found to be right for."""
        self._is_divided = False
        """Whether the arena can be given back in pieces."""
        self.measured: weakref.WeakKeyDictionary[Program, Activations] = weakref.WeakKeyDictionary()
        """What forwards of a program take besides the arena."""
        self.capturer: Capturer | str | None = None
        """What captures forwards, or why nothing does; None until a graph asks for it."""
        self.forwards = 0
        self.restores = 0
        self.replays = 0
        self._auto_budget: int | None = None
        forks.tell(self)
        if unified:
            warn_of_unified_memory(device)
        self._finalizer = weakref.finalize(self, _close_untraced, self.store, self.transfer)
        self._finalizer.atexit = False

    def shared_budget(self, config: OffloadConfig) -> Budget | None:
        """The budget that a graph with this config shares with other models, or None."""
        chosen = (self.budget or config).memory_budget
        return chosen if isinstance(chosen, Budget) else None

    @contextmanager
    def turn(self, config: OffloadConfig) -> Generator[None]:
        """In here the model is this thread's, and so is the budget that a graph with this config shares with others."""
        shared = self.shared_budget(config)
        with shared.turn() if shared is not None else nullcontext(), self.lock:
            yield

    def is_under(self, budget: Budget) -> bool:
        """Whether the model has this budget now. Its memory counts there also while nothing of it is planned."""
        if self.budget is not None:
            return self.budget.memory_budget is budget
        return not self.planned or any(planned.config.memory_budget is budget for planned in self.planned)

    def budget_nbytes(self, config: OffloadConfig) -> int:
        """The budget of a graph with this config, in bytes. What `"auto"` means is settled at the first question."""
        chosen = self.budget or config
        shared = self.shared_budget(config)
        if shared is not None:
            return shared.settle(self, resolve_budget(chosen, *device_memory(self.device)))
        if chosen.memory_budget != "auto":
            return resolve_budget(chosen, *device_memory(self.device))
        if self._auto_budget is None:
            total, free = device_memory(self.device)
            self._auto_budget = resolve_budget(chosen, total, free + self.arena.nbytes)
            logger.info("engine: memory_budget 'auto' is %d bytes", self._auto_budget)
        return self._auto_budget

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """These weights keep the engine alive, and find it."""
        with _lock:
            for tensor in tensors:
                _engine_of_weight[tensor] = self

    def log_takeover(self, devices: Sequence[str], tensors: Iterable[torch.Tensor]) -> None:
        nbytes = nbytes_of(tensors)
        logger.info(
            "engine: weights on %s (%d bytes) moved to the host store; they come back where the budget has room",
            ", ".join(devices),
            nbytes,
        )

    def unpack(self, tensors: Sequence[torch.Tensor], *, coarse: bool) -> None:
        """Before these are packed: forget what is packed no more (`HostStore.unpack`), with all that was planned on it.

        Slots and captured forwards of such a plan would keep the host memory, and what is packed next would come on top.
        """
        if self.store.unpack(tensors, coarse=coarse):
            self.drop_stale()

    def drop_stale(self) -> None:
        """Forget what was planned on tensors that are gone, or packed anew, with what it holds on the device."""
        stale = [p for p in {*self.planned, self.current} if p is not None and p.is_stale()]
        self.planned = [p for p in self.planned if p not in stale]
        for planned in stale:
            planned.release()

    def forget(self, packed: Iterable[HostTensor]) -> None:
        """The host bytes of tensors changed: what the arena holds of their buckets is stale."""
        buckets = {id(part.bucket): part.bucket for p in packed for part in p.parts}
        stale = set[str]().union(*(bucket.names() for bucket in buckets.values()))
        if not stale:
            return
        self.present = {offset: name for offset, name in self.present.items() if name not in stale}
        self.current = None

    def restore(self, slots: Slots) -> None:
        """Bring the arena into the state that a plan begins with. If that raises, nothing in the arena counts any more."""
        self.restores += 1
        present, self.present, self.current = self.present, {}, None
        self.present = slots.restore(present)

    def refresh(self) -> None:
        """Nothing in the arena counts any more: the next forward copies all it needs from the host."""
        self.present = {}
        self.current = None

    def after_fork(self) -> None:
        """In a child process: what was on its way into the arena never came."""
        self.lock = threading.RLock()
        self.transfer.after_fork()
        self.store.after_fork()
        self.refresh()

    @property
    def captured_nbytes(self) -> int:
        """What captured forwards hold."""
        return 0 if self.capturer is None or isinstance(self.capturer, str) else self.capturer.nbytes

    @property
    def arena_nbytes(self) -> int:
        """What the model holds between forwards."""
        return self.arena.nbytes + self.captured_nbytes

    def shrink_arena(self, most_nbytes: int) -> None:
        """Hold no more than so many bytes, for another model under the same budget. The next forward takes what it lacks anew.

        Captures go first, since they are good for one place only; then memory without residents; then that of the last residents.
        """
        if self.arena_nbytes <= most_nbytes:
            return
        for planned in self.planned:
            planned.lose_captures("another model under its budget takes the memory of its captures before they have paid")
        if self.arena.nbytes > most_nbytes:
            self._release()
            self.arena.shrink(most_nbytes, self.present)
            self.present = {offset: name for offset, name in self.present.items() if self.arena.holds(offset)}

    def free_cached(self) -> None:
        """Give what the allocator holds and nobody uses back to the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
            torch.accelerator.empty_cache()

    def make_room(self, plan: Plan | None) -> None:
        """Before an uncaptured forward: captures of this model that do not fit beside it are given back; all if no plan says."""
        if plan is not None and self.arena_nbytes + plan.activation_nbytes <= plan.budget_nbytes:
            return
        for planned in self.planned:
            if planned.captured:
                planned.lose_captures("uncaptured forwards of the model take the memory of its captures before they have paid")

    def fit_arena(self, plan: Plan, shared: Budget | None) -> None:
        """Hold all that a plan needs, in an arena that is no longer than its budget allows."""
        if not self._fits(plan, shared):
            self._divide(plan, shared)
        missing = self.arena.missing(plan.arena_nbytes)
        if shared is not None:
            held = self.arena.nbytes + sum(piece.nbytes for piece in missing)
            shared.make_room(self, held + plan.activation_nbytes, plan.budget_nbytes)
        if missing:
            self._allocate(missing)

    def _fits(self, plan: Plan, shared: Budget | None) -> bool:
        """Whether the arena is as long as it should be, and divided nowhere where the plan forbids it."""
        most = max(plan.arena_nbytes, plan.budget_nbytes - plan.activation_nbytes)
        if not plan.arena_nbytes <= self.arena.length <= most or (shared is not None and not self._is_divided):
            return False
        if self._fitted is not plan and all(self.arena.has(span.start, span.end) for span in find_spans(plan)):
            self._fitted = plan
        return self._fitted is plan

    def _divide(self, plan: Plan, shared: Budget | None) -> None:
        """Begin anew with an arena for a plan, of which nothing is held yet: in one piece for a model that shares no budget."""
        self._release()
        self.refresh()
        others = [planned.plan for planned in self.planned if planned.plan is not None]
        self._fitted, self._is_divided = plan, shared is not None
        self.arena.divide(divide(plan, others) if self._is_divided else (0,), plan.arena_nbytes)

    def _release(self) -> None:
        """Let go of every view of the arena: the memory would not be given back while there is one."""
        for planned in self.planned:
            planned.release()
        self.transfer.drain()
        self.current = None

    def _allocate(self, pieces: Sequence[Piece]) -> None:
        try:
            self.arena.allocate(pieces)
        except RuntimeError as error:
            refused = sum(piece.nbytes for piece in pieces)
            total, free = device_memory(self.device)
            raise OffloadError(
                f"engine: arena: {self.device} refuses {show_size(refused)} for weights, of its {show_size(total)} "
                f"{show_size(free)} are free; free device memory, or give the model less with fxoffload.set_memory_budget"
            ) from error

    def dissolve(self) -> None:
        """Leave the model as it was: no arena, nothing pinned, weights in host memory of their own kind."""
        self.shrink_arena(0)
        self.planned.clear()
        self.transfer.close()
        self.store.close()
        with _lock:
            for tensor in [tensor for tensor, engine in _engine_of_weight.items() if engine is self]:
                del _engine_of_weight[tensor]
            for root in [root for root, engine in _engine_of_root.items() if engine is self]:
                del _engine_of_root[root]

    def stats(self) -> Stats:
        counters = self.transfer.counters
        plan = self.current.plan if self.current is not None else None
        return Stats(
            nbytes_copied=counters.nbytes_copied,
            nbytes_resident=plan.resident_nbytes if plan is not None else 0,
            nbytes_arena=self.arena.nbytes,
            nbytes_host=self.store.nbytes,
            nbytes_pinned=self.store.pinned_nbytes,
            prefetches=counters.prefetches,
            stalls=counters.stalls,
            forwards=self.forwards,
            restores=self.restores,
            replays=self.replays,
        )


def _close(store: HostStore, transfer: Transfer) -> None:
    transfer.close()
    store.close()


# The garbage collector may find an engine in a frame that Dynamo watches, and Dynamo would trace what closes it.
_close_untraced = cast("Callable[..., None]", torch.compiler.disable(_close))


def find_engine(tensors: Sequence[torch.Tensor]) -> Engine | None:
    """The engine that packed one of these weights, or None."""
    for plain in (plain for tensor in tensors for plain in plain_tensors(tensor)):
        engine: Any = _engine_of_weight.get(plain)
        if engine is not None:
            return engine
    return None


def models_beside(engine: Engine, root: torch.nn.Module) -> list[torch.nn.Module]:
    """Other models that the engine of one serves, too, since they have a weight in common; not those in it, or that it is in."""
    with _lock:
        others = [other for other, found in _engine_of_root.items() if found is engine]
    inside = set(root.modules())
    return [other for other in others if other not in inside and all(module is not root for module in other.modules())]


def engine_for(
    tensors: Sequence[torch.Tensor],
    root: torch.nn.Module | None,
    config: OffloadConfig,
    device: torch.device,
    *,
    beside: Engine | None = None,
) -> Engine:
    """The engine of the model that has these weights, or that of a model `beside` it, made if there is none.

    Raises ConfigError where its copies were set up in another way than this config says.
    """
    with _lock:
        engine = find_engine(tensors)
        if engine is None and root is not None:
            engine = _engine_of_root.get(root, beside)
        if engine is None or engine.device != device:
            engine = Engine(root, device, overlap=config.async_transfer)
        elif engine.overlap != config.async_transfer:
            raise ConfigError(
                f"engine: async_transfer: {config.async_transfer}, but the model runs with {engine.overlap} since it was first "
                "offloaded, and has one way to copy; give the same, or remove its handle first, or build the model again"
            )
        if root is not None:
            _engine_of_root[root] = engine
        return engine
