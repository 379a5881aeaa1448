"""Real architectures, tiny: one graph, equal to fully resident under every budget, with late copies and poison."""

from __future__ import annotations

import pytest
import torch

import fxoffload
from fxoffload import api
from tests.checks import Trio, assert_streams, check_budgets
from tests.models import CASES, Inputs


@pytest.mark.parametrize("name", CASES)
def test_every_budget(name: str) -> None:
    case = CASES[name]
    model = case.build()
    check_budgets(model, [case.given(k) for k in range(3)])
    assert len(api.bindings_of(model)) == 1


SIZES = [(16, 8), (36, 8), (16, 12), (64, 12), (16, 8), (36, 8), (64, 12)]
"""Tokens of the image and of the text."""


def flux_inputs(k: int, image: int, text: int) -> Inputs:
    make = torch.Generator().manual_seed(k)
    shapes = {"hidden_states": (1, image, 4), "encoder_hidden_states": (1, text, 32), "pooled_projections": (1, 32)}
    shapes |= {"img_ids": (image, 3), "txt_ids": (text, 3), "timestep": (1,), "guidance": (1,)}
    return {name: torch.rand(shape, generator=make) for name, shape in shapes.items()} | {"return_dict": False}


@pytest.mark.parametrize("dynamic", [False, True])
def test_other_resolutions_and_lengths_of_text(dynamic: bool) -> None:
    trio = Trio(CASES["flux"].build, flux_inputs(0, *SIZES[0]), dynamic=dynamic)
    host, budget = fxoffload.stats(trio.streamed).nbytes_host, fxoffload.get_plan(trio.streamed).budget_nbytes
    for size in SIZES:
        for k in range(2):
            trio.check(flux_inputs(k, *size))
            plan, stats = fxoffload.get_plan(trio.streamed), fxoffload.stats(trio.streamed)
            assert stats.nbytes_arena + plan.activation_nbytes <= budget
        assert_streams(trio.streamed)
        assert stats.nbytes_host == host, "graphs share what is packed"
    assert len(api.bindings_of(trio.streamed)) == (1 if dynamic else len(set(SIZES)))


@pytest.mark.parametrize("name", ["flux", "qwen3_tied"])
def test_every_budget_with_blocks_cut_inside(name: str) -> None:
    case = CASES[name]
    model = case.build()
    check_budgets(model, [case.given(k) for k in range(3)], max_bucket_bytes="8KiB")
    segments = api.bindings_of(model)[0].program.blocks.segments
    assert any(":1" in segment.name for segment in segments)


@pytest.mark.parametrize("name", ["towers", "wan", "t5"])
def test_every_budget_compiled_by_aot_eager(name: str) -> None:
    case = CASES[name]
    check_budgets(case.build(), [case.given(k) for k in range(3)], segment_compiler="aot_eager")


@pytest.mark.parametrize("name", ["toy", "qwen3_tied"])
def test_every_budget_compiled_by_inductor(name: str) -> None:
    case = CASES[name]
    check_budgets(case.build(), [case.given(k) for k in range(3)], segment_compiler="inductor")


def test_tied_embeddings_are_one_bucket_and_counted_once() -> None:
    case = CASES["qwen3_tied"]
    model = case.build()
    check_budgets(model, [case.given(k) for k in range(3)])
    binding = api.bindings_of(model)[0]
    names = [weight.name for weight in binding.program.facts.weights]
    assert names.count("model.embed_tokens.weight") == 1
    assert "lm_head.weight" not in names
    own = {p.data_ptr(): p.nbytes for p in model.parameters()}
    assert fxoffload.stats(model).nbytes_host >= sum(own.values())


def test_a_block_called_twice_is_copied_once_for_both_or_twice() -> None:
    case = CASES["towers"]
    model = case.build()
    check_budgets(model, [case.given(k) for k in range(3)])
    binding = api.bindings_of(model)[0]
    shared = [bucket for bucket in binding.costs.buckets if len(bucket.uses) == 2]
    assert [bucket.name for bucket in shared] == ["shared.shared"]
    assert torch.equal(model.get_parameter("shared.weight"), CASES["towers"].build().get_parameter("shared.weight"))
