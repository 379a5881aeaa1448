"""Workloads: their sizes as published, values that matter and are the same every time, one call each."""

from __future__ import annotations

import pytest
import torch

from fxoffload.errors import ConfigError
from fxoffload.workloads import WORKLOADS, blocks_of, empty_model, find_workload, make_inputs, make_model, show, weight_nbytes

CPU = torch.device("cpu")
TINY = [name for name, workload in WORKLOADS.items() if workload.is_tiny]


@pytest.mark.parametrize(
    ("name", "gib", "blocks"),
    [
        ("flux", 22.17, 57), ("flux2", 60.02, 56), ("wan", 26.67, 40), ("qwen-image", 38.05, 60), ("sd3", 15.01, 38),
        ("t5-xxl", 8.87, 24), ("llama-prefill", 14.96, 32), ("llama-decode", 14.96, 32),
    ],
)  # fmt: skip
def test_real_sizes(name: str, gib: float, blocks: int) -> None:
    workload = WORKLOADS[name]
    model = empty_model(workload, CPU)
    assert round(weight_nbytes(model) / 2**30, 2) == gib
    assert len(blocks_of(workload, model)) == blocks
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_every_workload_has_a_tiny_version() -> None:
    assert [f"{name}-tiny" for name in WORKLOADS if not WORKLOADS[name].is_tiny] == TINY


@pytest.mark.parametrize("name", TINY)
@torch.no_grad()
def test_tiny_ones_run(name: str) -> None:
    workload = WORKLOADS[name]
    model = make_model(workload, CPU)
    output = model(**make_inputs(workload, model, CPU))[0]
    assert output.isfinite().all()
    assert output.std() > 1e-3
    assert len(blocks_of(workload, model)) == 6
    assert all(p.std() > 0 for p in model.parameters() if p.numel() > 1)


@torch.no_grad()
def test_the_same_values_every_time() -> None:
    workload = WORKLOADS["flux-tiny"]
    outputs: list[torch.Tensor] = []
    for _ in range(2):
        model = make_model(workload, CPU)
        outputs.append(model(**make_inputs(workload, model, CPU))[0])
    assert torch.equal(*outputs)


def test_no_two_blocks_are_equal() -> None:
    workload = WORKLOADS["llama-decode-tiny"]
    (_, first), *others = blocks_of(workload, make_model(workload, CPU))
    for _, block in others:
        assert not any(torch.equal(a, b) for a, b in zip(first.parameters(), block.parameters(), strict=True))


def test_tied_weights_stay_tied() -> None:
    model = make_model(WORKLOADS["t5-xxl-tiny"], CPU)
    assert model.get_parameter("shared.weight") is model.get_parameter("encoder.embed_tokens.weight")


def test_batches() -> None:
    workload = WORKLOADS["flux-tiny"]
    inputs = make_inputs(workload, make_model(workload, CPU), CPU, batch=3)
    assert inputs["hidden_states"].shape == (3, 256, 16)
    assert inputs["guidance"].tolist() == [4.0] * 3


def test_for_people() -> None:
    assert show(WORKLOADS["flux"], 23802816640, 3) == "FLUX.1-dev size, 1024x1024, batch 3, 22.17 GiB bfloat16"


def test_an_unknown_name() -> None:
    with pytest.raises(ConfigError) as caught:
        find_workload("flux-tini")
    assert str(caught.value) == "workloads: 'flux-tini' is not known; did you mean 'flux-tiny' or 'flux2-tiny' or 'flux'?"
