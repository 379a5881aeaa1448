"""The tensors of a model that runs without a compiler: which there are, which wrappers they are in, and where each is now.

While nothing runs, every tensor is what it is in the host store. While its unit runs it is a view of the arena, and the wrappers
that it is in say that they are on the device. What the model writes meanwhile is brought to the host when the unit is left; of
tensors that are on the device whatever runs, when the forward ends.
"""

# Private names of torch: the base of batch norms, the end of function modes. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from fxoffload.arena import Arena
from fxoffload.edits import EditWatch, elements, same_bytes, version_of
from fxoffload.engine import Engine
from fxoffload.errors import WeightError
from fxoffload.foreign import cast_weights
from fxoffload.layout import share_bytes
from fxoffload.pack import is_small_buffer, pack_units
from fxoffload.packed import HostTensor, HostWeight
from fxoffload.returned import copy_lent, lies_in
from fxoffload.storages import plain_tensors, storage_of
from fxoffload.units import Named, Units
from fxoffload.wrappers import Part, Path, find_parts, held_by, label

Views = list[tuple[HostTensor, torch.Tensor]]
"""Tensors, and the memory on the device that they are views of."""
Version = tuple[int | None, ...]
"""Of a tensor, and of the wrappers that it is in."""

_HOST = torch.device("cpu")


class Managed:
    """All tensors of one model, packed.

    Holds no module strongly, and a tensor only while a forward runs, since the engine, which lives as long as they do, holds it.
    """

    def __init__(self, engine: Engine, root: torch.nn.Module, units: Units) -> None:
        """Packs what is not in the store yet."""
        self._device = engine.device
        self._find = engine.store.find
        parts = find_parts(root, engine.device)
        pack_units(engine, units, parts)
        empty: dict[int, HostTensor] = {}
        self.units = [self._found(unit.tensors, empty) for unit in units.units]
        """Those of every unit."""
        rest = self._found(units.rest, empty)
        self.packed = _distinct([p for packed in (*self.units, rest) for p in packed])
        """Each once."""
        self._parts = {id(p): parts[id(t)] for p, t in zip(self.packed, self.tensors(), strict=True) if id(t) in parts}
        """Those that are part of a weight, or beside one."""
        self.rest = _distinct([*rest, *(p for p in self.packed if self._is_small_buffer(p))])
        """Resident, and on the device as long as a forward runs."""
        self.whole: dict[int, HostWeight] = {id(p): engine.store.part(p, None) for p in self.packed if p.parts and p.view.numel()}
        """Those that have bytes, in one piece."""
        self._by_id = {id(tensor): p for p, tensor in zip(self.packed, self.tensors(), strict=True)}
        self._statistics = [(weakref.ref(m), p) for m in root.modules() for p in self._statistics_of(m)]
        self._cast = {id(self._by_id[id(t)]) for t in cast_weights(root) if id(t) in self._by_id}
        """Weights that hooks convert around every use, and back."""
        self._unseen: set[int] = set()
        """Those that the model writes, and no version counter shows it."""
        held = held_by(self._place(p) for p in self.packed)
        self._wrappers = [Part(module, "", key, path) for (module, key), path in held]
        self._around: dict[int, list[int]] = {}
        """The wrappers, by their index, that a tensor is in."""
        for i, indices in enumerate(held.values()):
            for k in indices:
                self._around.setdefault(id(self.packed[k]), []).append(i)
        wrappers = self.wrappers()
        for wrapper in wrappers:
            label(wrapper, _HOST)
        views = [p.view for p in self.packed]
        self.watch = EditWatch(self.tensors(), views, list(zip(wrappers, held.values(), strict=True)))
        self.present: dict[int, HostTensor] = {}
        """What is on the device now, by `id`."""
        self._now: list[torch.Tensor] = []
        """The wrappers, while a forward runs."""
        self._arena: frozenset[int] = frozenset()
        """The storages that the weights of units are in, while a forward runs."""

    def _found(self, tensors: Sequence[Named], empty: dict[int, HostTensor]) -> list[HostTensor]:
        """What the store has of these tensors; those without bytes, which it may not have, are kept in `empty`, by `id`."""
        return [
            self._find(tensor) or empty.setdefault(id(tensor), HostTensor(name, weakref.ref(tensor), tensor.data))
            for name, tensor in tensors
        ]

    def _is_buffer(self, packed: HostTensor) -> bool:
        return id(packed) not in self._parts and not isinstance(tensor_of(packed), torch.nn.Parameter)

    def _is_small_buffer(self, packed: HostTensor) -> bool:
        return self._is_buffer(packed) and is_small_buffer(tensor_of(packed))

    def _statistics_of(self, module: torch.nn.Module) -> list[HostTensor]:
        """Buffers that batch norm writes in training mode, which no version counter shows."""
        if not isinstance(module, torch.nn.modules.batchnorm._NormBase) or not module.track_running_stats:
            return []
        return [p for t in module.buffers() if (p := self._by_id.get(id(t))) is not None]

    def _place(self, packed: HostTensor) -> tuple[Any, Path]:
        """What holds the wrapper that a tensor is in, and the path from there; an empty one for a tensor that is in none."""
        part = self._parts.get(id(packed))
        return ((part.module, part.key), part.path) if part is not None and part.wrapped else (None, ())

    def tensors(self) -> list[torch.Tensor]:
        """Each once, as `packed`."""
        return [tensor_of(p) for p in self.packed]

    def wrappers(self) -> list[torch.Tensor]:
        """All weights, and parts of weights, that are made of some of these tensors."""
        return [part.tensor for part in self._wrappers]

    def is_stale(self) -> bool:
        """Whether a tensor is gone, or the store has packed one anew."""
        return any((t := p.tensor()) is None or (bool(p.view.numel()) and self._find(t) is not p) for p in self.packed)

    def weights(self, packed: Sequence[HostTensor]) -> list[HostWeight]:
        """Those of these tensors that have bytes."""
        return [self.whole[id(p)] for p in packed if id(p) in self.whole]

    def found_in(self, tensor: torch.Tensor) -> list[HostTensor]:
        """Those that a tensor is, or consists of."""
        pairs = [(self._by_id.get(id(plain)), plain) for plain in plain_tensors(tensor)]
        return [packed for packed, plain in pairs if packed is not None and packed.tensor() is plain]

    def keep(self, packed: HostTensor) -> bool:
        """From the next forward on a tensor is resident. Returns whether that is new."""
        if any(p is packed for p in self.rest):
            return False
        self.rest.append(packed)
        return True

    def take_over(self, former: Managed) -> None:
        """Know of the tensors what another one learned, which has the same units."""
        for mine, other in zip(self.packed, former.packed, strict=True):
            if any(other is kept for kept in former.rest):
                self.keep(mine)
            if id(other) in former._unseen:
                self._unseen.add(id(mine))

    # -- while a forward runs --------------------------------------------------------------------------------------

    def begin(self, wrappers: list[torch.Tensor], arena: Arena) -> None:
        """A forward begins, with these wrappers."""
        self._now = wrappers
        self._arena = frozenset(storage_of(piece.memory) for piece in arena.pieces if piece.memory is not None)
        self.present.clear()

    def end(self) -> None:
        """The forward is over: all tensors are on the host."""
        self.take_out(list(self.present.values()))
        self._now, self._arena = [], frozenset()

    def put_in(self, views: Views) -> None:
        for packed, view in views:
            tensor_of(packed).data = view
            self.present[id(packed)] = packed
        self._label([packed for packed, _ in views], self._device)

    def take_out(self, packed: Sequence[HostTensor]) -> None:
        for p in packed:
            tensor_of(p).data = p.view
            self.present.pop(id(p), None)
        self._label(packed, _HOST)

    def copied(self, result: Any, lent: Views | None = None) -> Any:
        """A result with copies of what of it lies in lent memory: in these views, or anywhere in the arena.

        A weight that is returned itself stays the weight. It is on the host where it is not needed on the device, so where
        the forward ends (`lent` is left out) and that is another device, it leaves as a copy there.
        """
        leaves = lent is None and self._device.type != "cpu"

        def is_lent(tensor: torch.Tensor) -> bool:
            # First, since to ask a weight anything else looks like a read of it.
            if self.found_in(tensor):
                return leaves
            return lies_in(tensor, self._arena) and (lent is None or any(share_bytes(tensor, view) for _, view in lent))

        return copy_lent(result, is_lent, self._device)

    def _label(self, packed: Sequence[HostTensor], device: torch.device) -> None:
        """Let the wrappers of these tensors say that they are where these are."""
        if self._around and self._device.type != "cpu":
            for i in {i for p in packed for i in self._around.get(id(p), ())}:
                label(self._now[i], device)

    def see_write(self, tensor: torch.Tensor) -> None:
        """The model writes to a weight through its `data`; from now on it is taken as written whenever it was on the device."""
        self._unseen.update(id(packed) for packed in self.found_in(tensor))

    def take_given(self, views: Views) -> list[HostTensor]:
        """Tensors that the model gave other memory while they were on the host: the values go there, and to these views.

        Returns these tensors. Raises WeightError for one that has another layout there.
        """
        taken: list[HostTensor] = []
        # Who looks for reads of weights must not take these for any.
        with torch._C.DisableTorchFunction(), torch.inference_mode():
            for packed, view in views:
                if id(packed) in self._cast or tensor_of(packed).data_ptr() == packed.view.data_ptr():
                    continue
                try:
                    memory = self._memory_given(packed)
                except WeightError:
                    tensor_of(packed).data = packed.view
                    raise
                elements(packed.view).copy_(elements(memory))
                elements(view).copy_(elements(memory))
                taken.append(packed)
        if taken:
            self.watch.written(self.tensors(), self.wrappers())
        return taken

    def versions(self, views: Views) -> list[Version]:
        """Where the counters of these tensors stand."""
        if not self._around:
            return [(version_of(tensor_of(packed)),) for packed, _ in views]
        now, around = self._now, self._around
        return [(version_of(tensor_of(p)), *(version_of(now[i]) for i in around.get(id(p), ()))) for p, _ in views]

    def write_back(self, views: Views, versions: Sequence[Version], *, looks: bool) -> list[HostTensor]:
        """Bring tensors to the host whose counters moved, or that lie elsewhere now. Returns these.

        `looks`: find buffers that torch does not know are written, as by a Triton kernel, by their bytes; they are taken as
        written from now on. Raises WeightError for a tensor that has another layout where it lies now.
        """
        written: list[HostTensor] = []
        if looks:
            self._unseen.update(id(p) for p, view in views if self._is_buffer(p) and not same_bytes(p.view, view))
        unseen = self._unseen | {id(p) for module, p in self._statistics if (m := module()) is not None and m.training}
        for (packed, view), then, now in zip(views, versions, self.versions(views), strict=True):
            moved = tensor_of(packed).data_ptr() != view.data_ptr() and id(packed) not in self._cast
            memory = self._memory_given(packed) if moved else view
            unknown = now == (None,) and self._is_small_buffer(packed)
            if now != then or memory is not view or id(packed) in unseen or unknown:
                with torch.inference_mode():
                    elements(packed.view).copy_(elements(memory))
                    if memory is not view:
                        # Where it is resident, the next forward reads it there.
                        elements(view).copy_(elements(memory))
                written.append(packed)
        if written:
            # What the model wrote is no edit.
            self.watch.written(self.tensors(), self.wrappers())
        return written

    def _memory_given(self, packed: HostTensor) -> torch.Tensor:
        """The memory that the model gave a tensor while it ran. Raises WeightError for another layout."""
        now, host = tensor_of(packed).detach(), packed.view
        if (now.dtype, now.shape, now.stride()) != (host.dtype, host.shape, host.stride()):
            raise WeightError(
                f"managed: {packed.name}: the model made it {now.dtype} {list(now.shape)} while it ran, and it is {host.dtype} "
                f"{list(host.shape)} in host memory; let the model do that before it is offloaded"
            )
        return now


def tensor_of(packed: HostTensor) -> torch.Tensor:
    """The tensor of the model that was packed."""
    tensor = packed.tensor()
    assert tensor is not None, f"{packed.name} is gone, and the structure of the model was not looked at"
    return tensor


def _distinct(packed: Sequence[HostTensor]) -> list[HostTensor]:
    return list({id(p): p for p in packed}.values())
