"""A program bound to the weights of one model: its plan, its top level, and how a call runs.

A call checks that the weights are the ones that were bound (same objects, same memory, same versions), brings the arena into the
state that the plan begins with if it is not, and runs the generated top level. Whatever goes wrong in between, the
next call finds out from `engine.current`, which is set only while the arena is in the end state of a finished forward.

On an accelerator the first two forwards run with the least staging that works. The first warms kernels up; the second shows
how much memory a forward takes besides the arena, and the plan is made with that number instead of the estimate.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from fxoffload import ops, passes
from fxoffload.cost import BucketCost, Costs
from fxoffload.debug import logger, switches
from fxoffload.engine import Engine, engine_for
from fxoffload.lower import TopLevel, generate
from fxoffload.names import identifier
from fxoffload.owner import owner_of, tensor_names
from fxoffload.plan import Plan
from fxoffload.planner import Knobs, make_plan, smallest_budget
from fxoffload.profile import SegmentTimer
from fxoffload.program import Program
from fxoffload.sizes import show_size
from fxoffload.store import HostBucket, HostWeight, version_of
from fxoffload.transfer import Slot
from fxoffload.verify import check_plan

_WARM, _MEASURE, _STEADY = range(3)


class Binding:
    """One program with the weights of one engine. Held by the engine; programs find it weakly."""

    def __init__(self, program: Program, engine: Engine, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
        self.program = program
        self.engine = engine
        self.ids = tuple(map(id, tensors))
        self._weights: dict[str, HostWeight] = _pack(program, engine, tensors, names)
        ordered = [self._weights.get(program.facts.weights[i].placeholder) for i in range(len(tensors))]
        self._checked = [(i, weight) for i, weight in enumerate(ordered) if weight is not None]
        self._pointers = [tensors[i].data_ptr() for i, _ in self._checked]
        self._versions = [version_of(tensors[i]) for i, _ in self._checked]
        self._mutated = [self._weights[w.placeholder] for w in program.facts.weights if w.mutated and w.placeholder in self._weights]
        self._empty = {
            w.placeholder: torch.empty_strided(w.shape, w.stride, dtype=t.dtype, device=program.onload)
            for w, t in zip(program.facts.weights, tensors, strict=True)
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
        self._generation = -1

    def is_stale(self) -> bool:
        """Whether one of the bound tensors is gone, or no longer the weight that it was."""
        bound = [(self.ids[i], weight.tensor()) for i, weight in self._checked]
        return any(tensor is None or id(tensor) != known for known, tensor in bound)

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

    def smallest_budget(self) -> int:
        """The least budget, in bytes, that this graph runs in, by what is known of its activations now."""
        return smallest_budget(self.costs, self.knobs, activation_nbytes=self.activation_nbytes)

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
        self.top = None
        if self.engine.current is self:
            self.engine.current = None
        logger.info("%s", plan)

    # -- top level -------------------------------------------------------------------------------------------------

    def _materialise(self, plan: Plan) -> TopLevel:
        """Views of the arena, slots, and the generated function."""
        arena = self.engine.arena
        dump = switches().dump
        gm = passes.run(self.program.top, plan, dump=dump)
        hosts = self._buckets
        self._slots: dict[str, Slot] = {load.name: self._slot(load.bucket, load.offset, hosts) for load in plan.loads}
        self._resident_slots = [(r, self._slot(r.bucket, r.offset, hosts)) for r in plan.residents]
        self._offsets = {r.bucket: r.offset for r in plan.residents}
        self._load_offsets = {(identifier(plan.segments[i]), load.bucket): load for load in plan.loads for i in load.uses}
        self._device_views = {w: w.device_view(arena.memory, self._offsets[w.bucket.name]) for w in self._mutated}
        program = self.program
        top = generate(
            gm,
            programs=self._timer.wrap(program.programs) if self._timer is not None else program.programs,
            weights=frozenset(w.placeholder for w in program.facts.weights),
            weight=self._view,
            inputs={placeholder: name for _, placeholder, name in program.inputs},
            operations={ops.prefetch: self._prefetch, ops.wait: self._wait, ops.evict: self._evict},
            output_weights=frozenset(program.facts.output_weights),
            device=program.onload,
        )
        if dump is not None:
            (dump / "top_level.py").write_text(top.source)
            plan.save(dump / "plan.json")
        self._generation = arena.generation
        return top

    def _slot(self, bucket: str, offset: int, hosts: dict[str, HostBucket]) -> Slot:
        host = hosts[bucket]
        return self.engine.transfer.slot(host.flat, self.engine.arena.memory[offset : offset + host.nbytes])

    def _view(self, placeholder: str, segment: str) -> tuple[str, torch.Tensor]:
        weight = self._weights.get(placeholder)
        if weight is None:
            return identifier(placeholder), self._empty[placeholder]
        name, offset = weight.name, self._offsets.get(weight.bucket.name)
        if offset is None:
            load = self._load_offsets[segment, weight.bucket.name]
            offset = load.offset
            _, mark, number = load.name.partition("#")
            name = f"{name}{mark}{number}"
        return identifier(name), weight.device_view(self.engine.arena.memory, offset)

    def _prefetch(self, load: str, after: str | None) -> Callable[[], None]:
        transfer = self.engine.transfer
        return functools.partial(transfer.prefetch, self._slots[load], self._slots[after] if after is not None else None)

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
            self._fit(self.plan)
            if self.top is None or self._generation != engine.arena.generation:
                self.top = self._materialise(self.plan)
            engine.transfer.begin()
            engine.transfer.counters.reset()
            if engine.current is not self:
                self._restore(self.plan)
            engine.current = None
            outputs = self.top.forward(*[args[position] for position, _, _ in self.program.inputs])
            self._finish(self.plan)
            if self._phase != _STEADY:
                self._next_phase()
            return outputs

    def _see_edits(self, args: Sequence[Any]) -> None:
        """Weights that lie elsewhere now are taken over; weights that were written to are copied again."""
        positions = self.program.weight_positions
        tensors = [args[positions[i]] for i, _ in self._checked]
        if [t.data_ptr() for t in tensors] != self._pointers:
            moved = [k for k, t in enumerate(tensors) if t.data_ptr() != self._pointers[k]]
            self.engine.store.rebind([self._checked[k][1] for k in moved], [tensors[k] for k in moved])
            for k in moved:
                self.engine.forget(self._checked[k][1].bucket)
        versions = [version_of(t) for t in tensors]
        if versions != self._versions:
            for (_, weight), now, then in zip(self._checked, versions, self._versions, strict=True):
                if now != then:
                    self.engine.forget(weight.bucket)
            self._versions = versions

    def _fit(self, plan: Plan) -> None:
        spare = plan.budget_nbytes - plan.activation_nbytes
        if not plan.arena_nbytes <= self.engine.arena.nbytes <= max(spare, plan.arena_nbytes):
            self.engine.fit_arena(plan.arena_nbytes, max(spare, plan.arena_nbytes))

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

    def _finish(self, plan: Plan) -> None:
        engine = self.engine
        for weight in self._mutated:
            weight.view.copy_(self._device_views[weight])
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
            logger.info("binding: a forward takes %s besides the arena (estimate %s)", show_size(measured), show_size(self.activation_nbytes))
            self.engine.measured[self.program] = self.activation_nbytes = measured
        self.replan()


@functools.lru_cache(maxsize=64)
def _planned(costs: Costs, budget_nbytes: int, knobs: Knobs, activation_nbytes: int) -> Plan:
    """Equal blocks behind a graph break, and weights that replace others, meet the same costs again."""
    return make_plan(costs, budget_nbytes, knobs, activation_nbytes=activation_nbytes)


def _pack(program: Program, engine: Engine, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> dict[str, HostWeight]:
    """Every weight that is in a bucket, by placeholder, packed into the store if it was not."""
    store = engine.store
    tensor_of = {w.placeholder: t for w, t in zip(program.facts.weights, tensors, strict=True)}
    name_of = {w.placeholder: n for w, n in zip(program.facts.weights, names, strict=True)}
    found: dict[str, HostWeight] = {}
    for bucket in program.buckets.buckets:
        fresh = [p for p in bucket.weights if store.find(tensor_of[p]) is None]
        if any(tensor_of[p].numel() for p in fresh):
            packed = store.pack(bucket.name, [(name_of[p], tensor_of[p]) for p in fresh])
            engine.adopt(packed.weights)
        for placeholder in bucket.weights:
            weight = store.find(tensor_of[placeholder])
            if weight is not None:
                found[placeholder] = weight
    return found


class Dispatch:
    """What Dynamo calls: finds the binding of the weights that came, or makes one."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._bindings: weakref.WeakValueDictionary[tuple[int, ...], Binding] = weakref.WeakValueDictionary()
        self._positions = program.weight_positions

    def __call__(self, *args: Any) -> Any:
        binding = self._bindings.get(tuple([id(args[i]) for i in self._positions]))
        if binding is None:
            binding = self.bind([args[i] for i in self._positions])
        return binding.run(args)

    def bind(self, tensors: Sequence[torch.Tensor]) -> Binding:
        """Bind the program to these weights, in the engine of the model that they belong to."""
        program = self.program
        root = owner_of(tensors[0]) if tensors else None
        engine = engine_for(tensors, root, program.config, program.onload)
        with engine.lock:
            known = tensor_names(root)
            names = [known.get(id(t), w.name) for t, w in zip(tensors, program.facts.weights, strict=True)]
            if root is not None:
                _take_places(engine, tensors, names)
            binding = Binding(program, engine, tensors, names)
            engine.bindings = [b for b in engine.bindings if not b.is_stale()]
            engine.bindings.append(binding)
            self._bindings[binding.ids] = binding
        return binding


def _take_places(engine: Engine, tensors: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """A parameter that was replaced by another, or swapped with one, moves into the bytes of its name: plans stay as they are."""
    pairs = [(engine.store.replaced(name, t), t) for name, t in zip(names, tensors, strict=True)]
    moved = [(weight, tensor) for weight, tensor in pairs if weight is not None]
    if moved:
        engine.store.rebind([weight for weight, _ in moved], [tensor for _, tensor in moved])
        engine.adopt([weight for weight, _ in moved])
        for weight, _ in moved:
            engine.forget(weight.bucket)
