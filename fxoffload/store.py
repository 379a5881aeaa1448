"""The host store: every managed weight of one model, once, in flat memory that the device copies from.

`pack` copies the weights of a bucket into one page-aligned piece of memory, makes every weight a view of it, and with that
drops the memory it had before: the host never holds more than one copy of the model plus one bucket. Weights that lie in such a
piece already (`regions`) stay where they are. Then the piece is registered with the driver (pinned). Registering costs a twelfth
of a pinned allocation and rounds nothing up.

Each weight keeps a storage of its own, exactly as long as its bytes, that only *lies* in the bucket. So saving one tensor
saves its bytes, and safetensors sees no shared memory. Weights that shared memory before (tied through views) still do.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence

import torch

from fxoffload.buckets import align
from fxoffload.edits import elements
from fxoffload.errors import OffloadError
from fxoffload.hostmemory import host_memory
from fxoffload.layout import lay_out, share_bytes
from fxoffload.names import claim
from fxoffload.packed import HostBucket, HostTensor, HostWeight
from fxoffload.pins import Pins
from fxoffload.read import span_nbytes
from fxoffload.regions import Place, Region, find_places, lie_in, new_region
from fxoffload.sizes import show_size


class HostStore:
    """Buckets of one model. `device`: the accelerator that copies from here; memory is pinned for CUDA only, where it helps."""

    def __init__(self, device: torch.device, *, pin: bool = True) -> None:
        self._device = device
        self._pins = Pins(enabled=pin and device.type == "cuda")
        self._regions: list[Region] = []
        self.buckets: dict[str, HostBucket] = {}
        self._names: set[str] = set()
        """Those of all buckets, also of what weights are seen as besides (`part`)."""
        self._tensors: dict[int, HostTensor] = {}
        self.seconds = 0.0
        """Time spent packing and pinning, so far."""

    @property
    def nbytes(self) -> int:
        return sum(r.nbytes for r in self._regions)

    @property
    def pinned_nbytes(self) -> int:
        return self._pins.nbytes

    def find(self, tensor: torch.Tensor) -> HostTensor | None:
        """What was packed of this very tensor object, if it still has the dtype and layout of then, or None."""
        found = self._tensors.get(id(tensor))
        return found if found is not None and found.tensor() is tensor and found.is_like(tensor) else None

    def sharing(self, tensors: Sequence[torch.Tensor]) -> list[HostTensor]:
        """Ties that came or went since packing, as what is packed of all that have to do with them.

        One of these tensors lies in bytes of another weight now, or has left bytes that another weight or anybody else has, too.
        """
        strays = [t for t in tensors if t.numel() and not self._is_at_home(t)]
        inside = [t for t in strays if lie_in(self._regions, t)]
        pairs = [(p, t) for p in self._tensors.values() for t in inside if _is_lodger(t, p)]
        lodgers = {id(t) for _, t in pairs}
        left = [p for t in strays if (p := self._tensors.get(id(t))) is not None and (self.is_tied(p) or p.is_aliased())]
        return [*left, *(p for p, _ in pairs), *(p for key, p in self._tensors.items() if key in lodgers)]

    def is_tied(self, packed: HostTensor) -> bool:
        """Whether other packed weights have bytes of this one."""
        others = (w.whole for part in packed.parts for w in part.bucket.weights if w.whole is not packed)
        return any(share_bytes(packed.view, other.view) for other in others)

    def unpack(self, tensors: Sequence[torch.Tensor], *, coarse: bool) -> bool:
        """Forget every bucket of these tensors that is to be packed anew: one in which some weight is gone for good, or is tied.

        A weight is gone when its tensor is, or when the tensor has become another (`model.to(dtype)`). With `coarse`, buckets
        that were packed by modules are forgotten too; and in any case regions in which all weights are gone, whosever they were.
        Returns whether there was anything to forget.
        """
        before = len(self.buckets)
        tied = self.sharing(tensors)
        mine = [found for t in tensors if (found := self._tensors.get(id(t))) is not None and found.tensor() is t]
        for found in (*tied, *mine):
            regions = {id(part.bucket.region) for part in found.parts}
            buckets = [bucket for bucket in self.buckets.values() if id(bucket.region) in regions]
            wholes = {id(w.whole): w.whole for bucket in buckets for w in bucket.weights}
            intact = all((t := whole.tensor()) is not None and self.find(t) is whole for whole in wholes.values())
            if not intact or (coarse and any(bucket.coarse for bucket in buckets)) or found in tied:
                self._give_up(regions)
        # By the buckets, since another tensor may have the `id` of one that is gone.
        alive = {id(b.region) for b in self.buckets.values() if any(w.whole.tensor() is not None for w in b.weights)}
        self._give_up({id(region) for region in self._regions} - alive)
        return len(self.buckets) < before

    def part(self, packed: HostTensor, rows: tuple[int, int] | None) -> HostWeight:
        """A packed tensor, or some rows (first, end) of it, in one piece.

        Graphs may cut a weight by other rows than it was packed by, and code without a graph does not cut it. Its rows are one
        run of host memory, whatever buckets they lie in: what is asked for is seen as a bucket of its own.
        """
        found = next((part for part in (*packed.parts, *packed.others) if part.rows == rows), None)
        if found is not None:
            return found
        view = packed.view if rows is None else packed.view[rows[0] : rows[1]]
        region = packed.parts[0].bucket.region
        offset = view.data_ptr() - region.address
        flat = region.flat(offset, min(align(span_nbytes(view)), region.nbytes - offset))
        name = f"{packed.name}[:]" if rows is None else f"{packed.name}[{rows[0]}:{rows[1]}]"
        bucket = HostBucket(claim(name, self._names), flat.numel(), region, flat)
        bucket.weights.append(HostWeight(bucket, 0, span_nbytes(view), tuple(view.shape), tuple(view.stride()), packed, rows))
        packed.others.append(bucket.weights[0])
        return bucket.weights[0]

    def by_name(self, excluded: Collection[int] = ()) -> dict[str, HostTensor]:
        """Every packed tensor by its qualified name, but for those that live and whose `id` is excluded."""
        # By the buckets, since another tensor may have the `id` of one that is gone.
        wholes = (weight.whole for bucket in self.buckets.values() for weight in bucket.weights)
        return {whole.name: whole for whole in wholes if (t := whole.tensor()) is None or id(t) not in excluded}

    def find_places(self, groups: Sequence[Sequence[torch.Tensor]]) -> list[Place | None]:
        """For groups of tensors that are to be packed next, places where they lie already, to give to `pack`; else None."""
        places = find_places(groups)
        for region in {id(p.region): p.region for p in places if p is not None}.values():
            self._hold(region)
        return places

    def pack(
        self, name: str, tensors: Sequence[tuple[str, torch.Tensor]], *, coarse: bool = False, place: Place | None = None
    ) -> HostBucket:
        """Move (name, tensor) pairs into one new bucket; together they must have bytes. Tensors on a device come to the host."""
        if place is None:
            offsets, nbytes = lay_out([t for _, t in tensors])
            place = Place(self._allocate(nbytes, name), 0, nbytes)
        else:
            base = place.region.address + place.offset
            offsets = [t.data_ptr() - base if t.numel() else 0 for _, t in tensors]
        region = place.region
        flat = region.flat(place.offset, place.nbytes)
        bucket = HostBucket(claim(name, self._names), place.nbytes, region, flat, coarse=coarse)
        self.buckets[bucket.name] = bucket
        pairs = list(zip(offsets, tensors, strict=True))
        packed = [self._copy(region, place.offset + start, tensor_name, tensor) for start, (tensor_name, tensor) in pairs]
        for (start, (_, tensor)), whole in zip(pairs, packed, strict=True):
            weight = HostWeight(bucket, start, span_nbytes(tensor), tuple(tensor.shape), tuple(tensor.stride()), whole)
            whole.parts.append(weight)
            bucket.weights.append(weight)
            self._adopt(whole, tensor)
        self._pins.add(region, bucket.name)
        return bucket

    def pack_rows(
        self, tensors: Sequence[tuple[str, torch.Tensor]], rows: Sequence[tuple[int, int]], *, place: Place | None = None
    ) -> list[HostBucket]:
        """Move one contiguous matrix into the host memory of several new buckets, one for each run of rows (first, end).

        `tensors` are (name, tensor) pairs of the same bytes: several where two parameters share one memory.
        """
        name, like = tensors[0]
        row_nbytes = like.stride(0) * like.element_size()
        nbytes = align(span_nbytes(like))
        region, base = (place.region, place.offset) if place is not None else (self._allocate(nbytes, name), 0)
        buckets: list[HostBucket] = []
        for first, end in rows:
            flat = region.flat(base + first * row_nbytes, align((end - first) * row_nbytes))
            buckets.append(HostBucket(claim(f"{name}[{first}:{end}]", self._names), flat.numel(), region, flat))
            self.buckets[buckets[-1].name] = buckets[-1]
        for tensor_name, tensor in tensors:
            whole = self._copy(region, base, tensor_name, tensor)
            for bucket, (first, end) in zip(buckets, rows, strict=True):
                shape = (end - first, tensor.shape[1])
                whole.parts.append(
                    HostWeight(bucket, 0, (end - first) * row_nbytes, shape, tuple(tensor.stride()), whole, (first, end))
                )
                bucket.weights.append(whole.parts[-1])
            self._adopt(whole, tensor)
        self._pins.add(region, name)
        return buckets

    def rebind(self, packed: Sequence[HostTensor], tensors: Sequence[torch.Tensor]) -> None:
        """Let other tensors, of the same layout, take these places: their values are taken, and what was there keeps its own.

        Serves a replaced parameter, a swap of two, and `param.data = other`. All values are read before any is written.
        """
        self._finish_copies()
        # Those that come from outside let go of their memory one by one.
        values = [elements(t.detach()).clone() if lie_in(self._regions, t) else None for t in tensors]
        coming = {id(t) for t in tensors}
        strays = [t for p in self._tensors.values() if (t := p.tensor()) is not None and t.data_ptr() != p.view.data_ptr()]
        formers = [t for p in packed if (t := p.tensor()) is not None and t.data_ptr() == p.view.data_ptr()]
        for owner in (*formers, *(t for t in strays if id(t) not in coming and any(share_bytes(t, p.view) for p in packed))):
            with torch.inference_mode(owner.is_inference()):
                owner.data = elements(owner.detach()).clone().as_strided(owner.shape, owner.stride())
        places = {id(p) for p in packed}
        self._tensors = {key: p for key, p in self._tensors.items() if id(p) not in places}
        for place, tensor, value in zip(packed, tensors, values, strict=True):
            with torch.inference_mode():
                elements(place.view).copy_(elements(tensor.detach()) if value is None else value)
            place.tensor = weakref.ref(tensor)
            self._adopt(place, tensor)

    def after_fork(self) -> None:
        """A child process reads and edits its weights like any memory, but what is pinned is so for its parent."""
        self._pins.after_fork()
        for region in self._regions:
            region.pinned = False
        self._device = torch.device("cpu")

    def close(self) -> None:
        """Unpin everything. The weights keep their memory."""
        self._release(list(self._regions))
        self._forget(list(self.buckets.values()))
        self._tensors.clear()

    def _give_up(self, regions: Collection[int]) -> None:
        """Forget all that is packed in some regions, by `id`. What still lies there keeps the memory, which is unpinned."""
        buckets = [bucket for bucket in self.buckets.values() if id(bucket.region) in regions]
        wholes = {id(w.whole) for bucket in buckets for w in bucket.weights}
        self._tensors = {key: packed for key, packed in self._tensors.items() if id(packed) not in wholes}
        self._forget(buckets)
        self._release([region for region in self._regions if id(region) in regions])

    def _forget(self, buckets: Sequence[HostBucket]) -> None:
        """Buckets, weights and tensors know each other in circles, which would hold the memory until Python looks for those."""
        for bucket in buckets:
            self.buckets.pop(bucket.name, None)
            self._names -= bucket.names()
            for weight in bucket.weights:
                weight.whole.forget()
            bucket.weights.clear()

    def _is_at_home(self, tensor: torch.Tensor) -> bool:
        place = self._tensors.get(id(tensor))
        return place is not None and place.tensor() is tensor and tensor.data_ptr() == place.address

    def _finish_copies(self) -> None:
        """Copies that are queued on the device still read host memory; wait for them before it changes or goes."""
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)

    def _release(self, regions: Sequence[Region]) -> None:
        if regions:
            self._finish_copies()
        for region in regions:
            self._pins.remove(region)
            region.let_go()
            self._regions.remove(region)

    def _adopt(self, whole: HostTensor, tensor: torch.Tensor) -> None:
        tensor.data = whole.view
        self._tensors[id(tensor)] = whole

    def check_room(self, tensors: Sequence[torch.Tensor], name: str) -> None:
        """Raises OffloadError where a container's limit leaves no room for those of these tensors that are on a device."""
        self._check_room(sum(span_nbytes(t) for t in tensors if t.device.type != "cpu"), name)

    def _check_room(self, nbytes: int, name: str) -> None:
        memory = host_memory()
        if memory.limited_by and nbytes > memory.free_nbytes:
            raise OffloadError(
                f"store: {name}: packing it takes {show_size(nbytes)} more of host memory, and of {memory.name}, "
                f"{show_size(memory.total_nbytes)}, {show_size(memory.free_nbytes)} are free; raise it, or free host memory"
            )

    def _allocate(self, nbytes: int, name: str) -> Region:
        self._check_room(nbytes, name)
        return self._hold(new_region(nbytes))

    def _hold(self, region: Region) -> Region:
        region.hold()
        self._regions.append(region)
        return region

    def _copy(self, region: Region, offset: int, name: str, tensor: torch.Tensor) -> HostTensor:
        """A view with the layout of `tensor` and its values.

        It has a storage of its own, over the bytes of the region from `offset` on.
        """
        nbytes = span_nbytes(tensor)
        # A tensor made under inference mode has no version counter, and must get memory whose view expects none.
        with torch.inference_mode(tensor.is_inference()):
            if nbytes:
                count = nbytes // tensor.element_size()
                flat = torch.frombuffer(region.memory, dtype=tensor.dtype, count=count, offset=offset)
                view = flat.as_strided(tensor.shape, tensor.stride())
            else:
                view = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
        if view.data_ptr() != tensor.data_ptr():
            with torch.inference_mode():
                elements(view).copy_(elements(tensor.detach()))
        return HostTensor(name, weakref.ref(tensor), view)


def _is_lodger(tensor: torch.Tensor, packed: HostTensor) -> bool:
    """Whether a tensor lies in bytes of a packed weight that is another one, and lies there still."""
    owner = packed.tensor()
    at_home = owner is not None and owner is not tensor and owner.data_ptr() == packed.view.data_ptr()
    return at_home and share_bytes(tensor, packed.view)
