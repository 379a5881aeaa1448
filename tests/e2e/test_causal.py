"""A language model whose mask was dropped: equal to eager within a tolerance, and to resident under every budget."""

from __future__ import annotations

import pytest
import torch

from fxoffload import api
from fxoffload.workloads import find_workload, make_inputs, make_model
from tests.checks import check_budgets

CPU = torch.device("cpu")


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_llama_prefill(compiler: str) -> None:
    workload = find_workload("llama-prefill-tiny")
    model = make_model(workload, CPU).float()
    check_budgets(model, [make_inputs(workload, model, CPU, batch=batch) for batch in (2, 2)], segment_compiler=compiler)
    (binding,) = api.bindings_of(model)
    attention = [node for node in binding.program.facts.nodes if node.target.endswith("scaled_dot_product_attention")]
    assert len(attention) > 1
    assert {node.rate for node in attention} == {"float32_attention"}
    assert not any(node.target.endswith((".le", "cumsum", "diff")) for node in binding.program.facts.nodes)
