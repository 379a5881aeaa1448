"""Where the bytes of tensors lie: which tensors share some, and how a bucket places them."""

# Private names of torch: storage identity. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence

import torch

from fxoffload.buckets import align
from fxoffload.read import span_nbytes


def share_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether some byte of host memory belongs to both tensors."""
    return a.data_ptr() < b.data_ptr() + span_nbytes(b) and b.data_ptr() < a.data_ptr() + span_nbytes(a)


def lay_out(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Offsets of tensors in a bucket, and its length, in bytes. Each group that shares bytes begins at an aligned offset."""
    offsets: dict[int, int] = {}
    nbytes = 0
    for group in overlapping([("", t) for t in tensors]):
        base = min(t.data_ptr() for _, t in group)
        offsets.update((id(t), nbytes + t.data_ptr() - base) for _, t in group)
        nbytes += align(max(t.data_ptr() + span_nbytes(t) for _, t in group) - base)
    return [offsets[id(t)] for t in tensors], nbytes


def overlapping(tensors: Sequence[tuple[str, torch.Tensor]]) -> list[list[tuple[str, torch.Tensor]]]:
    """Groups of tensors that share bytes; most are alone. Order of the first member is kept."""
    order = {id(t): i for i, (_, t) in enumerate(tensors)}
    groups: list[list[tuple[str, torch.Tensor]]] = []
    end, device = -1, None
    for name, tensor in sorted(tensors, key=lambda pair: (str(pair[1].device), _address(pair[1]), order[id(pair[1])])):
        start = _address(tensor)
        if groups and start < end and tensor.device == device:
            groups[-1].append((name, tensor))
        else:
            groups.append([(name, tensor)])
            end = start
        device = tensor.device
        end = max(end, start + span_nbytes(tensor))
    return sorted(groups, key=lambda group: min(order[id(t)] for _, t in group))


def _address(tensor: torch.Tensor) -> int:
    """Where the bytes of a tensor begin. On the meta device nothing has an address: there storages get one each, far apart."""
    if tensor.device.type != "meta":
        return tensor.data_ptr()
    return (tensor.untyped_storage()._cdata << 64) + tensor.storage_offset() * tensor.element_size()
