"""The calls that a user writes: names, defaults, forms of a model, and each error by its text."""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import BudgetError, ConfigError, LayerwiseOffloadHandle, OffloadConfig, OffloadError
from tests.models import toy
from tests.unit.handles import BLOCK, BUDGET, assert_equal, offload, run

# -- the call ----------------------------------------------------------------------------------------------------------


def test_a_model_streams_and_computes_the_same() -> None:
    model = toy(6)
    handle = offload(model)
    assert_equal(run(model), run(toy(6)))
    assert handle.stats().nbytes_copied == (6 - handle.persistent_buckets) * BLOCK > 0
    assert handle.stats().nbytes_arena <= BUDGET


def test_help_shows_every_setting_with_its_default() -> None:
    fields = {f.name: f for f in dataclasses.fields(OffloadConfig)}
    parameters = inspect.signature(fxoffload.layerwise_offload).parameters
    assert [*parameters] == ["model", "component_settings", *fields]
    assert all(p.kind is p.KEYWORD_ONLY for name, p in parameters.items() if name != "model")
    assert (parameters["onload_device"].default, parameters["offload_device"].default) == ("cuda", "cpu")
    for name in fields.keys() - {"onload_device", "offload_device"}:
        assert parameters[name].default == fields[name].default
    left_out: dict[Any, set[str]] = {
        fxoffload.layerwise_cpu_offload: {"offload_device"},
        fxoffload.enable_layerwise_offload: {"module_names", "module_filter"},
    }
    for function, names in left_out.items():
        assert {*inspect.signature(function).parameters} - {"model", "pipeline"} == fields.keys() - names


def test_defaults() -> None:
    cpu = torch.device("cpu")
    handle = fxoffload.layerwise_offload(toy(2), onload_device="cpu")
    assert isinstance(handle, LayerwiseOffloadHandle)
    assert handle.config == OffloadConfig(onload_device=cpu)
    assert handle.memory_budget == "auto"
    assert handle.memory_budget_nbytes > 1 << 20
    assert handle.module_names == ("blocks.0", "blocks.1")
    assert (handle.onload_device, handle.offload_device, handle.output_device) == (cpu, cpu, None)
    assert (handle.async_transfer, handle.copy_streams, handle.max_copy_streams) == (True, 1, 1)
    assert (handle.transfer_buckets, handle.prefetch_limit, handle.max_inflight_prefetch_bytes) == (None, False, None)
    assert (handle.persistent_spans, handle.persistent_buckets, handle.persistent_bins) == ((), 0, 0)
    assert (handle.plan, handle.is_removed) == (None, False)


def test_without_an_accelerator_the_default_device_is_an_error() -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator")
    with pytest.raises(ConfigError, match=r"onload_device: 'cuda' is not available, .*; pass onload_device='cpu' to run here$"):
        fxoffload.layerwise_offload(toy(2))


def test_cpu_offload_has_its_offload_device_fixed() -> None:
    handle = fxoffload.layerwise_cpu_offload(toy(2), onload_device="cpu", module_names="blocks.1")
    assert isinstance(handle, LayerwiseOffloadHandle)
    assert (handle.module_names, handle.offload_device) == (("blocks.1",), torch.device("cpu"))


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"transfer_buckets": True}, TypeError, "config: transfer_buckets: True is of type bool; give an int >= 1"),
    ({"transfer_buckets": 0}, ValueError, "config: transfer_buckets: 0 is not accepted; give an int >= 1"),
    ({"persistent_buckets": -1}, ValueError, "config: persistent_buckets: -1 is not accepted; give an int >= 0"),
    ({"persistent_bins": 0}, ValueError, "config: persistent_bins: 0 is not accepted; give an int >= 1"),
    ({"prefetch_limit": 1}, TypeError, "config: prefetch_limit: 1 is of type int; give True or False"),
    ({"max_copy_streams": 0}, ValueError, "config: max_copy_streams: 0 is not accepted; give an int >= 1"),
    ({"max_inflight_prefetch_bytes": "4g"}, ValueError, "config: max_inflight_prefetch_bytes: '4g' is not a size"),
    ({"transfer_bucket": 1}, ValueError, "config: options: unknown key 'transfer_bucket'; did you mean 'transfer_buckets'?"),
    ({"onload_device": "meta"}, ValueError, "config: onload_device: 'meta' is not accepted; give an accelerator"),
    ({"offload_device": "cuda"}, ValueError, "config: offload_device: 'cuda' is not accepted; give 'cpu'"),
    (
        {"onload_device": "mps", "async_transfer": True},
        ValueError,
        "config: async_transfer: True, but copies from offload_device 'cpu' to onload_device 'mps' are not asynchronous",
    ),
    ({"module_names": []}, ValueError, "config: module_names: the list is empty; give at least one name"),
    (
        {"module_names": "block.1"},
        AttributeError,
        "select: module_names: Toy has no module 'block.1'; did you mean 'blocks.1' or 'blocks.0' or 'blocks.1.up'?",
    ),
    ({"module_filter": lambda name, module: False}, ValueError, "select: module_filter: no module with weights is chosen"),
    ({"component_settings": {}}, ValueError, "doors: component_settings: they are for pipelines, and a module was given"),
]


@pytest.mark.parametrize(("settings", "kind", "text"), BAD)
def test_bad_settings_are_named_and_change_nothing(settings: dict[str, Any], kind: type[Exception], text: str) -> None:
    model = toy(2)
    before = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(kind) as error:
        fxoffload.layerwise_offload(model, **{"onload_device": "cpu", **settings})
    assert str(error.value).startswith(text)
    assert [p.data_ptr() for p in model.parameters()] == before
    assert fxoffload.get_layerwise_offload_handles(model) == []
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("budget", ["", "4g", "-1", "1e9", "0", "0.1b", "4ib", 0.0, 1.5])
def test_bad_sizes_are_refused_with_what_is_accepted(budget: float | str) -> None:
    with pytest.raises(ValueError, match=r"^config: memory_budget: .*; give .*'512MiB'") as error:
        fxoffload.layerwise_offload(toy(2), onload_device="cpu", memory_budget=budget)
    assert repr(budget) in str(error.value)


@pytest.mark.parametrize("budget", [20480, "20kib", "20 KB", "0.01953125MiB"])
def test_sizes_in_every_form(budget: int | str) -> None:
    assert offload(toy(2), memory_budget=budget).memory_budget == 20480


def test_a_budget_that_is_too_small_names_one_that_works() -> None:
    model, wanted = toy(3), run(toy(3))
    with pytest.raises(BudgetError, match=r"; raise the budget to at least [\d.]+\w+$") as error:
        offload(model, memory_budget="3KiB")
    assert fxoffload.get_layerwise_offload_handles(model) == []
    assert_equal(run(model), wanted)
    offload(model, memory_budget=str(error.value).rpartition(" ")[2])
    assert_equal(run(model), wanted)


def test_a_bare_name_is_one_name_and_the_root_has_none() -> None:
    assert offload(toy(2), module_names="blocks.0").module_names == ("blocks.0",)
    handle = offload(toy(2), module_names="", memory_budget="1MiB")
    assert handle.module_names == ("",)
    assert_equal(run(handle.root), run(toy(2)))


def test_leaves_chosen_by_a_filter() -> None:
    model = toy(3)
    handle = offload(model, module_filter=lambda name, module: isinstance(module, nn.Linear), memory_budget="8KiB")
    assert len(handle.module_names) == 8
    assert_equal(run(model), run(toy(3)))
    assert handle.stats().nbytes_copied > 0


def test_weights_move_when_offloading_begins_or_at_the_first_call() -> None:
    eager, late = toy(2), toy(2)
    before = {id(model): [p.data_ptr() for p in model.parameters()] for model in (eager, late)}
    offload(eager)
    offload(late, eager_offload=False)
    assert not {p.data_ptr() for p in eager.parameters()} & set(before[id(eager)])
    assert [p.data_ptr() for p in late.parameters()] == before[id(late)]
    assert_equal(run(late), run(toy(2)))
    assert not {p.data_ptr() for p in late.parameters()} & set(before[id(late)])


# -- models, wrappers and handles --------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["module", "wrapper", "handle"])
def test_every_function_takes_a_module_its_wrapper_or_a_handle(form: str) -> None:
    model = toy(6)
    wrapper = torch.compile(model, backend="eager")
    handle = offload(wrapper if form == "wrapper" else model)
    assert handle.root is model
    given: Any = {"module": model, "wrapper": wrapper, "handle": handle}[form]
    run(model)
    assert fxoffload.stats(given) == handle.stats()
    assert fxoffload.get_plan(given) is handle.plan is handle.get_plan()
    assert fxoffload.smallest_budget(given) == handle.smallest_budget() == BUDGET - BLOCK
    fxoffload.set_memory_budget(given, "1MiB")
    assert (handle.memory_budget, handle.memory_budget_nbytes) == (1 << 20, 1 << 20)
    fxoffload.refresh(given)
    assert fxoffload.get_layerwise_offload_handles(given) == [handle]
    assert fxoffload.remove_layerwise_offload(given) == 1
    again: Any = fxoffload.layerwise_offload(given, onload_device="cpu")
    assert again.root is model
    assert again is not handle


def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError) as error:
        fxoffload.stats("model")
    assert str(error.value) == "api: str: give a torch.nn.Module, what torch.compile made of one, or a handle"
    with pytest.raises(ConfigError) as refused:
        fxoffload.layerwise_offload(3, onload_device="cpu")
    assert str(refused.value) == "pipelines: int: it has no component with weights; give a pipeline, or a torch.nn.Module"


def test_a_model_has_one_handle_as_long_as_it_is_offloaded() -> None:
    model = toy(2)
    assert fxoffload.get_layerwise_offload_handles(model) == []
    handle = offload(model)
    assert fxoffload.get_layerwise_offload_handles(model)[0] is handle
    del handle
    (found,) = fxoffload.get_layerwise_offload_handles(model)
    assert fxoffload.get_layerwise_offload_handles(model)[0] is found
    assert fxoffload.remove_layerwise_offload(model) == 1
    assert fxoffload.remove_layerwise_offload(model) == 0
    assert fxoffload.get_layerwise_offload_handles(model) == []


def test_offloading_twice_is_an_error_that_says_what_to_do() -> None:
    model = toy(3)
    offload(model)
    advice = "call fxoffload.remove_layerwise_offload first, or fxoffload.set_memory_budget for another budget"
    for other, text in (
        (model, "Toy: it"),
        (model.blocks[1], "Block: Toy, which shares modules with it,"),
        (nn.Sequential(nn.Linear(16, 16), model), "Sequential: Toy, which shares modules with it,"),
    ):
        with pytest.raises(OffloadError) as error:
            offload(other)
        assert str(error.value) == f"handle: {text} is offloaded already; {advice}"
    fxoffload.remove_layerwise_offload(model)
    offload(model)


def test_two_parts_of_a_model() -> None:
    model = nn.Sequential(toy(4), toy(4))
    wanted = run(model)
    handles = [offload(model[0]), offload(model[1])]
    assert_equal(run(model), wanted)
    assert all(handle.stats().nbytes_copied > 0 for handle in handles)
    assert fxoffload.get_layerwise_offload_handles(model) == handles
    assert fxoffload.remove_layerwise_offload(model) == 2
    assert_equal(run(model), wanted)


# -- enable ------------------------------------------------------------------------------------------------------------


def test_enable_streams_the_blocks_of_a_module_and_keeps_the_rest() -> None:
    model = toy(6)
    handle: Any = fxoffload.enable_layerwise_offload(model, onload_device="cpu", memory_budget=BUDGET)
    assert handle.module_names == tuple(f"blocks.{i}" for i in range(6))
    assert_equal(run(model), run(toy(6)))
    assert {load.bucket for load in handle.plan.loads} <= set(handle.module_names)


def test_enable_needs_blocks() -> None:
    with pytest.raises(ConfigError) as error:
        fxoffload.enable_layerwise_offload(nn.Linear(4, 4), onload_device="cpu")
    assert str(error.value) == (
        "doors: Linear: it has no blocks; declare them on its class, as _layerwise_offload_blocks_attrs = ['blocks'], "
        "or use layerwise_offload"
    )
