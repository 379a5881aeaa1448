"""Random sequences of everything that is done to a model: equal to its plain twin after every step."""

from __future__ import annotations

from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.lives import CHANGES, Life

small = st.integers(0, 7)
part = st.sampled_from([0.3, 0.5, 0.8, 2.0])
step = st.one_of(
    st.tuples(st.just("change"), st.sampled_from(sorted(CHANGES)), small),
    st.tuples(st.just("change"), st.sampled_from(sorted(CHANGES)), small),
    st.tuples(st.just("forward"), st.sampled_from(["compiled", "module"]), small),
    st.tuples(st.just("forward"), st.sampled_from(["compiled", "module"]), small),
    st.tuples(st.just("budget"), part),
    st.tuples(st.just("attach"), part),
    st.tuples(st.just("remove")),
    st.tuples(st.just("copies")),
    st.tuples(st.just("refuse"), st.sampled_from(["compiled", "module"])),
    st.tuples(st.just("refresh"), small),
)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(step, max_size=14))
def test_equal_to_the_plain_twin_after_every_step(steps: list[tuple[Any, ...]]) -> None:
    lead(steps)


def lead(steps: list[tuple[Any, ...]]) -> None:
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=64, accumulated_recompile_limit=256):
        life = Life()
        life.forward("compiled", 0)
        life.budget(0.5)
        for name, *arguments in steps:
            getattr(life, name)(*arguments)
            life.check()
        for i in range(2):
            life.forward("compiled", i)
            life.forward("module", i)
            life.check()
