"""transformers' `generate()` on an offloaded language model: many forwards of growing length, with a cache between them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxoffload
from tests.models import CASES


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "qwen3_tied"])
def test_the_same_tokens(name: str, cache: str) -> None:
    model: Any = CASES[name].build()
    given = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    prompts = [torch.randint(0, 100, (2, 8), generator=torch.Generator().manual_seed(k)) for k in range(2)]
    wanted = [model.generate(prompt, **given) for prompt in prompts]
    nbytes = sum(p.nbytes for p in model.parameters())
    with fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget=nbytes * 3 // 4) as handle:
        for prompt, tokens in zip(prompts, wanted, strict=True):
            assert torch.equal(model.generate(prompt, **given), tokens)
        stats = handle.stats()
        assert stats.nbytes_copied == handle.get_plan().streamed_nbytes > 0
        assert stats.forwards == 12
        assert stats.nbytes_arena <= nbytes * 3 // 4
    assert torch.equal(model.generate(prompts[0], **given), wanted[0])
