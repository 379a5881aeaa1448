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

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from fxoffload.attached import (
    attached_beside,
    attachment_of,
    dissolve_parts,
    forget,
    refuse_apart,
    refuse_nested,
    remember,
    running_beside,
)
from fxoffload.config import OffloadConfig
from fxoffload.containers import tensors_in, to_device
from fxoffload.devices import available_device
from fxoffload.engine import Engine, engine_for
from fxoffload.entries import Entry, Hook, RootHook, apart, is_called, is_compiled
from fxoffload.errors import GradientError, OffloadError
from fxoffload.follow import Follower
from fxoffload.foreign import refuse_foreign_hooks
from fxoffload.planned import Retied
from fxoffload.storages import is_differentiated
from fxoffload.units import Units
from fxoffload.ways import Ways

ENTRIES = ("forward", "encode", "decode", "get_text_features", "get_image_features")
"""Methods that callers begin with, where a model has them."""


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
    remember(attachment)
    return attachment


class Attachment:
    """One offloaded model. `module_names`: of the units, in the order of definition."""

    def __init__(self, root: torch.nn.Module, config: OffloadConfig, units: Units | None) -> None:
        self._root = weakref.ref(root)
        self.config = config
        dissolve_parts(root)
        self.engine: Engine = engine_for(
            [*root.parameters(), *root.buffers()],
            root,
            config,
            available_device(config.onload_device),
            beside=next((other.engine for _, other in attached_beside(root)), None),
        )
        self._ways = Ways(self.engine, config, root, units, self._hook_anew)
        self._hooks: list[RemovableHandle] = []
        self._entries: list[Entry] = []
        self._running: Follower | None = None
        self._alone: torch.nn.Module | None = None
        """The unit that was called outside all entries; or the root, by a forward that somebody put in place of the entry."""
        try:
            refuse_apart(root, self.engine)
            self._ways.look()
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
    def units(self) -> Units:
        return self._ways.units

    @property
    def module_names(self) -> tuple[str, ...]:
        return tuple(unit.name for unit in self.units.units)

    def detach(self, device: torch.device | None = None) -> None:
        """Give the model back: no hooks, its weights in ordinary host memory, or on `device`. May be called again."""
        root = self._root()
        with self.engine.lock:
            self._unhook()
            if root is not None:
                forget(self, root)
            self._ways.dissolve()
        if root is not None and device is not None:
            root.to(device)

    def fit(self, budget: OffloadConfig) -> Callable[[], None]:
        """Take another budget, and split units anew where those at hand do not fit it.

        Returns what takes it back. Raises BudgetError, and leaves all as it was, where smaller ones do not fit either.
        """
        return self._ways.fit(budget, runs=self._running is not None)

    # -- hooks -----------------------------------------------------------------------------------------------------

    def _hook_anew(self) -> None:
        self._unhook()
        self._stand_in(self.root)

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
        with self.engine.turn(self.config):
            inside = self._running is not None and (self._alone is None or self._is_in_root())
            if inside or not self._hooks:
                # Without hooks: detached while this waited for its turn.
                return method(*args, **kwargs)
            args, kwargs, looking = apart(self._begin_entry, entry, args, kwargs)
            completed = False
            try:
                with looking:
                    result = method(*args, **kwargs)
                result = apart(self._hand_out, result)
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
        with self.engine.turn(self.config):
            if not self._hooks:
                return None
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
        """The root returned, or raised and there is no result. Returns the result where it has to be another one."""
        if self._alone is not self.root:
            return None
        try:
            kept = self._hand_out(result)
        finally:
            # Nothing was learned: no mode that a missing hook would leave behind has looked for weights read outside their units.
            self._end_alone(completed=False)
        self.engine.forwards += result is not None
        target = self.config.output_device
        kept = kept if target is None else to_device(kept, target)
        return None if kept is result else kept

    def enter(self, unit: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """A unit is called. Returns its arguments, where they had to come to the device first."""
        with self.engine.lock:
            # Without a turn, which a thread that waits for the engine may have: the budget of this model may be another one.
            if self._is_lent(unit):
                return None
        with self.engine.turn(self.config):
            if not self._hooks:
                return None
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

    def leave(self, unit: int, result: Any) -> Any:
        """The unit returned, or raised and there is no result; or its call was refused before it began.

        Returns the result where it has to be another one.
        """
        running = self._running
        if running is None or running.innermost != unit:
            return None
        kept = running.leave(unit, result)
        if self._alone is self._module(unit) and running.innermost is None:
            try:
                kept = self._hand_out(kept)
            finally:
                self._end_alone(completed=True)
        return None if kept is result else kept

    def _is_lent(self, unit: int) -> bool:
        """Whether a forward of another model runs here that has this module too, and moves its weights."""
        return self._running is None and any(other.moves(self._module(unit)) for other in running_beside(self))

    def moves(self, module: torch.nn.Module) -> bool:
        """Whether the forward that runs moves all weights of a module."""
        return self._running is not None and self._running.moves([*module.parameters(), *module.buffers()])

    def _hand_out(self, result: Any) -> Any:
        assert self._running is not None
        self._refuse_gradients("results", tensors_in(result))
        return self._running.hand_out(result)

    def _module(self, unit: int) -> torch.nn.Module:
        return self.units.units[unit].module

    def _begin(
        self, entry: str, args: tuple[Any, ...], kwargs: dict[str, Any], *, ordered: bool
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        refuse_nested(self)
        self._refuse_gradients("inputs", tensors_in((args, kwargs)))
        follower = self._ways.follower(entry)
        self._refuse_gradients("weights", follower.weights())
        args, kwargs = self._to_onload((args, kwargs))
        shared = self.engine.shared_budget(self.config)
        if shared is not None:
            shared.begin(self.engine)
        try:
            inputs = [*tensors_in((args, kwargs))]
            try:
                follower.begin(inputs, ordered=ordered)
            except Retied:
                follower = self._ways.follower(entry, anew=True)
                follower.begin(inputs, ordered=ordered)
        except BaseException:
            if shared is not None:
                shared.end()
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
                shared.end()

    def _end_alone(self, *, completed: bool) -> None:
        if self._alone is not None:
            self._alone = None
            try:
                self._end(completed=completed)
            finally:
                self.engine.lock.release()

    def _refuse_gradients(self, what: str, tensors: Iterable[torch.Tensor]) -> None:
        name = type(self.root).__name__
        if is_differentiated():
            raise GradientError(
                f"eager: {name}: a transform of torch.func that is not vmap calls it, and fxoffload streams weights for "
                "inference only; call the model outside of torch.func.grad, jvp and their like"
            )
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise GradientError(
                f"eager: {name}: its {what} require gradients, and weights are streamed for inference only; "
                "call the model under torch.no_grad() or torch.inference_mode()"
            )
