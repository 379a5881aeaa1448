"""Safetensors files: headers are read as the format says, and what is no such file is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fxoffload.checkpoint import DTYPES, find_tensors, read_into
from fxoffload.errors import OffloadError


def read(path: Path, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
    stored = find_tensors(path)[name]
    dtype = dtype or stored.dtype
    memory = bytearray(stored.nbytes // stored.dtype.itemsize * dtype.itemsize)
    with stored.file.open("rb") as file:
        read_into(memoryview(memory), stored, dtype, file.fileno())
    return torch.frombuffer(memory, dtype=dtype).view(stored.shape)


def write(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_what_safetensors_writes_is_read(dtype: torch.dtype, tmp_path: Path) -> None:
    value = (torch.rand(3, 5) * 100).to(dtype)
    save_file({"a": torch.ones(3), "b": value, "c": torch.ones(())}, tmp_path / "x.safetensors", metadata={"format": "pt"})
    found = find_tensors(tmp_path)
    assert set(found) == {"a", "b", "c"}
    assert (found["b"].dtype, found["b"].shape) == (dtype, (3, 5))
    got = read(tmp_path / "x.safetensors", "b")
    assert got.view(torch.uint8).equal(value.view(torch.uint8))


def test_conversion_goes_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(1000, 3)
    save_file({"a": value}, tmp_path / "x.safetensors")
    monkeypatch.setattr("fxoffload.checkpoint._CHUNK_NBYTES", 1024)
    assert read(tmp_path, "a").equal(value)
    for dtype in (torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn):
        assert read(tmp_path, "a", dtype).float().equal(value.to(dtype).float())


def test_a_sharded_checkpoint(tmp_path: Path) -> None:
    for k in range(2):
        save_file({f"w{k}": torch.full((2,), float(k))}, tmp_path / f"model-{k}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {f"w{k}": f"model-{k}.safetensors" for k in range(2)}}))
    for path in (tmp_path, index):
        assert [found.file.name for found in find_tensors(path).values()] == ["model-0.safetensors", "model-1.safetensors"]
    for names, text in [
        ({"w0": "model-7.safetensors"}, "model-7.safetensors is missing; download it too"),
        ({"w9": "model-0.safetensors"}, "w9 is said to be in model-0.safetensors, which has no such tensor"),
        ({"w0": "../model-0.safetensors"}, "w0 is said to be in '../model-0.safetensors', outside the folder"),
    ]:
        index.write_text(json.dumps({"weight_map": names}))
        with pytest.raises(OffloadError) as caught:
            find_tensors(tmp_path)
        assert str(caught.value) == f"checkpoint: {index}: {text}"
    index.write_text("[]")
    with pytest.raises(OffloadError, match="no index of such files"):
        find_tensors(tmp_path)


def test_folders_that_say_too_little(tmp_path: Path) -> None:
    for path, text in [(tmp_path, "it has no .safetensors file; "), (tmp_path / "no", "there is no such file; ")]:
        with pytest.raises(OffloadError) as caught:
            find_tensors(path)
        assert str(caught.value).startswith(f"checkpoint: {path}: {text}")
    for name in "ab":
        save_file({"w": torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(OffloadError, match=r"it has a\.safetensors, b\.safetensors; give the file or the index"):
        find_tensors(tmp_path)


@pytest.mark.parametrize(
    ("header", "text"),
    [
        (b"\xff\xfe", "it is no safetensors file, and no index of such files (.*)"),
        ([1], "it is no safetensors file, and no index of such files"),
        ({"w": 3}, "w: 3 is no entry of a safetensors header"),
        ({"w": {"dtype": "F4", "shape": [2], "data_offsets": [0, 1]}}, "w: dtype F4 is not known; known are BOOL, .*"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, r"w: F32 of shape \[2\] has 8 bytes, not 0 to 4"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}, r"w: F32 of shape \[2\] has 8 bytes, not -8 to 0"),
        (
            {"w": {"dtype": "F32", "shape": [9], "data_offsets": [0, 36]}},
            r"w ends at \d+ B, the file at \d+ B; download it again",
        ),
    ],
)
def test_headers_that_are_wrong(header: Any, text: str, tmp_path: Path) -> None:
    path = write(tmp_path / "x.safetensors", header)
    with pytest.raises(OffloadError, match=rf"^checkpoint: {path}: {text}$"):
        find_tensors(path)


def test_a_file_that_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"w": torch.ones(100)}, path)
    stored = find_tensors(path)["w"]
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with path.open("rb") as file, pytest.raises(OffloadError, match="it ends early, 392 bytes into a tensor"):
        read_into(memoryview(bytearray(400)), stored, torch.float32, file.fileno())
    path.write_bytes(whole[:20])
    with pytest.raises(OffloadError, match="its header is said to have 64 bytes, the file has 20; is it complete"):
        find_tensors(path)
