"""`load_safetensors`: a checkpoint into a model without weights, with one copy of them on the host, and the runs that follow."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import fxoffload
from fxoffload import hostmemory
from fxoffload.errors import OffloadError
from fxoffload.hostmemory import HostMemory
from tests.checks import offload, snapshot
from tests.models import Toy, rows, seeded, toy


def on_meta(make: Callable[[], Any] = lambda: Toy(4)) -> Any:
    with torch.device("meta"):
        return make().eval().requires_grad_(False)


def save(model: nn.Module, folder: Path, *, shards: int = 1) -> Path:
    """A checkpoint of a model, with an index where it has several files."""
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    names = list(state)
    if shards == 1:
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    parts = {f"model-{k}.safetensors": names[k::shards] for k in range(shards)}
    for file, part in parts.items():
        save_file({name: state[name] for name in part}, folder / file)
    weight_map = {name: file for file, part in parts.items() for name in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def addresses(model: nn.Module) -> list[int]:
    return [p.data_ptr() for p in model.parameters()]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_loaded_model_runs_offloaded_and_nothing_is_copied(shards: int, tmp_path: Path, capsys: Any) -> None:
    model, plain = on_meta(), toy(4)
    assert fxoffload.load_safetensors(model, save(plain, tmp_path, shards=shards)) == ([], [])
    assert "loading" not in capsys.readouterr().err, "no bar where nobody looks"
    assert all(a.equal(b) and not a.requires_grad for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    where = addresses(model)
    compiled = offload(model)
    with torch.no_grad():
        for _ in range(2):
            handle = fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="16KiB")
            for k in range(3):
                assert torch.equal(model(rows(k)), plain(rows(k)))
            assert fxoffload.stats(model).nbytes_copied > 0
            # It comes to a compiled graph, and from there to a removal, where it is.
            assert torch.equal(compiled(rows(3)), plain(rows(3)))
            assert addresses(model) == where
            handle.remove()
            assert torch.equal(model(rows(4)), plain(rows(4)))
            assert addresses(model) == where


def test_a_terminal_shows_how_far_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    save(toy(4), tmp_path)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    fxoffload.load_safetensors(on_meta(), tmp_path)
    last = capsys.readouterr().err.split("\r")[-1]
    assert re.match(r"loading: 100%\|.+\| 19\.8k/19\.8k \[", last), last
    fxoffload.load_safetensors(on_meta(), tmp_path, progress=False)
    assert capsys.readouterr().err == ""


def test_dtypes(tmp_path: Path) -> None:
    model, plain = on_meta(), toy(4)
    plain.register_buffer("index", torch.arange(4))
    model.register_buffer("index", torch.arange(4, device="meta"))
    fxoffload.load_safetensors(model, save(plain, tmp_path), dtype=torch.bfloat16, progress=False)
    assert all(torch.equal(a, b.bfloat16()) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert torch.equal(model.index, torch.arange(4))


def test_tied_weights_may_be_there_once(tmp_path: Path) -> None:
    def tied(make: Callable[[], Any]) -> Any:
        model = make()
        model.out.weight = model.inp.weight
        return model

    plain = tied(lambda: toy(4))
    state = plain.state_dict()
    for left_out in ("inp.weight", "out.weight", "nothing"):
        model = on_meta(lambda: tied(lambda: Toy(4)))
        save_file({k: v.clone() for k, v in state.items() if k != left_out}, tmp_path / "x.safetensors")
        assert fxoffload.load_safetensors(model, tmp_path) == ([], [])
        assert model.out.weight is model.inp.weight
        assert torch.equal(model(rows(0)), plain(rows(0)))


class Tying(Toy):
    """Ties its weights as models of transformers do."""

    def tie_weights(self) -> None:
        self.out.weight = self.inp.weight


@pytest.mark.parametrize("left_out", ["out.weight", "blocks.0.up.weight"])
def test_ties_that_a_model_lost_on_the_meta_device(left_out: str, tmp_path: Path) -> None:
    plain = seeded(lambda: Tying(4))
    plain.tie_weights()  # type: ignore[operator]
    save_file({k: v.clone() for k, v in plain.state_dict().items() if k != left_out}, tmp_path / "x.safetensors")
    model = on_meta(lambda: Tying(4))
    if left_out == "out.weight":
        assert fxoffload.load_safetensors(model, tmp_path) == ([], [])
        assert model.out.weight is model.inp.weight
        assert torch.equal(model(rows(0)), plain(rows(0)))
        return
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match=r'Missing key.*"blocks\.0\.up\.weight"'):
        fxoffload.load_safetensors(model, tmp_path)
    assert all(p is before[name] for name, p in model.named_parameters(remove_duplicate=False))


class Rope(Toy):
    """Has a buffer that is saved, and one that is not."""

    def __init__(self) -> None:
        super().__init__(2)
        self.register_buffer("scale", torch.rand(16))
        self.register_buffer("rope", torch.rand(16), persistent=False)


def test_buffers(tmp_path: Path) -> None:
    plain = Rope()
    save(plain, tmp_path)
    model = on_meta(Rope)
    with pytest.raises(OffloadError) as caught:
        fxoffload.load_safetensors(model, tmp_path)
    assert str(caught.value).startswith("loading: Rope: rope: on the meta device, and saved in no checkpoint; ")
    assert all(p.is_meta for p in (*model.parameters(), *model.buffers()))
    fxoffload.load_safetensors(model, tmp_path, strict=False)
    assert torch.equal(model.scale, plain.scale)
    assert model.rope.is_meta
    with torch.no_grad(), pytest.raises(Exception, match="meta"):
        fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="64KiB")
    model.rope = torch.rand(16)
    fxoffload.load_safetensors(model, tmp_path)


@pytest.mark.parametrize("strict", [True, False])
def test_names_and_shapes_are_said_as_load_state_dict_says_them(strict: bool, tmp_path: Path) -> None:
    state = toy(4).state_dict()
    state["more"] = torch.ones(5)
    del state["blocks.1.up.bias"], state["out.weight"]
    save_file(state, tmp_path / "x.safetensors")
    model = on_meta()
    if strict:
        with pytest.raises(RuntimeError) as wanted:
            toy(4).load_state_dict(state)
        with pytest.raises(RuntimeError) as caught:
            fxoffload.load_safetensors(model, tmp_path)
        assert str(caught.value) == str(wanted.value)
        assert all(p.is_meta for p in model.parameters())
    else:
        got = fxoffload.load_safetensors(model, tmp_path, strict=False)
        assert got == toy(4).load_state_dict(state, strict=False)
        assert [name for name, p in model.named_parameters() if p.is_meta] == got.missing_keys
    with pytest.raises(RuntimeError, match=r"size mismatch for inp\.weight"):
        fxoffload.load_safetensors(on_meta(lambda: Toy(4, d=8)), tmp_path, strict=strict)


def test_a_file_that_goes_bad_leaves_the_model_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta()
    save(toy(4), tmp_path)
    monkeypatch.setattr("os.preadv", lambda *_: 0)
    with pytest.raises(OffloadError, match="ends early"):
        fxoffload.load_safetensors(model, tmp_path)
    assert all(p.is_meta for p in model.parameters())
    monkeypatch.undo()
    fxoffload.load_safetensors(model, tmp_path)
    assert torch.equal(model(rows(0)), toy(4)(rows(0)))


def test_weights_that_host_memory_has_no_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = on_meta()
    save(toy(4), tmp_path)
    monkeypatch.setattr("fxoffload.loading.host_memory", lambda: HostMemory(10_000, 4_096, "/sys/fs/cgroup/memory.max"))
    with pytest.raises(OffloadError) as caught:
        fxoffload.load_safetensors(model, tmp_path)
    assert str(caught.value) == (
        "loading: Toy: its weights have 19.38 KiB, and of the container's limit (/sys/fs/cgroup/memory.max), 9.77 KiB, 4.00 KiB "
        "are free; free or add host memory, or load a smaller dtype"
    )
    assert hostmemory.host_memory().free_nbytes > 10_000


MEASURE = """
import sys, torch, fxoffload
from tests.checks import offload
from tests.models import Toy, rows
torch.set_num_threads(1)

def status(what: str) -> int:
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(what))

how, path = sys.argv[1:]
small = Toy(2, d=8).eval().requires_grad_(False)
with torch.no_grad():
    offload(small)(torch.ones(1, 8)) if how == "compiled" else None
    with torch.device("meta"):
        model = Toy(24, d=800).eval().requires_grad_(False)
    weights = sum(p.nbytes for p in model.parameters())
    before = status("VmRSS")
    fxoffload.load_safetensors(model, path)
    budget = weights // 8
    if how == "compiled":
        run = offload(model, memory_budget=budget)
    else:
        fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=budget)
        run = model
    for _ in range(2):
        run(torch.ones(1, 800))
assert fxoffload.stats(model).nbytes_copied > 0
print((status("VmHWM") - before - fxoffload.stats(model).nbytes_arena) / weights)
"""


@pytest.mark.parametrize("how", ["eager", "compiled"])
def test_the_host_holds_the_weights_once(how: str, tmp_path: Path) -> None:
    """The highest resident size of a process that loads and runs 235 MiB. The arena is host memory here too: it is left out."""
    plain = Toy(24, d=800)
    nbytes = sum(p.nbytes for p in plain.parameters())
    assert nbytes > 230 << 20
    save(plain, tmp_path, shards=2)
    del plain
    done = subprocess.run([sys.executable, "-c", MEASURE, how, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert 0.9 < float(done.stdout) <= 1.1


def test_snapshot_of_a_loaded_model_saves_again(tmp_path: Path) -> None:
    model, plain = on_meta(), toy(4)
    fxoffload.load_safetensors(model, save(plain, tmp_path))
    save_file(snapshot(model), tmp_path / "model.safetensors")
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    again = on_meta()
    fxoffload.load_safetensors(again, tmp_path)
    assert torch.equal(again(rows(1)), plain(rows(1)))
