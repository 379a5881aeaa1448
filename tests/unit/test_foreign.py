"""Hooks of other libraries on the model: one error, with the call that removes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import remove_hook_from_module
from diffusers.hooks import HookRegistry, apply_group_offloading

import fxoffload
from fxoffload.config import OffloadConfig
from fxoffload.eager import attach
from fxoffload.errors import OffloadError
from fxoffload.foreign import refuse_foreign_hooks
from tests.models import toy


def test_accelerate() -> None:
    model = toy(3)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(OffloadError) as refused:
        attach(model, OffloadConfig.from_options({"onload_device": "cpu"}))
    assert "AlignDevicesHook of accelerate moves its weights already" in str(refused.value)
    remedy = "accelerate.hooks.remove_hook_from_module(model, recurse=True)"
    assert str(refused.value).endswith(f"call {remedy} first")
    compiled: Any = torch.compile(model, backend=fxoffload.layerwise, options={"onload_device": "cpu"})
    with pytest.raises(OffloadError, match="of accelerate"), torch.no_grad():
        compiled(torch.randn(2, 16))
    # What the error says helps.
    remove_hook_from_module(model, recurse=True)
    attach(model, OffloadConfig.from_options({"onload_device": "cpu"})).detach()


def test_accelerate_after_offloading() -> None:
    model, plain = toy(3), toy(3)
    attachment = attach(model, OffloadConfig.from_options({"onload_device": "cpu"}))
    given = torch.randn(2, 16)
    cpu_offload(model, execution_device=torch.device("cpu"))
    with torch.no_grad():
        for _ in range(2):
            with pytest.raises(
                OffloadError, match=r"AlignDevicesHook of accelerate .*; call accelerate\.hooks\.remove_hook_from"
            ):
                model(given)
        remove_hook_from_module(model, recurse=True)
        assert torch.equal(model(given), plain(given))
    attachment.detach()


def test_group_offloading() -> None:
    model = toy(3)
    apply_group_offloading(model, torch.device("cpu"), offload_type="leaf_level")
    with pytest.raises(OffloadError) as refused:
        refuse_foreign_hooks(model)
    assert "group offloading of diffusers ('group_offloading')" in str(refused.value)
    for key in ("group_offloading", "layer_execution_tracker", "lazy_prefetch_group_offloading"):
        HookRegistry.check_if_exists_or_initialize(model).remove_hook(key, recurse=True)
    attach(model, OffloadConfig.from_options({"onload_device": "cpu"})).detach()
