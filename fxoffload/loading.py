"""Loading a checkpoint into a model on the meta device: every byte is read once, to where it stays.

Memory is laid out as `layerwise_offload` packs a model, one mapping (`regions`) for the weights of each unit, and these in the
order of definition. So packing takes the mappings over as they are, and only pins them; a compiled graph too, where its pieces
are runs of them. What lies otherwise is moved, one bucket after the other: the host never holds more than the weights and a few
of these.
"""

# Private names of torch: the dictionaries of parameters and buffers of a module. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from fxoffload.api import module_of
from fxoffload.buckets import align
from fxoffload.checkpoint import Stored, find_tensors, read_into
from fxoffload.config import OffloadConfig
from fxoffload.errors import OffloadError
from fxoffload.hostmemory import host_memory
from fxoffload.pack import all_tensors, unit_buckets
from fxoffload.regions import new_region
from fxoffload.sizes import show_size
from fxoffload.units import find_units

_THREADS = 8
"""One thread does not fill a fast disk, nor copy a cached file as fast as memory is."""


class Loaded(NamedTuple):
    """What `load_state_dict` returns: names that the checkpoint does not have, and names that the model does not have."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def load_safetensors(
    model: Any,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    strict: bool = True,
    progress: bool = True,
) -> Loaded:
    """Load a checkpoint into a model whose parameters are on the meta device, to be offloaded then.

    `path`: a `.safetensors` file, the index of a sharded checkpoint, or a folder with one of either. `dtype` converts what is
    floating; None keeps the dtypes of the checkpoint. `strict`, missing and unexpected names, and parameters of another shape are
    as in `load_state_dict`; a tied weight need be there under one of its names only, also where the model has to tie it (its
    `tie_weights`). Parameters keep their `requires_grad`.

    The host holds the weights once, also while this runs. Raises RuntimeError as `load_state_dict` does; OffloadError for files
    that cannot be read, where host memory does not suffice, and where `strict` and tensors would stay on the meta device. The
    model is as it was then.
    """
    root = module_of(model)
    stored = find_tensors(Path(path))
    with torch.inference_mode(False), _restored(root):
        expected = _tied(root, stored)
        source_of = _sources(expected, stored)
        empty = {name: torch.empty(entry.shape, dtype=_dtype(entry, dtype), device="meta") for name, entry in stored.items()}
        with _restored(root, always=True):
            # Without a byte read, to know what is missing and what nobody asks for.
            outcome = root.load_state_dict(_state(expected, source_of, empty), strict=strict, assign=True)
            left = _untouched_meta(root, expected)
        if strict and left:
            raise OffloadError(
                f"loading: {type(root).__name__}: {', '.join(left)}: on the meta device, and saved in no checkpoint; build the "
                "model with only its parameters there (accelerate.init_empty_weights()), or pass strict=False and set them"
            )
        read = {source: stored[source] for name, source in source_of.items() if name not in outcome.unexpected_keys}
        _check_room(root, read, dtype)
        tensors = _read(_groups(root, read), read, dtype, progress=progress)
        root.load_state_dict(_state(expected, source_of, tensors), strict=strict, assign=True)
    return Loaded(list(outcome.missing_keys), list(outcome.unexpected_keys))


def _tied(root: torch.nn.Module, stored: Mapping[str, Stored]) -> dict[str, torch.Tensor]:
    """The model's state. Where the checkpoint lacks a part of it, the model ties its weights first, if it knows how to.

    A model of transformers that is made in `accelerate.init_empty_weights()` has lost its ties.
    """
    expected: dict[str, torch.Tensor] = root.state_dict(keep_vars=True)
    tie: Any = getattr(root, "tie_weights", None)
    if callable(tie) and any(tensor.is_meta and name not in stored for name, tensor in expected.items()):
        tie()
        expected = root.state_dict(keep_vars=True)
    return expected


def _sources(expected: Mapping[str, torch.Tensor], stored: Mapping[str, Stored]) -> dict[str, str]:
    """For every name that gets a tensor, the name of it in the checkpoint. Tied names get the same, the last that is there."""
    names_of: dict[int, list[str]] = {}
    for name, tensor in expected.items():
        names_of.setdefault(id(tensor), []).append(name)
    source_of = {name: name for name in stored}
    for names in names_of.values():
        there = [name for name in names if name in stored]
        source_of.update((name, there[-1]) for name in names if there)
    return source_of


def _state(
    expected: Mapping[str, torch.Tensor], source_of: Mapping[str, str], tensors: Mapping[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """The tensors by all of their names: one Parameter for tied names."""
    made: dict[str, torch.Tensor] = {}
    for name, source in source_of.items():
        former = expected.get(name)
        if source in tensors and source not in made:
            tensor = tensors[source]
            made[source] = torch.nn.Parameter(tensor, former.requires_grad) if isinstance(former, torch.nn.Parameter) else tensor
    return {name: made[source] for name, source in source_of.items() if source in made}


@contextmanager
def _restored(root: torch.nn.Module, *, always: bool = False) -> Generator[None, None, None]:
    """Afterwards the modules have the parameters and buffers that they have now, if what is in here raises, or `always`."""
    before = [(d, dict(d)) for m in root.modules() for d in (m._parameters, m._buffers)]
    completed = False
    try:
        yield
        completed = True
    finally:
        if always or not completed:
            for now, then in before:
                now.clear()
                now.update(then)  # type: ignore[arg-type]


def _untouched_meta(root: torch.nn.Module, expected: Mapping[str, torch.Tensor]) -> list[str]:
    """Tensors on the meta device that no state names."""
    named = chain(root.named_parameters(), root.named_buffers())
    return [name for name, tensor in named if tensor.is_meta and name not in expected]


def _dtype(entry: Stored, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and entry.dtype.is_floating_point else entry.dtype


def _nbytes(entry: Stored, dtype: torch.dtype | None) -> int:
    return entry.nbytes // entry.dtype.itemsize * _dtype(entry, dtype).itemsize


def _check_room(root: torch.nn.Module, read: Mapping[str, Stored], dtype: torch.dtype | None) -> None:
    nbytes, memory = sum(_nbytes(entry, dtype) for entry in read.values()), host_memory()
    if nbytes > memory.free_nbytes:
        raise OffloadError(
            f"loading: {type(root).__name__}: its weights have {show_size(nbytes)}, and of {memory.name}, "
            f"{show_size(memory.total_nbytes)}, {show_size(memory.free_nbytes)} are free; free or add host memory, or load a "
            "smaller dtype"
        )


def _groups(root: torch.nn.Module, names: Mapping[str, object]) -> list[list[str]]:
    """The names that share a mapping: those that `layerwise_offload` packs together."""
    units = find_units(root, OffloadConfig(onload_device=torch.device("cpu")))
    buckets = unit_buckets(units, {id(t) for _, t in all_tensors(units)})
    groups = [[name for name, _ in members if name in names] for _, members in buckets]
    placed = set(chain.from_iterable(groups))
    return [*groups, *([name] for name in names if name not in placed)]


def _read(
    groups: Sequence[Sequence[str]], read: Mapping[str, Stored], dtype: torch.dtype | None, *, progress: bool
) -> dict[str, torch.Tensor]:
    """Read every tensor to its place, on several threads."""
    tensors: dict[str, torch.Tensor] = {}
    with ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")).fileno() for path in {entry.file for entry in read.values()}}
        total = sum(entry.nbytes for entry in read.values())
        bar = stack.enter_context(
            tqdm(total=total, desc="loading", unit="B", unit_scale=True, disable=None if progress else True)
        )
        pool = stack.enter_context(ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)))
        jobs = []
        for group in groups:
            sizes = [align(_nbytes(read[name], dtype)) for name in group]
            region = new_region(sum(sizes)) if sum(sizes) else None
            offset = 0
            for name, size in zip(group, sizes, strict=True):
                entry, kind = read[name], _dtype(read[name], dtype)
                if region is None or not size:
                    tensors[name] = torch.empty(entry.shape, dtype=kind)
                    continue
                memory = memoryview(region.memory)[offset : offset + _nbytes(entry, dtype)]
                tensors[name] = torch.frombuffer(memory, dtype=kind).view(entry.shape)
                jobs.append((pool.submit(read_into, memory, entry, kind, files[entry.file]), entry.nbytes))
                offset += size
        for job, nbytes in jobs:
            job.result()
            bar.update(nbytes)
    return tensors
