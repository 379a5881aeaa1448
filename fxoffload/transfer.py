"""Copies from the host store into the arena: on a copy stream of an accelerator, or on a thread when the CPU is the device.

Both serve the same four calls. `prefetch` starts a copy behind all earlier ones, `wait` makes compute wait for it, `evict` says
that the last reader is launched, and `drain` makes everything issued so far precede what is issued next. On an accelerator no
call blocks the host.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from fxoffload.arena import POISON
from fxoffload.errors import OffloadError


@dataclass(slots=True)
class Counters:
    """What happened since `reset`."""

    nbytes_copied: int = 0
    prefetches: int = 0
    stalls: int = 0

    def reset(self) -> None:
        self.nbytes_copied = self.prefetches = self.stalls = 0


@dataclass(slots=True, eq=False)
class Slot:
    """The place of one load: `host` and `device` are uint8 views of equal length; the events are the transfer's own.

    `load` is its name in the plan, `""` for a resident.
    """

    host: torch.Tensor
    device: torch.Tensor
    load: str = ""
    ready: Any = None
    free: Any = None
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.nbytes = self.host.numel()


def copy_without_blocking(slot: Slot) -> None:
    slot.device.copy_(slot.host, non_blocking=True)


def copy_now(slot: Slot) -> None:
    slot.device.copy_(slot.host)


class Transfer(Protocol):
    counters: Counters
    copy: Callable[[Slot], None]
    """The copy itself, called where copies run: on the copy stream, or on the thread. To be wrapped by who times copies."""

    def slot(self, host: torch.Tensor, device: torch.Tensor, load: str = "") -> Slot: ...
    def begin(self) -> None: ...
    def prefetch(self, slot: Slot, after: Slot | None = None) -> None: ...
    def wait(self, slot: Slot) -> None: ...
    def evict(self, slot: Slot) -> None: ...
    def drain(self) -> None: ...
    def close(self) -> None: ...
    def after_fork(self) -> None: ...


class StreamTransfer:
    """One copy stream, and events both ways. With `overlap` off, copies run on the compute stream itself."""

    def __init__(self, device: torch.device, *, overlap: bool, poison: bool) -> None:
        self.counters = Counters()
        self.copy = copy_without_blocking
        self.device = device
        self._poison = poison
        self.overlap = overlap
        self._forked = False
        self._copy_stream = torch.Stream(device=device) if overlap else torch.accelerator.current_stream(device)
        self._compute_stream = torch.accelerator.current_stream(device)

    def slot(self, host: torch.Tensor, device: torch.Tensor, load: str = "") -> Slot:
        return Slot(host, device, load, ready=torch.Event(self.device), free=torch.Event(self.device))

    def begin(self) -> None:
        """A forward begins on the stream that is current now, behind all compute of the forward before.

        Raises OffloadError in a process that was forked since.
        """
        if self._forked:
            raise OffloadError(
                f"transfer: {self.device}: this process was forked after the model was offloaded, and a child cannot use its "
                "parent's device; start processes with the 'spawn' method, or fork before the model is offloaded"
            )
        stream = torch.accelerator.current_stream(self.device)
        if stream != self._compute_stream:
            # Evictions are waited for by the latest only, which is enough while compute runs in one order.
            stream.wait_event(self._compute_stream.record_event())
        self._compute_stream = stream
        if not self.overlap:
            self._copy_stream = self._compute_stream

    @property
    def copy_stream(self) -> torch.Stream:
        return self._copy_stream

    def prefetch(self, slot: Slot, after: Slot | None = None) -> None:
        stream = self._copy_stream
        if after is not None:
            stream.wait_event(after.free)
        with stream:
            self.copy(slot)
        slot.ready.record(stream)
        self.counters.prefetches += 1
        self.counters.nbytes_copied += slot.nbytes

    def wait(self, slot: Slot) -> None:
        # What the host sees done is done for all that is launched from here on.
        if not slot.ready.query():
            self.counters.stalls += 1
            self._compute_stream.wait_event(slot.ready)

    def evict(self, slot: Slot) -> None:
        if self._poison:
            slot.device.fill_(POISON)
        slot.free.record(self._compute_stream)

    def drain(self) -> None:
        """Copies issued from here on wait for all compute launched so far, on the current stream."""
        event = torch.Event(self.device)
        event.record(self._compute_stream)
        self._copy_stream.wait_event(event)

    def close(self) -> None:
        if not self._forked:
            torch.accelerator.synchronize(self.device)

    def after_fork(self) -> None:
        self._forked = True


_transfers: weakref.WeakSet[ThreadTransfer] = weakref.WeakSet()


@atexit.register
def _end_threads() -> None:
    """A thread that is still within a copy when the interpreter has gone would abort the process."""
    for transfer in list(_transfers):
        transfer.at_exit()


class ThreadTransfer:
    """The CPU as a device: copies on a background thread, in order; compute runs on the calling thread.

    `delay_s` makes every copy late by that much, so that a missing wait reads poison. Evicted bytes are always poisoned.
    """

    def __init__(self, *, overlap: bool) -> None:
        self.counters = Counters()
        self.copy = copy_now
        self.delay_s = 0.0
        self._overlap = overlap
        self._jobs: queue.SimpleQueue[Slot | threading.Event | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._failed: BaseException | None = None
        _transfers.add(self)

    def slot(self, host: torch.Tensor, device: torch.Tensor, load: str = "") -> Slot:
        return Slot(host, device, load, ready=threading.Event())

    def begin(self) -> None:
        pass

    def prefetch(self, slot: Slot, after: Slot | None = None) -> None:
        """`after` needs no waiting here: its eviction has happened on this very thread."""
        del after
        slot.ready.clear()
        self.counters.prefetches += 1
        self.counters.nbytes_copied += slot.nbytes
        if self._overlap:
            self._start()
            self._jobs.put(slot)
        else:
            self._copy(slot)

    def wait(self, slot: Slot) -> None:
        self.counters.stalls += not slot.ready.is_set()
        slot.ready.wait()
        if self._failed is not None:
            failed, self._failed = self._failed, None
            raise failed

    def evict(self, slot: Slot) -> None:
        slot.device.fill_(POISON)

    def drain(self) -> None:
        """Returns when no copy is under way."""
        if self._thread is not None:
            reached = threading.Event()
            self._jobs.put(reached)
            reached.wait()

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            # The garbage collector may find an engine while the thread itself runs.
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None

    def at_exit(self) -> None:
        """Finish what was issued. Whoever runs a model behind this copies without a thread."""
        self.close()
        self._overlap = False

    def after_fork(self) -> None:
        self._jobs = queue.SimpleQueue()
        self._thread = None
        self._failed = None

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fxoffload-copies", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            if isinstance(job, threading.Event):
                job.set()
            else:
                self._copy(job)
            # A slot has host memory, which must not stay until the next copy.
            del job

    def _copy(self, slot: Slot) -> None:
        try:
            if self.delay_s:
                time.sleep(self.delay_s)
            self.copy(slot)
        except BaseException as error:
            self._failed = error
        finally:
            slot.ready.set()
