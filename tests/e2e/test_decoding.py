"""transformers' `generate()` compiled: caches that grow and caches that do not."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from typing import Any

import pytest
import torch

import fxoffload
from tests.checks import budgets, delay_copies
from tests.models import seeded

IDS = torch.arange(14).view(2, 7)
CACHES: dict[str, dict[str, Any]] = {"dynamic cache": {}, "static cache": {"cache_implementation": "static"}}


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64,
    )  # fmt: skip
    return seeded(lambda: LlamaForCausalLM(config))


def generate(model: Any, tokens: int, cache: dict[str, Any]) -> torch.Tensor:
    return model.generate(IDS, max_new_tokens=tokens, do_sample=False, pad_token_id=0, **cache)


@pytest.mark.parametrize("dynamic", [True, None])
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_compiled(cache: dict[str, Any], dynamic: bool | None) -> None:
    model = llama()
    wanted = generate(llama(), 10, cache)
    options: Any = {"onload_device": "cpu", "memory_budget": "16MiB", "segment_compiler": "eager"}
    model.forward = torch.compile(model.forward, backend=fxoffload.layerwise, dynamic=dynamic, options=options)
    assert torch.equal(generate(model, 10, cache), wanted)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    delay_copies(model)
    for label in ("half", "smallest"):
        fxoffload.set_memory_budget(model, budgets(model)[label])
        assert torch.equal(generate(model, 10, cache), wanted)
        assert fxoffload.stats(model).nbytes_copied > 0
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
