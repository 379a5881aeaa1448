"""Prices: compute time by the formula, and what is alive at the peak of every segment."""

from __future__ import annotations

import pytest
import sympy
import torch

from fxoffload.blocks import find_blocks
from fxoffload.dynamic import price_function
from fxoffload.facts import Facts
from fxoffload.machine import Machine
from fxoffload.price import price
from tests.models import Towers, seeded, toy
from tests.tracing import cut, facts_of, node, read

# 1 GB/s and 1 TFLOP/s: 1e6 bytes and 1e9 operations a millisecond. No launch time.
MACHINE = Machine("test", 1.0, 0.5, 1.0, 0.0, (("float32", 1.0), ("bfloat16", 4.0)))
LAUNCH = Machine("test", 1.0, 0.5, 1.0, 0.25, (("float32", 1.0), ("bfloat16", 4.0)))


def activations(facts: Facts, *sizes: int, holds: bool = False) -> list[int]:
    return [p.cost.activation_nbytes for p in price(facts, cut(facts, *sizes), MACHINE, holds=holds)]


def milliseconds(facts: Facts, *sizes: int, machine: Machine = MACHINE) -> list[float]:
    return [p.cost.compute_ms for p in price(facts, cut(facts, *sizes), machine)]


# -- activations ------------------------------------------------------------------------------------------------------


def test_a_storage_is_alive_from_its_maker_to_its_last_reader() -> None:
    # x(1000) -> a(100) -> b(10) -> c(1), and d reads a again.
    nodes = [
        node("a", reads=[0], makes=(1, 100)),
        node("b", reads=[1], makes=(2, 10)),
        node("c", reads=[2], makes=(3, 1)),
        node("d", reads=[1, 3], makes=(4, 1000)),
        node("e", reads=[4], makes=(5, 20)),
    ]
    facts = facts_of(nodes, inputs=[("x", 0, 1000)], outputs=[5])
    assert activations(facts) == [1000 + 100 + 1 + 1000]
    alone = activations(facts, 1, 1, 1, 1)
    assert alone == [1100, 1110, 1111, 2101, 2020]


def test_what_crosses_segments_lives_to_its_last_reader_or_to_the_end_of_that_segment() -> None:
    nodes = [
        node("a", reads=[0], makes=(1, 100)),
        node("b", reads=[1], makes=(2, 10)),
        node("c", reads=[2], makes=(3, 1)),
        node("d", reads=[3], makes=(4, 5)),
    ]
    facts = facts_of(nodes, inputs=[("x", 0, 0)], outputs=[4])
    assert activations(facts) == activations(facts, holds=True) == [110]
    # Cut behind a: the segment frees a behind b, or holds it while c and d run.
    assert activations(facts, 1) == [100, 110]
    assert activations(facts, 1, holds=True) == [100, 111]
    assert activations(facts, 1, 1) == [100, 110, 11]
    assert activations(facts, 1, 1, holds=True) == [100, 110, 16]


def test_outputs_live_to_the_end_and_inputs_throughout() -> None:
    nodes = [
        node("a", reads=[0], makes=(1, 100)),
        node("b", reads=[0], makes=(2, 10)),
        node("c", reads=[2], makes=(3, 1)),
    ]
    facts = facts_of(nodes, inputs=[("x", 0, 1000), ("y", 9, 5000)], outputs=[1, 3])
    assert activations(facts, 1, 1) == [6100, 6110, 6111]


def test_a_value_that_nothing_reads_lives_where_it_is_made() -> None:
    nodes = [node("a", makes=(1, 100)), node("b", makes=(2, 10)), node("c", makes=(3, 1))]
    assert activations(facts_of(nodes, outputs=[3]), 1, 1) == [100, 10, 1]


def test_views_allocate_nothing_and_keep_what_they_view_alive() -> None:
    nodes = [
        node("a", makes=(1, 100)),
        node("view", reads=[1], kind="view"),
        node("b", makes=(2, 10)),
        node("c", reads=[1, 2], makes=(3, 1)),
    ]
    assert activations(facts_of(nodes, outputs=[3]), 1, 1, 1) == [100, 100, 110, 111]


# -- compute ----------------------------------------------------------------------------------------------------------


def test_an_extern_kernel_takes_the_longer_of_its_operations_and_its_bytes() -> None:
    def one(flops: int, touched: int, dtype: str = "float32") -> float:
        facts = facts_of([node("a", makes=(1, 8), kind="extern", flops=flops, touched=touched, rate=dtype)])
        (found,) = milliseconds(facts, machine=LAUNCH)
        return found

    assert one(2 * 10**9, 10**6) == pytest.approx(0.25 + 2.0)
    assert one(2 * 10**9, 3 * 10**6) == pytest.approx(0.25 + 3.0)
    assert one(2 * 10**9, 0, "bfloat16") == pytest.approx(0.25 + 0.5)
    assert one(2 * 10**9, 0, "int8") == pytest.approx(0.25 + 2.0), "a dtype without a rate runs at the slowest"


def test_attention_runs_at_its_own_rate() -> None:
    machine = Machine("test", 1.0, 0.5, 1.0, 0.0, (("float32", 1.0), ("float32_attention", 0.5)))
    facts = facts_of([node("a", makes=(1, 8), kind="extern", flops=10**9, rate="float32_attention")])
    assert milliseconds(facts, machine=machine) == [2.0]


def test_fused_work_of_a_segment_moves_every_storage_once() -> None:
    mb = 10**6
    nodes = [
        node("a", makes=(1, mb), kind="extern", flops=10**9),
        node("b", reads=[1], makes=(2, 2 * mb)),
        node("c", reads=[1, 2], makes=(3, 4 * mb)),
        node("d", reads=[3], kind="view"),
    ]
    facts = facts_of(nodes, outputs=[3])
    assert milliseconds(facts) == [pytest.approx(1.0 + (1 + 2 + 4))]
    assert milliseconds(facts, machine=LAUNCH) == [pytest.approx(1.0 + (1 + 2 + 4) + 2 * 0.25)]


def test_a_segment_of_views_takes_no_time() -> None:
    nodes = [node("a", kind="view"), node("b", makes=(1, 10**6))]
    assert milliseconds(facts_of(nodes), 1, machine=LAUNCH) == [0.0, pytest.approx(1.25)]


def test_fused_work_that_reads_another_segments_storage_pays_for_it() -> None:
    mb = 10**6
    nodes = [node("a", makes=(1, 8 * mb), kind="extern"), node("b", reads=[1], makes=(2, mb))]
    facts = facts_of(nodes, outputs=[2])
    together, (_, apart) = milliseconds(facts)[0], milliseconds(facts, 1)
    assert together == pytest.approx(9.0)
    assert apart == pytest.approx(9.0), "the storage is in memory, whichever segment made it"


# -- expressions ------------------------------------------------------------------------------------------------------


def test_expressions_hold_at_every_size() -> None:
    traced = read(seeded(Towers), torch.ones(3, 16), dynamic=True)
    prices = price(traced.facts, find_blocks(traced.facts, max_segment_nbytes=1 << 30), MACHINE)
    (batch,) = set().union(*(p.flops.free_symbols for p in prices))
    for n in (1, 7, 4096):
        static = read(seeded(Towers), torch.ones(n, 16))
        wanted = price(static.facts, find_blocks(static.facts, max_segment_nbytes=1 << 30), MACHINE)
        for got, fixed in zip(prices, wanted, strict=True):
            assert got.flops.subs(batch, n) == fixed.flops
            assert got.activation_nbytes.subs(batch, n) == fixed.activation_nbytes


def test_the_peak_holds_between_sizes_too() -> None:
    """Of these the first leads up to 50 rows, the second up to 200, the third from there on."""
    rows = sympy.Symbol("s0", positive=True, integer=True)
    live = [1000 * rows, 10 * rows * (rows + 50), 12 * rows**2 + 100 * rows, 900 * rows, 5 * rows**2 + 400 * rows]
    nodes = [node(f"n{i}", makes=(i + 1, nbytes)) for i, nbytes in enumerate(live)]
    facts = facts_of(nodes, hints=[(rows, 512)])
    prices = price(facts, cut(facts), MACHINE)
    costs = price_function(prices, [rows], dict(facts.hints))
    for n in (1, 2, 49, 51, 64, 100, 150, 199, 201, 1000, 10**6):
        assert costs(n)[0].activation_nbytes == max(int(nbytes.subs(rows, n)) for nbytes in live)
    (peak,) = (p.activation_nbytes for p in prices)
    assert peak == sympy.Max(*live[:3]), "what others cover is not evaluated at every change of size"


def test_equal_blocks_have_equal_prices() -> None:
    facts = read(toy(5), torch.ones(3, 16)).facts
    prices = price(facts, find_blocks(facts, max_segment_nbytes=1 << 30), Machine.nominal())
    assert [p.cost.name for p in prices] == ["inp", *(f"blocks.{i}" for i in range(5)), "out"]
    assert len({(p.flops, p.cost.compute_ms, p.cost.activation_nbytes) for p in prices[1:-1]}) == 1
