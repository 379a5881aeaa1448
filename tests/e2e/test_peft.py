"""PEFT's adapters on an offloaded model: before and after compilation, swapped, scaled, merged, taken away; compiles counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from peft.utils.hotswap import hotswap_adapter_from_state_dict, prepare_model_for_compiled_hotswap
from torch import nn

import fxoffload
from fxoffload import api
from tests.checks import assert_streams, halve, offload
from tests.models import rows, toy

pytestmark = pytest.mark.filterwarnings("ignore:Already found a `peft_config`")
HOWS = pytest.mark.parametrize("how", ["eager", "compiled"])
RANK = 8


def inject(model: Any, *, rank: int = 4, name: str = "default", blocks: tuple[int, ...] = (0, 1, 3), seed: int = 0) -> LoraConfig:
    """Adapters with random values on `up` and `down` of some blocks."""
    torch.manual_seed(seed)
    targets = [f"blocks.{i}.{part}" for i in blocks for part in ("up", "down")]
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=targets, init_lora_weights=False)
    inject_adapter_in_model(config, model, adapter_name=name)
    model.requires_grad_(False)
    return config


def values(rank: int, seed: int, blocks: tuple[int, ...] = (0, 1, 3)) -> dict[str, torch.Tensor]:
    """The state of other adapters of the same places."""
    other = toy(4)
    inject(other, rank=rank, seed=seed, blocks=blocks)
    return {name: p * (1 + seed) for name, p in other.named_parameters() if "lora_" in name}


def layers(model: nn.Module) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


class Twins:
    """A Toy that streams, and one that is plain. `graphs`: compiled since the last question."""

    def __init__(self, how: str, *changes: Callable[[Any], object]) -> None:
        self.model, self.plain = toy(4), toy(4)
        self.how = how
        self.edit(*changes)
        self.run: Any = offload(self.model, dynamic=None) if how == "compiled" else self.model
        if how == "eager":
            nbytes = sum(p.nbytes for p in self.model.parameters())
            fxoffload.layerwise_offload(self.model, onload_device="cpu", memory_budget=int(nbytes * 0.6))
        self.check(0, streams=False)
        if how == "compiled":
            halve(self.model)
        self.check(1)
        self._graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]

    def edit(self, *changes: Callable[[Any], object]) -> None:
        for change in changes:
            for m in (self.model, self.plain):
                with torch.no_grad():
                    change(m)

    def check(self, k: int, *, streams: bool = True) -> torch.Tensor:
        with torch.no_grad():
            for i in (k, k + 1):
                got, wanted = self.run(rows(i)), self.plain(rows(i))
                torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
        if streams:
            assert fxoffload.stats(self.model).nbytes_copied > 0
        return got

    @property
    def graphs(self) -> int:
        before, self._graphs = self._graphs, torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return self._graphs - before


@HOWS
def test_hot_swap_of_values_ranks_and_scales_ten_times(how: str) -> None:
    twins = Twins(how, inject, lambda m: prepare_model_for_compiled_hotswap(m, target_rank=RANK))
    seen = [twins.check(1)]
    for k in range(10):
        rank = (2, 4, RANK)[k % 3]
        config = LoraConfig(r=rank, lora_alpha=1 + k)
        twins.edit(lambda m, r=rank, k=k, c=config: hotswap_adapter_from_state_dict(m, values(r, k), "default", c))
        seen.append(twins.check(1))
        assert not torch.equal(seen[-1], seen[-2])
        # What streams is what the plan says, adapters included.
        assert_streams(twins.model)
    assert twins.graphs == 0


@HOWS
def test_values_in_place_and_scales_ten_times(how: str) -> None:
    twins = Twins(how, inject)
    for k in range(10):
        twins.edit(
            lambda m, k=k: [layer.lora_A["default"].weight.mul_(1 + 0.1 * k) for layer in layers(m)],
            lambda m, k=k: [layer.lora_B["default"].weight.data.add_(0.1) for layer in layers(m)],
        )
        twins.check(k)
    assert twins.graphs == 0
    for k in range(10):
        twins.edit(lambda m, k=k: [layer.set_scale("default", 0.2 + 0.1 * k) for layer in layers(m)])
        twins.check(k)
    # Dynamo compiles once more where a number that it took for a constant changes.
    assert twins.graphs == (how == "compiled")


@HOWS
def test_adapters_after_the_first_call_and_away_again(how: str) -> None:
    twins = Twins(how)
    first = twins.check(1)
    packed = fxoffload.stats(twins.model).nbytes_host
    for k in range(3):
        twins.edit(lambda m, k=k: inject(m, seed=k))
        assert not torch.equal(twins.check(1), first)
        assert twins.graphs <= 1
        assert fxoffload.stats(twins.model).nbytes_host > packed
        packed_now = api.engine_of(twins.model).store.by_name()
        assert any("lora_A" in name for name in packed_now), "adapters stream too"
        twins.edit(remove)
        torch.testing.assert_close(twins.check(1), first, rtol=0, atol=0)
        assert twins.graphs <= 1


def freeze(model: Any) -> None:
    model.requires_grad_(False)


def remove(model: Any) -> None:
    """The layers themselves in place of those with adapters, as PEFT's `unload` does."""
    for block in model.blocks:
        for part in ("up", "down"):
            layer = getattr(block, part)
            if isinstance(layer, LoraLayer):
                setattr(block, part, layer.get_base_layer())


@HOWS
def test_merge_and_unmerge(how: str) -> None:
    twins = Twins(how, inject)
    first = twins.check(1)
    plain = [p.clone() for p in twins.plain.parameters()]
    for _ in range(3):
        twins.edit(lambda m: [layer.merge() for layer in layers(m)])
        assert not all(torch.equal(p, q) for p, q in zip(twins.plain.parameters(), plain, strict=True))
        torch.testing.assert_close(twins.check(1), first, rtol=1e-4, atol=1e-5)
        twins.edit(lambda m: [layer.unmerge() for layer in layers(m)])
        torch.testing.assert_close(twins.check(1), first, rtol=1e-4, atol=1e-5)
    # Merged and not merged are two graphs, each compiled once.
    assert twins.graphs == (how == "compiled")


@HOWS
def test_several_adapters_in_turn(how: str) -> None:
    twins = Twins(how, inject, lambda m: inject(m, name="other", seed=5, blocks=(1, 2)))
    for k, names in enumerate(["other", "default", ["default", "other"], "default", "other", ["default", "other"]]):
        twins.edit(lambda m, names=names: [layer.set_adapter(names) for layer in layers(m)], freeze)
        twins.check(k)
    # One for each choice.
    assert twins.graphs <= (3 if how == "compiled" else 0)
    twins.edit(lambda m: [layer.delete_adapter("other") for layer in layers(m)])
    twins.check(3)


@pytest.mark.parametrize("level", ["diffusers", "attached first"])
def test_the_hot_swap_of_diffusers(level: str) -> None:
    """`enable_lora_hotswap`, then other weights under the same name: no compile, the same as loading them plainly."""
    from fxoffload.tiny import tiny_pipeline

    plain, model = (tiny_pipeline("flux").transformer for _ in range(2))
    for transformer in (plain, model):
        transformer.enable_lora_hotswap(target_rank=RANK)
        transformer.load_lora_adapter(flux_adapter(plain, 4, 0), adapter_name="default", prefix="transformer")
        transformer.requires_grad_(False)
    if level == "attached first":
        fxoffload.layerwise_offload(model, onload_device="cpu", memory_budget="1GiB")
    model.compile(
        backend=fxoffload.layerwise,
        fullgraph=True,
        options={"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"},
    )
    given = flux_inputs(plain)
    with torch.no_grad():
        model(**given)
        halve(model)
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        for k in range(1, 11):
            state = flux_adapter(plain, (2, 4, RANK)[k % 3], k)
            for transformer in (plain, model):
                transformer.load_lora_adapter(dict(state), adapter_name="default", prefix="transformer", hotswap=True)
            for _ in range(2):
                torch.testing.assert_close(model(**given)[0], plain(**given)[0], rtol=1e-5, atol=1e-6)
            assert_streams(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def flux_adapter(transformer: Any, rank: int, seed: int) -> dict[str, torch.Tensor]:
    generator, state = torch.Generator().manual_seed(seed), {}
    for name, module in transformer.named_modules():
        if name.endswith(("attn.to_q", "attn.to_v")):
            base = getattr(module, "base_layer", module)
            state[f"transformer.{name}.lora_A.weight"] = torch.randn(rank, base.in_features, generator=generator) * 0.3
            state[f"transformer.{name}.lora_B.weight"] = torch.randn(base.out_features, rank, generator=generator) * 0.3
    return state


def flux_inputs(transformer: Any) -> dict[str, Any]:
    config = transformer.config
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    given = {
        "hidden_states": random(1, 16, config.in_channels),
        "encoder_hidden_states": random(1, 8, config.joint_attention_dim),
        "pooled_projections": random(1, config.pooled_projection_dim),
        "timestep": torch.tensor([0.5]),
        "img_ids": random(16, 3),
        "txt_ids": random(8, 3),
        "return_dict": False,
    }
    return given | ({"guidance": torch.tensor([3.5])} if config.guidance_embeds else {})
