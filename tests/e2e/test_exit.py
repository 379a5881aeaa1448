"""A process ends while copies are under way."""

from __future__ import annotations

import subprocess
import sys

import pytest

LATE = """
import atexit, os, sys, time
how = sys.argv[1]
if how == "behind all else":
    atexit.register(lambda: issue())
import torch, fxoffload
from fxoffload.transfer import copy_now
from tests.models import toy
torch.set_num_threads(1)

def copy(slot):
    # Calls of torch one after the other: a thread that comes back from one to an interpreter that has gone aborts the process.
    end = time.monotonic() + (1 if slot.load == "late" else 0)
    while time.monotonic() < end:
        slot.host.sum()
    copy_now(slot)

@torch.no_grad()
def issue():
    for handle in handles:
        handle.root(torch.ones(2, 16))
        transfer, memory = handle.engine.transfer, torch.ones(64, dtype=torch.uint8)
        transfer.copy = copy
        transfer.prefetch(transfer.slot(memory, torch.zeros_like(memory), "late"))

handles = [fxoffload.layerwise_offload(toy(6), memory_budget="18KiB", onload_device="cpu") for _ in range(2)]
issue()
if how == "in a child":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    issue()
"""


@pytest.mark.parametrize("how", ["in a script", "in a child", "behind all else"])
def test_copies_that_nobody_waits_for_are_finished(how: str) -> None:
    done = subprocess.run([sys.executable, "-c", LATE, how], capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
