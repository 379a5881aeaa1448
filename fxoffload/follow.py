"""Running a model's units by a plan while its modules call each other as they like.

A unit is a module whose weights come and go together. For the planner a forward is a sequence of units, as a graph is one of
segments: the order that the first forward showed. In each later forward the units that are called are looked up in that order:

    the next one               the plan's prefetches, wait and evictions around it
    a later one                units in between were left out: their copies that nobody needs any more are not issued, and their
                               evictions are, so that the arena comes to the end state that the plan begins with
    none                       the plan is left for the rest of this forward: a unit is copied when it is called. The order is
                               then extended, so that the next such forward is followed

A weight that is read while its unit does not run (`F.linear(x, self.embedding.weight)`) is seen in the first forward, and stays
resident from then on. While nothing runs, every tensor of the model is what it is in the host store.
"""

# Private names of torch: version counters. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from fxoffload.config import OffloadConfig
from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.edits import EditWatch, elements, version_of
from fxoffload.engine import Engine
from fxoffload.errors import BudgetError
from fxoffload.machine import Machine
from fxoffload.pack import is_small_buffer, pack_units
from fxoffload.plan import Load
from fxoffload.planned import Planned
from fxoffload.profile import SegmentTimer
from fxoffload.sequence import find_next, merge
from fxoffload.slots import Slots
from fxoffload.store import HostTensor, HostWeight
from fxoffload.transfer import Slot
from fxoffload.units import Named, Units
from fxoffload.warmup import Warmup

_METADATA = frozenset(
    {
        torch.Tensor.data.__set__,  # type: ignore[attr-defined]
        torch.Tensor.dtype.__get__,  # type: ignore[attr-defined]
        torch.Tensor.shape.__get__,  # type: ignore[attr-defined]
        torch.Tensor.ndim.__get__,  # type: ignore[attr-defined]
        torch.Tensor.requires_grad.__get__,  # type: ignore[attr-defined]
        torch.Tensor._version.__get__,  # type: ignore[attr-defined]
        torch.Tensor.size,
        torch.Tensor.dim,
        torch.Tensor.numel,
        torch.Tensor.stride,
        torch.Tensor.element_size,
        torch.Tensor.is_floating_point,
        torch.Tensor.is_inference,
    }
)
"""Questions about a weight that the host's copy answers as well as the device's."""

Views = list[tuple[HostTensor, torch.Tensor]]


@dataclass(slots=True, eq=False)
class _Step:
    """What happens around one unit of the order."""

    prefetches: tuple[Load, ...]
    loads: tuple[Load, ...]
    evictions: tuple[Load, ...]
    views: Views


@dataclass(slots=True, eq=False)
class _Running:
    """A unit that runs: its weights on the device, and where its versions stood."""

    unit: int
    views: Views
    step: _Step | None
    slots: list[Slot]
    versions: list[int | None]
    start: Any


@dataclass(slots=True, eq=False)
class _Forward:
    """How far a forward has come.

    `ordered`: its order counts. `follows`: it is by the plan still. `present`: what is on the device now, by `id`.
    """

    ordered: bool
    follows: bool
    position: int = 0
    observed: list[int] = field(default_factory=list)
    running: list[_Running] = field(default_factory=list)
    waited: set[str] = field(default_factory=set)
    views: Views = field(default_factory=list)
    versions: list[int | None] = field(default_factory=list)
    present: dict[int, HostTensor] = field(default_factory=dict)


class Follower(Planned):
    """One way through a model: its forward, or another method that callers begin with.

    Holds no module and no tensor of the model strongly, since the engine, which lives as long as they do, holds it.
    """

    _estimates = False

    def __init__(
        self, engine: Engine, config: OffloadConfig, machine: Machine, root: torch.nn.Module, units: Units, *, measures: bool
    ) -> None:
        """Packs what is not in the store yet. `measures`: learn in the first forwards what they take besides the arena."""
        self._machine = machine
        self._names = tuple(unit.name for unit in units.units)
        pack_units(engine, units)
        empty: dict[int, HostTensor] = {}
        self._units = [_found(engine, unit.tensors, empty) for unit in units.units]
        rest = _found(engine, units.rest, empty)
        self._packed = _distinct([p for packed in (*self._units, rest) for p in packed])
        self._rest = _distinct([*rest, *(p for p in self._packed if _is_small_buffer(p))])
        """Resident, and on the device as long as a forward runs."""
        self._by_id = {id(tensor): p for p, tensor in zip(self._packed, self.tensors(), strict=True)}
        self._statistics = [(weakref.ref(m), p) for m in root.modules() for p in self._statistics_of(m)]
        self._whole: dict[int, HostWeight] = {id(p): engine.store.whole(p) for p in self._packed if p.parts and p.view.numel()}
        self._watch = EditWatch(self.tensors(), [p.view for p in self._packed])
        for packed in self._packed:
            # What the arena holds of these weights was copied before edits that this one cannot know of.
            engine.forget(packed)
        self.order: tuple[int, ...] = tuple(range(len(self._units)))
        self._known = False
        """Whether a forward has shown the order; until then it is that of definition."""
        self._looks = True
        """Whether the next forward looks for weights that are read outside their units."""
        self._ms: dict[str, float] = {}
        profile = measures and (config.profile or engine.device.type != "cpu")
        warmup = Warmup(engine.device, known=not measures, profile=profile, shares=engine.shared_budget(config) is not None)
        super().__init__(engine, config, self._price(), 0, warmup)
        self._slots: Slots | None = None
        self._steps: list[_Step] = []
        self._rest_views: Views = []
        self._forward: _Forward | None = None
        self._changed = False
        """Whether the order or what is resident changed since the costs were priced."""

    def _statistics_of(self, module: torch.nn.Module) -> list[HostTensor]:
        """Buffers that batch norm writes in training mode, which no version counter shows."""
        if not isinstance(module, torch.nn.modules.batchnorm._NormBase) or not module.track_running_stats:
            return []
        return [p for t in module.buffers() if (p := self._by_id.get(id(t))) is not None]

    @property
    def machine(self) -> Machine:
        return self._machine

    def tensors(self) -> list[torch.Tensor]:
        """All tensors of the model that are managed, each once."""
        return [_tensor(p) for p in self._packed]

    def is_stale(self) -> bool:
        """Whether a tensor is gone, or the store has packed one anew."""
        find = self.engine.store.find
        return any((t := p.tensor()) is None or (bool(p.view.numel()) and find(t) is not p) for p in self._packed)

    # -- plan ------------------------------------------------------------------------------------------------------

    def _price(self) -> Costs:
        """A segment for every unit of the order. Times are measured ones, or what reading the weights once takes."""
        names = _numbered([self._names[unit] for unit in self.order]) or ["forward"]
        nbytes: dict[str, int] = {}
        uses: dict[str, set[int]] = {}
        segments: list[SegmentCost] = []
        for i, name in enumerate(names):
            weights = self._weights(self._units[self.order[i]]) if self.order else []
            for weight in weights:
                nbytes[weight.bucket.name] = weight.bucket.nbytes
                uses.setdefault(weight.bucket.name, set()).add(i)
            read_ms = float(self._machine.compute_ms(0, sum(w.nbytes for w in weights), ""))
            segments.append(SegmentCost(name, self._ms.get(name, read_ms), 0))
        kept = {w.bucket.name: w.bucket.nbytes for w in self._weights(self._rest)}
        buckets = [
            BucketCost(name, size, self._machine.copy_ms(size), tuple(sorted(uses.get(name, {0}))), name in kept)
            for name, size in (nbytes | kept).items()
        ]
        buckets.sort(key=lambda b: (b.uses, b.name))
        return Costs(tuple(segments), tuple(buckets), self._machine.link_bytes_per_ms)

    def _price_anew(self) -> None:
        self.costs = self._price()
        self.plan = None
        self.release()

    def _refined(self, timer: SegmentTimer) -> Costs:
        self._ms = timer.times()
        return self._price()

    def _let_go(self) -> None:
        self._slots = None
        self._steps = []
        self._rest_views = []

    def _weights(self, packed: Sequence[HostTensor]) -> list[HostWeight]:
        """Those that have bytes."""
        return [self._whole[id(p)] for p in packed if id(p) in self._whole]

    def _stage(self, slots: Slots) -> None:
        """Bind the plan to the arena."""
        plan = slots.plan
        rest = {id(p) for p in self._rest}
        self._rest_views = [(p, self._device_view(slots, p, None)) for p in self._rest]
        self._steps = []
        for i, unit in enumerate(self.order):
            loads = {w.bucket.name: slots.load_for(i, w.bucket.name) for w in self._weights(self._units[unit])}
            views = [(p, self._device_view(slots, p, i)) for p in self._units[unit] if id(p) not in rest]
            used = tuple(load for load in loads.values() if load is not None)
            evictions = tuple(load for load in plan.loads if load.evict_after == i)
            self._steps.append(_Step(plan.prefetches_before(i), used, evictions, views))
        self._slots = slots

    def _device_view(self, slots: Slots, packed: HostTensor, segment: int | None) -> torch.Tensor:
        """A tensor on the device, as a segment reads it; None: it is resident. Without bytes it needs no place."""
        weight = self._whole.get(id(packed))
        if weight is None:
            return torch.empty_strided(
                packed.view.shape, packed.view.stride(), dtype=packed.view.dtype, device=self.engine.device
            )
        return slots.view(weight, None if segment is None else slots.load_for(segment, weight.bucket.name))

    def decide_early(self) -> None:
        """Raise now what the first forward would raise for certain: BudgetError, ConfigError."""
        self.decide(max(self.engine.budget_nbytes(self.config), 0))

    # -- a forward -------------------------------------------------------------------------------------------------

    def begin(self, inputs: Sequence[torch.Tensor], *, ordered: bool) -> None:
        """A forward begins, with these inputs on the device. `ordered`: it is a whole one, whose order counts."""
        engine = self.engine
        self._see_edits(self._watch, self._packed, self.tensors())
        fresh = self.plan is None
        if self.plan is None:
            self.replan()
        assert self.plan is not None
        engine.fit_arena(self.plan, engine.shared_budget(self.config))
        measures = fresh and not self._warmup.done
        engine.make_room(None if measures else self.plan)
        if measures:
            self._warmup.begin(inputs)
        if self._slots is None:
            hosts = {w.bucket.name: w.bucket for w in self._whole.values()}
            self._stage(Slots(self.plan, hosts, engine.arena, engine.transfer))
        assert self._slots is not None
        engine.transfer.begin()
        engine.transfer.counters.reset()
        if engine.current is not self:
            engine.restores += 1
            engine.present = self._slots.restore(engine.present)
        engine.current = None
        views = self._rest_views
        self._forward = _Forward(ordered, ordered, views=views, versions=[version_of(_tensor(p)) for p, _ in views])
        self._put_in(views)

    def looking(self) -> AbstractContextManager[object]:
        """In here, weights that are read outside their units are found, where that is not known yet."""
        return _Look(self) if self._looks else nullcontext()

    def enter(self, unit: int) -> None:
        """A unit is called: its weights are on the device when this returns."""
        forward = self._now
        views: Views = []
        step, slots = None, list[Slot]()
        if forward.running:
            # Its bytes have no place of their own while another unit runs.
            for packed in self._units[unit]:
                self.borrow(packed)
        else:
            forward.observed.append(unit)
            position = find_next(self.order, forward.position, unit) if forward.follows else None
            if position is None:
                views, slots = self._load_now(unit)
            else:
                self._skip_to(position)
                step = self._steps[position]
                self._prefetch(step.prefetches)
                self._wait(step.loads)
                views = step.views
            self._put_in(views)
        versions = [version_of(_tensor(p)) for p, _ in views]
        start = self._timer.start() if self._timer is not None else None
        forward.running.append(_Running(unit, views, step, slots, versions, start))

    def leave(self, unit: int) -> None:
        """The unit returned or raised. What it wrote to its tensors is brought to the host."""
        forward = self._now
        running = forward.running.pop()
        assert running.unit == unit
        if self._timer is not None and running.start is not None and running.step is not None:
            self._timer.stop(self.costs.segments[forward.position].name, running.start)
        self._write_back(running.views, running.versions)
        self._take_out([p for p, _ in running.views])
        if running.step is not None:
            self._evict(running.step.evictions)
            forward.position += 1
        for slot in running.slots:
            self.engine.transfer.evict(slot)

    def end(self, *, completed: bool) -> None:
        """The forward is over. `completed`: it did not raise."""
        forward, engine = self._now, self.engine
        self._write_back(forward.views, forward.versions)
        self._take_out(list(forward.present.values()))
        self._looks = not completed
        if completed:
            engine.forwards += 1
            if forward.ordered and not self._learn_order(forward) and forward.follows:
                self._skip_to(len(self.order))
                engine.current = self
        self._forward = None
        if self._changed:
            self._changed = False
            self._price_anew()
            with suppress(BudgetError):
                # The next forward says so, with nothing lost of this one.
                self.replan()
        if completed and forward.ordered:
            self._learn()

    @property
    def innermost(self) -> int | None:
        """The unit that runs now."""
        return self._forward.running[-1].unit if self._forward is not None and self._forward.running else None

    def see(self, tensor: torch.Tensor) -> None:
        """Some code reads this tensor. If it is a weight whose unit does not run, it comes to the device, to stay."""
        packed = self._by_id.get(id(tensor))
        if packed is not None and packed.tensor() is tensor:
            self.borrow(packed)

    def borrow(self, packed: HostTensor) -> None:
        """Bring a tensor to the device in memory of its own for the rest of this forward; it is resident in the next ones."""
        if id(packed) in self._now.present:
            return
        with packed.mode():
            view = packed.view.to(self.engine.device)
        self._put_in([(packed, view)])
        self._keep(packed)

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
        if not any(p is packed for p in self._rest):
            self._rest.append(packed)
            self._changed = True

    def _load_now(self, unit: int) -> tuple[Views, list[Slot]]:
        """Copy what a unit needs and is not resident into the staging area, behind all compute. The plan is left with that."""
        slots_of_plan, engine = self._slots, self.engine
        assert slots_of_plan is not None
        self._now.follows = False
        rest = {id(p) for p in self._rest}
        wanted = [(p, self._whole.get(id(p))) for p in self._units[unit] if id(p) not in rest]
        engine.transfer.drain()
        offset = max((r.offset + r.nbytes for r in slots_of_plan.plan.residents), default=0)
        places: dict[str, int] = {r.bucket: r.offset for r in slots_of_plan.plan.residents}
        views: Views = []
        slots: list[Slot] = []
        for packed, weight in wanted:
            if weight is None:
                views.append((packed, self._device_view(slots_of_plan, packed, None)))
                continue
            bucket = weight.bucket
            if bucket.name not in places:
                if offset + bucket.nbytes > engine.arena.nbytes:
                    self.borrow(packed)
                    continue
                places[bucket.name] = offset
                slots.append(engine.transfer.slot(bucket.flat, engine.arena.memory[offset : offset + bucket.nbytes]))
                engine.transfer.prefetch(slots[-1])
                engine.transfer.wait(slots[-1])
                offset += bucket.nbytes
            views.append((packed, weight.device_view(engine.arena.memory, places[bucket.name])))
        return views, slots

    def _skip_to(self, position: int) -> None:
        """Pass over the units up to a position of the order: what only they would use is not copied any more."""
        forward = self._now
        for step in self._steps[forward.position : position]:
            self._prefetch([load for load in step.prefetches if load.wraps or load.evict_after >= position])
            self._evict(step.evictions)
        forward.position = position

    def _prefetch(self, loads: Sequence[Load]) -> None:
        assert self._slots is not None
        for load in loads:
            after = self._slots.of_load[load.after] if load.after is not None else None
            self.engine.transfer.prefetch(self._slots.of_load[load.name], after)

    def _wait(self, loads: Sequence[Load]) -> None:
        assert self._slots is not None
        for load in loads:
            if load.name not in self._now.waited:
                self._now.waited.add(load.name)
                self.engine.transfer.wait(self._slots.of_load[load.name])

    def _evict(self, loads: Sequence[Load]) -> None:
        assert self._slots is not None
        for load in loads:
            self.engine.transfer.evict(self._slots.of_load[load.name])

    def _put_in(self, views: Views) -> None:
        present = self._now.present
        for packed, view in views:
            _tensor(packed).data = view
            present[id(packed)] = packed

    def _take_out(self, packed: Sequence[HostTensor]) -> None:
        present = self._now.present
        for p in packed:
            _tensor(p).data = p.view
            present.pop(id(p), None)

    def _write_back(self, views: Views, versions: Sequence[int | None]) -> None:
        """Bring tensors whose versions moved to the host; they are resident from the next forward on."""
        written = False
        unseen = {id(p) for module, p in self._statistics if (m := module()) is not None and m.training}
        for (packed, view), then in zip(views, versions, strict=True):
            now = version_of(_tensor(packed))
            if now != then or id(packed) in unseen or (now is None and _is_small_buffer(packed)):
                with torch.inference_mode():
                    elements(packed.view).copy_(elements(view))
                self._keep(packed)
                written = True
        if written:
            # What the model wrote is no edit.
            self._watch.written(self.tensors())


class _Look(TorchFunctionMode):
    """Shows a follower every tensor that some function is about to read."""

    def __init__(self, follower: Follower) -> None:
        super().__init__()
        self._follower = follower

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # What another compiler compiles reads the weights of units that run.
        if not torch.compiler.is_dynamo_compiling() and func not in _METADATA:
            for value in (*args, *(kwargs or {}).values()):
                for item in value if isinstance(value, (list, tuple)) else (value,):
                    if isinstance(item, torch.Tensor):
                        self._follower.see(item)
        return func(*args, **(kwargs or {}))


def _found(engine: Engine, tensors: Sequence[Named], empty: dict[int, HostTensor]) -> list[HostTensor]:
    """What the store has of these tensors; those without bytes, which it may not have, are kept in `empty`, by `id`."""
    found: list[HostTensor] = []
    for name, tensor in tensors:
        packed = engine.store.find(tensor)
        found.append(packed or empty.setdefault(id(tensor), HostTensor(name, weakref.ref(tensor), tensor.data)))
    return found


def _distinct(packed: Sequence[HostTensor]) -> list[HostTensor]:
    return list({id(p): p for p in packed}.values())


def _tensor(packed: HostTensor) -> torch.Tensor:
    tensor = packed.tensor()
    assert tensor is not None, f"{packed.name} is gone, and the structure of the model was not looked at"
    return tensor


def _is_small_buffer(packed: HostTensor) -> bool:
    return is_small_buffer(_tensor(packed))


def _numbered(names: Sequence[str]) -> list[str]:
    """`a`, `b`, `a@2`: every further call of a unit with its number."""
    seen: Counter[str] = Counter()
    numbered: list[str] = []
    for name in names:
        seen[name] += 1
        numbered.append(name if seen[name] == 1 else f"{name}@{seen[name]}")
    return numbered
