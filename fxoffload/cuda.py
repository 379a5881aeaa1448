"""Capturing on CUDA: streams, events and graphs of one engine, whose captures share one memory pool of their own.

A capture that fails (a copy that waits for the host, a call that is not permitted) ends without telling the allocator and the
random generator: the allocator would never give memory back again, and every later random number, in graphs and outside, would
raise. `_recover` ends it for both: the allocator is told, and one tiny capture that ends well sets the generator right.
"""

# Private names of torch: the end of a pool's use, its release, and the workspaces of cuBLAS. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false, reportAttributeAccessIssue=false

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from fxoffload.capture import Graph
from fxoffload.transfer import StreamTransfer

T = TypeVar("T")

_unfinished: list[torch.cuda.CUDAGraph] = []
"""Graphs whose capture failed: the allocator keeps pointers to them."""


def idle_nbytes(device: torch.device, capturer: CudaCapturer | None) -> int:
    """What memory pools hold without using it now: all but the allocator's own and that of a capturer."""
    if torch.cuda.get_allocator_backend() != "native":
        return 0
    known = ((0, 0), capturer.pool if capturer is not None else None)
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device.index and tuple(segment["segment_pool_id"]) not in known
    )


class CudaCapturer:
    """`capture.Capturer` for CUDA. `transfer`: the engine's own, whose copy stream is `outside`."""

    def __init__(self, transfer: StreamTransfer) -> None:
        self._transfer = transfer
        self._device = transfer.device
        self.compute = torch.cuda.Stream(self._device)
        self.copies = torch.cuda.Stream(self._device) if transfer.overlap else self.compute
        self.nbytes = 0
        self._live = 0
        self.pool: Any = None

    def caller(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def outside(self) -> torch.cuda.Stream:
        stream = self._transfer.copy_stream
        return torch.cuda.Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)  # type: ignore[call-arg]

    def event(self, *, external: bool) -> torch.cuda.Event:
        event = torch.cuda.Event(external=external)
        if external:
            # A wait for an event that was never recorded would leave no node in a graph.
            event.record(self.caller())
        return event

    def clock(self) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=True)

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def capture(self, work: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """What the allocator has cached is given back first: what a forward needs is not held twice."""
        self._settle()
        if self.pool is None:
            self.pool = torch.cuda.graph_pool_handle()
        before = torch.cuda.memory_reserved(self._device)
        graph = torch.cuda.CUDAGraph()
        collects = gc.isenabled()
        # What the garbage collector may find to destroy is not to be destroyed within a capture.
        gc.disable()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self.compute):
                result = self._record(graph, work)
        finally:
            if collects:
                gc.enable()
            # The workspace of this capture lies in the pool, where the next one may use it, too.
            torch._C._cuda_clearCublasWorkspaces()
        self._live += 1
        self.nbytes += torch.cuda.memory_reserved(self._device) - before
        return graph, result

    def wait(self) -> None:
        torch.cuda.synchronize(self._device)

    def release(self, graphs: Sequence[Graph]) -> None:
        for graph in graphs:
            graph.reset()
        self._live -= len(graphs)
        if not self._live:
            self.nbytes, self.pool = 0, None
            torch.cuda.empty_cache()

    def _settle(self) -> None:
        torch.cuda.synchronize(self._device)
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()

    def _record(self, graph: torch.cuda.CUDAGraph, work: Callable[[], T]) -> T:
        # Other threads may go on with what they do.
        graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
        try:
            result = work()
        except BaseException:
            try:
                graph.capture_end()
                graph.reset()
            except RuntimeError:
                self._recover(graph)
            raise
        try:
            graph.capture_end()
        except RuntimeError:
            self._recover(graph)
            raise
        return result

    def _recover(self, graph: torch.cuda.CUDAGraph) -> None:
        _unfinished.append(graph)
        for tell in (torch._C._cuda_endAllocateToPool, torch._C._cuda_releasePool):
            with contextlib.suppress(RuntimeError):
                tell(self._device.index, self.pool)
        if not self._live:
            self.pool = None
        well = torch.cuda.CUDAGraph()
        with torch.inference_mode(False):
            cell = torch.zeros(1, device=self._device)
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(torch.cuda.Stream(self._device)):
            well.capture_begin(capture_error_mode="thread_local")
            cell.zero_()
            well.capture_end()
        well.reset()
