"""The host store: one flat, aligned copy of every weight; the weights stay ordinary tensors that save and load."""

from __future__ import annotations

import gc
import io
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload import OffloadWarning
from fxoffload.store import HostStore
from tests.checks import offload
from tests.models import rows, toy
from tests.pinning import pinning


def weights(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[tuple[str, nn.Parameter]]:
    return [(f"w{i}", nn.Parameter(torch.rand(shape).to(dtype), requires_grad=False)) for i, shape in enumerate(shapes)]


def test_every_weight_is_aligned_and_a_view_of_the_bucket() -> None:
    named = [*weights((3,), (100, 7), ()), *weights((5,), dtype=torch.bfloat16), *weights((9,), dtype=torch.int8)]
    values = [p.clone() for _, p in named]
    bucket = HostStore(torch.device("cpu")).pack("b", named)
    assert bucket.nbytes == 256 + 2816 + 256 + 256 + 256
    assert [w.offset for w in bucket.weights] == [0, 256, 3072, 3328, 3584]
    for (_, p), value, weight in zip(named, values, bucket.weights, strict=True):
        assert torch.equal(p, value)
        assert p.data_ptr() == bucket.flat.data_ptr() + weight.offset
        assert p.data_ptr() % 256 == 0
        assert p.untyped_storage().nbytes() == p.nbytes
        p.zero_()
    assert not bucket.flat[:12].any()


def test_the_original_memory_goes_as_each_bucket_is_packed() -> None:
    named = weights((64, 64), (64,), (64, 64))
    freed: list[str] = []
    for name, p in named:
        weakref.finalize(p.untyped_storage(), freed.append, name)
    host = HostStore(torch.device("cpu"))
    storages = [p.untyped_storage().data_ptr() for _, p in named]
    host.pack("b", named[:2])
    assert [p.untyped_storage().data_ptr() == s for (_, p), s in zip(named, storages, strict=True)] == [False, False, True]
    assert host.nbytes == 64 * 64 * 4 + 256


def test_packing_holds_one_copy_and_one_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """When a bucket is allocated, all buckets before it have already let go of the memory their weights had."""
    model = toy(6)
    before = {name: (p.untyped_storage().data_ptr(), p.nbytes) for name, p in model.named_parameters()}
    most = 0
    allocate = HostStore._allocate
    packed = 0

    def counting(self: HostStore, nbytes: int, name: str) -> Any:
        nonlocal most, packed
        packed += nbytes
        unpacked = sum(n for key, (pointer, n) in before.items() if model.get_parameter(key).data_ptr() == pointer)
        most = max(most, packed + unpacked)
        return allocate(self, nbytes, name)

    monkeypatch.setattr(HostStore, "_allocate", counting)
    with torch.no_grad():
        offload(model)(rows(0))
    total = sum(n for _, n in before.values())
    largest = max(sum(p.nbytes for p in block.parameters()) for block in model.blocks)
    padding = packed - total
    assert packed < 1.3 * total
    assert most <= total + largest + padding


def test_strides_and_holes_are_kept() -> None:
    base = torch.rand(6, 8)
    named = [
        ("t", nn.Parameter(base.t())),
        ("s", nn.Parameter(torch.rand(4, 10)[:, ::3])),
        ("o", nn.Parameter(torch.rand(20)[5:])),
    ]
    layouts = [(p.shape, p.stride()) for _, p in named]
    values = [p.detach().clone() for _, p in named]
    bucket = HostStore(torch.device("cpu")).pack("b", named)
    assert [(p.shape, p.stride()) for _, p in named] == layouts
    for (_, p), value, weight in zip(named, values, bucket.weights, strict=True):
        assert torch.equal(p, value)
        arena = torch.zeros(bucket.nbytes + 256, dtype=torch.uint8)
        arena[256:] = bucket.flat
        view = weight.device_view(arena, 256)
        assert (view.shape, view.stride()) == (p.shape, p.stride())
        assert torch.equal(view, value)


def test_weights_that_share_memory_still_do() -> None:
    base = torch.rand(10, 4)
    a, b, c = (nn.Parameter(t, requires_grad=False) for t in (base[:6], base[3:], base.t()))
    bucket = HostStore(torch.device("cpu")).pack("b", [("a", a), ("b", b), ("c", c)])
    assert bucket.nbytes == 256
    b[0].fill_(7)
    assert a[3].eq(7).all()
    assert c[:, 3].eq(7).all()


def test_find_knows_the_object() -> None:
    host = HostStore(torch.device("cpu"))
    ((_, p),) = named = weights((4, 4))
    host.pack("b", named)
    assert host.find(p).name == "w0"
    assert host.find(p.detach()) is None
    assert host.find(nn.Parameter(torch.rand(4, 4))) is None


def test_rebind_takes_the_value_and_leaves_the_former_its_own() -> None:
    host = HostStore(torch.device("cpu"))
    ((_, p),) = named = weights((4, 4))
    bucket = host.pack("b", named)
    value = p.clone()
    other = nn.Parameter(torch.rand(4, 4), requires_grad=False)
    wanted = other.clone()
    host.rebind([w.whole for w in bucket.weights], [other])
    assert torch.equal(other, wanted)
    assert other.data_ptr() == bucket.flat.data_ptr()
    assert torch.equal(p, value)
    assert host.find(p) is None
    assert host.find(other) is bucket.weights[0].whole


def test_what_is_packed_goes_without_the_garbage_collector() -> None:
    """Also where graphs see a weight cut by other rows than those that it was packed by."""
    store = HostStore(torch.device("cpu"))
    weight = torch.rand(64, 64)
    store.pack("b", [("w", weight)])
    found = store.find(weight)
    assert found is not None
    flat = weakref.ref(store.part(found, (0, 32)).bucket.flat)
    assert store.part(found, (0, 32)).bucket.flat is flat(), "one view of it for all"
    del found
    gc.disable()
    try:
        store.close()
        assert flat() is None
    finally:
        gc.enable()


def test_a_region_goes_when_the_last_weight_in_it_is_gone() -> None:
    """Whether it has one bucket or several, and whoever has the `id` of such a weight since."""
    with pinning(1 << 20) as driver:
        host = HostStore(torch.device("cpu"))
        a, b = ([p for _, p in weights((64,), (64,))] for _ in range(2))
        matrix = torch.rand(64, 64)
        host.pack("a", [("a0", a[0]), ("a1", a[1])])
        host.pack("b", [("b0", b[0]), ("b1", b[1])])
        host.pack_rows([("m", matrix)], [(0, 32), (32, 64)])
        assert not host.unpack(a, coarse=False)
        flats = {name: weakref.ref(bucket.flat) for name, bucket in host.buckets.items()}
        view = b[1].detach()
        values = view.clone()
        gone = id(a[0])
        del a[0], b[:]
        assert host.unpack([], coarse=False)
        assert list(host.buckets) == ["a", "m[0:32]", "m[32:64]"], "one weight of it is left"
        assert flats["b"]() is None
        assert host.nbytes == host.pinned_nbytes == 512 + 64 * 64 * 4
        assert len(driver.pinned) == 2
        assert torch.equal(view, values), "memory stays as long as a tensor lies in it"
        del matrix
        for k in range(3):
            assert host.unpack([], coarse=False)
            new = weights((64,))
            if gone in host._tensors:
                host._tensors[id(new[0][1])] = host._tensors.pop(gone)
            host.pack(f"c{k}", new)
            del new
            assert (list(host.buckets), sorted(host.by_name())) == (["a", f"c{k}"], ["a0", "a1", "w0"])
            assert host.nbytes == host.pinned_nbytes == 512 + 256
        host.close()


def test_what_lies_in_the_memory_of_one_that_is_gone_is_packed_where_it_lies() -> None:
    host = HostStore(torch.device("cpu"))
    weight = torch.rand(64, 64)
    host.pack("b", [("w", weight)])
    other, address, values = nn.Parameter(weight.detach(), requires_grad=False), weight.data_ptr(), weight.clone()
    del weight
    assert host.unpack([other], coarse=False)
    places = host.find_places([[other]])
    host.pack("b", [("w", other)], place=places[0])
    assert (other.data_ptr(), host.nbytes) == (address, values.nbytes)
    assert torch.equal(other, values)


@pytest.mark.parametrize("inference", [False, True])
def test_who_else_has_the_memory_of_a_weight_is_known(inference: bool) -> None:
    host = HostStore(torch.device("cpu"))
    with torch.inference_mode(inference):
        weight = torch.rand(4, 4)
    packed = host.pack("b", [("w", weight)]).weights[0].whole
    assert not packed.is_aliased()
    aside = weight.detach()
    assert packed.is_aliased()
    del aside
    assert not packed.is_aliased()
    kept = weight.data
    del weight
    assert packed.is_aliased()
    assert torch.equal(kept, packed.view)
    del kept
    assert not packed.is_aliased()
    packed.view.untyped_storage().share_memory_()
    assert packed.is_aliased()


def test_rebind_swaps() -> None:
    host = HostStore(torch.device("cpu"))
    (_, a), (_, b) = named = weights((4, 4), (4, 4))
    bucket = host.pack("b", named)
    value_a, value_b = a.clone(), b.clone()
    host.rebind([w.whole for w in bucket.weights], [b, a])
    assert torch.equal(a, value_a)
    assert torch.equal(b, value_b)
    assert [a.data_ptr() - bucket.flat.data_ptr(), b.data_ptr() - bucket.flat.data_ptr()] == [256, 0]
    assert (host.find(a), host.find(b)) == (bucket.weights[1].whole, bucket.weights[0].whole)


def test_saving_one_weight_writes_its_bytes_only() -> None:
    model = toy(6, d=64)
    with torch.no_grad():
        offload(model)(rows(0, d=64))
    weight = model.blocks[2].up.weight
    file = io.BytesIO()
    torch.save(weight, file)
    assert file.tell() < weight.nbytes + 4096
    file.seek(0)
    assert torch.equal(torch.load(file), weight)


def test_safetensors_saves_and_loads(tmp_path: Path) -> None:
    from safetensors.torch import load_model, save_file, save_model

    model, reference = toy(4), toy(4)
    with torch.no_grad():
        offload(model)(rows(0))
    save_file(model.state_dict(), tmp_path / "state.safetensors")
    save_model(model, str(tmp_path / "model.safetensors"))
    other = toy(4, seed=3)
    load_model(other, str(tmp_path / "model.safetensors"))
    for name, p in other.named_parameters():
        assert torch.equal(p, reference.get_parameter(name))


def test_deepcopy_and_pickle_of_a_running_model() -> None:
    import copy
    import pickle

    model, reference = toy(4), toy(4)
    with torch.no_grad():
        offload(model)(rows(0))
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other.blocks[1].up.weight.zero_()
            assert torch.equal(model.blocks[1].up.weight, reference.blocks[1].up.weight)


class _Refusing:
    """A driver that pins the first `nbytes` bytes and refuses the rest."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes
        self.unpinned: list[int] = []

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.left -= nbytes
        return 0 if self.left >= 0 else 2

    def cudaHostUnregister(self, pointer: int) -> int:
        self.unpinned.append(pointer)
        return 0


def test_a_refusal_to_pin_is_one_warning_and_pageable_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = _Refusing(2 * 4096)
    waited: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    host = HostStore(torch.device("cuda"))
    named = weights(*[(100,)] * 4)
    with pytest.warns(OffloadWarning, match=r"^pins: b2: the driver refused to pin 512 B of host memory") as caught:
        [host.pack(f"b{i}", [pair]) for i, pair in enumerate(named)]
    assert len(caught) == 1
    assert host.pinned_nbytes == 2 * 512
    addresses = [b.flat.data_ptr() for b in list(host.buckets.values())[:2]]
    host.close()
    assert waited == [torch.device("cuda")], "queued copies read host memory until they are done"
    assert driver.unpinned == addresses
    assert all(p.sum() > 0 for _, p in named)
