"""What Dynamo calls: finds the binding of the weights that came, or makes one."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Mapping
from typing import Any

import torch

from fxoffload.attached import refuse_inside
from fxoffload.binding import Binding
from fxoffload.engine import Engine, engine_for, find_engine, models_beside
from fxoffload.owner import named_tensors, owner_of, tensor_names
from fxoffload.planned import Retied
from fxoffload.program import Program, ids_of, picker
from fxoffload.rows import Source


class Dispatch:
    """The callable of one compiled graph. Two models of one class share it, and with a graph break, all blocks of a model do."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._bindings: weakref.WeakValueDictionary[bytes, Binding] = weakref.WeakValueDictionary()
        self._pick = picker(program.places)
        self._weightless: list[Engine] = []
        """Engines that no weight keeps alive, because the graph has none with bytes."""

    def __call__(self, *args: Any) -> Any:
        weights = self._pick(args)
        refuse_inside(weights)
        binding = self._bindings.get(ids_of(weights))
        if binding is None:
            binding = self.bind(args)
        try:
            return binding.run(args, weights)
        except Retied:
            return self.bind(args).run(args, weights)

    def bind(self, args: Any) -> Binding:
        """Bind the program to the weights among these arguments, in the engine of the model that they belong to."""
        engine, tensors, names = place(self.program, args)
        with engine.lock:
            binding = Binding(self.program, engine, args, tensors, names)
            engine.drop_stale()
            engine.planned.append(binding)
            self._bindings[binding.ids] = binding
            if find_engine(list(tensors.values())) is not engine:
                self._weightless.append(engine)
        return binding


def place(program: Program, args: Any) -> tuple[Engine, dict[Source, torch.Tensor], dict[Source, str]]:
    """The engine for the weights among a call's arguments, and these weights and their qualified names by place."""
    tensors: dict[Source, torch.Tensor] = {p: p.of(args[p.position]) for p in program.places}
    root = owner_of(args[program.places[0].position]) if tensors else None
    engine = engine_for(list(tensors.values()), root, program.config, program.onload)
    known = tensor_names(root)
    traced = {source.whole: w.name for w, source in zip(program.facts.weights, program.sources, strict=True)}
    names = {p: known.get(id(t), traced[p]) for p, t in tensors.items()}
    if root is not None:
        with engine.lock:
            beside = [t for other in models_beside(engine, root) for _, t in named_tensors(other)]
            found = {id(t): engine.store.find(t) for t in beside}
            apart = {key for key, packed in found.items() if packed is None or known.get(key) != packed.name}
            _take_places(engine, tensors, names, apart)
    return engine, tensors, names


def _take_places(
    engine: Engine, tensors: Mapping[Source, torch.Tensor], names: Mapping[Source, str], apart: Collection[int]
) -> None:
    """A parameter that was replaced by another, or swapped with one, moves into the bytes of its name: plans stay as they are.

    Not where weights share bytes: those stay together. Nor into bytes that somebody else has a tensor of, such as a state dict
    set aside, nor into those in `apart`, which another model has, whose weights may have the same names.
    """
    store = engine.store
    by_name = store.by_name(apart)
    pairs = [(by_name.get(names[p]), tensor) for p, tensor in tensors.items()]
    moved = [(packed, t) for packed, t in pairs if packed is not None and packed.tensor() is not t and packed.is_like(t)]
    places, coming = [packed for packed, _ in moved], [tensor for _, tensor in moved]
    homes = [home for tensor in coming if (home := store.find(tensor)) is not None]
    if not moved or any(p.is_aliased() for p in places) or any(map(store.is_tied, (*places, *homes))) or store.sharing(coming):
        return
    store.rebind(places, coming)
    engine.adopt(coming)
    engine.forget(places)
