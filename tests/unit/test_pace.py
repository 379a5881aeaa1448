"""Which captures are kept, by the times of their replays."""

from __future__ import annotations

import dataclasses

import pytest

from fxoffload import pace
from fxoffload.cost import Costs, SegmentCost
from fxoffload.pace import ALIKE, SLOW, TIMED, TRIES, Pace, is_bound_by_copies, is_good
from fxoffload.planner import Knobs, make_plan
from tests.capturing import Capturer


def test_as_fast_as_planned() -> None:
    assert is_good([100.0], 100.0)
    assert is_good([100 * SLOW], 100.0)
    assert not is_good([101 * SLOW], 100.0)
    assert is_good([105.0, 100.0], 100.0)


def test_all_slow() -> None:
    """The prediction is wrong, or something else takes the link: the first that is among the fastest is kept after some tries."""
    slow = [110.0] * (TRIES - 1)
    assert not is_good(slow, 100.0)
    assert is_good([*slow, 110.0 * ALIKE], 100.0)
    assert not is_good([*slow, 115.0], 100.0)
    assert is_good([*slow, 115.0, 110.0], 100.0)
    ever_slower = [110.0 + k for k in range(2 * TRIES)]
    assert [is_good(ever_slower[: k + 1], 100.0) for k in range(2 * TRIES)] == [False] * (2 * TRIES - 1) + [True]


COSTS = Costs((SegmentCost("s", 1.0, 0),), (), 1.0)
PLAN = make_plan(COSTS, 1, Knobs())


@pytest.mark.parametrize(
    ("step_ms", "compute_ms", "bound"), [(100.0, 50.0, True), (100.0, 95.0, False), (pace.LEAST_MS / 2, 1.0, False)]
)
def test_which_plans_are_timed(step_ms: float, compute_ms: float, bound: bool) -> None:
    assert is_bound_by_copies(dataclasses.replace(PLAN, step_ms=step_ms, compute_ms=compute_ms)) == bound
    without_overlap = dataclasses.replace(PLAN, step_ms=step_ms, compute_ms=compute_ms, async_transfer=False)
    assert not is_bound_by_copies(without_overlap)


class Counting(Capturer):
    """Its clocks count their own records; an end comes late where `late`."""

    def __init__(self) -> None:
        super().__init__(takes_ms=[5.0])
        self.captures = 1
        self.made = 0
        self.late = False

    def clock(self):
        self.made += 1
        clock = super().clock()
        clock.query = lambda: not self.late
        return clock


def test_replays_are_timed_without_waiting_for_them() -> None:
    clocks = Counting()
    pace = Pace(clocks)
    clocks.late = True
    for k in range(TIMED + 4):
        assert pace.step_ms() is None
        with pace.timed():
            pass
        assert clocks.made == 2 * min(k + 1, TIMED + 1)
    assert pace.step_ms() is None
    clocks.late = False
    assert pace.step_ms() == 5.0


def test_a_replay_behind_a_restore_does_not_count() -> None:
    clocks = Counting()
    pace = Pace(clocks)
    pace.skip()
    for k in range(TIMED + 2):
        assert pace.step_ms() is None
        with pace.timed():
            pass
        assert clocks.made == 2 * k
    assert pace.step_ms() == 5.0
