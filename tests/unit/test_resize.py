"""What forwards take at sizes that were not measured."""

from __future__ import annotations

import pytest

from fxoffload.resize import Activations
from fxoffload.warmup import SLACK_NBYTES

MIB = 1 << 20
WORKSPACES = 32 * MIB


def taken(estimate_nbytes: int, part: float = 1.0) -> int:
    """What a forward is measured to take where each size takes the library's workspaces, and a part of the estimate."""
    return int(estimate_nbytes * part) + WORKSPACES + SLACK_NBYTES


def test_the_estimate_counts_where_nothing_was_measured() -> None:
    activations = Activations()
    assert not activations.known
    assert activations.at(5 * MIB) == 5 * MIB


def test_a_size_that_was_measured_is_as_it_was_measured() -> None:
    activations = Activations()
    for estimate in (16 * MIB, MIB, 700 * MIB):
        activations.learn(estimate, taken(estimate))
    assert activations.known
    # The small one last: what it takes is nearly all workspaces, and no measure of a larger one.
    for estimate in (700 * MIB, 16 * MIB, MIB):
        assert activations.at(estimate) == taken(estimate)


@pytest.mark.parametrize("part", [0.6, 1.0, 1.3])
@pytest.mark.parametrize("measured", [0, MIB, 16 * MIB, 1024 * MIB])
def test_a_larger_size_takes_no_less_and_not_many_times_more(measured: int, part: float) -> None:
    activations = Activations()
    activations.learn(measured, taken(measured, part))
    for estimate in (measured + MIB, 2 * measured + MIB, 10 * measured + MIB):
        grown = taken(estimate, part) - taken(measured, part)
        assert grown <= activations.at(estimate) - taken(measured, part) <= max(2 / part, 1) * grown + 4


@pytest.mark.parametrize("part", [0.6, 1.0, 1.3])
def test_a_smaller_size_keeps_the_slack(part: float) -> None:
    activations = Activations()
    activations.learn(1024 * MIB, taken(1024 * MIB, part))
    for estimate in (0, MIB, 512 * MIB, 1000 * MIB):
        # The workspaces are smaller than the slack.
        assert taken(estimate, part) - SLACK_NBYTES <= activations.at(estimate) <= taken(estimate, part)


def test_between_two_sizes_it_takes_no_more_than_at_the_larger() -> None:
    activations = Activations()
    activations.learn(MIB, 200 * MIB)
    activations.learn(100 * MIB, 180 * MIB)
    assert activations.at(50 * MIB) == 180 * MIB
    assert activations.at(100 * MIB) == 180 * MIB
