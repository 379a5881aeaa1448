"""Save the plans of models of real size, traced on the meta device, for `tests/unit/test_replay.py` to plan again.

    python tests/replay/save_models.py            # all of them, about three minutes
    python tests/replay/save_models.py wan

The machine is an H200 in round figures, so that a new calibration changes nothing here. What is saved are the costs that the
planner sees: a change of the tracer or of the cost model shows when this script is run again, one of the planner in the test.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import fxoffload
from fxoffload import shapes
from fxoffload.machine import Machine
from fxoffload.planner import Knobs

FOLDER = Path(__file__).parent / "models"
RATES = (("bfloat16", 650.0), ("float16", 650.0), ("float32", 50.0))
H200 = Machine("NVIDIA H200, round figures", 55.0, 0.01, 4000.0, 0.004, RATES)


def text(case: dict[str, Any]) -> str:
    """JSON with one line for each segment, bucket and load, so that a diff can be read."""
    return re.sub(r"\n {4,}|\n {3}(?=[}\]])", " ", json.dumps(case, indent=1)) + "\n"


def flux() -> torch.nn.Module:
    from diffusers import FluxTransformer2DModel

    return FluxTransformer2DModel(guidance_embeds=True)


def wan() -> torch.nn.Module:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel()


def qwen_image() -> torch.nn.Module:
    from diffusers import QwenImageTransformer2DModel

    return QwenImageTransformer2DModel()


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=16384, tie_word_embeddings=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], dict[str, int], tuple[str, ...]]] = {
    "flux-b1": (flux, {"batch": 1, "height": 1024, "width": 1024}, ("1.25GiB", "8GiB")),
    "flux-b3": (flux, {"batch": 3, "height": 1024, "width": 1024}, ("8GiB",)),
    "wan": (wan, {"height": 480, "width": 832, "frames": 81}, ("8GiB",)),
    "qwen-image": (qwen_image, {"height": 1328, "width": 1328}, ("8GiB",)),
    "llama-prefill": (llama, {"tokens": 8192}, ("8GiB",)),
    "llama-decode": (llama, {"tokens": 1}, ("8GiB",)),
}


def main(names: list[str]) -> None:
    FOLDER.mkdir(exist_ok=True)
    torch.set_default_dtype(torch.bfloat16)
    for name in names or MODELS:
        make, sizes, budgets = MODELS[name]
        with torch.device("meta"):
            model = make().eval().requires_grad_(False)
        given = shapes.example_inputs(model, device="meta", **sizes)
        for budget in budgets:
            with torch.no_grad():
                found = fxoffload.explain(model, given, machine=H200, memory_budget=budget)
            case = {
                "costs": dataclasses.asdict(found.costs),
                "budget_nbytes": found.plan.budget_nbytes,
                "knobs": dataclasses.asdict(Knobs()),
                "plan": dataclasses.asdict(found.plan),
            }
            (FOLDER / f"{name}-{budget}.json").write_text(text(case))
            print(name, budget, str(found.plan).splitlines()[0], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
