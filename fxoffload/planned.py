"""What runs by a plan: its costs, its plan for a budget, and the plan in the arena.

Two things do: a compiled program bound to weights (`binding`), and a model whose modules call the runtime (`eager`). Both learn
in the first forwards what a forward takes besides the arena (`warmup`), and are then planned for the whole budget.
"""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch

from fxoffload.config import OffloadConfig
from fxoffload.cost import Costs
from fxoffload.debug import logger, switches
from fxoffload.edits import EditWatch
from fxoffload.engine import Engine
from fxoffload.machine import Machine
from fxoffload.packed import HostTensor
from fxoffload.plan import Plan
from fxoffload.planner import Knobs, knobs_of, make_plan, smallest_budget
from fxoffload.profile import SegmentTimer
from fxoffload.verify import check_plan
from fxoffload.warmup import AMPLE_NBYTES, Warmup


class Retied(Exception):
    """Weights came to share bytes since they were packed. Not for users: they are bound anew, and the call goes on."""


class Planned:
    """Held by the engine, which it finds weakly."""

    _estimates = True
    """Whether anything is known of activations before they are measured."""

    def __init__(self, engine: Engine, config: OffloadConfig, costs: Costs, activation_nbytes: int, warmup: Warmup) -> None:
        self._engine = weakref.ref(engine)
        self.config = config
        self.costs = costs
        self.activation_nbytes = activation_nbytes
        self._warmup = warmup
        self._timer = warmup.timer
        self.plan: Plan | None = None
        self._kept: Plan | None = None
        """The plan that edits are looked for under."""
        self._kept_names: set[str] = set()
        """The buckets that it keeps on the device between forwards."""
        self._watched: tuple[EditWatch, Sequence[HostTensor]] | None = None

    @property
    def engine(self) -> Engine:
        engine = self._engine()
        assert engine is not None
        return engine

    @property
    def machine(self) -> Machine:
        """What the costs were priced on."""
        raise NotImplementedError

    @property
    def knobs(self) -> Knobs:
        return knobs_of(self.config)

    @property
    def running(self) -> bool:
        """Whether a forward by the plan is under way that calls code of the model."""
        return False

    @property
    def warm(self) -> bool:
        """Whether the first forwards, which measure and may change the plan, are over."""
        return self._warmup.done

    def is_stale(self) -> bool:
        """Whether one of its weights is gone, or no longer the weight that it was."""
        raise NotImplementedError

    def _let_go(self) -> None:
        """Drop every view of the arena."""
        raise NotImplementedError

    @property
    def captured(self) -> bool:
        """Whether captured forwards of it hold memory."""
        return False

    def lose_captures(self, why: str) -> None:
        """Others need the memory that captured forwards hold."""

    def smallest_budget(self, *, overlap: bool = False) -> int:
        """The least budget, in bytes, that this runs in (`planner.smallest_budget`).

        By what is known of its activations now.
        """
        return smallest_budget(self.costs, self.knobs, activation_nbytes=self.activation_nbytes, overlap=overlap)

    def decide(self, budget_nbytes: int) -> Plan:
        """The plan for a budget. Changes nothing. Raises BudgetError or ConfigError.

        Where a debug switch gives the plan, it raises PlanError for one that is not for these costs, or not within the budget.
        """
        chosen = switches().plan
        if chosen is None:
            plan = _planned(self.costs, budget_nbytes, self.knobs, self.activation_nbytes)
        else:
            plan = self._saved(chosen, budget_nbytes)
        check_plan(plan, self.costs)
        return plan

    def _saved(self, path: Path, budget_nbytes: int) -> Plan:
        """The plan of a file, to be judged by the budget and the activations at hand instead of those that it was made for.

        Until activations are measured they are at best an estimate, and what the plan was made with may be a measure of them.
        """
        plan = Plan.load(path)
        activations = self.activation_nbytes if self._warmup.done else plan.activation_nbytes
        return dataclasses.replace(plan, budget_nbytes=budget_nbytes, activation_nbytes=activations)

    def replan(self) -> None:
        """Plan for the engine's budget as it is now; take effect at the next call."""
        budget = self.engine.budget_nbytes(self.config)
        # A saved plan is what it is: it cannot leave room for the first forwards.
        if self._warmup.done or self._fits_amply(budget) or switches().plan is not None:
            self.adopt(self.decide(budget))
            return
        smallest = self.smallest_budget()
        if smallest > budget:
            self.decide(budget)
        self.adopt(self.decide(min(budget, smallest)))

    def adopt(self, plan: Plan) -> None:
        self.plan = plan
        self.release()
        logger.info("%s", plan)

    def release(self) -> None:
        """Let go of every view of the arena, and of the slots: what is on its way to them is lost track of."""
        self._let_go()
        if self.engine.current is self:
            self.engine.current = None

    def _fits_amply(self, budget_nbytes: int) -> bool:
        """Whether everything stays resident even if activations are twice the estimate: then nothing need be measured first."""
        weights = sum(bucket.nbytes for bucket in self.costs.buckets)
        return self._estimates and weights + 2 * self.activation_nbytes + AMPLE_NBYTES <= budget_nbytes

    def _see_edits(
        self,
        watch: EditWatch,
        packed: Sequence[HostTensor],
        tensors: Sequence[torch.Tensor],
        wrappers: Sequence[torch.Tensor],
    ) -> None:
        """Weights that lie elsewhere now are taken over; weights that were written to are copied again.

        `wrappers`: those that hold some of these tensors. Raises Retied, with nothing changed, where one lies in the bytes of
        another weight now: both must be packed anew.
        """
        moved = watch.moved(tensors)
        if moved:
            if self.engine.store.sharing([tensors[k] for k in moved]):
                raise Retied
            self.engine.store.rebind([packed[k] for k in moved], [tensors[k] for k in moved])
        self.engine.forget([packed[k] for k in {*moved, *watch.written(tensors, wrappers)}])
        last = self.engine.filled() if self.engine.filled is not None else self
        if last is None:
            self.engine.refresh()
        elif last is not self:
            # It may have copied other values than those that this saw before: edits through `.data` can be taken back.
            self.engine.forget(last.changed())

    def changed(self) -> list[HostTensor]:
        """What the plan keeps on the device and does not look, by its bytes, as it did when this ran."""
        watch, packed = self._watched or (None, ())
        return [packed[k] for k in watch.changed()] if watch is not None else []

    def _keep_watch(self, watch: EditWatch, packed: Sequence[HostTensor]) -> None:
        """Tell who looks for edits what the plan keeps on the device between forwards; what is new there is copied."""
        plan = self.plan
        assert plan is not None
        self._watched, self.engine.filled = (watch, packed), weakref.ref(self)
        if plan is self._kept:
            return
        self._kept = plan
        names = {resident.bucket for resident in plan.residents} | {load.bucket for load in plan.live_at_start()}
        if names == self._kept_names:
            return
        self._kept_names = names
        buckets = {id(part.bucket): part.bucket for p in packed for part in p.parts}
        kept = {key for key, bucket in buckets.items() if not names.isdisjoint(bucket.names())}
        new = watch.keep([k for k, p in enumerate(packed) if any(id(part.bucket) in kept for part in p.parts)])
        self.engine.forget([packed[k] for k in new])

    def _learn(self) -> None:
        """Plan with what the first forwards showed; plan again if one of the next takes more."""
        warmup = self._warmup
        if not warmup.done:
            if not warmup.after_forward():
                if warmup.timer is not None:
                    self._timer = warmup.timer
                    self.release()
                return
            if self._timer is not None:
                self.costs, self._timer = self._refined(self._timer), None
            self._take_activations(warmup.activations(self.activation_nbytes))
        elif excess := warmup.excess(self.activation_nbytes):
            self._take_activations(self.activation_nbytes + excess)

    def _refined(self, timer: SegmentTimer) -> Costs:
        return timer.refine(self.costs)

    def _take_activations(self, nbytes: int) -> None:
        self.activation_nbytes = nbytes
        # Should the budget be too small for what was measured, every call says so until it is raised.
        self.plan = None
        self.replan()


@functools.lru_cache(maxsize=64)
def _planned(costs: Costs, budget_nbytes: int, knobs: Knobs, activation_nbytes: int) -> Plan:
    """Equal blocks behind a graph break, and weights that replace others, meet the same costs again."""
    return make_plan(costs, budget_nbytes, knobs, activation_nbytes=activation_nbytes)
