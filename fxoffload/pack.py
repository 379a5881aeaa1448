"""From a program's buckets, which know placeholders, to a model's store, which knows tensors."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch

from fxoffload.engine import Engine
from fxoffload.program import Program
from fxoffload.rows import Source
from fxoffload.store import HostWeight, overlapping


def pack_program(
    program: Program, engine: Engine, tensors: Mapping[Source, torch.Tensor], names: Mapping[Source, str]
) -> dict[str, HostWeight]:
    """Pack what is not in the store yet. Returns every weight of the program that has bytes, by placeholder.

    What another graph of the model packed stays where it is. Tensors that share bytes go to the same bucket, whichever segments
    read them: a write to one must reach the other.
    """
    source_of = {w.placeholder: source for w, source in zip(program.facts.weights, program.sources, strict=True)}
    engine.store.unpack(tensors.values(), coarse=True)
    fresh = {p: t for p, t in tensors.items() if engine.store.find(t) is None}
    distinct = {id(t): (names[p], t) for p, t in fresh.items()}
    sharing = {id(t): group for group in overlapping(list(distinct.values())) for _, t in group}
    start = time.perf_counter()
    moved = {t.device for t in fresh.values() if t.device.type != "cpu"}
    for bucket in program.buckets.buckets:
        wanted: dict[int, tuple[str, torch.Tensor]] = {}
        for placeholder in bucket.weights:
            tensor = tensors[source_of[placeholder].whole]
            if engine.store.find(tensor) is None:
                wanted.update((id(t), (name, t)) for name, t in sharing[id(tensor)])
        if any(t.numel() for _, t in wanted.values()):
            whole = source_of[bucket.weights[0]].whole
            rows = [s.rows for s in program.sources if s.whole == whole and s.rows is not None]
            _pack_bucket(engine, bucket.name, list(wanted.values()), rows)
    engine.store.seconds += time.perf_counter() - start
    if moved:
        engine.log_takeover(sorted(map(str, moved)), fresh.values())
    found: dict[str, HostWeight] = {}
    for placeholder, source in source_of.items():
        packed = engine.store.find(tensors[source.whole])
        part = next((p for p in packed.parts if p.rows == source.rows), None) if packed is not None else None
        if part is not None and part.nbytes:
            found[placeholder] = part
    return found


def _pack_bucket(engine: Engine, name: str, tensors: list[tuple[str, torch.Tensor]], rows: list[tuple[int, int]]) -> None:
    """Pack into one bucket, or, for a weight that was cut, into one for each of its `rows`."""
    if rows:
        engine.store.pack_rows(tensors, rows)
    else:
        engine.store.pack(name, tensors)
    engine.adopt([tensor for _, tensor in tensors])
