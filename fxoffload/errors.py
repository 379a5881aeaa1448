"""Errors: one small tree, for what a user can change. A bug of ours is an `assert`, not one of these.

Every text reads `<stage>: <object>: <what, with numbers>; <what to do>`, as in
`planner: budget 2.00 GiB: blocks.3 alone needs 2.41 GiB; raise the budget to at least 2796MiB`.
"""

from __future__ import annotations


class OffloadError(RuntimeError):
    """Root of the tree: catch it to catch all that fxoffload raises for a user to act on."""


class ConfigError(OffloadError, ValueError):
    """A setting whose value, name or combination is not accepted. A value of a wrong type is a `TypeError` instead."""


class BudgetError(OffloadError):
    """The model does not run in the memory budget.

    `smallest_nbytes`: a budget, in bytes, that works. The text gives it as a size string that works too.
    """

    smallest_nbytes: int

    def __init__(self, message: str, smallest_nbytes: int) -> None:
        super().__init__(message, smallest_nbytes)
        self.smallest_nbytes = smallest_nbytes

    def __str__(self) -> str:
        return str(self.args[0])


class PlanError(OffloadError):
    """A plan that the judge refuses, or one that does not belong to the graph at hand."""


class WeightError(OffloadError):
    """A weight that can't be offloaded, or one that is not where its plan says."""


class GradientError(OffloadError):
    """Gradients were asked of an offloaded model: training is not supported."""


class OffloadWarning(UserWarning):
    """Something works, but slower or with more memory than it could; the text says what stays where, and why."""
