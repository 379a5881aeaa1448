"""Seeing that a weight was edited since it was copied to the device, at every call, in well under a millisecond.

Three looks, each at all weights of a graph at once:

- the address: `p.data = other` puts other memory behind a parameter;
- the version counter: in-place operations on the parameter raise it;
- a probe of the bytes: `p.data += x`, as PEFT merges adapters, raises no counter, for `p.data` is another tensor object over the
  same memory. So up to 64 elements of every weight, spread over its memory, are compared with what they were. Dense edits change
  some of them; an edit of a few single elements through `.data` may change none, and needs `fxoffload.refresh`.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Sequence
from math import gcd

import torch

_SAMPLES = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter, or None for a tensor made under inference mode, which has none whatever memory it is given later."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def sample(tensor: torch.Tensor) -> torch.Tensor:
    """A view of up to 64 elements of a host tensor, spread over its memory, as integers of their width."""
    flat = elements(torch.view_as_real(tensor) if tensor.is_complex() else tensor)
    step = max(-(-flat.numel() // _SAMPLES), 1)
    # A step that has a divisor in common with the row length would look at the same columns again and again.
    while step > 1 and gcd(step, tensor.shape[-1]) > 1:
        step += 1
    return flat[::step].view(_BITS[flat.element_size()])


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first to its last element, in one dimension, whatever the strides."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


class EditWatch:
    """Remembers the weights of one graph, which lie in the host store at `views`, as they were.

    `wrappers`: those that hold some of the weights, with the indices of these. An in-place operator on a wrapper, such as
    `load_state_dict` calls, raises its counter and none of those inside.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        views: Sequence[torch.Tensor],
        wrappers: Sequence[tuple[torch.Tensor, Sequence[int]]] = (),
    ) -> None:
        self._pointers = [view.data_ptr() for view in views]
        self._versions = [version_of(t) for t in (*tensors, *(w for w, _ in wrappers))]
        self._counted: list[Sequence[int]] = [*((k,) for k in range(len(tensors))), *(held for _, held in wrappers)]
        self._order: list[int] = []
        self._groups: list[list[torch.Tensor]] = []
        with torch.inference_mode(False):
            by_dtype: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
            for k, view in enumerate(views):
                if view.numel():
                    probe = sample(view)
                    by_dtype.setdefault(probe.dtype, []).append((k, probe))
            for probes in by_dtype.values():
                self._groups.append([probe for _, probe in probes])
                self._order.extend(k for k, probe in probes for _ in range(probe.numel()))
            self._known = self._read()

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Indices of the weights whose memory is not the store's any more."""
        pointers = [t.data_ptr() for t in tensors]
        if pointers == self._pointers:
            return []
        return [k for k, (now, then) in enumerate(zip(pointers, self._pointers, strict=True)) if now != then]

    def written(self, tensors: Sequence[torch.Tensor], wrappers: Sequence[torch.Tensor] = ()) -> list[int]:
        """Indices of the weights whose values changed since the last question."""
        found: set[int] = set()
        versions = [version_of(t) for t in (*tensors, *wrappers)]
        if versions != self._versions:
            changes = zip(versions, self._versions, self._counted, strict=True)
            found.update(k for now, then, held in changes if now != then for k in held)
            self._versions = versions
        values = self._read()
        if not all(map(torch.equal, values, self._known)):
            changed = torch.cat([(now != then) for now, then in zip(values, self._known, strict=True)])
            found.update(self._order[i] for i in changed.nonzero().view(-1).tolist())
            self._known = values
        return sorted(found)

    def _read(self) -> list[torch.Tensor]:
        with torch.inference_mode(False):
            return [torch.cat(probes) for probes in self._groups]
