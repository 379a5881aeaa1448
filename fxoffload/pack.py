"""Into a model's store, which knows tensors: a program's buckets, which know placeholders, and units, which know modules."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence

import torch

from fxoffload.engine import Engine
from fxoffload.errors import WeightError
from fxoffload.layout import overlapping
from fxoffload.owner import named_tensors
from fxoffload.packed import HostWeight
from fxoffload.program import Program
from fxoffload.rows import Source
from fxoffload.units import Named, Units

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_SMALL_NBYTES = 1 << 20
"""Buffers below are resident: models write to them, and read them anywhere."""


def pack_program(
    program: Program, engine: Engine, tensors: Mapping[Source, torch.Tensor], names: Mapping[Source, str]
) -> dict[str, HostWeight]:
    """Pack what is not in the store yet. Returns every weight of the program that has bytes, by placeholder.

    What another graph of the model packed stays where it is. Tensors that share bytes go to the same bucket, whichever segments
    read them: a write to one must reach the other.
    """
    source_of = {w.placeholder: source for w, source in zip(program.facts.weights, program.sources, strict=True)}
    engine.unpack(list(tensors.values()), coarse=True)
    fresh = {p: t for p, t in tensors.items() if engine.store.find(t) is None}
    root = engine.root() if engine.root is not None else None
    # What other graphs of the model read may share bytes with what this one reads.
    elsewhere = [pair for pair in named_tensors(root) if type(pair[1]) in _PLAIN and engine.store.find(pair[1]) is None]
    distinct = {id(t): (name, t) for name, t in (*elsewhere, *((names[p], t) for p, t in fresh.items()))}
    sharing = {id(t): group for group in overlapping(list(distinct.values())) for _, t in group}
    start = time.perf_counter()
    moved = {t.device for t in fresh.values() if t.device.type != "cpu"}
    wanted: list[tuple[str, list[Named], list[tuple[int, int]]]] = []
    taken: set[int] = set()
    for bucket in program.buckets.buckets:
        members: dict[int, Named] = {}
        for placeholder in bucket.weights:
            tensor = tensors[source_of[placeholder].whole]
            if id(tensor) in sharing and id(tensor) not in taken:
                members.update((id(t), (name, t)) for name, t in sharing[id(tensor)])
        taken.update(members)
        if any(t.numel() for _, t in members.values()):
            whole = source_of[bucket.weights[0]].whole
            rows = [s.rows for s in program.sources if s.whole == whole and s.rows is not None]
            wanted.append((bucket.name, list(members.values()), rows))
    engine.store.check_room(list(fresh.values()), "the model")
    places = engine.store.find_places([[t for _, t in pairs] for _, pairs, _ in wanted])
    for (name, pairs, rows), place in zip(wanted, places, strict=True):
        if rows:
            engine.store.pack_rows(pairs, rows, place=place)
        else:
            engine.store.pack(name, pairs, place=place)
        engine.adopt([tensor for _, tensor in pairs])
    engine.store.seconds += time.perf_counter() - start
    if moved:
        engine.log_takeover(sorted(map(str, moved)), fresh.values())
    found: dict[str, HostWeight] = {}
    for placeholder, source in source_of.items():
        packed = engine.store.find(tensors[source.whole])
        if packed is not None and packed.parts and packed.view.numel():
            found[placeholder] = engine.store.part(packed, source.rows)
    return found


def pack_units(engine: Engine, units: Units, parts: Collection[int]) -> None:
    """Pack all tensors of a model that are not in the store yet. `parts`: as `unit_buckets` has it."""
    named = all_tensors(units)
    _refuse_meta(named)
    _refuse_sparse(named)
    tensors = [tensor for _, tensor in named]
    engine.unpack(tensors, coarse=False)
    fresh = [t for t in tensors if engine.store.find(t) is None]
    moved = sorted({str(t.device) for t in fresh if t.device.type != "cpu"})
    start = time.perf_counter()
    found = unit_buckets(units, {id(t) for t in fresh}, parts=parts)
    buckets = [(name, members) for name, members in found if any(t.numel() for _, t in members)]
    engine.store.check_room(fresh, "the model")
    places = engine.store.find_places([[t for _, t in members] for _, members in buckets])
    for (name, members), place in zip(buckets, places, strict=True):
        engine.store.pack(name, members, coarse=True, place=place)
    engine.store.seconds += time.perf_counter() - start
    engine.adopt(tensors)
    if moved:
        engine.log_takeover(moved, fresh)


def _refuse_meta(named: Sequence[Named]) -> None:
    found = [name for name, tensor in named if tensor.is_meta]
    if found:
        names = _listed(found)
        raise WeightError(
            f"pack: {names}: on the meta device, without bytes; load them first (fxoffload.load_safetensors(model, path))"
        )


def _refuse_sparse(named: Sequence[Named]) -> None:
    found = [(name, tensor.layout) for name, tensor in named if tensor.layout != torch.strided]
    if found:
        names = _listed([name for name, _ in found])
        raise WeightError(
            f"pack: {names}: layout {found[0][1]} cannot be streamed; convert it to a strided tensor (to_dense()), or give it to "
            "the model as an input"
        )


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def unit_buckets(units: Units, chosen: Collection[int], *, parts: Collection[int] = ()) -> list[tuple[str, list[Named]]]:
    """Names and contents of buckets for the tensors that are chosen, by `id`: those that the same units use lie in one.

    Tensors that share bytes go to the same bucket, whichever units use them: a write to one must reach the other. `parts`: those
    that are part of a weight, or beside one (`wrappers.find_parts`), by `id`; they stream with it also where they are small.
    """
    users: dict[int, set[int]] = {}
    for index, tensors in (*enumerate(u.tensors for u in units.units), (-1, units.rest)):
        for _, tensor in tensors:
            stays = index == -1 or (id(tensor) not in parts and is_small_buffer(tensor))
            users.setdefault(id(tensor), set()).add(-1 if stays else index)
    buckets: dict[tuple[int, ...], list[Named]] = {}
    for group in overlapping([pair for pair in all_tensors(units) if id(pair[1]) in chosen]):
        together = set[int]().union(*(users[id(t)] for _, t in group))
        buckets.setdefault((-1,) if -1 in together else tuple(sorted(together)), []).extend(group)
    return [
        ("rest" if key == (-1,) else units.units[key[0]].name + (".shared" if len(key) > 1 else ""), members)
        for key, members in sorted(buckets.items())
    ]


def all_tensors(units: Units) -> list[Named]:
    """Every tensor of a model once, by the first of its names."""
    named: dict[int, Named] = {}
    for tensors in (*(u.tensors for u in units.units), units.rest):
        for name, tensor in tensors:
            named.setdefault(id(tensor), (name, tensor))
    return list(named.values())


def is_small_buffer(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, torch.nn.Parameter) and tensor.numel() * tensor.element_size() < _SMALL_NBYTES
