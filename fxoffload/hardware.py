"""What a measurement was made on: the machine and the versions, without names of hosts or users."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path

import torch

PACKAGES = ("fxoffload", "torch", "triton", "diffusers", "transformers", "accelerate", "cache-dit")


def machine(device: torch.device) -> dict[str, str | int | None]:
    """The device, its driver, the processor and the system, as text."""
    is_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if is_cuda else device.type,
        "driver": driver() if is_cuda else None,
        "processor": processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions() -> dict[str, str | None]:
    """Versions of Python and of all packages that are measured; None for one that is not installed."""
    return {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}}


def driver() -> str | None:
    """The version of NVIDIA's driver, where `nvidia-smi` says it."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, check=True, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip().splitlines()[0]


def processor() -> str:
    """The processor's own name where the system has it."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _version(name: str) -> str | None:
    if name == "torch":
        return str(torch.__version__)
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
