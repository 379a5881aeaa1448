"""What a trace of copies comes to (`tests/bench/graph.py`)."""

import pytest

from tests.bench.graph import summary


def test_a_trace_of_copies_tells_how_busy_the_link_was_and_which_of_them_were_slow() -> None:
    # Two forwards of four copies of 1 MB; in each the last one takes twice as long. One copy comes 10 us late.
    starts, spans = (0.0, 21.0, 42.0, 63.0, 104.0, 125.0, 146.0, 177.0), (20.0, 20.0, 20.0, 40.0) * 2
    found = summary([(start, us, 10**6) for start, us in zip(starts, spans, strict=True)], loads=4)
    assert found["busy"] == pytest.approx(200 / 217)
    assert (found["gap_us"], found["gap_max_us"]) == (1.0, 11.0)
    assert found["gb_s"] == pytest.approx({"least": 25.0, "tenth": 25.0, "median": 50.0, "most": 50.0})
    assert found["quarters_gb_s"] == [50.0, 50.0, 50.0, 25.0]
