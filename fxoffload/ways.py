"""The ways through a model that is offloaded without a compiler: its forward, and the other methods that callers begin with.

Each has a follower of its own, and all go by the same units. These are found anew where the model is made of other modules or
tensors than at the last look, and where a smaller budget wants them split.
"""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch

from fxoffload.attached import refuse_apart
from fxoffload.calibrate import machine_of
from fxoffload.config import OffloadConfig
from fxoffload.engine import Engine
from fxoffload.errors import BudgetError
from fxoffload.follow import Follower
from fxoffload.foreign import refuse_foreign_hooks
from fxoffload.pack import all_tensors
from fxoffload.units import Units, find_units, split_limit
from fxoffload.wrappers import Part, find_parts


class Ways:
    """Of one model. `given`: the units to begin with, found where it is left out. `changed` is called when there are others."""

    def __init__(
        self,
        engine: Engine,
        config: OffloadConfig,
        root: torch.nn.Module,
        given: Units | None,
        changed: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._root = weakref.ref(root)
        self._given = given
        self._changed = changed
        self._followers: dict[str, Follower] = {}
        self._activations: dict[str, int] = {}
        """What forwards by other units took."""
        self._structure: list[tuple[dict[str, Any], tuple[Any, ...]]] = []
        self._parts: dict[int, Part] = {}
        self.units = Units((), ())

    def look(self) -> None:
        """Find the units for the first time."""
        self.units = self._find()
        self._structure, self._parts = _structure(self.root), find_parts(self.root, self._engine.device)
        self._begin()

    @property
    def root(self) -> torch.nn.Module:
        root = self._root()
        assert root is not None
        return root

    def dissolve(self) -> None:
        """Where something was packed, the model is as it was before."""
        if self._followers:
            self._followers.clear()
            self._engine.dissolve()

    def follower(self, entry: str, *, anew: bool = False) -> Follower:
        """The follower for one way through the model, made at its first use; `""` for units on their own."""
        self._see_structure()
        found = self._followers.get(entry)
        if found is not None and not found.is_stale() and not anew:
            return found
        engine = self._engine
        if found in engine.planned:
            engine.planned.remove(found)
        found = Follower(engine, self._config, machine_of(engine.device), self.root, self.units, measures=bool(entry))
        found.activation_nbytes = self._activations.get(entry, 0)
        found.decide_early()
        self._followers[entry] = found
        engine.drop_stale()
        engine.planned.append(found)
        return found

    def fit(self, budget: OffloadConfig, *, runs: bool) -> Callable[[], None]:
        """Take another budget, and split units anew where those at hand do not fit it, unless one `runs`.

        Returns what takes it back. Raises BudgetError, and leaves all as it was, where smaller ones do not fit either.
        """
        engine, former, before = self._engine, self.units, self._engine.budget
        followers = dict(self._followers)

        def undo() -> None:
            engine.budget = before
            if self.units is not former:
                self._go_back(former, followers)

        engine.budget = budget
        try:
            units = self._fitting(runs=runs)
            if units is not former:
                self._activations.update({entry: follower.activation_nbytes for entry, follower in followers.items()})
                self._repack(units)
        except BaseException:
            undo()
            raise
        return undo

    def _fitting(self, *, runs: bool) -> Units:
        """The units at hand where they fit the engine's budget, else smaller ones. Raises BudgetError where there are none."""
        try:
            for follower in self._followers.values():
                follower.decide(self._engine.budget_nbytes(self._config))
            return self.units if self._followers else self._find()
        except BudgetError:
            units = self._find()
            if runs or units.are_same(self.units):
                raise
            return units

    def _find(self) -> Units:
        if self._given is not None:
            return self._given
        limit_nbytes = split_limit(self.root, self._config, self._engine.budget_nbytes(self._config))
        return find_units(self.root, self._config, limit_nbytes=limit_nbytes)

    def _begin(self) -> None:
        if self._config.eager_offload:
            self.follower("forward")

    def _see_structure(self) -> None:
        """Find the units again when a module, a parameter, a buffer or a part of one was replaced, added or taken away."""
        root = self.root
        same = all(len(now) == len(then) and all(map(operator.is_, now.values(), then)) for now, then in self._structure)
        if same and all(id(part.tensor) == key for key, part in self._parts.items()):
            return
        refuse_foreign_hooks(root)
        refuse_apart(root, self._engine)
        former, given = self.units, self._given
        self._given = None
        units, parts = self._find(), find_parts(root, self._engine.device)
        same_places = _places(parts) == _places(self._parts)
        self._structure, self._parts = _structure(root), parts
        if same_places and units.are_same(former):
            # Other modules around them, as a cache of blocks puts there and takes away in every forward.
            self._given = given
            return
        self._take(units)

    def _take(self, units: Units) -> None:
        """Other units from the next call on."""
        self.units = units
        self._engine.planned = [p for p in self._engine.planned if p not in self._followers.values()]
        self._followers.clear()
        self._changed()

    def _repack(self, units: Units) -> None:
        """Other units from the next call on, in buckets of their own."""
        self._take(units)
        self._engine.unpack([tensor for _, tensor in all_tensors(units)], coarse=True)
        self._begin()

    def _go_back(self, units: Units, followers: Mapping[str, Follower]) -> None:
        """The units of before, and all that these followers learned with them."""
        # A model whose budget is too small for what was measured says so at its next call, as it would have.
        with suppress(BudgetError):
            self._repack(units)
            for entry, former in followers.items():
                self.follower(entry).take_over(former)


def _structure(root: torch.nn.Module) -> list[tuple[dict[str, Any], tuple[Any, ...]]]:
    """Every dict that holds modules, parameters and buffers, with what it holds now."""
    dicts = (d for m in root.modules() for d in (m._modules, m._parameters, m._buffers))
    return [(d, tuple(d.values())) for d in dicts]


def _places(parts: Mapping[int, Part]) -> dict[int, tuple[Any, ...]]:
    """Where parts of weights are, whatever the names of their modules."""
    return {key: (part.module, part.key, part.path, part.wrapped) for key, part in parts.items()}
