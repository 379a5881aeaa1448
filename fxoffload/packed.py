"""What the host store has packed: tensors of a model, as their bytes lie in buckets of host memory."""

# Private names of torch: how many use a storage. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

import torch

from fxoffload.regions import Region


def _uses(storage: torch.UntypedStorage) -> int:
    """How many tensors have a storage, and a few more."""
    return torch._C._storage_Use_Count(storage._cdata)


_LONE = torch.empty(1)
_OWN_USES = _uses(_LONE.untyped_storage())
"""Of a storage that one tensor has. One that is a view of another one keeps that, too."""


@dataclass(slots=True, eq=False)
class HostWeight:
    """A packed tensor of the model, or some rows of one: where its bytes lie in a bucket."""

    bucket: HostBucket
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    whole: HostTensor
    rows: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return self.whole.name if self.rows is None else f"{self.whole.name}[{self.rows[0]}:{self.rows[1]}]"

    def device_view(self, memory: torch.Tensor, bucket_offset: int) -> torch.Tensor:
        """This weight in memory of the device (uint8, one dimension), if its bucket lies at `bucket_offset` bytes."""
        start = bucket_offset + self.offset
        with self.whole.mode():
            elements = memory[start : start + self.nbytes].view(self.whole.view.dtype)
            return elements.as_strided(self.shape, self.stride, elements.storage_offset())


@dataclass(slots=True, eq=False)
class HostTensor:
    """A tensor of the model that the store packed. `view` is the host memory that `tensor` has become a view of."""

    name: str
    tensor: weakref.ref[torch.Tensor]
    view: torch.Tensor
    parts: list[HostWeight] = field(default_factory=list)
    others: list[HostWeight] = field(default_factory=list)
    """What it is seen as besides, cut otherwise (`HostStore.part`)."""
    address: int = field(init=False)
    """Where the bytes lie. `view` leaves them where torch moves its storage, as `share_memory_` does."""

    def __post_init__(self) -> None:
        self.address = self.view.data_ptr()

    def forget(self) -> None:
        """It is packed no more."""
        for weight in self.others:
            weight.bucket.weights.clear()
        self.parts.clear()
        self.others.clear()

    def is_like(self, other: torch.Tensor) -> bool:
        """Whether `other` has the same dtype and layout, and lies on the host."""
        mine = self.view
        return (mine.device, mine.dtype, mine.shape, mine.stride()) == (other.device, other.dtype, other.shape, other.stride())

    def is_aliased(self) -> bool:
        """Whether another tensor than `tensor` has the memory of `view` (as one of a state dict), or torch moved it elsewhere."""
        storage, owner = self.view.untyped_storage(), self.tensor()
        mine = _OWN_USES + self.view._is_view() + (owner is not None and owner.untyped_storage()._cdata == storage._cdata)
        return self.view.data_ptr() != self.address or _uses(storage) > mine

    def mode(self) -> torch.inference_mode:
        """In here memory is made that is to stand behind the tensor: made in the other mode, it would hide writes."""
        return torch.inference_mode(self.view.is_inference())


@dataclass(slots=True, eq=False)
class HostBucket:
    """Bytes that are copied together. `flat` is uint8, one dimension, `nbytes` long."""

    name: str
    nbytes: int
    region: Region
    flat: torch.Tensor
    weights: list[HostWeight] = field(default_factory=list)
    coarse: bool = False
    """Packed by modules, not by the segments of a graph: a graph packs it anew."""

    def names(self) -> set[str]:
        """What all buckets with some of its bytes are called: itself, and those that its weights are seen as besides."""
        return {self.name, *(other.bucket.name for w in self.weights for other in w.whole.others)}
