"""Peers' sessions: what is asked of other projects, as far as it can be seen without an accelerator."""

from __future__ import annotations

import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fxoffload import peers
from fxoffload.contenders import CONTENDERS
from fxoffload.errors import ConfigError
from fxoffload.peers import CacheDit, CacheDitFitted, move_outside, next_count
from fxoffload.sessions import FLAGS, Scene
from fxoffload.workloads import WORKLOADS, make_inputs, make_model
from tests.models import toy

CPU = torch.device("cpu")


@pytest.fixture
def scene() -> Scene:
    workload = WORKLOADS["wan-tiny"]
    model = make_model(workload, CPU)
    return Scene(workload, model, make_inputs(workload, model, CPU), CPU, "eager")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What a package of the name `cache_dit` was called with. Where the scene is, there is an accelerator."""
    calls: list[dict[str, Any]] = []

    def layerwise_offload(model: torch.nn.Module, **keywords: Any) -> Any:
        calls.append({"model": model, **keywords})
        return SimpleNamespace(remove=lambda: calls.append({"removed": True}))

    monkeypatch.setitem(sys.modules, "cache_dit", SimpleNamespace(layerwise_offload=layerwise_offload))
    monkeypatch.setattr(peers, "needs_accelerator", lambda *_: None)
    return calls


def test_published_flags_reach_cache_dit(scene: Scene, asked: list[dict[str, Any]]) -> None:
    session = CacheDit(scene)
    flags = CONTENDERS["cache-dit-published"].settings[3]
    session.apply(flags)
    session.undo()
    assert asked == [
        {"model": scene.model, "onload_device": CPU, "offload_device": "cpu", **flags},
        {"removed": True},
    ]


def test_flags_fill_the_budget(scene: Scene, asked: list[dict[str, Any]]) -> None:
    session = CacheDitFitted(scene)
    setting = {"budget": "100MiB"}
    first = session.next_try(setting, [])
    assert first is not None
    assert first[FLAGS]["persistent_buckets"] == 0
    assert first[FLAGS]["max_inflight_prefetch_bytes"] == 2 * max(session.target_nbytes)
    room_nbytes = int(2.5 * sum(session.target_nbytes) / len(session.target_nbytes))
    more = session.next_try(setting, [(first, 100 * 2**20 - room_nbytes)])
    assert more is not None
    assert (more[FLAGS]["persistent_buckets"], more[FLAGS]["persistent_bins"]) == (2, 2)
    session.apply(more)
    assert asked == [{"model": scene.model, "onload_device": CPU, "offload_device": "cpu", **more[FLAGS]}]
    assert session.next_try({**setting, FLAGS: more[FLAGS]}, []) == {**setting, FLAGS: more[FLAGS]}


def test_leaves_have_all_weights_but_those_directly_on_a_block(scene: Scene) -> None:
    session = CacheDitFitted(scene)
    directly = [p for name, p in scene.model.named_parameters() if name.endswith("scale_shift_table")]
    assert len(directly) == 7
    assert sum(session.target_nbytes) == sum(p.nbytes for p in scene.model.parameters()) - sum(p.nbytes for p in directly)


@pytest.mark.parametrize(
    ("tried", "count"),
    [
        ([], 0),
        ([(0, 40)], 6),
        ([(0, 101)], None),
        ([(0, 95)], None),
        ([(0, 40), (6, 120)], 4),
        ([(0, 40), (6, 120), (4, 90)], 5),
        ([(0, 40), (6, 120), (4, 90), (5, 101)], None),
        ([(0, 1)], 8),
        ([(0, 40), (6, 190)], 3),
        ([(0, 40), (6, 120), (4, 110)], 2),
        ([(0, 40), (6, 120), (4, 110), (2, 70)], None),
        ([(0, 40), (6, 70)], 8),
        ([(4, 120)], 2),
        ([(4, 170)], 1),
        ([(0, 120), (2, 60)], 6),
    ],
)
def test_how_many_targets_to_keep(tried: list[tuple[int, int]], count: int | None) -> None:
    assert next_count(100, [10] * 8, tried) == count


def test_an_overshoot_that_leads_back_to_a_count_that_was_tried_is_bisected() -> None:
    """A Llama 8B in 6 GiB: a second try that takes far more than the mean size says is no reason to keep nothing resident."""
    gib = 2**30
    tried = [(0, int(3.23 * gib))]
    sizes = [int(52.6 * 2**20)] * 291
    assert next_count(6 * gib, sizes, tried) == 53
    assert next_count(6 * gib, sizes, [*tried, (53, 9 * gib)]) == 26


class Peaks:
    """What tries of `session` reserve: `base` by look-ahead, and the mean size for each resident target."""

    def __init__(self, session: CacheDitFitted, **base: int) -> None:
        self.session = session
        self.base = base
        self.mean = sum(session.target_nbytes) / len(session.target_nbytes)

    def tries(self, budget_nbytes: int) -> list[tuple[int, int]]:
        """Look-ahead and count of each."""
        tried: list[tuple[Any, int | None]] = []
        setting = {"budget": f"{budget_nbytes}B"}
        while (found := self.session.next_try(setting, tried)) is not None:
            base = self.base[f"ahead_{found[FLAGS]['transfer_buckets']}"]
            tried.append((found, int((base + found[FLAGS]["persistent_buckets"]) * self.mean)))
        return [(found[FLAGS]["transfer_buckets"], found[FLAGS]["persistent_buckets"]) for found, _ in tried]


@pytest.mark.usefixtures("asked")
def test_the_published_look_ahead_is_tried_from_the_count_found_on(scene: Scene) -> None:
    session = CacheDitFitted(scene)
    peaks = Peaks(session, ahead_2=5, ahead_4=5)
    assert peaks.tries(int(9.5 * peaks.mean)) == [(2, 0), (2, 4), (4, 4)]
    assert Peaks(session, ahead_2=5, ahead_4=8).tries(int(9.5 * peaks.mean)) == [(2, 0), (2, 4), (4, 4), (4, 1)]
    alone = {FLAGS: {"transfer_buckets": 2, "persistent_buckets": 0}}
    found = session.next_try({"budget": f"{int(5.5 * peaks.mean)}B"}, [(alone, int(5 * peaks.mean))])
    assert found is not None
    published = CONTENDERS["cache-dit-published"].settings[2]
    residents = {name: published[name] for name in ("persistent_buckets", "persistent_bins")}
    assert {**found[FLAGS], **residents} == published


@pytest.mark.usefixtures("asked")
def test_where_nothing_fits_less_look_ahead_is_tried(scene: Scene) -> None:
    peaks = Peaks(CacheDitFitted(scene), ahead_2=5, ahead_1=4)
    assert peaks.tries(int(4.5 * peaks.mean)) == [(2, 0), (1, 0)]
    assert peaks.tries(int(3.5 * peaks.mean)) == [(2, 0), (1, 0)]


@pytest.mark.usefixtures("asked")
@pytest.mark.parametrize("peak", [0, 10**6])
def test_tries_are_few_whatever_they_reserve(scene: Scene, peak: int) -> None:
    session = CacheDitFitted(scene)
    setting, tried = {"budget": "1MB"}, list[tuple[Any, int | None]]()
    while (found := session.next_try(setting, tried)) is not None:
        tried.append((found, peak if len(tried) % 2 else 2 * 10**6 - peak))
    assert len(tried) <= 7


def test_what_is_outside_moves() -> None:
    model = toy(2)
    move_outside(model, [model.get_submodule("blocks")], torch.device("meta"))
    assert {name: p.device.type for name, p in model.named_parameters() if "blocks" not in name} == {
        "inp.weight": "meta", "inp.bias": "meta", "out.weight": "meta", "out.bias": "meta",
    }  # fmt: skip
    assert {p.device.type for p in model.get_submodule("blocks").parameters()} == {"cpu"}


@pytest.mark.parametrize("contender", ["cache-dit-sync", "cache-dit-fitted", "group-leaf-streams", "group-block-streams-record"])
def test_on_the_cpu_device_some_say_that_they_cannot(scene: Scene, contender: str) -> None:
    found = CONTENDERS[contender]
    session = found.session(scene, **found.options)

    def measured() -> None:
        setting = session.next_try({"budget": "1GiB"} if found.by_budget else {}, [])
        session.apply(setting or {})

    with pytest.raises(ConfigError, match="only on an accelerator"):
        measured()


def test_names_say_what_is_ours_and_what_is_not() -> None:
    assert "our code" in CONTENDERS["two-block-hooks"].what
    assert all(c.what.startswith("fxoffload") for name, c in CONTENDERS.items() if name.startswith("fxoffload"))
    assert len({c.what for c in CONTENDERS.values()}) == len(CONTENDERS)
    assert all(dataclasses.is_dataclass(c) and name == c.name for name, c in CONTENDERS.items())
