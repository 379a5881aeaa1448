"""The device that a model computes on: whether it is there, and its memory."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from fxoffload.errors import ConfigError, OffloadWarning
from fxoffload.hostmemory import host_memory


def available_device(device: torch.device) -> torch.device:
    """The device with its index. Raises ConfigError where it is not there."""
    if device.type == "cpu":
        return device
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None or current.type != device.type:
        there = "no accelerator" if current is None else f"{current.type!r}"
        raise ConfigError(
            f"backend: onload_device: {str(device)!r} is not available, this machine has {there}; "
            "pass onload_device='cpu' to run here"
        )
    index: Any = device.index  # None for a bare "cuda", which torch's annotation leaves out
    return torch.device(device.type, torch.accelerator.current_device_index() if index is None else index)


def device_memory(device: torch.device) -> tuple[int, int]:
    """(total, free now) bytes of a device; free includes what this process's allocator has cached.

    For the CPU, the host's memory, or what a container leaves of it.
    """
    if device.type == "cpu":
        memory = host_memory()
        return memory.total_nbytes, memory.free_nbytes
    free, total = torch.accelerator.get_memory_info(device)
    cached = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
    return total, free + cached


def shares_host_memory(device: torch.device) -> bool:
    """Whether a device is part of the host's chip and computes in its memory."""
    return device.type == "cuda" and bool(getattr(torch.cuda.get_device_properties(device), "is_integrated", False))


def warn_of_unified_memory(device: torch.device) -> None:
    """Say that offloading saves nothing there."""
    warnings.warn(
        f"engine: {device}: it computes in the host's own memory, so streaming saves none of it, and every copy is one too many; "
        "weights are not pinned; run the model there without offloading",
        OffloadWarning,
        stacklevel=3,
    )
