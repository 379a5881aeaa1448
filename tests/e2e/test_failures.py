"""What goes wrong around a model: memory that is refused, forks, and what must not grow or be left behind."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import tracemalloc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.attached import attachment_of
from fxoffload.engine import Engine, find_engine
from fxoffload.errors import ConfigError, OffloadError, OffloadWarning
from fxoffload.hostmemory import HostMemory
from fxoffload.store import HostStore
from tests.checks import assert_state, assert_streams, halve, offload, snapshot
from tests.models import Toy, rows, seeded, toy
from tests.pinning import pinning
from tests.sharing import refusing

HOWS = pytest.mark.parametrize("how", ["eager", "compiled"])


def offloaded(model: nn.Module, how: str) -> Any:
    """A model that has run once, in half of its weights."""
    run: Any = model
    with torch.no_grad():
        if how == "compiled":
            run = offload(model)
            run(rows(0))
            halve(model)
        else:
            nbytes = sum(p.nbytes for p in model.parameters())
            fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes // 2)
        run(rows(0))
    return run


def right(run: Any, plain: Toy, n: int = 3) -> None:
    with torch.no_grad():
        for k in range(3):
            torch.testing.assert_close(run(rows(k, n=n)), plain(rows(k, n=n)), rtol=1e-4, atol=1e-5)


# -- memory that is refused --------------------------------------------------------------------------------------------


@HOWS
def test_an_arena_that_the_device_refuses(how: str) -> None:
    model, plain = toy(6), toy(6)
    run = offloaded(model, how)
    right(run, plain)
    budget, before = fxoffload.get_plan(model).budget_nbytes, snapshot(model)
    for other in (budget - 2048, budget + 4096):
        fxoffload.set_memory_budget(model, other)
        with refusing(1), torch.no_grad():
            for _ in range(2):
                with pytest.raises(OffloadError) as caught:
                    run(rows(0))
        size = r"[\d.]+ [KMGT]?i?B"
        assert re.fullmatch(
            rf"engine: arena: cpu refuses {size} for weights, of its {size} {size} are free; free device memory, or give the "
            r"model less with fxoffload\.set_memory_budget",
            str(caught.value),
        )
        assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
        assert_state(model, before)
        right(run, plain)
        assert_streams(model)


def refuse_after(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's memory for weights is refused after `n` pieces."""
    allocate, given = HostStore._allocate, [n]

    def refusing(self: HostStore, nbytes: int, name: str) -> Any:
        given[0] -= 1
        if given[0] < 0:
            raise OffloadError("store: no more")
        return allocate(self, nbytes, name)

    monkeypatch.setattr(HostStore, "_allocate", refusing)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_an_attach_that_fails_half_way_leaves_the_model_as_it_was(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = toy(4), toy(4)
    before, names = snapshot(model), {id(m): set(vars(m)) for m in model.modules()}
    objects = [id(p) for p in model.parameters()]
    with monkeypatch.context() as patch:
        refuse_after(n, patch)
        with pytest.raises(OffloadError, match="store: no more"):
            fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="16KiB")
    assert_state(model, before)
    assert [id(p) for p in model.parameters()] == objects
    assert {id(m): set(vars(m)) for m in model.modules()} == names
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert attachment_of(model) is None
    assert find_engine([*model.parameters()]) is None
    right(model, plain)
    with fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="16KiB"):
        right(model, plain)


@pytest.mark.parametrize("n", [0, 2])
def test_a_compiled_call_that_finds_no_host_memory_and_the_next_one(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = toy(4), toy(4)
    run = offload(model)
    with monkeypatch.context() as patch, torch.no_grad():
        refuse_after(n, patch)
        for _ in range(2):
            with pytest.raises(OffloadError, match="store: no more"):
                run(rows(0))
    assert_state(model, snapshot(plain))
    right(run, plain)
    halve(model)
    right(run, plain)
    assert_streams(model)


def test_a_container_without_room_for_weights_that_come_from_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = HostMemory(1 << 20, 4096, "/sys/fs/cgroup/memory.max")
    monkeypatch.setattr("fxoffload.store.host_memory", lambda: limit)
    store = HostStore(torch.device("cpu"))
    with pytest.raises(OffloadError) as caught:
        store.check_room([torch.empty(2048, device="meta"), torch.empty(4096)], "the model")
    assert str(caught.value) == (
        "store: the model: packing it takes 8.00 KiB more of host memory, and of the container's limit "
        "(/sys/fs/cgroup/memory.max), 1.00 MiB, 4.00 KiB are free; raise it, or free host memory"
    )


@HOWS
def test_pinning_that_is_refused_half_way(how: str) -> None:
    model, plain = toy(6), toy(6)
    with pinning(3 * 4096), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", OffloadWarning)
        run = offloaded(model, how)
        right(run, plain)
        assert 0 < fxoffload.stats(model).nbytes_pinned < fxoffload.stats(model).nbytes_host
        assert_streams(model)
        del model, run
    (text,) = (str(w.message) for w in caught if w.category is OffloadWarning)
    assert re.match(r"pins: \S+: the driver refused to pin .* of host memory \(error 2\) after .*; the rest stays pageable", text)


def test_a_device_that_computes_in_host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxoffload.engine.shares_host_memory", lambda device: True)
    model, plain = toy(4), toy(4)
    with pytest.warns(
        OffloadWarning, match=r"^engine: cpu: it computes in the host's own memory, .*; weights are not pinned; run"
    ):
        run = offloaded(model, "eager")
    right(run, plain)
    assert fxoffload.stats(model).nbytes_pinned == 0


# -- processes and threads ---------------------------------------------------------------------------------------------

FORK = """
import os, sys, torch, fxoffload, warnings
from tests.e2e.test_failures import offloaded, right
from tests.models import rows, toy
torch.set_num_threads(1)
warnings.simplefilter("ignore", DeprecationWarning)
model, plain = toy(5), toy(5)
run = offloaded(model, sys.argv[1])
right(run, plain)
for _ in range(2):
    pid = os.fork()
    if pid == 0:
        try:
            with torch.no_grad():
                for m in (model, plain):
                    m.blocks[1].up.weight.mul_(1.5)
            right(run, plain)
            assert fxoffload.stats(model).nbytes_copied > 0
        except BaseException as error:
            print("child", repr(error), flush=True)
            os._exit(1)
        os._exit(0)
    right(run, plain)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    right(run, plain)
"""


@HOWS
def test_a_forked_child_runs_and_its_parent_goes_on(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", FORK, how], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


# -- what must not grow ------------------------------------------------------------------------------------------------


@HOWS
def test_a_thousand_forwards_leave_memory_flat(how: str) -> None:
    model = toy(2, d=8)
    nbytes = sum(p.nbytes for p in model.parameters())
    run: Any = model
    with torch.no_grad():
        if how == "compiled":
            run = offload(model)
            run(rows(0, d=8))
            halve(model)
            api.engine_of(model).transfer.delay_s = 0.0
        else:
            fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes * 2 // 3)
        x = rows(0, d=8)
        held: list[int] = []
        tracemalloc.start()
        try:
            for k in range(1000):
                run(x)
                if k in (200, 999):
                    gc.collect()
                    held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert fxoffload.stats(model).forwards >= 1000
    assert_streams(model)
    # A tensor a forward would be 100 KiB.
    assert held[1] - held[0] < 40_000, held
    assert fxoffload.stats(model).restores <= 3


FREED = """
import gc, sys, torch, fxoffload
from tests.e2e.test_failures import offloaded
from tests.checks import offload
from tests.models import Toy
torch.set_num_threads(1)

def resident() -> int:
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmRSS"))

def live(n: int, d: int, how: str) -> None:
    model = Toy(n, d).eval().requires_grad_(False)
    run = offload(model, memory_budget="48MiB") if how == "compiled" else model
    if how != "compiled":
        fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="48MiB")
    with torch.no_grad():
        run(torch.ones(1, d)), run(torch.ones(1, d))
    assert fxoffload.stats(model).nbytes_copied > 0
    assert resident() - before > 90 << 20
    if how == "removed":
        fxoffload.remove_layerwise_offload(model)

how = sys.argv[1]
before = 0
live(24, 700, how)
gc.collect()
torch._dynamo.reset()
before = resident()
for _ in range(2):
    live(24, 700, how)
    torch._dynamo.reset()
    gc.collect()
print((resident() - before) >> 20)
"""


@pytest.mark.parametrize("how", ["eager", "compiled", "removed"])
def test_a_model_that_is_deleted_gives_its_host_memory_back(how: str) -> None:
    # Memory that the C library gave out before packing goes back at once.
    env = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run([sys.executable, "-c", FREED, how], capture_output=True, text=True, check=False, timeout=300, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) < 24, "MiB more than before, where the model has 180"


@HOWS
def test_a_model_that_is_deleted_is_unpinned(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Models of other tests are not counted.
    torch._dynamo.reset()
    gc.collect()
    closed: list[int] = []
    close = HostStore.close
    monkeypatch.setattr(HostStore, "close", lambda self: (closed.append(self.nbytes), close(self)))
    model = toy(4)
    run = offloaded(model, how)
    engine: weakref.ref[Engine] = weakref.ref(api.engine_of(model))
    arena = weakref.ref(api.engine_of(model).arena)
    del model, run
    torch._dynamo.reset()
    gc.collect()
    assert (engine(), arena()) == (None, None)
    assert len(closed) == 1
    assert closed[0] > 0


def test_two_graphs_of_one_model_share_its_budget() -> None:
    model, plain = toy(6), toy(6)
    run = offload(model)
    budget = sum(p.nbytes for p in model.parameters()) // 2
    for n in (3, 5, 3, 5):
        right(run, plain, n)
        fxoffload.set_memory_budget(model, budget)
        for k in (3, 5):
            right(run, plain, k)
            assert_streams(model)
            stats = fxoffload.stats(model)
            assert stats.nbytes_arena + api.bindings_of(model)[-1].activation_nbytes <= budget
    assert len(api.bindings_of(model)) == 2


@HOWS
@pytest.mark.parametrize("name", ["blocks.0.up", "out"])
def test_parameters_on_meta_are_named(name: str, how: str) -> None:
    model = toy(3)
    model.get_submodule(name).to("meta")
    with pytest.raises(OffloadError, match=rf"{re.escape(name)}.weight.*meta|meta.*{re.escape(name)}.weight"):
        offloaded(model, how)


@torch.no_grad()
@pytest.mark.parametrize("how", ["alone", "in a pipeline"])
def test_sparse_tensors_are_named(how: str) -> None:
    model, plain = toy(4), toy(4)
    model.blocks[1].register_buffer("adjacency", torch.eye(3).to_sparse())
    what: Any = model if how == "alone" else SimpleNamespace(text_encoder=toy(2), transformer=model)
    text = r"^pack: blocks\.1\.adjacency: layout torch\.sparse_coo cannot be streamed; convert it to a strided tensor"
    with pytest.raises(OffloadError, match=text):
        fxoffload.layerwise_offload(what, onload_device="cpu", memory_budget="1MiB")
    assert attachment_of(model) is None
    right(model, plain)


def test_another_budget_while_a_forward_runs() -> None:
    model, reference = toy(), toy()
    fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="1GiB")
    model(rows(0))
    before = fxoffload.get_plan(model)
    hook = model.blocks[1].register_forward_hook(lambda *_: fxoffload.set_memory_budget(model, "2GiB"))
    with pytest.raises(OffloadError, match="set_memory_budget: a forward of Toy is under way"):
        model(rows(0))
    hook.remove()
    assert fxoffload.get_plan(model).budget_nbytes == before.budget_nbytes
    assert torch.equal(model(rows(1)), reference(rows(1)))


class Chosen(Toy):
    """Returns the products of as many rows as are above zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        z = y[(y[:, 0] > 0).nonzero().squeeze(-1)]
        return z @ z.T


@torch.no_grad()
def test_a_size_that_depends_on_values() -> None:
    model, reference = (seeded(lambda: Chosen(3, 16)) for _ in range(2))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), pytest.raises(OffloadError, match="price: nonzero"):
        offload(model)(rows(0))
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", OffloadWarning)
        assert torch.equal(offload(model, fullgraph=False)(rows(0)), reference(rows(0)))


@pytest.mark.parametrize("name", ["max_autotun", "triton"])
def test_an_option_that_inductor_does_not_have(name: str) -> None:
    with pytest.raises(ConfigError, match=f"config: inductor: Inductor has no option {name!r}; "), torch.no_grad():
        offload(toy(2), segment_compiler="inductor", inductor={name: True})(rows(0))


@torch.no_grad()
def test_an_option_of_inductor_that_stands_for_others() -> None:
    from torch._inductor import list_options

    assert "force_disable_caches" not in list_options()
    offload(toy(2), segment_compiler="inductor", inductor={"force_disable_caches": True})(rows(0))
