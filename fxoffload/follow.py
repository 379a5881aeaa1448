"""Running a model's units by a plan while its modules call each other as they like.

A unit is a module whose weights come and go together. For the planner a forward is a sequence of units, as a graph is one of
segments: the order that the first forward showed. In each later forward the units that are called are looked up in that order:

    the next one               the plan's prefetches, wait and evictions around it
    a later one                units in between were left out: their copies that nobody needs any more are not issued, and their
                               evictions are, so that the arena comes to the end state that the plan begins with
    none                       the plan is left for the rest of this forward: a unit is copied when it is called. The order is
                               then extended, so that the next such forward is followed

A weight that is read while its unit does not run (`F.linear(x, self.embedding.weight)`) is seen in the first forward, and stays
resident from then on. Where each tensor is meanwhile is what `managed` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch

from fxoffload.config import OffloadConfig
from fxoffload.cost import Costs
from fxoffload.edits import elements
from fxoffload.engine import Engine
from fxoffload.errors import BudgetError
from fxoffload.look import Look
from fxoffload.machine import Machine
from fxoffload.managed import Managed, Version, Views
from fxoffload.packed import HostTensor
from fxoffload.planned import Planned
from fxoffload.profile import SegmentTimer
from fxoffload.sequence import find_next, merge
from fxoffload.steps import Step, Steps
from fxoffload.transfer import Slot
from fxoffload.unitcosts import price_units
from fxoffload.units import Units
from fxoffload.warmup import Warmup


@dataclass(slots=True, eq=False)
class _Running:
    """A unit that runs: its weights on the device, and where its versions stood."""

    unit: int
    views: Views
    step: Step | None
    slots: list[Slot]
    versions: list[Version]
    start: Any


@dataclass(slots=True, eq=False)
class _Forward:
    """How far a forward has come.

    `ordered`: its order counts. `follows`: it is by the plan still. `views`: what is on the device until it ends, residents and
    what was borrowed. `versions`: where they stood when they came there. `timed`: the segment that is timed, and since when.
    """

    ordered: bool
    follows: bool
    position: int = 0
    observed: list[int] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)
    waited: set[str] = field(default_factory=set)
    views: Views = field(default_factory=list)
    versions: list[Version] = field(default_factory=list)
    timed: tuple[str, Any] | None = None


class Follower(Planned):
    """One way through a model: its forward, or another method that callers begin with.

    Holds no module of the model strongly, since the engine, which lives as long as its weights do, holds it.
    """

    _estimates = False

    def __init__(
        self, engine: Engine, config: OffloadConfig, machine: Machine, root: torch.nn.Module, units: Units, *, measures: bool
    ) -> None:
        """Packs what is not in the store yet. `measures`: learn in the first forwards what they take besides the arena."""
        self._machine = machine
        self._names = tuple(unit.name for unit in units.units)
        self._managed = Managed(engine, root, units)
        self.order: tuple[int, ...] = tuple(range(len(units.units)))
        self._known = False
        """Whether a forward has shown the order; until then it is that of definition."""
        self._looks = True
        """Whether the next forward looks for weights that are read outside their units."""
        self._ms: dict[str, float] = {}
        profile = measures and (config.profile or engine.device.type != "cpu")
        warmup = Warmup(engine.device, known=not measures, profile=profile, shares=engine.shared_budget(config) is not None)
        super().__init__(engine, config, self._price(), 0, warmup)
        self._staged: Steps | None = None
        self._forward: _Forward | None = None
        self._changed = False
        """Whether the order or what is resident changed since the costs were priced."""

    @property
    def machine(self) -> Machine:
        return self._machine

    def weights(self) -> Iterator[torch.Tensor]:
        """All tensors of the model, and the wrappers that they are in."""
        yield from self._managed.tensors()
        yield from self._managed.wrappers()

    def moves(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether all of these are among its tensors."""
        return all(self._managed.found_in(tensor) for tensor in tensors)

    def is_stale(self) -> bool:
        """Whether a tensor is gone, or the store has packed one anew."""
        return self._managed.is_stale()

    # -- plan ------------------------------------------------------------------------------------------------------

    def _price(self) -> Costs:
        return price_units(self._names, self.order, self._managed, self._machine, self._ms)

    def _price_anew(self) -> None:
        self.costs = self._price()
        self.plan = None
        self.release()

    def _refined(self, timer: SegmentTimer) -> Costs:
        self._ms = timer.times()
        return self._price()

    def _let_go(self) -> None:
        self._staged = None

    def decide_early(self) -> None:
        """Raise now what the first forward would raise for certain: BudgetError, ConfigError."""
        self.decide(max(self.engine.budget_nbytes(self.config), 0))

    def take_over(self, former: Follower) -> None:
        """Know what another follower learned with the same units, and plan again what it had planned."""
        self._managed.take_over(former._managed)
        self.order, self._known, self._looks, self._ms = former.order, former._known, former._looks, former._ms
        self.activation_nbytes, self._warmup, self._timer = former.activation_nbytes, former._warmup, former._timer
        self._price_anew()
        if former.plan is not None:
            self.replan()

    # -- a forward -------------------------------------------------------------------------------------------------

    def begin(self, inputs: Sequence[torch.Tensor], *, ordered: bool) -> None:
        """A forward begins, with these inputs on the device. `ordered`: it is a whole one, whose order counts."""
        engine, managed = self.engine, self._managed
        wrappers = managed.wrappers()
        self._see_edits(managed.watch, managed.packed, managed.tensors(), wrappers)
        fresh = self.plan is None
        if self.plan is None:
            self.replan()
        assert self.plan is not None
        engine.fit_arena(self.plan, engine.shared_budget(self.config))
        measures = fresh and not self._warmup.done
        engine.make_room(None if measures else self.plan)
        if measures:
            self._warmup.begin(inputs)
        self._keep_watch(managed.watch, managed.packed)
        if self._staged is None:
            self._staged = Steps(self.plan, managed, self.order, engine)
        engine.transfer.begin()
        engine.transfer.counters.reset()
        if engine.current is not self:
            engine.restore(self._staged)
        engine.current = None
        managed.begin(wrappers, engine.arena)
        views = self._staged.rest_views
        self._forward = _Forward(ordered, ordered, views=[*views], versions=managed.versions(views))
        managed.put_in(views)

    def looking(self) -> AbstractContextManager[object]:
        """In here, weights that are read outside their units are found, where that is not known yet."""
        return Look(self._see, self._managed.see_write) if self._looks else nullcontext()

    def enter(self, unit: int) -> None:
        """A unit is called: its weights are on the device when this returns."""
        forward, staged = self._now, self._steps
        views: Views = []
        step, slots = None, list[Slot]()
        if forward.running:
            # Its bytes have no place of their own while another unit runs.
            for packed in self._managed.units[unit]:
                self.borrow(packed)
        else:
            self._stop_timer()
            forward.observed.append(unit)
            position = find_next(self.order, forward.position, unit) if forward.follows else None
            if position is None:
                views, slots = self._load_now(unit)
            else:
                self._skip_to(forward, position)
                step = staged.steps[position]
                staged.prefetch(step.prefetches)
                staged.wait(step.loads, forward.waited)
                # What was borrowed may have been written there since.
                views = [(p, view) for p, view in step.views if id(p) not in self._managed.present]
            self._put_in(views)
        versions = self._managed.versions(views)
        start = self._timer.start() if self._timer is not None else None
        forward.running.append(_Running(unit, views, step, slots, versions, start))

    def leave(self, unit: int, result: Any = None) -> Any:
        """The unit returned, or raised without a result. What it wrote to its tensors is brought to the host.

        Returns the result: what of it lies in the unit's weights is copied, since other weights come there.
        """
        forward = self._now
        running = forward.running.pop()
        assert running.unit == unit
        if running.start is not None and running.step is not None:
            forward.timed = (self.costs.segments[forward.position].name, running.start)
        self._write_back(running.views, running.versions)
        self._managed.take_out([p for p, _ in running.views])
        result = self._managed.copied(result, running.views)
        if running.step is not None:
            self._steps.evict(running.step.evictions)
            forward.position += 1
        for slot in running.slots:
            self.engine.transfer.evict(slot)
        return result

    def hand_out(self, result: Any) -> Any:
        """What the forward returns, now that it is about to end: the caller may keep it while others run."""
        return self._managed.copied(result)

    def end(self, *, completed: bool) -> None:
        """The forward is over. `completed`: it did not raise."""
        forward, engine = self._now, self.engine
        self._stop_timer()
        try:
            self._write_back(forward.views, forward.versions)
        finally:
            self._managed.end()
            # What was borrowed goes before anybody measures what a forward holds.
            forward.views.clear()
            # It is over also where a weight cannot be brought to the host.
            self._forward, self._looks = None, True
        self._looks = not completed
        if completed:
            engine.forwards += 1
            if forward.ordered and not self._learn_order(forward) and forward.follows:
                self._skip_to(forward, len(self.order))
                engine.current = self
        if self._changed:
            self._changed = False
            self._price_anew()
            with suppress(BudgetError):
                # The next forward says so, with nothing lost of this one.
                self.replan()
        if completed and forward.ordered:
            self._learn()

    @property
    def running(self) -> bool:
        return self._forward is not None

    @property
    def innermost(self) -> int | None:
        """The unit that runs now."""
        return self._forward.running[-1].unit if self._forward is not None and self._forward.running else None

    def _see(self, tensor: torch.Tensor) -> bool:
        """Some code reads this tensor. If it is a weight whose unit does not run, it comes to the device, to stay.

        Returns whether it is a weight.
        """
        found = self._managed.found_in(tensor)
        for packed in found:
            self.borrow(packed)
        return bool(found)

    def borrow(self, packed: HostTensor) -> None:
        """Bring a tensor to the device in memory of its own for the rest of this forward; it is resident in the next ones."""
        managed, forward, host = self._managed, self._now, packed.view
        if id(packed) in managed.present:
            return
        with packed.mode():
            # A copy on every device, the CPU too: what is written to it reaches the host as from any other.
            memory = elements(host).to(self.engine.device, copy=True)
            views: Views = [(packed, memory.as_strided(host.shape, host.stride()))]
        self._put_in(views)
        forward.views += views
        forward.versions += managed.versions(views)
        # What is written to it does not reach the arena.
        self.engine.forget([packed])
        self._keep(packed)

    def _put_in(self, views: Views) -> None:
        """Let tensors be views of the device. What the model gave them meanwhile is theirs, and stays resident."""
        for packed in self._managed.take_given(views):
            self._keep(packed)
        self._managed.put_in(views)

    @property
    def _steps(self) -> Steps:
        assert self._staged is not None, "no forward is under way"
        return self._staged

    @property
    def _now(self) -> _Forward:
        assert self._forward is not None, "no forward is under way"
        return self._forward

    def _learn_order(self, forward: _Forward) -> bool:
        """Take the order of a whole forward in. Returns whether anything changed."""
        order = self.order
        if not self._known:
            order = tuple(forward.observed)
        elif not forward.follows:
            order = merge(order, forward.observed)
        self._known = True
        if order != self.order:
            self.order = order
            self._changed = True
        return self._changed

    def _keep(self, packed: HostTensor) -> None:
        """From the next forward on a tensor is resident."""
        self._changed |= self._managed.keep(packed)

    def _load_now(self, unit: int) -> tuple[Views, list[Slot]]:
        """Copy what a unit needs and is not resident. The plan is left with that."""
        self._now.follows = False
        managed = self._managed
        views, slots, left = self._steps.load_now([p for p in managed.units[unit] if id(p) not in managed.present])
        for packed in left:
            self.borrow(packed)
        return views, slots

    def _stop_timer(self) -> None:
        """What is computed behind a unit, up to the next one, counts as its own: copies run beside it, too."""
        timed, self._now.timed = self._now.timed, None
        if self._timer is not None and timed is not None:
            self._timer.stop(*timed)

    def _skip_to(self, forward: _Forward, position: int) -> None:
        """Pass over the units up to a position of the order."""
        if self._staged is not None:
            self._staged.skip(forward.position, position)
        forward.position = position

    def _write_back(self, views: Views, versions: Sequence[Version]) -> None:
        """Bring tensors that were written to the host; they are resident from the next forward on."""
        for packed in self._managed.write_back(views, versions, looks=self._looks):
            self._keep(packed)
