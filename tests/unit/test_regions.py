"""Regions: mappings that live as long as a tensor lies in them, and are taken over whole or not at all."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

import gc
import itertools
import mmap
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fxoffload import regions
from fxoffload.buckets import align
from fxoffload.regions import Region, find_places, lie_in, new_region

Group = list[torch.Tensor]


def laid_out(*groups: Sequence[int], dtype: torch.dtype = torch.uint8) -> tuple[Region, list[Group]]:
    """A mapping full of groups, one behind the other, of tensors with so many elements."""
    sizes = [n * dtype.itemsize for n in itertools.chain(*groups)]
    region = new_region(max(sum(map(align, sizes)), 1))
    offset, made = 0, []
    for group in groups:
        made.append([])
        for n in group:
            if n:
                made[-1].append(torch.frombuffer(region.memory, dtype=dtype, count=n, offset=offset))
            else:
                made[-1].append(torch.empty(0, dtype=dtype))
            offset += align(n * dtype.itemsize)
    return region, made


def places(groups: Sequence[Sequence[torch.Tensor]]) -> list[tuple[int, int] | None]:
    """Offsets and sizes of the places that are found."""
    return [None if place is None else (place.offset, place.nbytes) for place in find_places(groups)]


# -- mappings ----------------------------------------------------------------------------------------------------------


def test_memory_is_page_aligned_zero_and_as_long_as_asked_for() -> None:
    region = new_region(5000)
    flat = region.flat(0, 5000)
    assert region.address == flat.data_ptr()
    assert region.address % mmap.PAGESIZE == 0
    assert (region.nbytes, len(region.memory), region.memory.used_nbytes) == (5000, 2 * mmap.PAGESIZE, 5000)
    assert not flat.any()
    assert not region.pinned


def test_flat_is_the_memory_itself() -> None:
    region = new_region(4096)
    region.flat(256, 512).fill_(7)
    assert region.flat(0, 1024).nonzero().flatten().tolist() == list(range(256, 768))
    assert bytes(region.memory[255:258]) == b"\0\7\7"


def test_a_mapping_lives_as_long_as_a_tensor_lies_in_it() -> None:
    region, ((first, second),) = laid_out([100, 300])
    address = region.address
    second.fill_(3)
    del region, first
    gc.collect()
    assert address in regions._memories
    assert (second == 3).all()
    view = second[10:20]
    del second
    gc.collect()
    assert address in regions._memories
    assert (view == 3).all()
    del view
    gc.collect()
    assert address not in regions._memories


def test_without_huge_pages_there_is_memory_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    assert not new_region(4096).flat(0, 4096).any()


def test_what_lies_in_a_region() -> None:
    region, ((first, last),) = laid_out([256, 300])
    other = new_region(4096)
    assert all(lie_in([other, region], t) for t in (first, last, last[299:]))
    assert not lie_in([other], first)
    assert not lie_in([], first)
    assert not lie_in([region], torch.zeros(4))
    # The page goes on, the region does not.
    behind = torch.frombuffer(region.memory, dtype=torch.uint8, count=8, offset=region.nbytes)
    assert not lie_in([region], behind)


# -- taking over -------------------------------------------------------------------------------------------------------


def test_groups_that_fill_a_mapping_are_found_where_they_lie() -> None:
    region, (a, b, c) = laid_out([10, 300], [256], [1, 1, 1])
    assert places([a, b, c]) == [(0, 768), (768, 256), (1024, 768)]
    assert places([c, a, b]) == [(1024, 768), (0, 768), (768, 256)]
    assert places([list(reversed(a)), b, c]) == [(0, 768), (768, 256), (1024, 768)]
    found = find_places([a, b, c])
    assert {id(p.region) for p in found if p is not None} == {id(p.region) for p in found[:1] if p is not None}, (
        "one region for all"
    )
    assert all(p is not None and (p.region.address, p.region.nbytes) == (region.address, 1792) for p in found)


def test_groups_of_two_mappings_are_told_apart() -> None:
    _, (a, b) = laid_out([10], [20])
    _, (c, d) = laid_out([30], [40])
    assert places([c, a, d, b]) == [(0, 256), (0, 256), (256, 256), (256, 256)]
    found = find_places([c, a, d, b])
    addresses = [p.region.address for p in found if p is not None]
    assert addresses == [c[0].data_ptr(), a[0].data_ptr()] * 2
    # One of them is not all there, the other is.
    assert places([c, a, d]) == [(0, 256), None, (256, 256)]


def test_a_mapping_that_is_not_filled_is_left_alone() -> None:
    _, (a, b, c) = laid_out([10, 300], [256], [1, 1])
    for some in ([a, b], [b, c], [a, c], [b], [a[:1], b, c], [a, b, c[:1]], [a, b, c[1:]]):
        assert places(some) == [None] * len(some)
    # Twice the same bytes, in two groups, are no tiling either.
    assert places([a, b, c, b]) == [None] * 4


def test_other_memory_beside_changes_nothing() -> None:
    _, (a, b) = laid_out([10], [20])
    loose = [torch.zeros(64)]
    assert places([a, loose, b]) == [(0, 256), None, (256, 256)]
    assert places([loose]) == [None]
    assert places([[*a, *loose], b]) == [None, None]
    assert places([[a[0].to("meta")], b]) == [None, None]


def test_nothing_has_no_place() -> None:
    _, (a,) = laid_out([10])
    empty = torch.empty(0)
    assert places([]) == []
    assert places([[], [empty], a]) == [None, None, (0, 256)]
    # An empty tensor takes part without bytes.
    assert places([[empty, *a]]) == [(0, 256)]


def test_a_store_that_has_a_mapping_keeps_it() -> None:
    _, (a, b) = laid_out([10], [20])
    (first, _) = find_places([a, b])
    assert first is not None
    first.region.hold()
    assert places([a, b]) == [None, None]
    first.region.let_go()
    assert places([a, b]) == [(0, 256), (256, 256)]


def test_the_region_that_was_made_and_one_that_was_found_are_of_one_mapping() -> None:
    region, (a,) = laid_out([10])
    region.hold()
    assert places([a]) == [None]
    region.let_go()
    assert places([a]) == [(0, 256)]


def test_tensors_that_share_bytes_are_one_run() -> None:
    _, ((a, b),) = laid_out([1000, 300])
    assert places([[a, a[:100], b, a.view(10, 100), a[100:700]]]) == [(0, 1024 + 512)]
    # In two groups they are not: who packs puts what shares bytes into one.
    assert places([[a, b], [a[:100]]]) == [None, None]


def test_a_tensor_begins_where_a_bucket_would_put_it() -> None:
    region = new_region(1024)

    def at(offset: int, n: int) -> torch.Tensor:
        return torch.frombuffer(region.memory, dtype=torch.uint8, count=n, offset=offset)

    assert places([[at(0, 200), at(256, 768)]]) == [(0, 1024)]
    assert places([[at(0, 200), at(200, 824)]]) == [None], "not aligned"
    assert places([[at(0, 200), at(512, 512)]]) == [None], "a gap"
    assert places([[at(16, 1008)]]) == [None], "the first begins late"
    assert places([[at(0, 200)], [at(256, 300)]]) == [None, None], "the last bytes are nobody's"


def test_layouts_are_seen_by_the_bytes_that_they_span() -> None:
    _, ((flat,),) = laid_out([64 * 24], dtype=torch.float32)
    assert places([[flat.view(64, 24).t()]]) == [(0, 64 * 24 * 4)]
    assert places([[flat.as_strided((23,), (64,))]]) == [None], "it ends earlier"
    every_other = flat.as_strided((64, 12), (24, 2))
    # It spans all but the last element, which is within what is aligned.
    assert places([[every_other]]) == [(0, 64 * 24 * 4)]


@given(st.lists(st.lists(st.integers(0, 700), max_size=4), min_size=1, max_size=5), st.randoms(use_true_random=False))
def test_whatever_was_laid_out_is_found_in_any_order(sizes: list[list[int]], random: object) -> None:
    region, groups = laid_out(*sizes)
    lengths = [sum(align(n) for n in group) for group in sizes]
    starts = [0, *itertools.accumulate(lengths)]
    wanted = [(start, length) if length else None for start, length in zip(starts, lengths, strict=False)]
    order = list(range(len(groups)))
    random.shuffle(order)  # type: ignore[attr-defined]
    assert places([groups[i] for i in order]) == [wanted[i] for i in order]
    there = [i for i in order if wanted[i] is not None]
    if there:
        assert all(place is None for place in places([groups[i] for i in order if i != there[0]]))
    assert region.nbytes == max(sum(lengths), 1)
