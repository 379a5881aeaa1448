"""Seeing that a weight was edited since it was copied to the device, at every call, in well under a millisecond.

Three looks, each at all weights of a graph at once:

- the address: `p.data = other` puts other memory behind a parameter;
- the version counter: in-place operations on the parameter raise it;
- a probe of the bytes: `p.data += x`, as PEFT merges adapters, raises no counter, for `p.data` is another tensor object over the
  same memory. So up to 32 words of 8 bytes of every weight, spread over its memory, are compared with what they were. Dense
  edits change some of them; an edit of a few single elements through `.data` may change none, and needs `fxoffload.refresh`.

Only what the device keeps between calls can be outdated there (`EditWatch.keep`): all else is copied anew anyway.

All words are read by one gather over the address space from the first weight to the last: a thousand views, or the two thousand
lines of memory that single elements lie in, would take longer than the rest of a replayed forward. Nothing here is handed to
several threads, as `take`, or torch's comparison of 32,768 elements, would be: to wake them can take milliseconds.
"""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import ctypes
from collections.abc import Collection, Sequence
from itertools import chain, compress
from math import gcd
from operator import attrgetter

import torch

_WORD = 8
_WORDS = 32
_address = torch.Tensor.data_ptr
_version = attrgetter("_version")


def version_of(tensor: torch.Tensor) -> int | None:
    """The version counter, or None for a tensor made under inference mode, which has none whatever memory it is given later."""
    try:
        return tensor._version
    except RuntimeError:
        return None


def probed_words(tensor: torch.Tensor) -> range:
    """Which words of the address space are looked at for a host tensor: up to 32, the number of an address divided by 8."""
    flat = elements(tensor)
    if not flat.numel():
        return range(0)
    start = flat.data_ptr()
    first, last = start // _WORD, (start + flat.numel() * flat.element_size() - 1) // _WORD
    step = max(-(-(last - first + 1) // _WORDS), 1)
    row = max((tensor.shape[-1] if tensor.dim() else 1) * tensor.element_size() // _WORD, 1)
    # A step that has a divisor in common with the row length would look at the same columns again and again.
    while step > 1 and gcd(step, row) > 1:
        step += 1
    return range(first, last + 1, step)


def elements(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor from its first to its last element, in one dimension, whatever the strides."""
    span = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)) if tensor.numel() else 0
    return tensor.as_strided((span,), (1,), tensor.storage_offset())


def same_bytes(host: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one layout, the second one on any device, have the same bytes. NaNs are equal to themselves."""
    with torch.inference_mode(False):
        a, b = (elements(t.detach()).view(torch.uint8) for t in (host, other.to(host.device)))
        return torch.equal(a, b)


class _Probe:
    """Words of the address space, wherever they lie, read at once. The views that they lie in have to outlive this."""

    def __init__(self, views: Sequence[torch.Tensor]) -> None:
        """Some view must have bytes."""
        words = [probed_words(view) for view in views]
        self.owner = [k for k, found in enumerate(words) for _ in found]
        first, last = min(w[0] for w in words if w), max(w[-1] for w in words if w)
        # Not a byte of this is read but at the places, each of which lies in a view.
        space = (ctypes.c_char * ((last + 1 - first) * _WORD)).from_address(first * _WORD)
        with torch.inference_mode(False):
            self._places = torch.tensor([word - first for found in words for word in found])
            self._space = torch.frombuffer(space, dtype=torch.int64)
            self._words = torch.empty_like(self._places)
        self._bytes = (ctypes.c_char * self._words.nbytes).from_address(self._words.data_ptr())
        self._known = self._read()

    def _read(self) -> bytes:
        torch.index_select(self._space, 0, self._places, out=self._words)
        return self._bytes.raw

    def changed(self) -> set[int]:
        """The views that do not look as they did at the last question."""
        known, now = self._known, self._read()
        # Copied and compared as bytes: a fifth of the time that torch takes to compare words.
        if now == known:
            return set()
        self._known = now
        pairs = zip(memoryview(now).cast("q"), memoryview(known).cast("q"), self.owner, strict=True)
        return {owner for a, b, owner in pairs if a != b}


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
        self._addresses = list(map(_address, views))
        self._counted: list[Sequence[int]] = [*((k,) for k in range(len(tensors))), *(held for _, held in wrappers)]
        """The weights that each version counter stands for: those of the tensors, then those of the wrappers."""
        self._looked = [False] * len(self._counted)
        """Which counters are looked at: those that stand for a weight that the device keeps."""
        self._versions = _versions([*tensors, *(wrapper for wrapper, _ in wrappers)])
        """Where they all stood when they were looked at last."""
        self._expected: list[int | None] = []
        """Of these, the ones that are looked at."""
        self._views = list(views)
        self._kept: dict[int, int] = {}
        """The weights that are looked at, by their number in the probe."""
        self._probe: _Probe | None = None

    def keep(self, chosen: Collection[int]) -> list[int]:
        """From now on the device keeps these weights between calls, and `written` tells of them alone.

        Returns those that it did not keep before, of which nothing is known.
        """
        before = set(self._kept.values())
        self._kept = dict(enumerate(sorted(chosen)))
        kept = set(chosen)
        self._looked = [not kept.isdisjoint(held) for held in self._counted]
        self._expected = list(compress(self._versions, self._looked))
        views = [self._views[k] for k in self._kept.values()]
        self._probe = _Probe(views) if any(view.numel() for view in views) else None
        return [k for k in self._kept.values() if k not in before]

    def changed(self) -> list[int]:
        """Indices of the weights that the device keeps and whose bytes do not look as they did at the last question."""
        return sorted(self._kept[k] for k in self._probe.changed()) if self._probe is not None else []

    def moved(self, tensors: Sequence[torch.Tensor]) -> list[int]:
        """Indices of the weights whose memory is not the store's any more."""
        addresses = list(map(_address, tensors))
        if addresses == self._addresses:
            return []
        return [k for k, (now, then) in enumerate(zip(addresses, self._addresses, strict=True)) if now != then]

    def written(self, tensors: Sequence[torch.Tensor], wrappers: Sequence[torch.Tensor] = ()) -> list[int]:
        """Indices of the weights that the device keeps and whose values changed since the last question.

        Also of those that were written to while they were not kept, and are kept since.
        """
        found: set[int] = set()
        versions = _versions(list(compress(chain(tensors, wrappers), self._looked)))
        if versions != self._expected:
            looked = compress(range(len(self._counted)), self._looked)
            for i, now, then in zip(looked, versions, self._expected, strict=True):
                if now != then:
                    self._versions[i] = now
                    found.update(self._counted[i])
            found.intersection_update(self._kept.values())
            self._expected = versions
        return sorted(found.union(self.changed()))


def _versions(tensors: Sequence[torch.Tensor]) -> list[int | None]:
    try:
        return list(map(_version, tensors))
    except RuntimeError:
        return [version_of(t) for t in tensors]
