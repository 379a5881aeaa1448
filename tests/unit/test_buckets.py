"""Buckets: which weights move together, what is apart, and how they are laid out."""

from __future__ import annotations

import expecttest
import torch

from fxoffload.blocks import Blocks, Segment
from fxoffload.buckets import ALIGNMENT, Bucket, align, pack_buckets
from fxoffload.facts import Facts
from tests.tracing import facts_of, weight


def graph(*segments: str, mutated: str = "", nbytes: int = 10) -> tuple[Facts, Blocks]:
    """Segments `s0`, `s1`, ... that read one-letter weights, as in `graph("ab", "bc")`."""
    letters = dict.fromkeys("".join(segments))
    weights = [weight(name, nbytes, mutated=name in mutated) for name in letters]
    return facts_of([], weights=weights), Blocks(tuple(Segment(f"s{i}", "", (), tuple(read)) for i, read in enumerate(segments)))


def shown(buckets: tuple[Bucket, ...]) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(b.name, "".join(b.weights), b.uses) for b in buckets]


def test_a_segment_has_one_bucket_and_a_shared_weight_another() -> None:
    buckets = pack_buckets(*graph("abx", "cxy", "dy", "x")).buckets
    assert shown(buckets) == [
        ("s0", "ab", (0,)),
        ("s0.shared", "x", (0, 1, 3)),
        ("s1", "c", (1,)),
        ("s1.shared", "y", (1, 2)),
        ("s2", "d", (2,)),
    ]
    assert not any(b.keep for b in buckets)


def test_weights_shared_by_the_same_segments_are_one_bucket() -> None:
    buckets = pack_buckets(*graph("axyz", "bxy", "cz")).buckets
    assert shown(buckets) == [
        ("s0", "a", (0,)),
        ("s0.shared", "xy", (0, 1)),
        ("s0.shared+", "z", (0, 2)),
        ("s1", "b", (1,)),
        ("s2", "c", (2,)),
    ]


def test_what_the_model_writes_and_what_is_kept_stays_in_buckets_of_its_own() -> None:
    buckets = pack_buckets(*graph("abm", "cm", "de", mutated="m"), keep=frozenset("be")).buckets
    assert [(b.name, "".join(b.weights), b.uses, b.keep) for b in buckets] == [
        ("s0", "a", (0,), False),
        ("s0.kept", "b", (0,), True),
        ("s0.kept+", "m", (0, 1), True),
        ("s1", "c", (1,), False),
        ("s2", "d", (2,), False),
        ("s2.kept", "e", (2,), True),
    ]


def test_pieces_of_a_weight_are_alone() -> None:
    buckets = pack_buckets(*graph("abpq", "p"), alone=frozenset("pq")).buckets
    assert shown(buckets) == [("s0", "ab", (0,)), ("s0+", "q", (0,)), ("s0.shared", "p", (0, 1))]


def test_a_weight_that_nothing_reads_has_no_bucket() -> None:
    facts, blocks = graph("a", "b")
    facts = facts_of([], weights=[*facts.weights, weight("unread", 10)])
    assert shown(pack_buckets(facts, blocks).buckets) == [("s0", "a", (0,)), ("s1", "b", (1,))]


def test_every_weight_starts_at_a_multiple_of_256_bytes() -> None:
    facts, blocks = graph("abc", "d")
    sizes = {"a": 12, "b": 256, "c": 257, "d": 0}
    facts = facts_of([], weights=[weight(name, nbytes) for name, nbytes in sizes.items()])
    (bucket,) = pack_buckets(facts, blocks).buckets
    assert bucket.nbytes == 256 + 256 + 512
    assert [align(n) for n in (0, 1, 255, 256, 257)] == [0, 256, 256, 256, 512]
    assert ALIGNMENT == 256


def test_buckets_come_in_order_of_first_use() -> None:
    buckets = pack_buckets(*graph("z", "a", "m", "zk", "k")).buckets
    assert [b.uses[0] for b in buckets] == sorted(b.uses[0] for b in buckets)
    assert len({b.name for b in buckets}) == len(buckets)


def test_tied_weights_of_a_real_model_are_one_bucket() -> None:
    from fxoffload.blocks import find_blocks
    from tests.models import CASES
    from tests.tracing import read

    case = CASES["qwen3_tied"]
    torch.manual_seed(0)
    facts = read(case.build(), **case.given(0)).facts
    blocks = find_blocks(facts, max_segment_nbytes=1 << 30)
    shared = [b for b in pack_buckets(facts, blocks).buckets if len(b.uses) > 1]
    by_placeholder = {w.placeholder: w.name for w in facts.weights}
    assert "model.embed_tokens.weight" in {by_placeholder[p] for b in shared for p in b.weights}
    assert [b.uses for b in shared if "embed" in by_placeholder[b.weights[0]]] == [(0, len(blocks.segments) - 1)]


class TestGolden(expecttest.TestCase):
    def test_table(self) -> None:
        self.assertExpectedInline(
            str(pack_buckets(*graph("abm", "bc", mutated="m", nbytes=300))),
            """\
buckets  4 buckets  2048 bytes
bucket     bytes  weights  segments
s0           512        1  0
s0.kept      512        1  0         resident
s0.shared    512        1  0,1
s1           512        1  1""",
        )
