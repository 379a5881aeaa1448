"""A plan in words: what bounds its step, what more memory would buy, and from which budget on streaming costs nothing."""

from __future__ import annotations

from fxoffload.curve import FREE, Landmarks, Study
from fxoffload.plan import Plan
from fxoffload.show import table
from fxoffload.sizes import format_size, show_size

_NEGLIGIBLE = FREE - 1
_IN_TURN = 1.25
"""A step this many times longer than both its copies and its compute time overlaps them badly."""


def show_ms(ms: float) -> str:
    """A time for a sentence: `388 ms`, `12.3 ms`, `0.0904 ms`: three digits that count."""
    digits = 0 if ms >= 100 else 1 if ms >= 10 else 2 if ms >= 1 else 4
    return f"{ms:.{digits}f} ms"


def sentences(study: Study, plan: Plan, landmarks: Landmarks) -> tuple[str, ...]:
    """Bound, one GiB more, smallest budgets, free streaming: one sentence each. One in all for a model without weights."""
    if not any(bucket.nbytes for bucket in study.costs.buckets):
        needs = f"computes for {show_ms(plan.compute_ms)} and needs {show_size(plan.activation_nbytes)} of activations"
        return (f"There are no weights to stream: a forward {needs}.",)
    return (bound_sentence(study, plan), _more(plan, landmarks), _smallest(landmarks), _free(landmarks))


def bound_sentence(study: Study, plan: Plan) -> str:
    """What bounds the step, link or compute, with both numbers."""
    if not plan.loads:
        return (
            f"Compute bounds the step: every weight stays on the device, and a forward computes for {show_ms(plan.compute_ms)}."
        )
    copy_ms = {bucket.name: bucket.copy_ms for bucket in study.costs.buckets}
    copies_ms = sum(copy_ms[load.bucket] for load in plan.loads)
    numbers = (
        f"copies take {show_ms(copies_ms)} a step ({show_size(plan.streamed_nbytes)}), computation {show_ms(plan.compute_ms)}"
    )
    stall = f"it waits {show_ms(plan.stall_ms)} for copies"
    if not plan.async_transfer:
        return f"Copies and computation take turns, because async_transfer is off: {numbers}."
    if plan.stall_ms <= _NEGLIGIBLE * plan.compute_ms:
        return f"Compute bounds the step: {numbers}, and the copies hide behind it."
    if plan.step_ms > _IN_TURN * max(copies_ms, plan.compute_ms):
        return f"The budget bounds the step: {numbers}, and with so little room much of that happens in turn; {stall}."
    if copies_ms >= plan.compute_ms:
        return f"The link bounds the step: {numbers}; {stall}."
    return (
        f"Compute bounds most of the step, the link a part of it: {numbers}, yet {stall}, "
        "where weights are dense and there is too little room to copy them ahead."
    )


def _more(plan: Plan, landmarks: Landmarks) -> str:
    saved_ms = plan.step_ms - landmarks.more.step_ms
    if not plan.loads:
        return "1 GiB more would buy nothing."
    if saved_ms <= plan.step_ms * 1e-3:
        return "1 GiB more would buy nothing to speak of."
    holds = ", and hold every weight" if not landmarks.more.streamed_nbytes else ""
    return f"1 GiB more would save {show_ms(saved_ms)} a step ({saved_ms / plan.step_ms:.0%}){holds}."


def _smallest(landmarks: Landmarks) -> str:
    smallest, overlap = landmarks.smallest, landmarks.overlap
    text = f"The smallest budget that works is {format_size(smallest.budget_nbytes)} ({show_ms(smallest.step_ms)} a step)"
    if overlap.budget_nbytes == smallest.budget_nbytes:
        return f"{text}."
    return f"{text}; with copies beside compute, {format_size(overlap.budget_nbytes)} ({show_ms(overlap.step_ms)})."


def _free(landmarks: Landmarks) -> str:
    free, everything = landmarks.free, landmarks.everything
    within = f"within {_NEGLIGIBLE:.0%} of computation alone"
    if free is None:
        return f"With these settings no budget makes streaming free ({within})."
    if not free.streamed_nbytes:
        return (
            f"Streaming is never free ({within}) here: all weights have to stay, which takes {format_size(free.budget_nbytes)}."
        )
    text = f"Streaming is free ({within}) from {format_size(free.budget_nbytes)} on"
    if everything is None:
        return f"{text}; with these settings some weights are streamed at every budget."
    part = free.budget_nbytes / everything.budget_nbytes
    return f"{text}, {part:.0%} of the {show_size(everything.budget_nbytes)} that hold everything."


def landmarks_table(landmarks: Landmarks, compute_ms: float) -> str:
    """The budgets that stand out, a row each."""
    most = max(point.step_ms for _, point in landmarks.rows())
    digits = 1 if most >= 100 else 2 if most >= 1 else 4
    rows = [
        (
            name,
            show_size(point.budget_nbytes),
            f"{point.step_ms:.{digits}f}",
            f"{point.bound_ms:.{digits}f}",
            f"{point.step_ms / compute_ms:.2f}" if compute_ms else "-",
            show_size(point.streamed_nbytes),
        )
        for name, point in landmarks.rows()
    ]
    return table(("at a budget of", "size", "step ms", "bound ms", "x compute", "streamed a step"), rows, fold=False)
