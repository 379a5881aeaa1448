"""Real architectures, tiny: one graph, equal to fully resident under every budget, with late copies and poison."""

from __future__ import annotations

import pytest
import torch

import fxoffload
from fxoffload import api
from tests.checks import check_budgets
from tests.models import CASES


@pytest.mark.parametrize("name", CASES)
def test_every_budget(name: str) -> None:
    case = CASES[name]
    model = case.build()
    check_budgets(model, [case.given(k) for k in range(3)])
    assert len(api.bindings_of(model)) == 1


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
