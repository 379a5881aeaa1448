"""What gives an edit away: the address, the version counter, and a probe of the bytes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fxoffload.edits import EditWatch, probed_words, same_bytes, version_of
from tests.wrapped import Scaled

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def made(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.zeros(shape, dtype=dtype)
    if dtype.is_complex:
        return torch.complex(torch.rand(shape), torch.rand(shape)).to(dtype)
    return (torch.rand(shape) * 3 + 1).to(dtype)


def test_an_operator_on_a_wrapper_raises_its_counter_only() -> None:
    wrappers = [Scaled.of(made((4, 4), torch.float32)) for _ in range(2)]
    inner = [t for w in wrappers for t in (w.data_, w.scale)]
    watch = EditWatch(inner, inner, [(w, (2 * i, 2 * i + 1)) for i, w in enumerate(wrappers)])
    watch.keep(range(len(inner)))
    assert watch.written(inner, wrappers) == []
    versions = [t._version for t in inner]
    wrappers[1].copy_(wrappers[1].clone())
    assert [t._version for t in inner] == versions
    assert watch.written(inner, wrappers) == [2, 3]
    inner[0].add_(1)
    assert watch.written(inner, wrappers) == [0]
    assert watch.written(inner, wrappers) == []


def dense_edit(tensor: torch.Tensor) -> None:
    """Every element gets another value, through `.data`: no version counter moves."""
    if tensor.dtype == torch.bool:
        tensor.data.logical_not_()
    elif tensor.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor.data.copy_((tensor.data.float() * 2 + 1).to(tensor.dtype))
    else:
        tensor.data += 5


class Watched:
    """Parameters whose memory is watched, as the store's views are."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.tensors = [nn.Parameter(t, requires_grad=False) for t in tensors]
        self.watch = EditWatch(self.tensors, [t.data for t in self.tensors])
        self.watch.keep(range(len(tensors)))

    def written(self) -> list[int]:
        return self.watch.written(self.tensors)

    def moved(self) -> list[int]:
        return self.watch.moved(self.tensors)


def three() -> Watched:
    return Watched(torch.rand(16, 16), torch.rand(3), torch.rand(40, 40))


def test_nothing_happened() -> None:
    watched = three()
    for _ in range(2):
        assert watched.moved() == []
        assert watched.written() == []


# -- address and version ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [0, 1, 2])
def test_other_memory_is_seen_by_its_address(k: int) -> None:
    watched = three()
    watched.tensors[k].data = watched.tensors[k].data.clone()
    assert watched.moved() == [k]


def test_a_swap_of_two_is_seen() -> None:
    watched = Watched(torch.rand(4, 4), torch.rand(4, 4), torch.rand(4, 4))
    a, b, _ = watched.tensors
    a.data, b.data = b.data, a.data
    assert watched.moved() == [0, 1]


def test_another_tensor_over_the_same_memory_is_no_move() -> None:
    watched = three()
    watched.tensors[0] = nn.Parameter(watched.tensors[0].data, requires_grad=False)
    assert watched.moved() == []


@pytest.mark.parametrize(
    "edit",
    [lambda p: p.add_(1), lambda p: p[0].zero_(), lambda p: p.copy_(torch.ones_like(p)), lambda p: p.view(-1)[-1:].mul_(2)],
)
def test_in_place_operations_are_seen_by_the_version(edit: Callable[[torch.Tensor], object]) -> None:
    watched = three()
    edit(watched.tensors[1])
    assert watched.written() == [1]
    assert watched.written() == [], "an edit is told once"


def test_a_single_element_of_a_large_weight_is_seen_by_the_version() -> None:
    watched = Watched(torch.rand(1000, 1000))
    watched.tensors[0][617, 3] = 7
    assert watched.written() == [0]


# -- the probe --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(), (1,), (3,), (64,), (65, 7), (100, 64), (8, 4, 3, 3)])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_a_dense_edit_of_any_dtype_and_shape_is_seen(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    watched = Watched(made(shape, dtype), torch.rand(5))
    version = watched.tensors[0]._version
    dense_edit(watched.tensors[0])
    assert watched.tensors[0]._version == version
    assert watched.written() == [0]
    assert watched.written() == []


LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "transposed": lambda: torch.rand(30, 50).t(),
    "strided": lambda: torch.rand(30, 50)[::2, ::3],
    "channels last": lambda: torch.rand(4, 8, 3, 3).to(memory_format=torch.channels_last),
    "offset": lambda: torch.rand(2000)[7:],
    "one row expanded": lambda: torch.rand(1, 8),
    "one column": lambda: torch.rand(500, 1),
    "complex transposed": lambda: torch.rand(30, 50, dtype=torch.complex64).t(),
    "bfloat16 strided": lambda: torch.rand(30, 50).bfloat16()[:, ::7],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_dense_edit_of_any_layout_is_seen(layout: str) -> None:
    watched = Watched(torch.rand(5), LAYOUTS[layout]())
    dense_edit(watched.tensors[1])
    assert watched.written() == [1]


@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (128, 64), (1000, 512), (100, 63), (4096, 8), (3, 5000)])
@pytest.mark.parametrize("part", ["one column in eight", "one row in sixteen", "the first half", "the last tenth"])
def test_an_edit_of_a_part_is_seen(part: str, rows: int, columns: int) -> None:
    watched = Watched(torch.rand(rows, columns))
    data = watched.tensors[0].data
    chosen = {
        "one column in eight": data[:, :: min(8, columns)],
        "one row in sixteen": data[:: min(16, rows)],
        "the first half": data.view(-1)[: data.numel() // 2],
        "the last tenth": data.view(-1)[-(data.numel() // 10) :],
    }[part]
    chosen += 1
    assert watched.written() == [0]


def test_a_low_rank_update_is_seen() -> None:
    watched = Watched(torch.rand(256, 512).bfloat16())
    watched.tensors[0].data += (torch.randn(256, 4) @ torch.randn(4, 512)).bfloat16()
    assert watched.written() == [0]


def test_several_edits_of_several_dtypes_are_told_apart() -> None:
    watched = Watched(*(made((20, 20), dtype) for dtype in DTYPES))
    chosen = [0, 3, 4, 7, 11, 13]
    for k in chosen:
        dense_edit(watched.tensors[k])
    assert watched.written() == chosen


def test_many_weights_are_compared_in_several_parts() -> None:
    watched = Watched(*torch.rand(1500, 600))
    for k in (0, 749, 1499):
        dense_edit(watched.tensors[k])
        assert watched.written() == [k]
        assert watched.written() == []


# -- what the device keeps --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("edit", [dense_edit, lambda p: p.add_(1)], ids=["through .data", "in place"])
def test_edits_of_what_is_not_kept_are_not_told(edit: Callable[[torch.Tensor], object]) -> None:
    watched = three()
    assert watched.watch.keep([0, 2]) == []
    for k in (1, 2):
        edit(watched.tensors[k])
    assert watched.written() == [2]
    assert watched.watch.keep([]) == []
    edit(watched.tensors[0])
    assert watched.written() == []


def test_of_what_was_not_kept_nothing_is_known() -> None:
    watched = three()
    watched.watch.keep([0])
    dense_edit(watched.tensors[1])
    assert watched.watch.keep([0, 1]) == [1], "whoever keeps it now has to copy it"
    assert watched.written() == []
    dense_edit(watched.tensors[0])
    dense_edit(watched.tensors[1])
    assert watched.written() == [0, 1]


def test_nan_is_no_edit() -> None:
    assert Watched(torch.full((10, 10), float("nan"))).written() == []
    assert Watched(torch.full((10, 10), float("nan")).bfloat16()).written() == []


def test_empty_weights_are_watched_too() -> None:
    watched = Watched(torch.rand(0, 4), torch.rand(4), torch.rand(3, 0))
    dense_edit(watched.tensors[1])
    assert watched.written() == [1]
    assert EditWatch([], []).written([]) == EditWatch([], []).moved([]) == []


def test_tensors_of_inference_mode_have_no_version_but_bytes() -> None:
    with torch.inference_mode():
        watched = Watched(torch.rand(8, 8), torch.rand(8))
        assert version_of(watched.tensors[0]) is None
        assert watched.written() == []
        watched.tensors[0].add_(1)
        assert watched.written() == [0]
        watched.tensors[1].mul_(2)
    assert watched.written() == [1]
    assert version_of(torch.rand(1)) == 0


def test_asking_under_inference_mode_leaves_ordinary_tensors() -> None:
    tensors = [nn.Parameter(torch.rand(8, 8), requires_grad=False)]
    with torch.inference_mode():
        watch = EditWatch(tensors, tensors)
        watch.keep([0])
        assert watch.written(tensors) == []
    with torch.no_grad():
        tensors[0].add_(1)
        assert watch.written(tensors) == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize("count", [1, 63, 64, 65, 100, 127, 1000, 100_000])
def test_probed_words_are_few_and_spread_over_the_memory(count: int, dtype: torch.dtype) -> None:
    tensor = torch.zeros(count, dtype=dtype)
    words = probed_words(tensor)
    assert 1 <= len(words) <= 32
    assert words[0] == tensor.data_ptr() // 8
    end = tensor.data_ptr() + count * tensor.element_size()
    assert (words[-1] + 1) * 8 <= end + 7
    assert (words[-1] + words.step) * 8 >= end - 8
    if words.step > 1:
        assert len(words) > 10


def test_probed_words_are_of_many_columns() -> None:
    tensor = torch.zeros(1024, 64)
    columns = {(word * 8 - tensor.data_ptr()) // 4 % 64 for word in probed_words(tensor)}
    assert len(columns) > 16


def test_a_part_of_a_weight_is_enough() -> None:
    """A twentieth of the rows, wherever they are: such as one head of a merged projection."""
    for first in range(0, 1000, 50):
        watched = Watched(torch.rand(1000, 100))
        watched.tensors[0].data[first : first + 50] += 1
        assert watched.written() == [0]


def test_a_probe_reads_memory_of_its_own_only() -> None:
    """Weights that lie far apart, with anything between them."""
    tensors = [torch.rand(4, 4) for _ in range(3)]
    between = [torch.rand(1000) for _ in range(50)]
    watched = Watched(*tensors)
    for other in between:
        other += 1
    assert watched.written() == []
    dense_edit(watched.tensors[2])
    assert watched.written() == [2]


@pytest.mark.parametrize("values", [torch.tensor([[torch.nan, -0.0, 1.0]]), torch.rand(4, 3).t().bfloat16(), torch.rand(5, 0)])
def test_bytes_are_compared_not_values(values: torch.Tensor) -> None:
    other = values.clone()
    assert same_bytes(values, other)
    if other.numel():
        other[0, 1] = 0.0
        assert not same_bytes(values, other)
