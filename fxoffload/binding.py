"""A program bound to the weights of one model: its plan, its top level, and how a call runs.

A call checks that the weights are the ones that were bound (same objects, same memory, same versions), brings the arena into
the state that the plan begins with if it is not, and runs the generated top level. Whatever goes wrong in between, the next
call finds out from `engine.current`, which is set only while the arena is in the end state of a finished forward.

On an accelerator the first forwards run with the least staging that works, and the plan for the whole budget is made with what
they show (`warmup`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxoffload import ops, passes
from fxoffload.cost import BucketCost, Costs
from fxoffload.debug import logger, switches
from fxoffload.edits import EditWatch, elements
from fxoffload.engine import Engine
from fxoffload.lower import TopLevel, generate
from fxoffload.names import identifier
from fxoffload.pack import pack_program
from fxoffload.plan import Plan, Resident
from fxoffload.planner import Knobs, make_plan, smallest_budget
from fxoffload.profile import SegmentTimer
from fxoffload.program import Program
from fxoffload.store import HostBucket, HostWeight
from fxoffload.transfer import Slot
from fxoffload.verify import check_plan
from fxoffload.warmup import Warmup


class Binding:
    """One program with the weights of one engine. Held by the engine; programs find it weakly."""

    def __init__(self, program: Program, engine: Engine, tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
        """`tensors` and `names` (qualified names) of the weights by their position among a call's arguments."""
        self.program = program
        self._engine = weakref.ref(engine)
        self.ids = tuple(map(id, tensors.values()))
        self._weights: dict[str, HostWeight] = pack_program(program, engine, tensors, names)
        self._checked = [(i, packed) for i, tensor in tensors.items() if (packed := engine.store.find(tensor)) is not None]
        # What the arena holds of these weights was copied under another binding, before edits that this one cannot know of.
        for _, packed in self._checked:
            engine.forget(packed)
        self._watch = EditWatch([tensors[i] for i, _ in self._checked], [packed.view for _, packed in self._checked])
        facts = program.facts.weights
        self._mutated = [self._weights[w.placeholder] for w in facts if w.mutated and w.placeholder in self._weights]
        self._empty = {
            w.placeholder: torch.empty_strided(w.shape, w.stride, dtype=getattr(torch, w.dtype), device=program.onload)
            for w in facts
            if w.placeholder not in self._weights
        }
        self.costs = self._price()
        estimate = max((s.activation_nbytes for s in self.costs.segments), default=0)
        self.activation_nbytes = engine.measured.get(program, estimate)
        known = program in engine.measured
        self._warmup = Warmup(program.onload, engine.arena, known=known, profile=program.config.profile)
        self._timer = self._warmup.timer
        self.plan: Plan | None = None
        self.top: TopLevel | None = None
        self._slots: dict[str, Slot] = {}
        self._resident_slots: list[tuple[Resident, Slot]] = []
        self._device_views: dict[HostWeight, torch.Tensor] = {}

    @property
    def engine(self) -> Engine:
        """The engine, which holds this binding."""
        engine = self._engine()
        assert engine is not None
        return engine

    def is_stale(self) -> bool:
        """Whether one of the bound tensors is gone, or no longer the weight that it was."""
        ids = dict(zip(self.program.weight_positions, self.ids, strict=True))
        for i, packed in self._checked:
            tensor = packed.tensor()
            if tensor is None or id(tensor) != ids[i] or self.engine.store.find(tensor) is not packed:
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

    @property
    def knobs(self) -> Knobs:
        config = self.program.config
        return Knobs(
            transfer_buckets=config.transfer_buckets,
            persistent_buckets=config.persistent_buckets,
            persistent_bins=config.persistent_bins,
            prefetch_limit=config.prefetch_limit,
            max_inflight_prefetch_bytes=config.max_inflight_prefetch_bytes,
            async_transfer=config.async_transfer,
        )

    def smallest_budget(self, *, overlap: bool = False) -> int:
        """The least budget, in bytes, that this graph runs in (`planner.smallest_budget`).

        By what is known of its activations now.
        """
        return smallest_budget(self.costs, self.knobs, activation_nbytes=self.activation_nbytes, overlap=overlap)

    def profile(self, call: Callable[[], object]) -> Costs:
        """The costs with the compute times of the one forward of this graph that `call` runs."""
        timer = self._timer = SegmentTimer(self.program.onload)
        self.release()
        try:
            call()
        finally:
            self._timer = None
            self.release()
        return timer.refine(self.costs)

    def decide(self, budget_nbytes: int) -> Plan:
        """The plan for a budget. Changes nothing. Raises BudgetError or ConfigError."""
        chosen = switches().plan
        if chosen is not None:
            plan = Plan.load(chosen)
        else:
            plan = _planned(self.costs, budget_nbytes, self.knobs, self.activation_nbytes)
        check_plan(plan, self.costs)
        return plan

    def replan(self) -> None:
        """Plan for the engine's budget as it is now; take effect at the next call."""
        budget = self.engine.budget_nbytes(self.program.config)
        if not self._warmup.done:
            smallest = self.smallest_budget()
            if smallest > budget:
                self.decide(budget)
            self.adopt(self.decide(min(budget, smallest)))
        else:
            self.adopt(self.decide(budget))

    def adopt(self, plan: Plan) -> None:
        self.plan = plan
        self.release()
        if self.engine.current is self:
            self.engine.current = None
        logger.info("%s", plan)

    # -- top level -------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Let go of every view of the arena."""
        self.top = None
        self._slots = {}
        self._resident_slots = []
        self._device_views = {}

    def _materialise(self, plan: Plan) -> TopLevel:
        """Views of the arena, slots, and the generated function."""
        arena = self.engine.arena
        dump = switches().dump
        gm = passes.run(self.program.top, plan, dump=dump)
        hosts = self._buckets
        self._slots = {load.name: self._slot(load.bucket, load.offset, hosts) for load in plan.loads}
        self._resident_slots = [(r, self._slot(r.bucket, r.offset, hosts)) for r in plan.residents]
        offsets = {r.bucket: r.offset for r in plan.residents}
        self._device_views = {w: w.device_view(arena.memory, offsets[w.bucket.name]) for w in self._mutated}
        program = self.program
        top = generate(
            gm,
            programs=self._timer.wrap(program.programs) if self._timer is not None else program.programs,
            weights=frozenset(w.placeholder for w in program.facts.weights),
            weight=self._viewer(plan),
            inputs={placeholder: name for _, placeholder, name in program.inputs},
            operations={ops.prefetch: self._prefetch, ops.wait: self._wait, ops.evict: self._evict},
            output_weights={i: placeholder if itself else None for i, placeholder, itself in program.facts.output_weights},
            device=program.onload,
        )
        if dump is not None:
            (dump / "top_level.py").write_text(top.source)
            plan.save(dump / "plan.json")
        return top

    def _slot(self, bucket: str, offset: int, hosts: dict[str, HostBucket]) -> Slot:
        host = hosts[bucket]
        return self.engine.transfer.slot(host.flat, self.engine.arena.memory[offset : offset + host.nbytes])

    def _viewer(self, plan: Plan) -> Callable[[str, str], tuple[str, torch.Tensor]]:
        """Name and view of a weight, for the segment that reads it."""
        memory = self.engine.arena.memory
        offsets = {r.bucket: r.offset for r in plan.residents}
        loads = {(identifier(plan.segments[i]), load.bucket): load for load in plan.loads for i in load.uses}

        def view(placeholder: str, segment: str) -> tuple[str, torch.Tensor]:
            weight = self._weights.get(placeholder)
            if weight is None:
                return identifier(placeholder), self._empty[placeholder]
            if weight.bucket.name in offsets:
                return identifier(weight.name), weight.device_view(memory, offsets[weight.bucket.name])
            load = loads[segment, weight.bucket.name]
            _, mark, number = load.name.partition("#")
            return identifier(f"{weight.name}{mark}{number}"), weight.device_view(memory, load.offset)

        return view

    def _prefetch(self, load: str, after: str | None) -> Callable[[], None]:
        return functools.partial(
            self.engine.transfer.prefetch, self._slots[load], self._slots[after] if after is not None else None
        )

    def _wait(self, load: str) -> Callable[[], None]:
        return functools.partial(self.engine.transfer.wait, self._slots[load])

    def _evict(self, load: str) -> Callable[[], None]:
        return functools.partial(self.engine.transfer.evict, self._slots[load])

    # -- a call ----------------------------------------------------------------------------------------------------

    def run(self, args: Sequence[Any]) -> Any:
        """One forward on all arguments of the graph, weights included."""
        engine = self.engine
        inputs = [args[position] for position, _, _ in self.program.inputs]
        with engine.lock:
            self._see_edits([args[i] for i, _ in self._checked])
            if self.plan is None:
                if not self._warmup.done:
                    self._warmup.begin(inputs)
                self.replan()
            assert self.plan is not None
            engine.fit_arena(self.plan)
            if self.top is None:
                self.top = self._materialise(self.plan)
            engine.transfer.begin()
            engine.transfer.counters.reset()
            if engine.current is not self:
                self._restore(self.plan)
            engine.current = None
            try:
                outputs = self.top.forward(*inputs)
            finally:
                self._write_back([args[i] for i, _ in self._checked])
            engine.forwards += 1
            engine.current = self
            self._learn()
        target = self.program.output_device
        if target is not None:
            outputs = tuple(value.to(target) if isinstance(value, torch.Tensor) else value for value in outputs)
        return outputs

    def _see_edits(self, tensors: Sequence[torch.Tensor]) -> None:
        """Weights that lie elsewhere now are taken over; weights that were written to are copied again."""
        moved = self._watch.moved(tensors)
        if moved:
            self.engine.store.rebind([self._checked[k][1] for k in moved], [tensors[k] for k in moved])
        for k in {*moved, *self._watch.written(tensors)}:
            self.engine.forget(self._checked[k][1])

    def _restore(self, plan: Plan) -> None:
        """Bring the arena into the state that the plan begins with: copy what is not there."""
        engine, transfer = self.engine, self.engine.transfer
        engine.restores += 1
        transfer.drain()
        wanted = {r.offset: r.bucket for r in plan.residents}
        engine.present = {offset: name for offset, name in engine.present.items() if wanted.get(offset) == name}
        for resident, slot in self._resident_slots:
            if engine.present.get(resident.offset) != resident.bucket:
                transfer.prefetch(slot)
                transfer.wait(slot)
                engine.present[resident.offset] = resident.bucket
        for load in plan.live_at_start():
            transfer.prefetch(self._slots[load.name])

    def _write_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Bring what the model wrote to its buffers to the host, also when it raised half way: as far as it came, it counts."""
        if self._mutated:
            with torch.inference_mode():
                for weight in self._mutated:
                    elements(weight.whole.view).copy_(elements(self._device_views[weight]))
            # What we wrote is no edit.
            self._watch.written(tensors)

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
                self.costs, self._timer = self._timer.refine(self.costs), None
            self._take_activations(warmup.activations(self.activation_nbytes))
        elif excess := warmup.excess(self.activation_nbytes):
            self._take_activations(self.activation_nbytes + excess)

    def _take_activations(self, nbytes: int) -> None:
        self.activation_nbytes = nbytes
        self.engine.measured[self.program] = nbytes
        # Should the budget be too small for what was measured, every call says so until it is raised.
        self.plan = None
        self.replan()


@functools.lru_cache(maxsize=64)
def _planned(costs: Costs, budget_nbytes: int, knobs: Knobs, activation_nbytes: int) -> Plan:
    """Equal blocks behind a graph break, and weights that replace others, meet the same costs again."""
    return make_plan(costs, budget_nbytes, knobs, activation_nbytes=activation_nbytes)
