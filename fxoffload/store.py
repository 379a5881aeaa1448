"""The host store: every managed weight of one model, once, in flat memory that the device copies from.

`pack` copies the weights of a bucket into one page-aligned piece of memory, makes every weight a view of it, and with that
drops the memory it had before: the host never holds more than one copy of the model plus one bucket. Then the piece is
registered with the driver (pinned). Registering costs a twelfth of a pinned allocation and rounds nothing up.

Each weight keeps a storage of its own, exactly as long as its bytes, that only *lies* in the bucket. So saving one tensor
saves its bytes, and safetensors sees no shared memory. Weights that shared memory before (tied through views) still do.
"""

from __future__ import annotations

import mmap
import warnings
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from fxoffload.buckets import align
from fxoffload.errors import OffloadWarning
from fxoffload.facts import span_nbytes
from fxoffload.sizes import show_size

_PAGE = mmap.PAGESIZE


@dataclass(slots=True, eq=False)
class HostWeight:
    """One packed weight: where it lies in its bucket, the tensor that is a view of it, and what of it the device was given."""

    name: str
    bucket: HostBucket
    offset: int
    nbytes: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    tensor: weakref.ref[torch.Tensor]
    view: torch.Tensor
    version: int | None = None

    def device_view(self, arena: torch.Tensor, bucket_offset: int) -> torch.Tensor:
        """This weight in the arena (uint8, one dimension), if its bucket lies at `bucket_offset` bytes."""
        start = bucket_offset + self.offset
        elements = arena[start : start + self.nbytes].view(self.dtype)
        return elements.as_strided(self.shape, self.stride, elements.storage_offset())


@dataclass(slots=True, eq=False)
class HostBucket:
    """`flat` is uint8, one dimension, `nbytes` long."""

    name: str
    nbytes: int
    memory: mmap.mmap
    flat: torch.Tensor
    weights: list[HostWeight] = field(default_factory=list)
    pinned: bool = False


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter, or None for an inference tensor, which has none."""
    return None if tensor.is_inference() else tensor._version


class HostStore:
    """Buckets of one model. `pin_device`: the accelerator that copies from here, or None for a store that is not pinned."""

    def __init__(self, pin_device: torch.device | None) -> None:
        self._pin = pin_device is not None and pin_device.type == "cuda"
        self._warned = False
        self.buckets: dict[str, HostBucket] = {}
        self._weights: dict[int, HostWeight] = {}

    @property
    def nbytes(self) -> int:
        return sum(b.nbytes for b in self.buckets.values())

    @property
    def pinned_nbytes(self) -> int:
        return sum(b.nbytes for b in self.buckets.values() if b.pinned)

    def find(self, tensor: torch.Tensor) -> HostWeight | None:
        """The packed weight that this very tensor object is, or None."""
        found = self._weights.get(id(tensor))
        return found if found is not None and found.tensor() is tensor else None

    def replaced(self, name: str, tensor: torch.Tensor) -> HostWeight | None:
        """The packed weight of this name and layout that `tensor` has taken the place of, or None."""
        for bucket in self.buckets.values():
            for weight in bucket.weights:
                if weight.name == name and weight.tensor() is not tensor:
                    same = (weight.dtype, weight.shape, weight.stride) == (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
                    return weight if same else None
        return None

    def pack(self, name: str, tensors: Sequence[tuple[str, torch.Tensor]]) -> HostBucket:
        """Move (name, weight) pairs into a new bucket, which must have bytes. Weights elsewhere (on the device, say) come to the host."""
        placed: list[tuple[int, str, torch.Tensor]] = []
        offset = 0
        for group in _overlapping(tensors):
            base = min(t.data_ptr() for _, t in group)
            placed.extend((offset + t.data_ptr() - base, weight_name, t) for weight_name, t in group)
            end = max(t.data_ptr() + span_nbytes(t) for _, t in group)
            offset += align(end - base)
        bucket = _allocate(self._unused(name), offset)
        views = [_view(bucket, start, t) for start, _, t in placed]
        for (start, weight_name, tensor), view in zip(placed, views, strict=True):
            view.copy_(tensor.detach())
            layout = (tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()))
            bucket.weights.append(HostWeight(weight_name, bucket, start, span_nbytes(tensor), *layout, weakref.ref(tensor), view))
        for weight in bucket.weights:
            self._adopt(weight)
        self.buckets[bucket.name] = bucket
        self._register(bucket)
        return bucket

    def rebind(self, weights: Sequence[HostWeight], tensors: Sequence[torch.Tensor]) -> None:
        """Let other tensors, of the same layout, be these weights: their values are taken, and what was there before keeps its own.

        Serves a replaced parameter, a swap of two, and `param.data = other`. All values are read before any is written.
        """
        values = [t.detach().clone(memory_format=torch.preserve_format) for t in tensors]
        for weight, tensor in zip(weights, tensors, strict=True):
            former = weight.tensor()
            if former is not None and former is not tensor and former.data_ptr() == weight.view.data_ptr():
                former.data = weight.view.clone(memory_format=torch.preserve_format)
            self._weights.pop(id(former), None)
        for weight, tensor, value in zip(weights, tensors, values, strict=True):
            weight.view.copy_(value)
            weight.tensor = weakref.ref(tensor)
            self._adopt(weight)

    def _adopt(self, weight: HostWeight) -> None:
        tensor = weight.tensor()
        assert tensor is not None
        tensor.data = weight.view
        self._weights[id(tensor)] = weight
        weight.version = None

    def close(self) -> None:
        """Unpin everything. The weights keep their memory."""
        for bucket in self.buckets.values():
            if bucket.pinned:
                torch.cuda.cudart().cudaHostUnregister(bucket.flat.data_ptr())
                bucket.pinned = False
        self.buckets.clear()
        self._weights.clear()

    def _unused(self, name: str) -> str:
        candidate, k = name, 2
        while candidate in self.buckets:
            candidate, k = f"{name}~{k}", k + 1
        return candidate

    def _register(self, bucket: HostBucket) -> None:
        if not self._pin or self._warned:
            return
        status = int(torch.cuda.cudart().cudaHostRegister(bucket.flat.data_ptr(), len(bucket.memory), 0))
        bucket.pinned = status == 0
        if status:
            self._warned = True
            warnings.warn(
                f"store: {bucket.name}: the driver refused to pin {show_size(bucket.nbytes)} of host memory (error {status}) after "
                f"{show_size(self.pinned_nbytes)}; the rest stays pageable host memory, whose copies are slower and block the host; raise the "
                "limit on locked memory (ulimit -l) or free host memory",
                OffloadWarning,
                stacklevel=2,
            )


def _allocate(name: str, nbytes: int) -> HostBucket:
    rounded = -(-nbytes // _PAGE) * _PAGE
    memory = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    flat = torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)
    return HostBucket(name, nbytes, memory, flat)


def _view(bucket: HostBucket, offset: int, like: torch.Tensor) -> torch.Tensor:
    """A tensor with the layout of `like` and a storage of its own, over the bytes of the bucket from `offset` on."""
    nbytes = span_nbytes(like)
    if nbytes == 0:
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype)
    elements = torch.frombuffer(bucket.memory, dtype=like.dtype, count=nbytes // like.element_size(), offset=offset)
    return elements.as_strided(like.shape, like.stride())


def _overlapping(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Groups of tensors that share bytes; most are alone. Order of the first member is kept."""
    order = {id(t): i for i, (_, t) in enumerate(tensors)}
    groups: list[list[tuple[str, torch.Tensor]]] = []
    end, device = -1, None
    for name, tensor in sorted(tensors, key=lambda pair: (str(pair[1].device), pair[1].data_ptr(), order[id(pair[1])])):
        start = tensor.data_ptr()
        if groups and start < end and tensor.device == device:
            groups[-1].append((name, tensor))
        else:
            groups.append([(name, tensor)])
            end = start
        device = tensor.device
        end = max(end, start + span_nbytes(tensor))
    return sorted(groups, key=lambda group: min(order[id(t)] for _, t in group))
