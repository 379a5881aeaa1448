"""What a run of a pipeline took: times between marks of the device, peaks of memory, and bytes that streamed."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from fxoffload.handle import LayerwiseOffloadHandle
from fxoffload.profile import Mark, mark, ms_between, synchronize
from fxoffload.select import nbytes_below
from fxoffload.show import table
from fxoffload.sizes import KIB, show_size


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one call of a pipeline. `step_s`: the mean of the steps behind the first; None where there was one."""

    prompt_s: float
    first_step_s: float
    step_s: float | None
    steps: int
    decode_s: float
    total_s: float

    def __str__(self) -> str:
        steps = "" if self.step_s is None else f"  step {self.step_s:.3g} s (x{self.steps - 1})"
        return (
            f"prompt {self.prompt_s:.3g} s  first step {self.first_step_s:.3g} s{steps}  decode {self.decode_s:.3g} s  "
            f"total {self.total_s:.3g} s"
        )


class Watch:
    """Marks the stages of one call of a pipeline, and counts its peak of device memory."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._start: Mark = None
        self._begin: Mark = None
        self._steps: list[Mark] = []
        self._end: Mark = None
        self._total_s = 0.0

    @contextmanager
    def watching(self, pipeline: Any) -> Generator[None, None, None]:
        """The call happens in here, with `on_step` as its `callback_on_step_end`."""
        progress_bar = pipeline.progress_bar

        def begin(*args: Any, **kwargs: Any) -> Any:
            # Pipelines make their bar between the prompt and the first step.
            self._begin = mark(self._device)
            return progress_bar(*args, **kwargs)

        pipeline.progress_bar = begin
        if self._device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats(self._device)
        started = time.perf_counter()
        self._start = mark(self._device)
        try:
            yield
        finally:
            del pipeline.progress_bar
            self._end = mark(self._device)
            synchronize(self._device)
            self._total_s = time.perf_counter() - started

    def on_step(self, _pipeline: Any, _step: int, _timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        self._steps.append(mark(self._device))
        return tensors

    @property
    def times(self) -> Times:
        steps = self._steps
        assert steps, "the pipeline called back at no step"
        more = len(steps) - 1
        return Times(
            prompt_s=ms_between(self._start, self._begin) / 1e3,
            first_step_s=ms_between(self._begin, steps[0]) / 1e3,
            step_s=ms_between(steps[0], steps[-1]) / 1e3 / more if more else None,
            steps=len(steps),
            decode_s=ms_between(steps[-1], self._end) / 1e3,
            total_s=self._total_s,
        )


def summary(
    times: Times,
    components: Mapping[str, torch.nn.Module],
    handles: Mapping[str, LayerwiseOffloadHandle],
    *,
    device: torch.device,
    load_s: float,
) -> str:
    """Times, peaks, and a row for every component. `handles`: of those that are offloaded, under one budget."""
    memory = [f"host {show_size(host_peak_nbytes())}"]
    if device.type != "cpu":
        reserved, allocated = torch.accelerator.max_memory_reserved(device), torch.accelerator.max_memory_allocated(device)
        memory.insert(0, f"device {show_size(reserved)} reserved, {show_size(allocated)} allocated")
    if handles:
        memory.append(f"budget {show_size(max(handle.memory_budget_nbytes for handle in handles.values()))}")
    rows = [_row(name, module, handles.get(name)) for name, module in components.items()]
    headers = ("component", "class", "weights", "resident", "streamed a forward", "forwards")
    return f"time    load {load_s:.3g} s  {times}\nmemory  {'  '.join(memory)}  (peaks)\n\n{table(headers, rows, fold=False)}"


def _row(name: str, module: torch.nn.Module, handle: LayerwiseOffloadHandle | None) -> tuple[str, ...]:
    nbytes, kind = nbytes_below(module), type(module).__name__
    if handle is None:
        return name, kind, show_size(nbytes), show_size(nbytes), show_size(0), "-"
    plan, stats = handle.plan, handle.stats()
    resident = "-" if plan is None else show_size(plan.resident_nbytes)
    return name, kind, show_size(nbytes), resident, show_size(stats.nbytes_copied), str(stats.forwards)


def host_peak_nbytes() -> int:
    """The most host memory that this process held so far, in bytes; 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # Windows
        return 0
    # macOS counts bytes, others KiB.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else KIB)
