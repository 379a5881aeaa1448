"""Units that are split: into which modules, from which size on, and what that is worth by the cost model."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload import OffloadConfig
from fxoffload.cost import Costs
from fxoffload.forecast import unit_costs
from fxoffload.machine import Machine
from fxoffload.plan import Plan
from fxoffload.planner import make_plan
from fxoffload.sizes import GIB, MIB
from fxoffload.units import split_limit
from fxoffload.verify import check_plan
from tests.dit import DiT
from tests.models import Block, seeded, toy
from tests.unit.test_units import Layers, names, rest, units_of

CONFIG = OffloadConfig(onload_device="cpu")
H200 = Machine("H200", 55.2, 0.0085, 3837.0, 0.004, (("bfloat16", 735.0),))


def nbytes_of(module: nn.Module) -> int:
    return sum(p.nbytes for p in module.parameters())


def large(n: int) -> DiT:
    """Blocks of 540 MiB in bfloat16, without bytes."""
    with torch.device("meta"):
        return DiT(n, 3072).to(torch.bfloat16)


# -- into what ---------------------------------------------------------------------------------------------------------


def test_a_block_above_the_limit_is_split_into_its_leaves() -> None:
    model = seeded(Layers)
    block = sum(p.nbytes for p in model.layers[0].parameters())
    assert names(units_of(model, limit_nbytes=block)) == ["layers.0", "layers.1", "layers.2"]
    units = units_of(model, limit_nbytes=block - 1)
    assert names(units) == [f"layers.{i}.parts.{k}" for i in range(3) for k in (0, 2)]
    assert rest(units) == ["table", "shift", "scale", "layers.0.gate", "layers.1.gate", "layers.2.gate"]


def test_one_block_alone_is_split() -> None:
    model = seeded(Layers)
    limit = sum(p.nbytes for p in model.layers[0].parameters())
    model.layers[1].extra = nn.Linear(16, 64)
    parts = [f"layers.1.{name}" for name in ("parts.0", "parts.2", "extra")]
    assert names(units_of(model, limit_nbytes=limit)) == ["layers.0", *parts, "layers.2"]


def test_blocks_are_split_where_three_do_not_fit_beside_the_rest() -> None:
    model = toy(6)
    block, outside = (sum(p.nbytes for p in m.parameters()) for m in (model.blocks[0], nn.Sequential(model.inp, model.out)))
    config = OffloadConfig(onload_device="cpu")
    assert split_limit(model, config, outside + 3 * block) == block
    assert split_limit(model, config, outside + 3 * block - 1) < block
    assert split_limit(model, config, outside + 6 * block) >= block
    assert split_limit(model, config, outside - 1) == 0
    one = OffloadConfig(onload_device="cpu", module_names="blocks.1")
    assert split_limit(model, one, outside + 6 * block) == block


def test_a_leaf_above_the_limit_stays_whole() -> None:
    assert names(units_of(toy(2), limit_nbytes=1)) == [f"blocks.{i}.{part}" for i in range(2) for part in ("norm", "up", "down")]


def test_modules_that_read_their_childrens_weights_are_not_split() -> None:
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 16) for _ in range(2)))
    assert names(units_of(model, limit_nbytes=1)) == ["0", "1"]
    model = nn.Sequential(*(nn.TransformerDecoderLayer(8, 2, 16) for _ in range(2)))
    assert names(units_of(model, limit_nbytes=1))[:2] == ["0.self_attn", "0.multihead_attn"]


def test_a_block_is_split_into_the_largest_modules_within_the_limit() -> None:
    model = seeded(DiT)
    parts = ["mod.1", "attn", "mlp", "mlp_text"]
    assert names(units_of(model, limit_nbytes=nbytes_of(model.blocks[0]) - 1)) == [
        f"blocks.{i}.{p}" for i in range(3) for p in parts
    ]
    # Attention has more biases than an MLP.
    units = units_of(model, limit_nbytes=nbytes_of(model.blocks[0].attn) - 1)
    parts = ["mod.1", "attn.qkv", "attn.out", "mlp", "mlp_text"]
    assert names(units) == [f"blocks.{i}.{p}" for i in range(3) for p in parts]


def test_a_container_in_a_block_never_stands_for_its_members() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 16), nn.Sequential(Block(16)))
            self.wide = nn.Linear(16, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.wide(self.net(x))

    model = nn.Sequential(seeded(Net), seeded(Net))
    units = units_of(model, limit_nbytes=nbytes_of(model[0]) - 1)
    assert names(units) == [f"{i}.{part}" for i in range(2) for part in ("net.0", "net.1.0", "wide")]


def test_a_module_with_most_of_its_weights_itself_is_not_split() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = nn.Parameter(torch.ones(4, 16, 16))
            self.norm = nn.LayerNorm(16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x @ self.stacked.sum(0))

    units = units_of(nn.Sequential(Experts(), Experts()), limit_nbytes=1)
    assert names(units) == ["0", "1"]
    assert rest(units) == []


# -- from which size on ------------------------------------------------------------------------------------------------


def test_nothing_is_split_where_everything_fits() -> None:
    model = large(4)
    nbytes = nbytes_of(model)
    assert split_limit(model, CONFIG, nbytes) == nbytes
    assert split_limit(model, CONFIG, nbytes - 1) < nbytes_of(model.blocks[0])


@pytest.mark.parametrize(
    ("blocks", "budget", "limit"),
    [
        (60, 16 * GIB, 160 * MIB),
        (60, 2 * GIB, 160 * MIB),
        # Activations may take most of a small budget.
        (60, GIB, 128 * MIB),
        # A twelfth of few weights.
        (2, GIB, nbytes_of(large(2)) // 12),
    ],
)
def test_pieces(blocks: int, budget: int, limit: int) -> None:
    assert split_limit(large(blocks), CONFIG, budget) == limit


def test_max_bucket_bytes_is_the_largest_piece() -> None:
    config = OffloadConfig(onload_device="cpu", max_bucket_bytes="500MiB")
    assert split_limit(large(60), config, 2 * GIB) == 500 * MIB
    assert split_limit(large(60), config, GIB) == GIB // 3


@pytest.mark.parametrize(
    "setting", [{"transfer_buckets": 2}, {"persistent_buckets": 0}, {"persistent_bins": 2}, {"prefetch_limit": True}]
)
def test_settings_that_count_buckets_count_blocks(setting: dict[str, Any]) -> None:
    config = OffloadConfig(onload_device="cpu", **setting)
    for budget in (2 * GIB, GIB):
        # Of the latter a block takes more than half.
        assert split_limit(large(60), config, budget) == budget
    assert split_limit(large(60), dataclasses.replace(config, max_bucket_bytes=100 * MIB), 2 * GIB) == 100 * MIB


def test_the_settings_of_text_encoders_take_little_memory() -> None:
    config = OffloadConfig(onload_device="cpu", transfer_buckets=1, persistent_buckets=0)
    assert split_limit(large(60), config, GIB) == GIB // 3


# -- what it is worth --------------------------------------------------------------------------------------------------


def planned(
    model: DiT, budget_nbytes: int, limit_nbytes: int, *, activation_nbytes: int, compute_ms: float
) -> tuple[Plan, Costs]:
    """The plan when everything was measured: a forward computes for `compute_ms`, none of it in the modulation."""
    costs = unit_costs(model, CONFIG, H200, limit_nbytes=limit_nbytes)
    shares = [0.0 if ".mod" in s.name else b.nbytes for s, b in zip(costs.segments, costs.buckets, strict=True)]
    segments = [
        dataclasses.replace(segment, compute_ms=compute_ms * share / sum(shares))
        for segment, share in zip(costs.segments, shares, strict=True)
    ]
    costs = dataclasses.replace(costs, segments=tuple(segments))
    plan = make_plan(costs, budget_nbytes, activation_nbytes=activation_nbytes)
    check_plan(plan, costs)
    return plan, costs


@pytest.mark.parametrize("budget", [1.4, 2.0, 4.0, 8.0])
def test_pieces_come_close_to_the_bound_where_blocks_do_not(budget: float) -> None:
    """60 blocks and activations of 0.95 GiB, as Qwen-Image has at 1328 x 1328."""
    model, budget_nbytes = large(60), int(budget * GIB)
    settings: dict[str, Any] = {"activation_nbytes": int(0.95 * GIB), "compute_ms": 300.0}
    pieces, _ = planned(model, budget_nbytes, split_limit(model, CONFIG, budget_nbytes), **settings)
    assert pieces.step_ms <= 1.03 * pieces.bound_ms
    assert pieces.peak_nbytes <= budget_nbytes
    if budget_nbytes < settings["activation_nbytes"] + nbytes_of(model.blocks[0]):
        return
    blocks, _ = planned(model, budget_nbytes, budget_nbytes, **settings)
    assert blocks.step_ms >= 1.03 * pieces.step_ms
