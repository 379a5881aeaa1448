"""The group of a pipeline's handles: where the pipeline runs, the way back; and the blocks of denoisers alone."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import ConfigError, OffloadError
from fxoffload.components import find_components
from fxoffload.pipelines import group_of
from tests.models import Toy, seeded, toy
from tests.unit.handles import BUDGET, assert_equal, run
from tests.unit.toy_pipelines import Placed, Plain, hooked, offload

# -- the group ---------------------------------------------------------------------------------------------------------


def test_a_pipeline_runs_on_the_onload_device_until_its_offloading_is_removed() -> None:
    pipeline = Placed()
    group = offload(pipeline)
    assert isinstance(pipeline, Placed)
    for name in ("__name__", "__qualname__", "__module__", "__doc__"):
        assert getattr(type(pipeline), name) == getattr(Placed, name)
    assert pipeline.device == pipeline._execution_device == torch.device("cpu")
    for call in (lambda: pipeline.to("cuda"), lambda: pipeline.to(device="cuda"), lambda: pipeline.to("cuda", torch.float16)):
        with pytest.raises(OffloadError) as error:
            call()
        assert str(error.value) == (
            "pipelines: Placed.to('cuda'): its components (text_encoder, transformer, vae) are offloaded and run on 'cpu' "
            "already; leave the call out (enable_model_cpu_offload "
            "and enable_sequential_cpu_offload of diffusers make it), "
            "or call fxoffload.remove_layerwise_offload(pipeline) first"
        )
    group.remove()
    assert type(pipeline) is Placed
    assert vars(pipeline).keys() == vars(Placed()).keys()


@pytest.mark.parametrize("make", [Plain, Placed])
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda pipeline: pickle.loads(pickle.dumps(pipeline))], ids=["deep", "pickle"])
def test_copies_and_pickles_are_plain_pipelines(make: type[Plain], copied: Callable[[Any], Any]) -> None:
    pipeline = make()
    wanted = pipeline()
    with offload(pipeline):
        twin = copied(pipeline)
        assert type(twin) is make
        assert group_of(twin) is None
        assert fxoffload.get_layerwise_offload_handles(twin) == []
        assert torch.equal(twin(), wanted)
        with torch.no_grad():
            twin.vae.out.weight.zero_()
        assert torch.equal(pipeline(), wanted)
        with offload(twin):
            assert not torch.equal(twin(), wanted)


def test_a_shallow_copy_has_the_same_components() -> None:
    pipeline = Placed()
    wanted = pipeline()
    with offload(pipeline):
        twin = copy.copy(pipeline)
        assert twin.vae is pipeline.vae
        assert twin.device == torch.device("cpu")
        assert torch.equal(twin(), wanted)
        with pytest.raises(OffloadError, match=r"Placed\.to"):
            twin.to("cuda")


def test_a_pipeline_without_a_dictionary_keeps_its_layout() -> None:
    class Slots:
        __slots__ = ("__weakref__", "components")
        device = property(lambda self: torch.device("meta"))

    pipeline = Slots()
    pipeline.components = {"transformer": toy(2)}
    group = offload(pipeline)
    assert pipeline.device == torch.device("cpu")
    group.remove()
    assert type(pipeline) is Slots


def test_before_any_component_ran_the_smallest_budget_is_not_known() -> None:
    with pytest.raises(OffloadError, match=r"^api: Toy: it has not run yet, and plans are made at the first call; call it once$"):
        offload(Plain()).smallest_budget()


def test_a_dtype_may_be_changed() -> None:
    pipeline, plain = Placed(), Placed()
    group = offload(pipeline, memory_budget=2 * BUDGET)
    assert pipeline.to(torch.float64) is pipeline
    plain.to(torch.float64)
    x = torch.ones(2, 16, dtype=torch.float64)
    with torch.no_grad():
        for _ in range(2):
            assert torch.equal(pipeline.transformer(x), plain.transformer(x))
    assert group["transformer"].stats().nbytes_copied > 0


def test_remove_gives_everything_back_and_may_be_called_again() -> None:
    pipeline, wanted = Plain(), Plain()()
    kept = vars(pipeline).keys()
    with offload(pipeline) as group:
        assert torch.equal(pipeline(), wanted)
        assert repr(group) == "<LayerwiseOffloadHandleGroup Plain: text_encoder, transformer, vae on cpu>"
    group.remove()
    assert (group.is_removed, repr(group)) == (True, "<LayerwiseOffloadHandleGroup Plain: removed>")
    assert vars(pipeline).keys() == kept
    assert hooked(pipeline.text_encoder, pipeline.transformer, pipeline.vae) == 0
    assert torch.equal(pipeline(), wanted)


@pytest.mark.parametrize("by", ["pipeline", "group", "handles"])
def test_remove_by_every_way(by: str) -> None:
    pipeline = Placed()
    group = offload(pipeline)
    assert fxoffload.get_layerwise_offload_handles(pipeline) == fxoffload.get_layerwise_offload_handles(group) == [*group]
    if by == "handles":
        for handle in group:
            handle.remove()
    else:
        assert fxoffload.remove_layerwise_offload(group if by == "group" else pipeline) == 3
    assert fxoffload.get_layerwise_offload_handles(pipeline) == []
    assert fxoffload.remove_layerwise_offload(pipeline) == 0
    assert type(pipeline) is Placed
    again = offload(group)
    assert again.source is pipeline
    again.remove()
    assert type(pipeline) is Placed


def test_a_pipeline_that_is_offloaded_already_is_an_error() -> None:
    pipeline = Plain()
    offload(pipeline)
    with pytest.raises(OffloadError, match=r"^handle: Toy: it is offloaded already; call "):
        offload(pipeline)
    assert len(fxoffload.get_layerwise_offload_handles(pipeline)) == 3


# -- enable ------------------------------------------------------------------------------------------------------------


def enable(pipeline: Any, **settings: Any) -> Any:
    return fxoffload.enable_layerwise_offload(pipeline, **{"onload_device": "cpu", "memory_budget": BUDGET, **settings})


def test_enable_streams_the_blocks_of_denoisers_and_keeps_all_else(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline, wanted = Plain(), Plain()()
    pipeline.transformer_2, pipeline.unet = toy(4, seed=7), toy(4, seed=8)
    moved: list[tuple[nn.Module, Any]] = []
    move = nn.Module.to
    monkeypatch.setattr(nn.Module, "to", lambda self, *args: moved.append((self, *args)) or move(self, *args))
    group = enable(pipeline)
    assert group.root_names == ("transformer", "transformer_2", "unet")
    assert group.resident_names == ("text_encoder", "vae")
    assert group["transformer"].module_names == tuple(f"blocks.{i}" for i in range(6))
    assert moved == [(pipeline.text_encoder, torch.device("cpu")), (pipeline.vae, torch.device("cpu"))]
    assert torch.equal(pipeline(), wanted)
    assert group["transformer"].stats().nbytes_copied > 0
    moved.clear()
    group.remove("meta")
    assert {pipeline.vae, pipeline.text_encoder, pipeline.transformer} <= {module for module, _ in moved}
    assert {p.device.type for module in find_components(pipeline).values() for p in module.parameters()} == {"meta"}


def test_a_class_that_declares_its_blocks_is_a_denoiser_by_any_name() -> None:
    class Declares(Toy):
        _layerwise_offload_blocks_attrs = ("blocks",)

    pipeline = SimpleNamespace(model=seeded(lambda: Declares(1)), language=toy(4))
    group = enable(pipeline)
    assert group.module_names == ("model.blocks.0",)
    assert group.resident_names == ("language",)


def test_enable_needs_a_denoiser_with_blocks() -> None:
    with pytest.raises(ConfigError) as error:
        enable(SimpleNamespace(transformer=nn.Linear(4, 4), vae=toy(2)))
    assert str(error.value) == (
        "pipelines: SimpleNamespace: none of its components (transformer, vae) is a denoiser with blocks; declare them on its "
        "class, as _layerwise_offload_blocks_attrs = ['blocks'], or use layerwise_offload"
    )
    with pytest.raises(ConfigError) as refused:
        enable(Plain(), module_names="transformer")
    assert str(refused.value).startswith("pipelines: module_names: it does not go with enable_layerwise_offload; use ")


def test_results_are_those_of_the_plain_models() -> None:
    pipeline = Plain()
    enable(pipeline)
    assert_equal(run(pipeline.transformer), run(Plain().transformer))
