"""The judge of captured forwards accepts what a capture records, and refuses it with one step less or in another place."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import expecttest
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fxoffload.cost import Costs
from fxoffload.errors import PlanError
from fxoffload.plan import Load, Plan
from fxoffload.planner import Knobs, make_plan, smallest_budget
from fxoffload.verify_capture import Recording, Step, check_capture
from tests.capturing import record
from tests.unit.planner_cases import UNIT, random_costs, random_knobs
from tests.unit.test_replay import MODELS, read_case


def load(i: int, slot: int, prefetch_before: int, after: int) -> Load:
    return Load(f"blocks.{i}", f"blocks.{i}", slot * UNIT, UNIT, (i,), prefetch_before, f"blocks.{after}")


PLAN = Plan(
    segments=tuple(f"blocks.{i}" for i in range(4)),
    residents=(),
    # 3 goes where 1 was, 2 where 0 was, which the forward before issues as it does 1.
    loads=(load(0, 0, 3, 2), load(1, 1, 3, 1), load(2, 0, 1, 0), load(3, 2, 0, 3)),
    arena_nbytes=3 * UNIT,
    activation_nbytes=0,
    budget_nbytes=3 * UNIT,
    async_transfer=True,
    compute_ms=4.0,
    step_ms=4.0,
    bound_ms=4.0,
)
RIGHT = record(PLAN)


def refusal(recording: Recording, plan: Plan = PLAN) -> str:
    with pytest.raises(PlanError) as error:
        check_capture(plan, recording)
    text = str(error.value)
    start, end = "judge: captured forward: ", "; run without cuda_graph, and report this as a bug"
    assert text.startswith(start)
    assert text.endswith(end)
    return text.removeprefix(start).removesuffix(end)


def without(part: str, line: str, what: str, name: str, recording: Recording = RIGHT) -> Recording:
    """With one step less."""
    steps = list(getattr(recording, part))
    steps.remove(Step(line, what, name))  # type: ignore[arg-type]
    return dataclasses.replace(recording, **{part: tuple(steps)})


def moved(step: Step, to: int) -> Recording:
    """With a step inside the graph in another place."""
    steps = [s for s in RIGHT.inside if s != step]
    return dataclasses.replace(RIGHT, inside=(*steps[:to], step, *steps[to:]))


class TestRecording(expecttest.TestCase):
    def test_what_a_capture_records(self):
        check_capture(PLAN, RIGHT)
        self.assertExpectedInline(
            str(RIGHT),
            """\
        line             name
before  outside  record  sent
inside  compute  record  fork
inside  copies   wait    fork
inside  copies   wait    sent
inside  copies   copy    blocks.3
inside  copies   record  ready blocks.3
inside  compute  wait    ready blocks.0
inside  compute  run     blocks.0
inside  compute  evict   blocks.0
inside  compute  record  free blocks.0
inside  copies   wait    free blocks.0
inside  copies   copy    blocks.2
inside  copies   record  ready blocks.2
inside  compute  wait    ready blocks.1
inside  compute  run     blocks.1
inside  compute  evict   blocks.1
inside  compute  record  free blocks.1
inside  copies   record  mark
inside  compute  wait    ready blocks.2
inside  compute  run     blocks.2
inside  compute  evict   blocks.2
inside  compute  record  free blocks.2
inside  copies   wait    free blocks.2
inside  copies   record  go blocks.0
inside  copies   wait    free blocks.1
inside  copies   record  go blocks.1
inside  compute  wait    ready blocks.3
inside  compute  run     blocks.3
inside  compute  evict   blocks.3
inside  compute  record  free blocks.3
inside  copies   record  join
inside  compute  wait    join
behind  outside  wait    go blocks.0
behind  outside  copy    blocks.0
behind  outside  record  ready blocks.0
behind  outside  wait    go blocks.1
behind  outside  copy    blocks.1
behind  outside  record  ready blocks.1""",
        )


def test_where_nothing_is_streamed_the_graph_has_one_line():
    plan = dataclasses.replace(PLAN, loads=())
    recording = record(plan)
    assert {step.line for step in recording.inside} == {"compute"}
    assert not [step for step in recording.inside if step.what == "wait"]
    assert not recording.behind
    check_capture(plan, recording)


def test_what_is_recorded_is_accepted_without_overlap_too():
    loads = tuple(dataclasses.replace(w, prefetch_before=w.uses[0], after=w.name) for w in PLAN.loads)
    plan = dataclasses.replace(PLAN, loads=loads, async_transfer=False)
    recording = record(plan, overlap=False)
    assert {step.line for step in (*recording.before, *recording.inside, *recording.behind)} == {"compute"}
    assert not recording.behind
    check_capture(plan, recording)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        (
            without("inside", "compute", "wait", "ready blocks.2"),
            "run blocks.2: it reads blocks.2 and does not wait for its copy",
        ),
        (
            without("inside", "compute", "wait", "ready blocks.0"),
            "run blocks.0: it reads blocks.0 and does not wait for its copy",
        ),
        (
            without("inside", "copies", "wait", "free blocks.0"),
            "copy blocks.2: on line copies it overwrites bytes of blocks.0 and does not wait for segment blocks.0",
        ),
        (
            without("behind", "outside", "wait", "go blocks.0"),
            "copy blocks.0: on line outside it overwrites bytes of blocks.0 and does not wait for segment blocks.0",
        ),
        (
            moved(Step("copies", "record", "go blocks.0"), 3),
            "copy blocks.0: on line outside it overwrites bytes of blocks.0 and does not wait for segment blocks.0",
        ),
        (
            without("inside", "copies", "wait", "fork", without("inside", "copies", "wait", "sent")),
            "copy blocks.3: on line copies, which is not forked from the capture",
        ),
        (without("inside", "copies", "wait", "fork"), "wait sent: on line copies, which is not forked from the capture"),
        (without("inside", "compute", "wait", "join"), "record join: on line copies, which is not joined before the end"),
        (moved(Step("compute", "wait", "join"), 9), "compute waits for event 'join', which nothing has recorded"),
        (moved(Step("copies", "wait", "free blocks.2"), 3), "copies waits for event 'free blocks.2', which nothing has recorded"),
        # Behind the copy that takes the bytes, before and behind the wait for it.
        (moved(Step("compute", "evict", "blocks.0"), 10), "evict blocks.0: its bytes hold something else"),
        (moved(Step("compute", "evict", "blocks.0"), 16), "evict blocks.0: its bytes hold something else"),
        (moved(Step("compute", "evict", "blocks.0"), 6), "run blocks.0: it reads blocks.0, whose bytes hold something else"),
        (
            moved(Step("compute", "evict", "blocks.0"), 5),
            "evict blocks.0: on line compute it overwrites bytes of blocks.0 and does not wait for the copy of blocks.0",
        ),
        (
            dataclasses.replace(RIGHT, behind=()),
            "copies: a replay makes 2 copies of loads, the plan has 4: blocks.0, blocks.1",
        ),
        (
            without("behind", "outside", "record", "ready blocks.1"),
            "compute waits for event 'ready blocks.1', which nothing has recorded",
        ),
        (
            without("inside", "compute", "run", "blocks.1"),
            "segments: 3 were recorded ('blocks.0', 'blocks.2', 'blocks.3')..., "
            "the plan has 4 ('blocks.0', 'blocks.1', 'blocks.2')...",
        ),
    ],
)
def test_refused(changed: Recording, text: str):
    assert refusal(changed) == text


def test_a_copy_for_the_next_replay_that_is_captured_and_not_waited_for():
    """Its event belongs to the replay that records it: the next one cannot wait for it."""
    inside = list(RIGHT.inside)
    at = inside.index(Step("copies", "record", "go blocks.1"))
    inside[at : at + 1] = [Step("copies", "copy", "blocks.1"), Step("copies", "record", "ready blocks.1")]
    behind = tuple(step for step in RIGHT.behind if "blocks.1" not in step.name)
    text = refusal(Recording(RIGHT.before, tuple(inside), behind))
    assert text == "compute waits for event 'ready blocks.1', which nothing has recorded"


def forks(inside: Sequence[Step]) -> list[str]:
    """Loads that compute waits for while their copy is the last that was captured on its line: copies go on elsewhere then."""
    found: list[str] = []
    last = ""
    for step in inside:
        if step.line == "copies" and (step.what == "copy" or (step.what == "record" and step.name.split()[0] in ("mark", "go"))):
            last = step.name if step.what == "copy" else ""
        elif step.line == "compute" and step.what == "wait" and step.name == f"ready {last}":
            found.append(last)
    return found


def test_marks_keep_copies_in_one_row():
    assert forks(RIGHT.inside) == []
    assert forks([step for step in RIGHT.inside if step.name != "mark"]) == ["blocks.2"]


@settings(max_examples=150, deadline=None)
@given(random_costs(), random_knobs, st.integers(0, 40 * UNIT), st.booleans())
def test_captures_of_random_plans_are_accepted(costs: Costs, knobs: Knobs, extra_nbytes: int, gathered: bool):
    knobs = dataclasses.replace(knobs, cuda_graph=gathered)
    plan = make_plan(costs, smallest_budget(costs, knobs) + extra_nbytes, knobs)
    recording = record(plan, overlap=plan.async_transfer)
    check_capture(plan, recording)
    assert forks(recording.inside) == []


@settings(max_examples=60, deadline=None)
@given(random_costs(), random_knobs, st.integers(0, 40 * UNIT))
def test_without_waits_for_copies_every_capture_is_refused(costs: Costs, knobs: Knobs, extra_nbytes: int):
    plan = make_plan(costs, smallest_budget(costs, knobs) + extra_nbytes, knobs)
    recording = record(plan)
    inside = tuple(s for s in recording.inside if s.line != "compute" or s.what != "wait" or s.name == "join")
    if not plan.loads:
        return
    with pytest.raises(PlanError, match="does not wait for its copy"):
        check_capture(plan, dataclasses.replace(recording, inside=inside))


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.json")), ids=lambda path: path.stem)
def test_captures_of_real_models_are_accepted(path: Path):
    costs, budget_nbytes, knobs, _ = read_case(path)
    for gathered in (False, True):
        plan = make_plan(costs, budget_nbytes, dataclasses.replace(knobs, cuda_graph=gathered))
        recording = record(plan)
        check_capture(plan, recording)
        assert forks(recording.inside) == []
