"""A program bound to the weights of one model: its plan, its top level, and how a call runs.

A call checks that the weights are the ones that were bound (same objects, same memory, same versions), brings the arena into
the state that the plan begins with if it is not, and runs the generated top level. Whatever goes wrong in between, the next
call finds out from `engine.current`, which is set only while the arena is in the end state of a finished forward.

On an accelerator the first forwards run with the least staging that works, and the plan for the whole budget is made with what
they show (`warmup`), unless everything fits with room to spare.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.fx as fx

from fxoffload.cost import BucketCost, Costs
from fxoffload.edits import EditWatch, elements
from fxoffload.engine import Engine
from fxoffload.graph import Graphs, idle_elsewhere
from fxoffload.lower import TopLevel
from fxoffload.machine import Machine
from fxoffload.pack import pack_program
from fxoffload.packed import HostBucket, HostWeight
from fxoffload.plan import Plan
from fxoffload.planned import Planned
from fxoffload.profile import SegmentTimer
from fxoffload.program import Program, ids_of, picker
from fxoffload.resize import CHANGE, WORTH, Activations, Sizes, estimate, much_other
from fxoffload.rows import Source
from fxoffload.staged import Staged, Watcher, write_plan
from fxoffload.timeline import simulate
from fxoffload.transfer import Transfer
from fxoffload.warmup import Warmup
from fxoffload.wrappers import held_by, label


class Binding(Planned):
    """One program with the weights of one engine. Programs find it weakly."""

    def __init__(
        self,
        program: Program,
        engine: Engine,
        args: Sequence[Any],
        tensors: Mapping[Source, torch.Tensor],
        names: Mapping[Source, str],
    ) -> None:
        """`args` of a call, and of the weights among them, by their places: the plain tensors and their qualified names."""
        self.program = program
        self.ids = ids_of(tuple(tensors.values()))
        self._weights: dict[str, HostWeight] = pack_program(program, engine, tensors, names)
        bound = [(place, t, packed) for place, t in tensors.items() if (packed := engine.store.find(t)) is not None]
        self._packed = [packed for _, _, packed in bound]
        self._bound = [id(t) for _, t, _ in bound]
        self._pick = picker([place for place, _, _ in bound])
        held = held_by((place.position, place.path) for place, _, _ in bound)
        self._pick_wrappers = picker([Source(position, path=path) for position, path in held])
        wrappers = self._pick_wrappers(args)
        for wrapper in wrappers:
            label(wrapper, torch.device("cpu"))
        views = [packed.view for packed in self._packed]
        self._watch = EditWatch([t for _, t, _ in bound], views, list(zip(wrappers, held.values(), strict=True)))
        facts = program.facts.weights
        self._mutated = [self._weights[w.placeholder] for w in facts if w.mutated and w.placeholder in self._weights]
        self._sizes = Sizes(program)
        costs = self._price()
        self._activations = engine.measured.setdefault(program, Activations())
        found = weakref.ref(engine)
        warmup = Warmup(
            program.onload,
            known=self._activations.known,
            profile=program.config.profile,
            shares=engine.shared_budget(program.config) is not None,
            idle=lambda: idle_elsewhere(engine) if (engine := found()) is not None else 0,
        )
        super().__init__(engine, program.config, costs, self._activations.at(estimate(costs)), warmup)
        self.staged: Staged | None = None
        """The plan in the arena, from the first call that needs it until the plan or the arena changes."""
        self._written: tuple[Plan, fx.GraphModule] | None = None
        """A plan, and the top level with it."""
        self._last: Staged | None = None
        """Whose slots the arena is in the end state of, while this is `engine.current`."""
        how = program.config.cuda_graph
        self._graphs = Graphs(program, engine, strict=how == "strict") if how else None

    @property
    def machine(self) -> Machine:
        return self.program.machine

    @property
    def top(self) -> TopLevel | None:
        """The generated top level, once a call needed it."""
        return self.staged.top if self.staged is not None else None

    def is_stale(self) -> bool:
        """Whether one of the bound tensors is gone, or no longer the weight that it was."""
        for key, packed in zip(self._bound, self._packed, strict=True):
            tensor = packed.tensor()
            if tensor is None or id(tensor) != key or self.engine.store.find(tensor) is not packed:
                return True
        return False

    # -- plan ------------------------------------------------------------------------------------------------------

    @property
    def _buckets(self) -> dict[str, HostBucket]:
        return {w.bucket.name: w.bucket for w in self._weights.values()}

    def _price(self) -> Costs:
        """The program's prices, with the buckets as they lie in the store (another graph may have packed them)."""
        uses: dict[str, set[int]] = {}
        keep: set[str] = set()
        for bucket in self.program.buckets.buckets:
            for placeholder in bucket.weights:
                if placeholder in self._weights:
                    name = self._weights[placeholder].bucket.name
                    uses.setdefault(name, set()).update(bucket.uses)
                    if bucket.keep:
                        keep.add(name)
        machine = self.program.machine
        buckets = [
            BucketCost(name, host.nbytes, machine.copy_ms(host.nbytes), tuple(sorted(uses[name])), name in keep)
            for name, host in self._buckets.items()
        ]
        buckets.sort(key=lambda b: (b.uses, b.name))
        return Costs(tuple(p.cost for p in self.program.prices), tuple(buckets), machine.link_bytes_per_ms)

    def profile(self, call: Callable[[], object]) -> Costs:
        """The costs with the compute times of the last forward of this graph that `call` runs."""
        with self.timed() as timer:
            call()
        return timer.refine(self.costs)

    @contextmanager
    def timed(self) -> Generator[SegmentTimer, None, None]:
        """Segments are timed in here."""
        timer = self._timer = SegmentTimer(self.program.onload)
        self.release()
        try:
            yield timer
        finally:
            self._timer = None
            self.release()

    def _resize(self) -> None:
        """Price the sizes of this call; keep the plan where it fits, if they are about the same or a fresh one not worth it."""
        costs, kept = self._sizes.costs(self.costs), self.plan
        nbytes = roomy_nbytes = self._activations.at(estimate(costs))
        if not much_other(costs, self.costs):
            if kept is not None and kept.arena_nbytes + nbytes <= kept.budget_nbytes:
                return
            # With room for more, so that a text that grows token by token is not planned anew for each of them.
            roomy_nbytes = self._activations.at(int(estimate(costs) * (1 + CHANGE)))
        self.costs, self.activation_nbytes = costs, roomy_nbytes
        if roomy_nbytes > nbytes and self.smallest_budget() > self.engine.budget_nbytes(self.config):
            self.activation_nbytes = nbytes
        self._warmup.watch()
        if kept is None or not self._warmup.done:
            self.plan = None
            return
        self.plan = None
        fresh = self.decide(self.engine.budget_nbytes(self.config))
        step_ms = simulate(kept, costs).step_ms
        if kept.arena_nbytes + self.activation_nbytes <= fresh.budget_nbytes and step_ms <= fresh.step_ms * (1 + WORTH):
            numbers = {"activation_nbytes": self.activation_nbytes, "budget_nbytes": fresh.budget_nbytes, "step_ms": step_ms}
            self.plan = dataclasses.replace(kept, **numbers, compute_ms=fresh.compute_ms, bound_ms=fresh.bound_ms)
        else:
            self.adopt(fresh)

    def _let_go(self) -> None:
        self.staged = self._last = None
        if self._graphs is not None:
            self._graphs.release()

    @property
    def captured(self) -> bool:
        return self._graphs is not None and self._graphs.held

    @property
    def settled(self) -> bool:
        """Whether the first forwards are over, and captures, if any, are made and not to be made again: for benchmarks."""
        return self.warm and self.plan is not None and (self._graphs is None or self._graphs.settled)

    @property
    def captures_ms(self) -> list[float]:
        """How long replays of the captures under this plan took that were timed (`pace`)."""
        return [ms for times in self._graphs.times_ms.values() for ms in times] if self._graphs is not None else []

    def lose_captures(self, why: str) -> None:
        if self._graphs is not None:
            self._graphs.lose(why)

    # -- a call ----------------------------------------------------------------------------------------------------

    def run(self, args: Sequence[Any], weights: Sequence[torch.Tensor]) -> Any:
        """One forward on all arguments of the graph; `weights`: those among them that it was bound to."""
        engine = self.engine
        inputs = [args[position] for position, _, _ in self.program.inputs]
        shared = engine.shared_budget(self.config)
        with shared.running(engine) if shared is not None else nullcontext(), engine.lock:
            # There may be a thousand: they are picked again only where some have no bytes.
            tensors = weights if len(weights) == len(self._packed) else self._pick(args)
            wrappers = self._pick_wrappers(args)
            self._see_edits(self._watch, self._packed, tensors, wrappers)
            if self._sizes.changed(args):
                self._resize()
            fresh = self.plan is None
            if self.plan is None:
                self.replan()
            assert self.plan is not None
            engine.fit_arena(self.plan, shared)
            if fresh and not self._warmup.done:
                engine.make_room(None)
                self._warmup.begin(inputs)
            self._keep_watch(self._watch, self._packed)
            staged, forward = self._stage(inputs)
            engine.transfer.begin()
            engine.transfer.counters.reset()
            if engine.current is not self or self._last is not staged:
                engine.restore(staged)
                if self._graphs is not None:
                    self._graphs.restored()
            engine.current = None
            try:
                outputs = forward(*inputs)
            finally:
                self._write_back(staged, tensors, wrappers)
            engine.forwards += 1
            engine.current, self._last = self, staged
            if self._graphs is not None:
                self._ran(staged, self._graphs)
            self._learn()
        target = self.program.output_device
        if target is not None:
            outputs = tuple(value.to(target) if isinstance(value, torch.Tensor) else value for value in outputs)
        return outputs

    def _stage(self, inputs: Sequence[Any]) -> tuple[Staged, Callable[..., Any]]:
        """The plan in the arena, and a forward under it: a captured one, or else the generated program."""
        engine, plan = self.engine, self.plan
        assert plan is not None
        # What is to be timed has to run segment by segment.
        if self._graphs is not None and self._timer is None and (self.warm or not self.config.profile):
            capture = self._graphs.find(inputs, plan, self._make_staged)
            if capture is not None:
                return capture.staged, capture.replay
        engine.make_room(plan)
        if self.staged is None:
            self.staged = self._make_staged(engine.transfer, self._timer)
        return self.staged, self.staged.top.forward

    def _make_staged(self, transfer: Transfer, watcher: Watcher | None) -> Staged:
        plan = self.plan
        assert plan is not None
        if self._written is None or self._written[0] is not plan:
            self._written = plan, write_plan(self.program, plan)
        return Staged(self.program, plan, self._written[1], self._weights, self.engine.arena, transfer, watcher)

    def _ran(self, staged: Staged, graphs: Graphs) -> None:
        if staged is self.staged:
            graphs.ran_uncaptured()
        else:
            self.engine.replays += 1

    def _write_back(self, staged: Staged, tensors: Sequence[torch.Tensor], wrappers: Sequence[torch.Tensor]) -> None:
        """Bring what the model wrote to its buffers to the host, also when it raised half way: as far as it came, it counts."""
        if self._mutated:
            with torch.inference_mode():
                for weight in self._mutated:
                    elements(weight.whole.view).copy_(elements(staged.view(weight, None)))
            # What we wrote is no edit.
            self._watch.written(tensors, wrappers)

    def _take_activations(self, nbytes: int) -> None:
        self._activations.learn(estimate(self.costs), nbytes)
        super()._take_activations(nbytes)
