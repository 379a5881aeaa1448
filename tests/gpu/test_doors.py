"""The front doors on a GPU: where inputs, results and latents are, and how much memory a pipeline takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import OffloadError, OffloadWarning
from tests.gpu.helpers import DEVICE, ON_GPU, given, toy

pytestmark = ON_GPU


@torch.no_grad()
@pytest.mark.parametrize("input_device", ["cpu", "cuda"])
@pytest.mark.parametrize("output_device", [None, "cpu"])
def test_inputs_may_be_anywhere_and_results_are_where_they_are_asked_for(input_device: str, output_device: str | None) -> None:
    model, plain = toy(), toy().to(DEVICE)
    handle: Any = fxoffload.layerwise_offload(model, output_device=output_device, memory_budget="1GiB", persistent_buckets=0)
    assert handle.onload_device == DEVICE
    # Three forwards find out what the model takes, the next one is the first under its plan.
    for k in range(5):
        result = model(given(k).to(input_device))
        assert result.device == (DEVICE if output_device is None else torch.device("cpu"))
        assert torch.equal(result.to(DEVICE), plain(given(k)))
    assert handle.stats().nbytes_copied == handle.get_plan().streamed_nbytes > 0
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    handle.remove(device="cuda")
    assert {p.device for p in model.parameters()} == {DEVICE}
    assert torch.equal(model(given(0)), plain(given(0)))


@torch.no_grad()
def test_persistent_blocks_are_on_the_device_and_their_weights_on_the_host() -> None:
    model = toy(8)
    handle: Any = fxoffload.layerwise_offload(model, memory_budget="1GiB", persistent_buckets=4, persistent_bins=2)
    for k in range(3):
        model(given(k))
    assert handle.persistent_spans == ((0, 2), (4, 6))
    handle.remove()
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert not any(p.is_pinned() for p in model.parameters())


def test_latents_are_made_on_the_device_and_stay_there() -> None:
    from fxoffload.tiny import tiny_pipeline

    def generate(pipeline: Any) -> torch.Tensor:
        pipeline.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(1)
        size = {"height": 32, "width": 32, "num_inference_steps": 2}
        return pipeline(prompt="a cat", generator=generator, output_type="pt", **size).images

    pipeline = tiny_pipeline("flux")
    wanted = generate(tiny_pipeline("flux").to(DEVICE))
    group: Any = fxoffload.layerwise_offload(pipeline, memory_budget="256MiB")
    seen: set[torch.device] = set()
    pipeline.transformer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.update(t.device for t in kwargs.values() if isinstance(t, torch.Tensor)),
        with_kwargs=True,
    )
    image = generate(pipeline)
    assert (pipeline.device, pipeline._execution_device, image.device) == (DEVICE, DEVICE, DEVICE)
    assert seen == {DEVICE}
    torch.testing.assert_close(image, wanted, rtol=1e-3, atol=1e-3)
    with pytest.raises(OffloadError, match="are offloaded and run on 'cuda:0' already"):
        pipeline.to("cuda")
    group.remove()
    assert {p.device.type for p in pipeline.transformer.parameters()} == {"cpu"}


def test_what_is_kept_resident_is_on_the_device_until_the_offloading_is_removed() -> None:
    from fxoffload.tiny import tiny_pipeline

    pipeline = tiny_pipeline("flux")
    group: Any = fxoffload.enable_layerwise_offload(pipeline, memory_budget="256MiB")
    resident = [getattr(pipeline, name) for name in group.resident_names]
    assert len(resident) == 3
    assert {p.device for module in resident for p in module.parameters()} == {DEVICE}
    group.remove()
    assert {p.device.type for module in (*resident, pipeline.transformer) for p in module.parameters()} == {"cpu"}


def test_a_component_that_is_left_on_the_host_is_named() -> None:
    from fxoffload.tiny import tiny_pipeline

    with pytest.warns(OffloadWarning, match=r"^pipelines: \w+: it is not chosen, and its .* of weights stay on 'cpu'"):
        fxoffload.layerwise_offload(tiny_pipeline("flux"), module_names="transformer", memory_budget="256MiB")
