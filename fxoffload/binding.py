"""A program bound to the weights of one model: its plan, its top level, and how a call runs.

A call checks that the weights are the ones that were bound (same objects, same memory, same versions), brings the arena into the
state that the plan begins with if it is not, and runs the generated top level. Whatever goes wrong in between, the
next call finds out from `engine.current`, which is set only while the arena is in the end state of a finished forward.

On an accelerator the first two forwards run with the least staging that works. The first warms kernels up; the second shows
how much memory a forward takes besides the arena, and the plan is made with that number instead of the estimate.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from fxoffload import ops, passes
from fxoffload.cost import BucketCost, Costs
from fxoffload.debug import logger, switches
from fxoffload.engine import Engine
from fxoffload.lower import TopLevel, generate
from fxoffload.names import identifier
from fxoffload.pack import pack_program
from fxoffload.plan import Plan, Resident
from fxoffload.planner import Knobs, make_plan, smallest_budget
from fxoffload.profile import SegmentTimer
from fxoffload.program import Program
from fxoffload.sizes import show_size
from fxoffload.store import HostBucket, HostWeight, version_of
from fxoffload.transfer import Slot
from fxoffload.verify import check_plan

_WARM, _MEASURE, _STEADY = range(3)
_ALLOCATOR_SLACK = 32 << 20


class Binding:
    """One program with the weights of one engine. Held by the engine; programs find it weakly."""

    def __init__(self, program: Program, engine: Engine, tensors: Mapping[int, torch.Tensor], names: Mapping[int, str]) -> None:
        """`tensors` and `names` (qualified names) of the weights by their position among a call's arguments."""
        self.program = program
        self.engine = engine
        self.ids = tuple(map(id, tensors.values()))
        self._weights: dict[str, HostWeight] = pack_program(program, engine, tensors, names)
        self._checked = [(i, packed) for i, tensor in tensors.items() if (packed := engine.store.find(tensor)) is not None]
        self._pointers = [tensors[i].data_ptr() for i, _ in self._checked]
        self._versions = [version_of(tensors[i]) for i, _ in self._checked]
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
        self._phase = _STEADY if program in engine.measured else _MEASURE if program.onload.type == "cpu" else _WARM
        if self._phase == _MEASURE and not program.config.profile:
            self._phase = _STEADY
        self._timer = SegmentTimer(program.onload) if self._phase == _MEASURE else None
        self._foreign_nbytes = 0
        self.plan: Plan | None = None
        self.top: TopLevel | None = None
        self._slots: dict[str, Slot] = {}
        self._resident_slots: list[tuple[Resident, Slot]] = []
        self._device_views: dict[HostWeight, torch.Tensor] = {}

    def is_stale(self) -> bool:
        """Whether one of the bound tensors is gone, or no longer the weight that it was."""
        return any(id(packed.tensor()) not in self.ids for _, packed in self._checked)

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
        """The least budget, in bytes, that this graph runs in (`planner.smallest_budget`), by what is known of its activations now."""
        return smallest_budget(self.costs, self.knobs, activation_nbytes=self.activation_nbytes, overlap=overlap)

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
        if self._phase != _STEADY:
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
            output_weights=frozenset(program.facts.output_weights),
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
        with engine.lock:
            self._see_edits(args)
            if self.plan is None:
                self._first_plan(args)
            assert self.plan is not None
            engine.fit_arena(self.plan)
            if self.top is None:
                self.top = self._materialise(self.plan)
            engine.transfer.begin()
            engine.transfer.counters.reset()
            if engine.current is not self:
                self._restore(self.plan)
            engine.current = None
            outputs = self.top.forward(*[args[position] for position, _, _ in self.program.inputs])
            self._finish()
            if self._phase != _STEADY:
                self._next_phase()
        target = self.program.output_device
        if target is not None:
            outputs = tuple(value.to(target) if isinstance(value, torch.Tensor) else value for value in outputs)
        return outputs

    def _see_edits(self, args: Sequence[Any]) -> None:
        """Weights that lie elsewhere now are taken over; weights that were written to are copied again."""
        tensors = [args[i] for i, _ in self._checked]
        if [t.data_ptr() for t in tensors] != self._pointers:
            moved = [k for k, t in enumerate(tensors) if t.data_ptr() != self._pointers[k]]
            self.engine.store.rebind([self._checked[k][1] for k in moved], [tensors[k] for k in moved])
            for k in moved:
                self.engine.forget(self._checked[k][1])
        versions = [version_of(t) for t in tensors]
        if versions != self._versions:
            for (_, packed), now, then in zip(self._checked, versions, self._versions, strict=True):
                if now != then:
                    self.engine.forget(packed)
            self._versions = versions

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

    def _finish(self) -> None:
        engine = self.engine
        for weight in self._mutated:
            weight.whole.view.copy_(self._device_views[weight])
        engine.forwards += 1
        engine.current = self

    # -- the first forwards ------------------------------------------------------------------------------------------

    def _first_plan(self, args: Sequence[Any]) -> None:
        if self._phase == _WARM:
            inputs = [args[position] for position, _, _ in self.program.inputs]
            given = sum(t.untyped_storage().nbytes() for t in inputs if isinstance(t, torch.Tensor))
            self._foreign_nbytes = self._reserved() - self.engine.arena.nbytes - given
        self.replan()

    def _reserved(self) -> int:
        """Device bytes that this process holds now, without what its allocator could give back."""
        torch.accelerator.synchronize(self.program.onload)
        torch.accelerator.empty_cache()
        return torch.accelerator.memory_reserved(self.program.onload)

    def _next_phase(self) -> None:
        if self._phase == _WARM:
            self._phase = _MEASURE
            self._reserved()
            if self.program.config.profile:
                self._timer, self.top = SegmentTimer(self.program.onload), None
            return
        self._phase = _STEADY
        if self._timer is not None:
            self.costs = self._timer.refine(self.costs)
            self._timer, self.top = None, None
        if self.program.onload.type != "cpu":
            measured = torch.accelerator.memory_reserved(self.program.onload) - self.engine.arena.nbytes - self._foreign_nbytes
            logger.info(
                "binding: a forward takes %s besides the arena (estimate %s)",
                show_size(measured),
                show_size(self.activation_nbytes),
            )
            # What the allocator holds comes in pieces of 20 MiB that fall otherwise at other addresses; below a few of them it
            # tells little.
            self.activation_nbytes = max(measured + _ALLOCATOR_SLACK, min(self.activation_nbytes, 3 * _ALLOCATOR_SLACK))
            self.engine.measured[self.program] = self.activation_nbytes
        self.replan()


@functools.lru_cache(maxsize=64)
def _planned(costs: Costs, budget_nbytes: int, knobs: Knobs, activation_nbytes: int) -> Plan:
    """Equal blocks behind a graph break, and weights that replace others, meet the same costs again."""
    return make_plan(costs, budget_nbytes, knobs, activation_nbytes=activation_nbytes)
