"""Offload without a compiler: the modules of a model call the same runtime, by a plan of the same planner.

`attach` stands in for the methods of the root that callers begin with (its forward; a VAE's `decode`), and hooks every unit. A
method begins and ends a forward; the hooks bring a unit's weights in and take them out (`follow`). A unit that is called on its
own, outside all of these, is copied for that call.

While Dynamo traces for one of our backends all of this is left out: a compiled graph has prefetches, waits and evictions of its
own. Another backend's graphs break around every unit, and compute the same.
"""

# Private names of torch: constants of Dynamo. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fxoffload.calibrate import machine_of
from fxoffload.config import OffloadConfig
from fxoffload.containers import tensors_in, to_device
from fxoffload.engine import Engine, available_device, engine_for, find_engine
from fxoffload.entries import Entry, Hook, RootHook, apart, is_called, is_compiled
from fxoffload.errors import BudgetError, GradientError, OffloadError
from fxoffload.follow import Follower
from fxoffload.foreign import refuse_foreign_hooks
from fxoffload.pack import all_tensors
from fxoffload.planned import Retied
from fxoffload.units import Units, find_units, split_limit
from fxoffload.wrappers import Part, find_parts

ENTRIES = ("forward", "encode", "decode", "get_text_features", "get_image_features")
"""Methods that callers begin with, where a model has them."""

_attachment_of: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[Attachment]] = weakref.WeakKeyDictionary()
"""Weak on both sides: the model's hooks hold its attachment."""


def attachment_of(root: torch.nn.Module) -> Attachment | None:
    """What offloads this model without a compiler, or None."""
    found = _attachment_of.get(root)
    return found() if found is not None else None


@contextmanager
def held(weights: Sequence[torch.Tensor]) -> Generator[bool, None, None]:
    """Keep the model that has these weights from running, or False where it runs now, in this thread or in another.

    Does not wait: the caller holds Dynamo's lock, which a call of the model may be waiting for.
    """
    engine = find_engine(weights)
    if engine is None:
        yield True
    elif not engine.lock.acquire(blocking=False):
        yield False
    else:
        try:
            attachment = attachment_with(weights)
            yield attachment is None or not attachment.runs_here()
        finally:
            engine.lock.release()


def refuse_inside(weights: Sequence[torch.Tensor]) -> None:
    """Raises OffloadError in a call of a model that is offloaded without a compiler and has these weights.

    The arena is in the state of its plan, and a compiled graph of a part would run by a plan of its own in there.
    """
    attachment = attachment_with(weights)
    if attachment is not None and attachment.runs_here():
        raise OffloadError(
            f"eager: {type(attachment.root).__name__}: a part of it is compiled with backend='layerwise', and it runs without a "
            "compiler around that; compile the whole model with torch.compile(model, backend='layerwise'), or its parts with "
            "another backend"
        )


def attachment_with(weights: Sequence[torch.Tensor]) -> Attachment | None:
    """What offloads the model that these weights belong to without a compiler, or None."""
    engine = find_engine(weights)
    root = engine.root() if engine is not None and engine.root is not None else None
    return attachment_of(root) if root is not None else None


def attach(root: torch.nn.Module, config: OffloadConfig, units: Units | None = None) -> Attachment:
    """Offload a model: from now on it runs from host memory. `units`: the modules that stream, found where it is left out.

    Raises BudgetError where the weights of one unit do not fit the budget, OffloadError where somebody else already moves
    the model's weights. The model is then as it was.
    """
    refuse_foreign_hooks(root)
    if attachment_of(root) is not None:
        raise OffloadError(
            f"eager: {type(root).__name__}: it is offloaded already; call fxoffload.remove_layerwise_offload(model) first"
        )
    attachment = Attachment(root, config, units)
    _attachment_of[root] = weakref.ref(attachment)
    return attachment


class Attachment:
    """One offloaded model. `module_names`: of the units, in the order of definition."""

    def __init__(self, root: torch.nn.Module, config: OffloadConfig, units: Units | None) -> None:
        self._root = weakref.ref(root)
        self.config = config
        self._given = units
        _dissolve_parts(root)
        self.engine: Engine = engine_for(
            [*root.parameters(), *root.buffers()], root, config, available_device(config.onload_device)
        )
        self._followers: dict[str, Follower] = {}
        self._activations: dict[str, int] = {}
        """What forwards by other units took."""
        self._hooks: list[RemovableHandle] = []
        self._entries: list[Entry] = []
        self._running: Follower | None = None
        self._alone: torch.nn.Module | None = None
        """The unit that was called outside all entries; or the root, by a forward that somebody put in place of the entry."""
        try:
            self.units = self._find()
            self._structure, self._parts = _structure(root), find_parts(root, self.engine.device)
            if config.eager_offload:
                self._follower("forward")
            self._stand_in(root)
        except BaseException:
            self.detach()
            if not self.engine.planned:
                # What was packed before it went wrong.
                self.engine.dissolve()
            raise

    @property
    def root(self) -> torch.nn.Module:
        root = self._root()
        assert root is not None
        return root

    @property
    def module_names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units.units)

    def detach(self, device: torch.device | None = None) -> None:
        """Give the model back: no hooks, its weights in ordinary host memory, or on `device`. May be called again."""
        root = self._root()
        with self.engine.lock:
            self._unhook()
            if root is not None and attachment_of(root) is self:
                del _attachment_of[root]
            if self._followers:
                self._followers.clear()
                self.engine.dissolve()
        if root is not None and device is not None:
            root.to(device)

    # -- set-up ----------------------------------------------------------------------------------------------------

    def _find(self) -> Units:
        if self._given is not None:
            return self._given
        limit_nbytes = split_limit(self.root, self.config, self.engine.budget_nbytes(self.config))
        return find_units(self.root, self.config, limit_nbytes=limit_nbytes)

    def _follower(self, entry: str, *, anew: bool = False) -> Follower:
        """The follower for one way through the model, made at its first use; `""` for units on their own."""
        self._see_structure()
        found = self._followers.get(entry)
        if found is not None and not found.is_stale() and not anew:
            return found
        engine = self.engine
        if found in engine.planned:
            engine.planned.remove(found)
        found = Follower(engine, self.config, machine_of(engine.device), self.root, self.units, measures=bool(entry))
        found.activation_nbytes = self._activations.get(entry, 0)
        found.decide_early()
        self._followers[entry] = found
        engine.planned = [*(p for p in engine.planned if not p.is_stale()), found]
        return found

    def _see_structure(self) -> None:
        """Find the units again when a module, a parameter, a buffer or a part of one was replaced, added or taken away."""
        root = self.root
        same = all(len(now) == len(then) and all(map(operator.is_, now.values(), then)) for now, then in self._structure)
        if same and all(id(part.tensor) == key for key, part in self._parts.items()):
            return
        former, given = self.units, self._given
        self._given = None
        units, parts = self._find(), find_parts(root, self.engine.device)
        same_places = _places(parts) == _places(self._parts)
        self._structure, self._parts = _structure(root), parts
        if same_places and units.are_same(former):
            # Other modules around them, as a cache of blocks puts there and takes away in every forward.
            self._given = given
            return
        self._take(units)

    def _take(self, units: Units) -> None:
        """Other units from the next call on."""
        self._unhook()
        self.units = units
        self.engine.planned = [p for p in self.engine.planned if p not in self._followers.values()]
        self._followers.clear()
        self._stand_in(self.root)

    def fit(self, budget: OffloadConfig) -> None:
        """Take another budget, and split units anew where those at hand do not fit it.

        Raises BudgetError, and leaves all as it was, where smaller ones do not fit either.
        """
        engine, former, before = self.engine, self.units, self.engine.budget
        engine.budget = budget
        try:
            for follower in self._followers.values():
                follower.decide(engine.budget_nbytes(self.config))
            units = former if self._followers else self._find()
        except BudgetError:
            units = self._find()
            if self._running is not None or units.are_same(former):
                engine.budget = before
                raise
        if units is former:
            return
        self._activations.update({entry: follower.activation_nbytes for entry, follower in self._followers.items()})
        try:
            self._repack(units)
        except BudgetError:
            engine.budget = before
            with suppress(BudgetError):
                self._repack(former)
            raise

    def _repack(self, units: Units) -> None:
        """Other units from the next call on, in buckets of their own."""
        self._take(units)
        self.engine.store.unpack([tensor for _, tensor in all_tensors(units)], coarse=True)
        if self.config.eager_offload:
            self._follower("forward")

    def _stand_in(self, root: torch.nn.Module) -> None:
        for name in ENTRIES:
            method = getattr(root, name, None)
            if callable(method) and not is_compiled(method):
                self._entries.append(Entry(self, name, method))
                self._entries[-1].stand_in(root)
        for index, unit in enumerate(self.units.units):
            before, after = Hook(self, index, enters=True), Hook(self, index, enters=False)
            self._hooks.append(unit.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(unit.module.register_forward_hook(after, with_kwargs=True, always_call=True))
        if all(unit.module is not root for unit in self.units.units):
            before, after = RootHook(self, enters=True), RootHook(self, enters=False)
            self._hooks.append(root.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
            self._hooks.append(root.register_forward_hook(after, with_kwargs=True, always_call=True))

    def _unhook(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        root = self._root()
        if root is not None:
            for entry in self._entries:
                entry.step_aside(root)
        self._entries.clear()

    # -- a call ----------------------------------------------------------------------------------------------------

    def call(self, entry: str, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of the root, from host memory."""
        if not self._hooks:
            # Detached, and somebody kept the stand-in.
            return method(*args, **kwargs)
        with self.engine.lock:
            if self._running is not None and (self._alone is None or self._is_in_root()):
                return method(*args, **kwargs)
            args, kwargs, looking = apart(self._begin_entry, entry, args, kwargs)
            completed = False
            try:
                with looking:
                    result = method(*args, **kwargs)
                completed = True
            finally:
                apart(self._end, completed=completed)
            target = self.config.output_device
            return result if target is None else to_device(result, target)

    def _begin_entry(self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any]:
        self._end_alone(completed=False)
        moved = self._begin(entry, args, kwargs, ordered=True)
        assert self._running is not None
        return *moved, self._running.looking()

    def runs_here(self) -> bool:
        """Whether this is inside of a call. Waits for the calls of other threads."""
        with self.engine.lock:
            if self._alone is not None and not is_called(self._alone, beyond=False):
                # Interrupted, and the hook never ran.
                self._end_alone(completed=False)
            return self._running is not None

    def enter_root(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """The root is called. Returns its arguments on the device, where a forward without an entry around it is to run.

        A library may have put its own in place of the entry, as a cache of steps does. The next call has an entry around it.
        """
        root = self.root
        theirs = root.forward
        with self.engine.lock:
            if self._alone is root and not is_called(root, beyond=True):
                # Interrupted, and the hook never ran.
                self._end_alone(completed=False)
            if self._running is not None or theirs in self._entries or is_compiled(theirs):
                return None
            self._entries.append(Entry(self, "forward", theirs))
            self._entries[-1].stand_in(root)
            args, kwargs, _ = self._begin_entry("forward", args, kwargs)
            self._alone = root
            self.engine.lock.acquire()
            return args, kwargs

    def _is_in_root(self) -> bool:
        return self._alone is self.root and is_called(self.root, beyond=False)

    def leave_root(self, result: Any) -> Any:
        """The root returned, or raised and there is no result. Returns the result where it has to be."""
        if self._alone is not self.root:
            return None
        # Nothing was learned: no mode that a missing hook would leave behind has looked for weights read outside their units.
        self._end_alone(completed=False)
        self.engine.forwards += result is not None
        target = self.config.output_device
        return None if target is None else to_device(result, target)

    def enter(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A unit is called. Returns its arguments, where they had to come to the device first."""
        with self.engine.lock:
            if self._alone is not None and not is_called(self._alone, beyond=self._alone == self._module(unit)):
                # A call of a unit on its own was interrupted, and its hook never ran.
                self._end_alone(completed=False)
            if self._running is not None:
                self._running.enter(unit)
                return None
            moved = self._begin("", args, kwargs, ordered=False)
            follower = self._running
            assert follower is not None
            self._alone = self._module(unit)
            self.engine.lock.acquire()
            try:
                follower.enter(unit)
            except BaseException:
                self._end_alone(completed=False)
                raise
            return moved

    def leave(self, unit: int) -> None:
        """The unit returned or raised; or its call was refused before it began."""
        running = self._running
        if running is not None and running.innermost == unit:
            running.leave(unit)
            if self._alone is self._module(unit) and running.innermost is None:
                self._end_alone(completed=True)

    def _module(self, unit: int) -> torch.nn.Module:
        return self.units.units[unit].module

    def _begin(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, ordered: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        follower = self._follower(entry)
        self._refuse_gradients(follower)
        args, kwargs = self._to_onload((args, kwargs))
        shared = self.engine.shared_budget(self.config)
        if shared is not None:
            shared.lock.acquire()
        try:
            inputs = [*tensors_in((args, kwargs))]
            try:
                follower.begin(inputs, ordered=ordered)
            except Retied:
                follower = self._follower(entry, anew=True)
                follower.begin(inputs, ordered=ordered)
        except BaseException:
            if shared is not None:
                shared.lock.release()
            raise
        self._running = follower
        return args, kwargs

    def _to_onload(self, given: Any) -> Any:
        """Inputs on the onload device, wherever they were."""
        if any(tensor.is_meta for tensor in tensors_in(given)):
            raise OffloadError(
                f"eager: {type(self.root).__name__}: an input is on the meta device, without bytes; give one that is on "
                f"{str(self.engine.device)!r}, or on another device that it can be copied from"
            )
        return to_device(given, self.engine.device)

    def _end(self, *, completed: bool) -> None:
        follower, self._running = self._running, None
        assert follower is not None
        shared = self.engine.shared_budget(self.config)
        try:
            follower.end(completed=completed)
        finally:
            if shared is not None:
                shared.lock.release()

    def _end_alone(self, *, completed: bool) -> None:
        if self._alone is not None:
            self._alone = None
            try:
                self._end(completed=completed)
            finally:
                self.engine.lock.release()

    def _refuse_gradients(self, follower: Follower) -> None:
        if torch.is_grad_enabled() and follower.requires_grad:
            raise GradientError(
                f"eager: {type(self.root).__name__}: its weights require gradients, and weights are streamed for inference only; "
                "call the model under torch.no_grad() or torch.inference_mode()"
            )


def _dissolve_parts(root: torch.nn.Module) -> None:
    """Parts of the model that were compiled for our backend and called before are offloaded with it from now on."""
    parts = {id(module) for module in root.modules() if module is not root}
    engines = [find_engine([tensor]) for tensor in (*root.parameters(), *root.buffers())]
    for engine in {id(engine): engine for engine in engines if engine is not None}.values():
        if engine.root is not None and id(engine.root()) in parts:
            with engine.lock:
                engine.dissolve()


def _structure(root: torch.nn.Module) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Every dict that holds modules, parameters and buffers, with what it holds now."""
    dicts = (d for m in root.modules() for d in (m._modules, m._parameters, m._buffers))
    return [(d, tuple(d.values())) for d in dicts]


def _places(parts: Mapping[int, Part]) -> dict[int, tuple[Any, ...]]:
    """Where parts of weights are, whatever the names of their modules."""
    return {key: (part.module, part.key, part.path, part.wrapped) for key, part in parts.items()}
