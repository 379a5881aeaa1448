"""Host memory as the machine and its control groups give it, of both versions, and what pinning and packing make of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload import hostmemory
from fxoffload.devices import device_memory
from fxoffload.errors import OffloadError, OffloadWarning
from fxoffload.hostmemory import host_memory
from fxoffload.pins import Pins
from fxoffload.regions import new_region
from fxoffload.store import HostStore

MIB = 1 << 20
V2 = {"limit": "memory.max", "usage": "memory.current"}
V1 = {"limit": "memory.limit_in_bytes", "usage": "memory.usage_in_bytes"}


class Groups:
    """A tree of control groups for this process, in a folder of the test's own."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = folder / "cgroup"
        self.own = folder / "own"
        self.root.mkdir()
        self.is_in("")
        monkeypatch.setattr(hostmemory, "GROUPS", self.root)
        monkeypatch.setattr(hostmemory, "OWN_GROUPS", self.own)

    def is_in(self, text: str) -> None:
        self.own.write_text(text)

    def limit(self, path: str, limit: int | str, used: int = 0, files: dict[str, str] | None = None, stat: str = "") -> Path:
        folder = self.root / path
        folder.mkdir(parents=True, exist_ok=True)
        names = files or V2
        (folder / names["limit"]).write_text(f"{limit}\n")
        (folder / names["usage"]).write_text(f"{used}\n")
        (folder / "memory.stat").write_text(stat)
        return folder / names["limit"]


@pytest.fixture
def groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Groups:
    return Groups(tmp_path, monkeypatch)


def test_a_machine_without_limits(groups: Groups) -> None:
    found = host_memory()
    assert found.total_nbytes > found.free_nbytes > 0
    assert found.limited_by == ""
    assert found.name == "this machine's memory"
    groups.own.unlink()
    assert host_memory().total_nbytes == found.total_nbytes


def test_version_2(groups: Groups) -> None:
    groups.is_in("0::/pod/box\n")
    groups.limit("pod/box", "max")
    assert host_memory().limited_by == ""
    limit = groups.limit("pod/box", 64 * MIB, 40 * MIB, stat="anon 7\ninactive_file 1048576\nactive_file 2097152\n")
    found = host_memory()
    assert (found.total_nbytes, found.free_nbytes, found.limited_by) == (64 * MIB, 27 * MIB, str(limit))
    assert found.name == f"the container's limit ({limit})"
    # A group above limits all in it.
    above = groups.limit("pod", 32 * MIB, 31 * MIB)
    assert (host_memory().total_nbytes, host_memory().free_nbytes, host_memory().limited_by) == (32 * MIB, MIB, str(above))
    assert device_memory(torch.device("cpu")) == (32 * MIB, MIB)


def test_version_1_in_a_container_that_does_not_see_its_path(groups: Groups) -> None:
    groups.is_in("4:cpu,memory:/docker/abc\n1:name=systemd:/\n0::/\n")
    groups.limit("memory", 9223372036854771712, files=V1)
    assert host_memory().limited_by == ""
    limit = groups.limit("memory", 64 * MIB, 60 * MIB, files=V1, stat="inactive_file 1\ntotal_inactive_file 1048576\n")
    assert host_memory() == hostmemory.HostMemory(64 * MIB, 5 * MIB, str(limit))
    groups.limit("memory/docker/abc", 16 * MIB, 17 * MIB, files=V1)
    assert host_memory().free_nbytes == 0


def weights(*sizes: int) -> list[tuple[str, nn.Parameter]]:
    return [(f"w{i}", nn.Parameter(torch.ones(n), requires_grad=False)) for i, n in enumerate(sizes)]


def test_packing_beyond_the_limit_is_refused_before_anything_is_taken(groups: Groups) -> None:
    groups.is_in("0::/\n")
    limit = groups.limit("", 64 * MIB, 63 * MIB)
    store = HostStore(torch.device("cpu"))
    small, large = weights(1024), weights(MIB)
    store.pack("small", small)
    with pytest.raises(OffloadError) as caught:
        store.pack("large", large)
    assert str(caught.value) == (
        f"store: large: packing it takes 4.00 MiB more of host memory, and of the container's limit ({limit}), 64.00 MiB, "
        "1.00 MiB are free; raise it, or free host memory"
    )
    assert store.nbytes == 4096
    assert store.find(large[0][1]) is None
    groups.limit("", 64 * MIB, 0)
    store.pack("large", large)
    assert large[0][1].eq(1).all()


class Driver:
    def __init__(self) -> None:
        self.pinned: dict[int, int] = {}

    def cudaHostRegister(self, pointer: int, nbytes: int, flags: int) -> int:
        self.pinned[pointer] = nbytes
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:
        del self.pinned[pointer]
        return 0


def test_no_more_is_pinned_than_nine_tenths_of_the_limit(groups: Groups, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    groups.is_in("0::/\n")
    limit = groups.limit("", 10 * MIB)
    others, pins = Pins(enabled=True), Pins(enabled=True)
    regions = [new_region(3 * MIB) for _ in range(4)]
    others.add(regions[0], "a")
    pins.add(regions[1], "b")
    pins.add(regions[2], "c")
    with pytest.warns(OffloadWarning) as caught:
        pins.add(regions[3], "d")
    pins.add(new_region(10), "e")
    assert [str(w.message) for w in caught] == [
        f"pins: d: 9.00 MiB are pinned, and no more than nine tenths may be of the container's limit ({limit}), 10.00 MiB; the "
        "rest stays pageable host memory, whose copies are slower and block the host; add host memory, or raise the limit"
    ]
    assert (others.nbytes, pins.nbytes, len(driver.pinned)) == (3 * MIB, 6 * MIB, 3)
    for region in regions:
        (others if region is regions[0] else pins).remove(region)
    assert (others.nbytes, pins.nbytes, driver.pinned) == (0, 0, {})


def test_memory_that_the_system_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("fxoffload.regions._Memory", refuse)
    text = "regions: 4.00 KiB of host memory: the system refuses it (Cannot allocate memory); "
    with pytest.raises(OffloadError, match=f"^{re.escape(text)}"):
        HostStore(torch.device("cpu")).pack("b", weights(1024))
