"""Safetensors files: what is in them and where, read from their headers, and the bytes themselves, read to where they belong.

A file begins with the length of its header (8 bytes, little-endian) and the header, JSON: for every tensor its dtype, its shape,
and where its bytes begin and end behind the header. A sharded checkpoint is a folder of files with an index, which says for every
name the file that has it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxoffload.errors import OffloadError
from fxoffload.sizes import MIB, show_size

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_INDEX = ".safetensors.index.json"
_HEADER_NBYTES = 8
_CHUNK_NBYTES = 16 * MIB
"""So much is read at once: what is converted needs that much more memory."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a file: `nbytes` from `offset` on, contiguous."""

    file: Path
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]


def find_tensors(path: Path) -> dict[str, Stored]:
    """All tensors of a checkpoint: a file, an index, or a folder with one of either. Raises OffloadError for anything else."""
    if path.is_dir():
        path = _in_folder(path)
    if not path.is_file():
        raise OffloadError(f"checkpoint: {path}: there is no such file; give a .safetensors file, or a folder that has one")
    return _read_index(path) if path.name.endswith(_INDEX) else _read_header(path)


def read_into(memory: memoryview, stored: Stored, dtype: torch.dtype, file: int) -> None:
    """Read a tensor from an open file into memory, as `dtype`. What is converted is so piece by piece."""
    if dtype == stored.dtype:
        _fill(memory, stored, 0, file)
        return
    step = _CHUNK_NBYTES // stored.dtype.itemsize
    count = stored.nbytes // stored.dtype.itemsize
    scratch = bytearray(min(stored.nbytes, _CHUNK_NBYTES))
    for first in range(0, count, step):
        part = min(step, count - first)
        _fill(memoryview(scratch)[: part * stored.dtype.itemsize], stored, first * stored.dtype.itemsize, file)
        target = torch.frombuffer(memory, dtype=dtype, count=part, offset=first * dtype.itemsize)
        target.copy_(torch.frombuffer(scratch, dtype=stored.dtype, count=part))


def _fill(memory: memoryview, stored: Stored, start: int, file: int) -> None:
    while memory:
        count = os.preadv(file, [memory[:_CHUNK_NBYTES]], stored.offset + start)
        if not count:
            raise OffloadError(
                f"checkpoint: {stored.file}: it ends early, {start} bytes into a tensor; was it changed meanwhile?"
            )
        memory, start = memory[count:], start + count


def _in_folder(folder: Path) -> Path:
    found = sorted(folder.glob(f"*{_INDEX}")) or sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found[0]
    what = f"it has {', '.join(path.name for path in found)}" if found else "it has no .safetensors file"
    raise OffloadError(f"checkpoint: {folder}: {what}; give the file or the index (*{_INDEX}) that is meant")


def _read_index(path: Path) -> dict[str, Stored]:
    names = _load_json(path, path.read_bytes()).get("weight_map")
    if not isinstance(names, dict):
        raise OffloadError(f"checkpoint: {path}: it has no weight_map; is it the index of a sharded checkpoint?")
    files: dict[str, dict[str, Stored]] = {}
    found: dict[str, Stored] = {}
    for name, file in names.items():
        if file != Path(file).name:
            raise OffloadError(f"checkpoint: {path}: {name} is said to be in {file!r}, outside the folder")
        if file not in files:
            if not (path.parent / file).is_file():
                raise OffloadError(f"checkpoint: {path}: {file} is missing; download it too")
            files[file] = _read_header(path.parent / file)
        if name not in files[file]:
            raise OffloadError(f"checkpoint: {path}: {name} is said to be in {file}, which has no such tensor")
        found[name] = files[file][name]
    return found


def _read_header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_HEADER_NBYTES), "little")
        if _HEADER_NBYTES + length > size:
            raise OffloadError(
                f"checkpoint: {path}: its header is said to have {length} bytes, the file has {size}; is it complete?"
            )
        header = _load_json(path, file.read(length))
    begin = _HEADER_NBYTES + length
    return {name: _entry(path, name, value, begin, size) for name, value in header.items() if name != "__metadata__"}


def _entry(path: Path, name: str, value: Any, begin: int, size: int) -> Stored:
    try:
        kind, shape, (first, end) = str(value["dtype"]), tuple(map(int, value["shape"])), map(int, value["data_offsets"])
    except (TypeError, KeyError, ValueError) as error:
        raise OffloadError(f"checkpoint: {path}: {name}: {value!r} is no entry of a safetensors header") from error
    if kind not in DTYPES:
        raise OffloadError(f"checkpoint: {path}: {name}: dtype {kind} is not known; known are {', '.join(DTYPES)}")
    nbytes = math.prod(shape) * DTYPES[kind].itemsize
    if min(first, *shape, 0) < 0 or end - first != nbytes:
        raise OffloadError(f"checkpoint: {path}: {name}: {kind} of shape {list(shape)} has {nbytes} bytes, not {first} to {end}")
    if begin + end > size:
        raise OffloadError(
            f"checkpoint: {path}: {name} ends at {show_size(begin + end)}, the file at {show_size(size)}; download it again"
        )
    return Stored(path, begin + first, nbytes, DTYPES[kind], shape)


def _load_json(path: Path, text: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OffloadError(f"checkpoint: {path}: it is no safetensors file, and no index of such files ({error})") from error
    if not isinstance(found, dict):
        raise OffloadError(f"checkpoint: {path}: it is no safetensors file, and no index of such files")
    return found  # pyright: ignore[reportUnknownVariableType]
