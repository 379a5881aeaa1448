"""Golden prints: fixed columns, totals first, repeats folded. Refresh with EXPECTTEST_ACCEPT=1 and read the diff."""

from __future__ import annotations

import re
from random import Random

import pytest
from expecttest import TestCase

from fxoffload.cost import BucketCost, Costs, SegmentCost
from fxoffload.planner import Knobs, make_plan
from fxoffload.show import chart, fold_names, fold_rows, plan_table, table
from fxoffload.timeline import simulate
from tests.unit.planner_cases import GIB, UNIT, chain, flux

MIB = 2**20


def blocks() -> Costs:
    return chain([640 * MIB] * 8, [22.0] * 8, 24e6, latency_ms=0.01, activation_nbytes=256 * MIB)


class TestGolden(TestCase):
    def test_plan(self):
        plan = make_plan(blocks(), int(3.25 * GIB))
        self.assertExpectedInline(
            str(plan),
            """\
plan  budget 3.25 GiB  peak 2.75 GiB  step 187.9 ms = 176.0 compute + 11.9 stall  (bound 176.0 ms)
arena 2.50 GiB = 1.25 GiB persistent + 1.25 GiB staging  activations 256.00 MiB  streamed 3.75 GiB a forward
bucket             MiB  state            prefetch before  wait before  evict after
blocks.1         640.0  persistent       -                -            -
blocks.6         640.0  persistent       -                -            -
blocks.0         640.0  streamed, wraps  blocks.6         blocks.0     blocks.0
blocks.2-3 (x2)  640.0  streamed         blocks.0-1       blocks.2-3   blocks.2-3
blocks.4-5 (x2)  640.0  streamed         blocks.3-4       blocks.4-5   blocks.4-5
blocks.7         640.0  streamed         blocks.5         blocks.7     blocks.7""",
        )

    def test_plan_with_costs(self):
        plan = make_plan(blocks(), int(3.25 * GIB), Knobs(persistent_buckets=1))
        self.assertExpectedInline(
            plan_table(plan, blocks()),
            """\
plan  budget 3.25 GiB  peak 2.75 GiB  step 195.8 ms = 176.0 compute + 19.8 stall  (bound 176.0 ms)
arena 2.50 GiB = 640.00 MiB persistent + 1.88 GiB staging  activations 256.00 MiB  streamed 4.38 GiB a forward
bucket             MiB  state            prefetch before  wait before  evict after  copy ms  stall ms
blocks.0         640.0  persistent       -                -            -                  -         -
blocks.1-2 (x2)  640.0  streamed, wraps  blocks.7         blocks.1-2   blocks.1-2     27.97      0.00
blocks.3         640.0  streamed         blocks.0         blocks.3     blocks.3       27.97      0.00
blocks.4         640.0  streamed         blocks.2         blocks.4     blocks.4       27.97      1.89
blocks.5-7 (x3)  640.0  streamed         blocks.4-6       blocks.5-7   blocks.5-7     27.97      5.97
copy    |===[2============[3=============[4============[5============[6============[7=============[1=========
compute |[0=========[1=========[2==========[3========= [4=========   [5=========   [6==========   [7=========""",
        )

    def test_plan_of_a_tiny_model(self):
        costs = chain([UNIT, 3 * UNIT, 0, UNIT], [0.001, 0.0005, 0.0, 0.002], 1e6, activation_nbytes=96)
        self.assertExpectedInline(
            plan_table(make_plan(costs, 4 * UNIT + 96), costs),
            """\
plan  budget 1.09 KiB  peak 1.09 KiB  step 0.003756 ms = 0.003500 compute + 0.000256 stall  (bound 0.003500 ms)
arena 1.00 KiB = 768 B persistent + 256 B staging  activations 96 B  streamed 512 B a forward
bucket      B  state       prefetch before  wait before  evict after   copy ms  stall ms
blocks.0  256  streamed    blocks.0         blocks.0     blocks.0     0.000256  0.000256
blocks.1  768  persistent  -                -            -                   -         -
blocks.3  256  streamed    blocks.1         blocks.3     blocks.3     0.000256  0.000000
copy    |[0=====                          [3=====
compute |       [0========================[1============[3===================================================""",
        )

    def test_plan_without_overlap_of_a_tied_bucket(self):
        segments = tuple(SegmentCost(f"blocks.{i}", 1.0, 0) for i in range(3))
        costs = Costs(segments, (BucketCost("emb", MIB, 2.0, (0, 2)), BucketCost("blocks.1", MIB, 2.0, (1,))), MIB / 2)
        plan = make_plan(costs, MIB, Knobs(async_transfer=False))
        self.assertExpectedInline(
            plan_table(plan, costs),
            """\
plan  budget 1.00 MiB  peak 1.00 MiB  step 9.00 ms = 3.00 compute + 6.00 stall  (bound 3.00 ms)
arena 1.00 MiB = 0 B persistent + 1.00 MiB staging  activations 0 B  streamed 3.00 MiB a forward  copies on the compute stream
bucket    MiB  state     prefetch before  wait before  evict after  copy ms  stall ms
emb#0     1.0  streamed  blocks.0         blocks.0     blocks.0        2.00      2.00
emb#1     1.0  streamed  blocks.2         blocks.2     blocks.2        2.00      2.00
blocks.1  1.0  streamed  blocks.1         blocks.1     blocks.1        2.00      2.00
copy    |[emb#0================           [blocks.1==============           [emb#1================
compute |                      [0=========                       [1=========                      [2=========""",
        )

    def test_plan_of_a_model_without_weights(self):
        self.assertExpectedInline(
            str(make_plan(chain([0], [1.0]), 1)),
            """\
plan  budget 1 B  peak 0 B  step 1.00 ms = 1.00 compute + 0.00 stall  (bound 1.00 ms)
arena 0 B = 0 B persistent + 0 B staging  activations 0 B  streamed 0 B a forward""",
        )

    def test_plan_of_flux(self):
        """The head of the table of a plan of 323 buckets: periods of several rows fold, too."""
        costs = flux(1)
        plan = make_plan(costs, 23 * GIB)
        self.assertExpectedInline(
            str(plan),
            """\
plan  budget 23.00 GiB  peak 22.49 GiB  step 131.3 ms = 131.3 compute + 0.0 stall  (bound 131.3 ms)
arena 22.04 GiB = 22.04 GiB persistent + 0 B staging  activations 460.80 MiB  streamed 0 B a forward
bucket                 MiB  state       prefetch before  wait before  evict after
double.0-18:0 (x19)  108.0  persistent  -                -            -
double.0-18:1 (x19)  108.0  persistent  -                -            -
double.0-18:2 (x19)   54.0  persistent  -                -            -
double.0-18:3 (x19)   54.0  persistent  -                -            -
double.0-18:4 (x19)   36.0  persistent  -                -            -
double.0-18:5 (x19)   72.0  persistent  -                -            -
double.0-18:6 (x19)   72.0  persistent  -                -            -
double.0-18:7 (x19)   72.0  persistent  -                -            -
double.0-18:8 (x19)   72.0  persistent  -                -            -
single.0-37:0 (x38)   54.0  persistent  -                -            -
single.0-37:1 (x38)   54.0  persistent  -                -            -
single.0-37:2 (x38)   72.0  persistent  -                -            -
single.0-37:3 (x38)   90.0  persistent  -                -            -""",
        )

    def test_costs(self):
        self.assertExpectedInline(
            str(flux(1)),
            """\
costs  323 segments, 131.3 ms compute  323 buckets, 22.04 GiB, 430.4 ms copy  link 55.4 GB/s
segment              compute ms  copy ms  weights MiB  activations MiB
double.0-18:0 (x19)        0.00     2.05        108.0            460.8
double.0-18:1 (x19)        0.00     2.05        108.0            460.8
double.0-18:2 (x19)        0.27     1.03         54.0            460.8
double.0-18:3 (x19)        0.27     1.03         54.0            460.8
double.0-18:4 (x19)        0.23     0.69         36.0            460.8
double.0-18:5 (x19)        0.38     1.37         72.0            460.8
double.0-18:6 (x19)        0.38     1.37         72.0            460.8
double.0-18:7 (x19)        0.38     1.37         72.0            460.8
double.0-18:8 (x19)        0.38     1.37         72.0            460.8
single.0-37:0 (x38)        0.00     1.03         54.0            460.8
single.0-37:1 (x38)        0.62     1.03         54.0            460.8
single.0-37:2 (x38)        0.75     1.37         72.0            460.8
single.0-37:3 (x38)        0.93     1.71         90.0            460.8""",
        )

    def test_timeline(self):
        plan = make_plan(blocks(), int(2.25 * GIB), Knobs(persistent_buckets=0))
        self.assertExpectedInline(
            str(simulate(plan, blocks())),
            """\
timeline  step 223.8 ms = 176.0 compute + 47.8 stall  copy engine busy 223.8 ms
segment          compute ms  stall ms
blocks.0-7 (x8)        22.0       6.0
copy    |===[1==========[2===========[3==========[4===========[5==========[6===========[7==========[0========
compute |   [0=======   [1========   [2=======   [3========   [4=======   [5========   [6========  [7========""",
        )

    def test_chart_of_a_stall(self):
        costs = chain([4 * UNIT, UNIT, UNIT, 4 * UNIT], [2.0] * 4)
        plan = make_plan(costs, 5 * UNIT, Knobs(persistent_buckets=0))
        self.assertExpectedInline(
            chart(simulate(plan, costs), width=60),
            """\
copy    |[0===============[1==     [2==    [3===============
compute |                 [0=======[1======[2=======        [3=======""",
        )

    def test_table(self):
        rows = [("in", 3, "1.50", "x"), ("blocks.0", 20, "0.25", ""), ("blocks.1", 20, "0.25", ""), ("out", 100, "-", "yy")]
        self.assertExpectedInline(
            table(("name", "n", "ms", ""), rows),
            """\
name               n    ms
in                 3  1.50  x
blocks.0-1 (x2)   20  0.25
out              100     -  yy""",
        )
        self.assertExpectedInline(
            table(("name", "n", "ms", ""), rows, fold=False),
            """\
name        n    ms
in          3  1.50  x
blocks.0   20  0.25
blocks.1   20  0.25
out       100     -  yy""",
        )


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["a"], "a"),
        (["blocks.4", "blocks.5", "blocks.6"], "blocks.4-6"),
        (["h.4:1", "h.5:1"], "h.4-5:1"),
        (["x", "x"], "x"),
        (["layers.9.self", "layers.10.self"], "layers.9-10.self"),
    ],
)
def test_fold_names(names: list[str], folded: str):
    assert fold_names(names) == folded


def test_rows_fold_only_where_they_repeat():
    # a number that differs, a gap, and another name do not repeat
    rows = [("b.0", 5), ("b.1", 5), ("b.2", 6), ("b.4", 6), ("c.5", 6)]
    assert fold_rows(rows) == [("b.0-1 (x2)", "5"), ("b.2", "6"), ("b.4", "6"), ("c.5", "6")]


@pytest.mark.parametrize(
    ("numbers", "folded"),
    [
        # What counts up goes up by one in every row, and what stays stays in all.
        ([3, 4, 5], [("b.0-2 (x3)", "b.3-5")]),
        ([3, 3, 3], [("b.0-2 (x3)", "b.3")]),
        ([3, 3, 5], [("b.0-1 (x2)", "b.3"), ("b.2", "b.5")]),
        ([3, 4, 3], [("b.0-1 (x2)", "b.3-4"), ("b.2", "b.3")]),
        ([3, 5, 5], [("b.0", "b.3"), ("b.1-2 (x2)", "b.5")]),
    ],
)
def test_rows_fold_only_where_a_number_does_the_same_in_each(numbers: list[int], folded: list[tuple[str, ...]]):
    assert fold_rows([(f"b.{i}", f"b.{n}") for i, n in enumerate(numbers)]) == folded


def test_printed_rows_are_those_of_the_plan():
    unfolded = 0
    for seed in range(40):
        random = Random(seed)
        n = random.choice([6, 8, 12, 16])
        plan = make_plan(chain([UNIT] * n, random.choices([0.2, 1.0, 1.0, 1.0, 3.0], k=n)), random.choice([2, 3, 4, 5]) * UNIT)
        at = {load.name: [plan.segments[i] for i in (load.prefetch_before, load.wait_before)] for load in plan.loads}
        # A bucket, its state, and two segments, as `blocks.4-7 (x4)` or `blocks.4`.
        row = re.compile(r"(\S+?)(?: \(x(\d+)\))? +\d+ +streamed(?:, wraps)? +(\S+) +(\S+)")
        for match in filter(None, map(row.match, str(plan).splitlines())):
            times = int(match[2] or 1)
            unfolded += times
            for k in range(times):
                name, *segments = (_unfolded(match[g], k) for g in (1, 3, 4))
                assert at[name] == segments, match[0]
    assert unfolded


def _unfolded(text: str, k: int) -> str:
    return re.sub(r"(\d+)-\d+", lambda match: str(int(match[1]) + k), text)


def test_formatted_floats_do_not_count_up():
    assert fold_rows([("b.0", "1.5"), ("b.1", "2.5")]) == [("b.0", "1.5"), ("b.1", "2.5")]


def test_periods_fold():
    rows = [(f"b.{i}:{k}", k, f"b.{i}:{k}") for i in range(3) for k in range(2)]
    assert fold_rows(rows) == [("b.0-2:0 (x3)", "0", "b.0-2:0"), ("b.0-2:1 (x3)", "1", "b.0-2:1")]


def test_an_empty_table_has_a_header():
    assert table(("a", "bc"), []) == "a  bc"
