"""Pipelines of toy models: which components, with which settings, under one budget."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import Budget, BudgetError, ConfigError, LayerwiseOffloadHandleGroup, OffloadError, OffloadWarning
from fxoffload.components import find_components
from tests.models import Reversed, Toy, seeded, toy
from tests.unit.handles import BLOCK, BUDGET, REST, assert_equal
from tests.unit.toy_pipelines import Placed, Plain, hooked, offload

# -- components --------------------------------------------------------------------------------------------------------


def test_every_component_with_weights_is_a_root() -> None:
    pipeline, wanted = Plain(), Plain()()
    group = offload(pipeline)
    assert isinstance(group, LayerwiseOffloadHandleGroup)
    assert torch.equal(pipeline(), wanted)
    assert group.root_names == ("text_encoder", "transformer", "vae")
    assert (len(group), [*group]) == (3, [*group.handles])
    assert group["vae"].root is pipeline.vae
    assert group.module_names == (
        *(f"text_encoder.blocks.{i}" for i in range(4)),
        *(f"transformer.blocks.{i}" for i in range(6)),
        *(f"vae.blocks.{i}" for i in range(3)),
    )
    assert group.stats()["transformer"].forwards == 2
    assert all(stats.nbytes_copied > 0 for name, stats in group.stats().items() if name != "vae")


def test_the_root_of_a_component_has_its_name() -> None:
    pipeline = SimpleNamespace(embed=nn.Linear(4, 4), head=toy(2))
    group = offload(pipeline, component_settings={"embed": {"module_names": ""}})
    assert group.module_names == ("embed", "head.blocks.0", "head.blocks.1")


@pytest.mark.parametrize(
    "pipeline",
    [
        SimpleNamespace(dit=toy(2), again=None, scheduler=object()),
        SimpleNamespace(components={"dit": toy(2), "tokenizer": "none"}),
        SimpleNamespace(dit=torch.compile(toy(2), backend="eager")),
    ],
    ids=["attributes", "components", "compiled"],
)
def test_modules_are_attributes_or_components_compiled_or_not(pipeline: Any) -> None:
    assert offload(pipeline).root_names == ("dit",)
    assert [handle.module_names for handle in fxoffload.get_layerwise_offload_handles(pipeline)] == [("blocks.0", "blocks.1")]
    assert fxoffload.remove_layerwise_offload(pipeline) == 1


def test_a_module_under_two_names_is_one_component() -> None:
    model = toy(2)
    pipeline = SimpleNamespace(transformer=model, dit=model)
    assert offload(pipeline, module_names="dit").root_names == ("transformer",)


def test_a_pipeline_inside_a_pipeline_is_found() -> None:
    inner = Placed()
    outer = SimpleNamespace(prior=inner, decoder=toy(2), same=inner)
    outer.prior.parent = outer
    assert [*find_components(outer)] == ["decoder", "prior.text_encoder", "prior.transformer", "prior.vae"]
    group = offload(outer, module_names=["prior.transformer", "decoder"])
    assert group.root_names == ("decoder", "prior.transformer")
    with pytest.raises(OffloadError, match=r"^pipelines: Placed.to\('cuda'\): "):
        inner.to("cuda")
    group.remove()
    assert type(inner) is Placed


def test_only_what_is_chosen_is_touched() -> None:
    pipeline = Plain()
    others = (pipeline.text_encoder, pipeline.vae)
    before = [p.data_ptr() for module in others for p in module.parameters()]
    group = offload(pipeline, module_names="transformer")
    wanted = Plain()()
    assert group.root_names == ("transformer",)
    assert torch.equal(pipeline(), wanted)
    assert [p.data_ptr() for module in others for p in module.parameters()] == before
    assert hooked(*others) == 0
    assert not any("forward" in vars(module) for module in others)


def test_what_is_not_chosen_and_lies_elsewhere_is_named() -> None:
    pipeline = Plain()
    pipeline.vae.to("meta")
    with pytest.warns(OffloadWarning) as warned:
        offload(pipeline, module_names="transformer")
    (warning,) = warned
    assert str(warning.message) == (
        "pipelines: vae: it is not chosen, and its 15.06 KiB of weights stay on 'meta', while the pipeline runs on 'cpu'; "
        "move it there, or offload it too"
    )
    assert warning.filename.endswith("toy_pipelines.py")


def test_a_filter_chooses_components() -> None:
    seen: list[str] = []
    group = offload(Plain(), module_filter=lambda name, module: seen.append(name) or len(module.blocks) > 3)
    assert group.root_names == ("text_encoder", "transformer")
    assert seen == ["text_encoder", "transformer", "vae"]


def test_a_module_inside_a_component_can_be_chosen() -> None:
    group = offload(Plain(), module_names=["transformer.blocks.1", "transformer.blocks.3", "vae"], memory_budget="1MiB")
    assert group.module_names == ("transformer.blocks.1", "transformer.blocks.3", *(f"vae.blocks.{i}" for i in range(3)))
    assert offload(Plain(), module_names=["transformer.blocks.1", "transformer"]).root_names == ("transformer",)


@pytest.mark.parametrize(
    ("settings", "kind", "text"),
    [
        (
            {"module_names": "transformr"},
            AttributeError,
            "pipelines: module_names: Plain has no component 'transformr'; did you mean 'transformer'?",
        ),
        (
            {"module_names": "steps"},
            TypeError,
            "pipelines: module_names: Plain.steps is of type int, no module with weights; give one of 'text_encoder', "
            "'transformer', 'vae'",
        ),
        (
            {"module_names": "transformer.block"},
            AttributeError,
            "select: module_names: Toy has no module 'block'; did you mean 'blocks' or ",
        ),
        (
            {"module_filter": lambda name, module: False},
            ConfigError,
            "pipelines: module_filter: no component is chosen; choose at least one, or leave it out",
        ),
        (
            {"module_names": []},
            ConfigError,
            "config: module_names: the list is empty; give at least one name",
        ),
        (
            {"component_settings": {"text_encodr": {}}},
            AttributeError,
            "pipelines: component_settings: Plain offloads no component 'text_encodr'; did you mean 'text_encoder'?",
        ),
        (
            {"component_settings": {"vae": {"transfer_buckets": 0}}},
            ConfigError,
            "config: transfer_buckets: 0 is not accepted; give an int >= 1",
        ),
    ],
)
def test_bad_settings_are_named_and_change_nothing(settings: dict[str, Any], kind: type[Exception], text: str) -> None:
    pipeline = Plain()
    with pytest.raises(kind) as error:
        offload(pipeline, **settings)
    assert str(error.value).startswith(text)
    assert fxoffload.get_layerwise_offload_handles(pipeline) == []
    assert hooked(pipeline.text_encoder, pipeline.transformer, pipeline.vae) == 0


def test_one_component_that_cannot_be_offloaded_leaves_all_as_they_were() -> None:
    pipeline, wanted = Placed(), Placed()()
    pipeline.vae._hf_hook = object()
    with pytest.raises(OffloadError, match=r"^foreign: Toy: object of accelerate moves its weights already"):
        offload(pipeline)
    assert fxoffload.get_layerwise_offload_handles(pipeline) == []
    assert type(pipeline) is Placed
    del pipeline.vae._hf_hook
    assert torch.equal(pipeline(), wanted)


# -- settings ----------------------------------------------------------------------------------------------------------


def test_text_encoders_are_streamed_with_little_memory_and_the_rest_is_up_to_the_planner() -> None:
    pipeline = Plain()
    pipeline.text_encoder_2, pipeline.vision_language_encoder = toy(2), toy(2)
    group = offload(pipeline)
    knobs = {name: (group[name].config.transfer_buckets, group[name].config.persistent_buckets) for name in group.root_names}
    conservative, free = (1, 0), (None, None)
    assert knobs == {
        "text_encoder": conservative,
        "transformer": free,
        "vae": free,
        "text_encoder_2": conservative,
        "vision_language_encoder": conservative,
    }
    group = offload(Plain(), transfer_buckets=3, persistent_buckets="auto")
    assert group["text_encoder"].config.transfer_buckets == group["transformer"].config.transfer_buckets == 3
    assert group["text_encoder"].config.persistent_buckets is None


def test_settings_of_single_components() -> None:
    pipeline = Plain()
    pipeline.text_encoder_2 = toy(2)
    group = offload(
        pipeline,
        max_inflight_prefetch_bytes="8KiB",
        component_settings={
            "text_encoder": {"transfer_buckets": 4},
            "text_encoder*": {"transfer_buckets": 2, "max_inflight_prefetch_bytes": None},
            "nothing*": {"transfer_buckets": 9},
            "vae": {"memory_budget": "1MiB", "persistent_buckets": 1},
        },
    )
    configs = {name: group[name].config for name in group.root_names}
    assert {name: config.transfer_buckets for name, config in configs.items()} == {
        "text_encoder": 4, "transformer": None, "vae": None, "text_encoder_2": 2,
    }  # fmt: skip
    limits = [configs[name].max_inflight_prefetch_bytes for name in ("text_encoder", "text_encoder_2", "transformer")]
    assert limits == [None, None, 8192]
    assert (configs["vae"].memory_budget, configs["vae"].persistent_buckets) == (1 << 20, 1)
    assert configs["text_encoder"].memory_budget is configs["transformer"].memory_budget


def test_components_share_one_budget() -> None:
    pipeline, wanted = Plain(), Plain()()
    group = offload(pipeline)
    budgets = {id(handle.memory_budget) for handle in group}
    assert len(budgets) == 1
    assert isinstance(group.handles[0].memory_budget, Budget)
    for _ in range(2):
        assert torch.equal(pipeline(), wanted)
        assert 0 < sum(handle.engine.arena.nbytes for handle in group) <= BUDGET
    mine = Budget(BUDGET)
    assert {handle.memory_budget for handle in offload(Plain(), memory_budget=mine)} == {mine}


def test_another_budget_for_all() -> None:
    pipeline, wanted = Plain(), Plain()()
    group = offload(pipeline)
    pipeline()
    group.set_memory_budget("1MiB")
    assert torch.equal(pipeline(), wanted)
    assert torch.equal(pipeline(), wanted)
    assert group["transformer"].stats().nbytes_copied == 0
    least = group.smallest_budget()
    assert least == REST + 2 * BLOCK
    with pytest.raises(BudgetError, match=r"^pipelines: \w+: budget 2.50 KiB: blocks.0.up alone needs .* at least"):
        group.set_memory_budget(REST)
    assert {handle.memory_budget_nbytes for handle in group} == {1 << 20}
    group.set_memory_budget(least)
    assert torch.equal(pipeline(), wanted)


def test_where_one_component_refuses_a_budget_the_others_are_as_they_were() -> None:
    pipeline = Plain()
    pipeline.transformer, pipeline.vae = seeded(lambda: Toy(6, 32)), seeded(lambda: Reversed(4))
    parts = {pipeline.text_encoder: 16, pipeline.transformer: 32, pipeline.vae: 16}

    def results() -> list[torch.Tensor]:
        with torch.no_grad():
            return [part(torch.ones(2, d)) for part, d in parts.items()]

    wanted = results()
    group = offload(pipeline, memory_budget="64KiB")
    for _ in range(2):
        results()
    before = [(handle.module_names, handle.plan, handle.stats(), handle.memory_budget) for handle in group]
    with pytest.raises(BudgetError, match=r"^pipelines: transformer: budget 8.50 KiB: .* alone needs .* at least") as refused:
        # The others have room in it when their blocks are split.
        group.set_memory_budget(REST + BLOCK + 1024)
    assert [(handle.module_names, handle.plan, handle.stats(), handle.memory_budget) for handle in group] == before
    assert_equal(results(), wanted)
    group.set_memory_budget(refused.value.smallest_nbytes)
    assert_equal(results(), wanted)


def test_the_budget_that_an_error_names_works_for_all() -> None:
    pipeline = Plain()
    pipeline.transformer = seeded(lambda: Toy(6, 32))
    with pytest.raises(BudgetError, match=r"^pipelines: transformer: budget 3.00 KiB: .* at least .*iB$") as error:
        offload(pipeline, memory_budget="3KiB")
    assert fxoffload.get_layerwise_offload_handles(pipeline) == []
    offload(pipeline, memory_budget=error.value.smallest_nbytes)
