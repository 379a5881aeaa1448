"""Tiny pipelines of diffusers, from the prompt to the image or video: the same with and without offload."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import fxoffload
from fxoffload import BudgetError, OffloadError, api
from fxoffload.tiny import tiny_pipeline
from fxoffload.transfer import ThreadTransfer
from tests.checks import assert_state, snapshot

SMALL = {"flux": 160, "flux2": 400, "wan": 110, "qwen-image": 800, "sd3": 240, "ltx": 200}
"""KiB that each runs in, less than its transformer weighs."""
VIDEO = {"wan": 5, "ltx": 9}
"""Frames."""


def generate(pipeline: Any, preset: str, *, seed: int = 1) -> torch.Tensor:
    """Two steps at 32x32."""
    pipeline.set_progress_bar_config(disable=True)
    given: dict[str, Any] = {"num_frames": VIDEO[preset]} if preset in VIDEO else {}
    if preset in {"flux2", "qwen-image"}:
        given["max_sequence_length"] = 32
    generator = torch.Generator().manual_seed(seed)
    result = pipeline(
        prompt="a cat on a sofa", height=32, width=32, num_inference_steps=2, generator=generator, output_type="pt", **given
    )
    return torch.as_tensor(result.frames if preset in VIDEO else result.images)


def offload(pipeline: Any, preset: str, **settings: Any) -> Any:
    chosen = {"onload_device": "cpu", "memory_budget": SMALL[preset] << 10, **settings}
    group = fxoffload.layerwise_offload(pipeline, **chosen)
    for handle in group:
        transfer = handle.engine.transfer
        assert isinstance(transfer, ThreadTransfer)
        transfer.delay_s = 0.0005
    return group


@pytest.mark.parametrize("preset", SMALL)
def test_the_same_image_with_and_without_offload(preset: str) -> None:
    pipeline = tiny_pipeline(preset)
    wanted = generate(pipeline, preset)
    kind = type(pipeline)
    states = {name: snapshot(m) for name, m in pipeline.components.items() if isinstance(m, torch.nn.Module)}
    with offload(pipeline, preset) as group:
        assert set(group.root_names) == set(states)
        for _ in range(2):
            assert torch.equal(generate(pipeline, preset), wanted)
        assert not torch.equal(generate(pipeline, preset, seed=2), wanted)
        assert group["transformer"].stats().nbytes_copied > 0
        assert group["text_encoder"].persistent_spans == ()
        assert 0 < sum(handle.engine.arena.nbytes for handle in group) <= SMALL[preset] << 10
    assert type(pipeline) is kind
    assert torch.equal(generate(pipeline, preset), wanted)
    for name, state in states.items():
        assert_state(getattr(pipeline, name), state)


@pytest.mark.parametrize("preset", ["flux", "wan"])
def test_compiled_transformers_take_the_settings_over(preset: str) -> None:
    pipeline = tiny_pipeline(preset)
    eager = generate(pipeline, preset)
    group = offload(pipeline, preset, memory_budget="1GiB", segment_compiler="eager")
    names = [name for name in group.root_names if name.startswith("transformer")]
    for name in names:
        setattr(pipeline, name, torch.compile(getattr(pipeline, name), backend=fxoffload.layerwise, dynamic=False))
    pictures = [generate(pipeline, preset) for _ in range(2)]
    torch.testing.assert_close(pictures[1], eager, rtol=1e-3, atol=1e-3)
    group.set_memory_budget(group.smallest_budget())
    pictures += [generate(pipeline, preset) for _ in range(2)]
    assert all(torch.equal(picture, pictures[0]) for picture in pictures)
    for name in names:
        assert len(api.bindings_of(group[name])) == 1
        assert group[name].stats().nbytes_copied == group[name].get_plan().streamed_nbytes > 0
    assert [handle.root for handle in fxoffload.get_layerwise_offload_handles(pipeline)] == [handle.root for handle in group]
    group.remove()
    for name in names:
        setattr(pipeline, name, group[name].root)
    assert torch.equal(generate(pipeline, preset), eager)


def test_two_transformers_in_turn_stay_within_one_budget() -> None:
    pipeline = tiny_pipeline("wan")
    group = offload(pipeline, "wan")
    held: list[tuple[str, int]] = []
    for name in ("transformer", "transformer_2"):

        def look(*_: Any, name: str = name) -> None:
            held.append((name, sum(handle.engine.arena.nbytes for handle in group)))

        getattr(pipeline, name).register_forward_hook(look)
    for _ in range(3):
        generate(pipeline, "wan")
    assert {name for name, _ in held} == {"transformer", "transformer_2"}
    assert max(nbytes for _, nbytes in held) <= SMALL["wan"] << 10
    a_third = len(held) // 3
    assert held[a_third:-a_third] == held[-a_third:]


def test_the_pipeline_says_that_it_is_on_the_onload_device() -> None:
    pipeline = tiny_pipeline("flux")
    kind = type(pipeline)
    with offload(pipeline, "flux"):
        assert isinstance(pipeline, kind)
        assert pipeline.device == pipeline._execution_device == torch.device("cpu")
        with pytest.raises(OffloadError, match=r"^pipelines: FluxPipeline.to\('cuda'\): its components \(vae, text_encoder, "):
            pipeline.to("cuda")
        with pytest.raises(OffloadError, match=r"^pipelines: FluxPipeline.to\('cpu'\): "):
            pipeline.enable_model_cpu_offload(device="cpu")
    assert type(pipeline) is kind
    pipeline.to("cpu")


def test_another_dtype_through_the_pipeline() -> None:
    pipeline, plain = tiny_pipeline("flux"), tiny_pipeline("flux")
    plain.to(torch.float64)
    with offload(pipeline, "flux", memory_budget=2 * SMALL["flux"] << 10) as group:
        assert pipeline.to(torch.float64) is pipeline
        assert torch.equal(generate(pipeline, "flux"), generate(plain, "flux"))
        assert group["transformer"].stats().nbytes_copied > 0


def test_an_offloaded_pipeline_can_be_saved(tmp_path: Path) -> None:
    pipeline = tiny_pipeline("flux")
    wanted = snapshot(pipeline.transformer)
    with offload(pipeline, "flux"):
        generate(pipeline, "flux")
        pipeline.save_pretrained(tmp_path)
    loaded = type(pipeline).from_pretrained(tmp_path, local_files_only=True)
    assert_state(loaded.transformer, wanted)


def test_only_the_transformer() -> None:
    pipeline = tiny_pipeline("flux")
    wanted = generate(pipeline, "flux")
    others = [m for n, m in pipeline.components.items() if isinstance(m, torch.nn.Module) and n != "transformer"]
    before = [p.data_ptr() for m in others for p in m.parameters()]
    group = offload(pipeline, "flux", module_names="transformer")
    assert torch.equal(generate(pipeline, "flux"), wanted)
    assert group["transformer"].stats().nbytes_copied > 0
    assert [p.data_ptr() for m in others for p in m.parameters()] == before


def test_a_budget_that_is_too_small_for_one_component_names_one_that_works_for_all() -> None:
    pipeline = tiny_pipeline("wan")
    wanted = generate(pipeline, "wan")
    with pytest.raises(BudgetError, match=r"^pipelines: \w+: budget 4.00 KiB: .* at least .*iB$") as error:
        offload(pipeline, "wan", memory_budget="4KiB")
    assert torch.equal(generate(pipeline, "wan"), wanted)
    offload(pipeline, "wan", memory_budget=error.value.smallest_nbytes)
    assert torch.equal(generate(pipeline, "wan"), wanted)


@pytest.mark.parametrize("preset", ["flux", "wan"])
def test_enable_streams_the_declared_blocks_of_the_denoisers(preset: str) -> None:
    pipeline = tiny_pipeline(preset)
    wanted = generate(pipeline, preset)
    group: Any = fxoffload.enable_layerwise_offload(pipeline, onload_device="cpu", memory_budget=SMALL[preset] << 10)
    blocks = {"flux": ("transformer_blocks.", "single_transformer_blocks."), "wan": ("blocks.",)}[preset]
    assert all(name.startswith(blocks) for handle in group for name in handle.module_names)
    assert group.root_names == {"flux": ("transformer",), "wan": ("transformer", "transformer_2")}[preset]
    assert set(group.resident_names) == {n for n in ("text_encoder", "text_encoder_2", "vae") if hasattr(pipeline, n)}
    for _ in range(2):
        assert torch.equal(generate(pipeline, preset), wanted)
    assert group["transformer"].stats().nbytes_copied > 0
    assert fxoffload.remove_layerwise_offload(pipeline) == len(group)
    assert torch.equal(generate(pipeline, preset), wanted)


def test_a_combined_pipeline_finds_the_modules_of_the_others() -> None:
    class Combined:
        def __init__(self, first: Any, second: Any) -> None:
            self.prior, self.decoder = first, second

    first, second = tiny_pipeline("flux"), tiny_pipeline("ltx")
    wanted = generate(first, "flux"), generate(second, "ltx")
    group = offload(Combined(first, second), "ltx", memory_budget="400KiB")
    assert {name.split(".")[0] for name in group.root_names} == {"prior", "decoder"}
    assert group["prior.text_encoder"].config.persistent_buckets == 0
    assert torch.equal(generate(first, "flux"), wanted[0])
    assert torch.equal(generate(second, "ltx"), wanted[1])
    for pipeline in (first, second):
        with pytest.raises(OffloadError, match="are offloaded and run on 'cpu' already"):
            pipeline.to("cuda")
