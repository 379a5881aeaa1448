"""`explain`: what a plan does and why, as a value that prints, for a model that ran or one that never will."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fxoffload import api, draw
from fxoffload.analysis import costs_of, graph_code, top_level, trace
from fxoffload.attached import attachment_of
from fxoffload.binding import Binding
from fxoffload.blocks import Blocks
from fxoffload.buckets import Buckets
from fxoffload.calibrate import machine_of
from fxoffload.config import OffloadConfig, resolve_budget
from fxoffload.cost import Costs
from fxoffload.curve import POINTS, Curve, Landmarks, Study, find_curve, find_landmarks
from fxoffload.devices import available_device, device_memory
from fxoffload.dynamic import knee
from fxoffload.engine import find_engine
from fxoffload.errors import ConfigError, OffloadError
from fxoffload.facts import Facts
from fxoffload.html import explanation_html
from fxoffload.machine import Machine
from fxoffload.plan import Plan
from fxoffload.planned import Planned
from fxoffload.planner import Knobs, knobs_of, make_plan
from fxoffload.price import SegmentPrice
from fxoffload.program import Program
from fxoffload.show import plan_table
from fxoffload.sizes import parse_size, show_size
from fxoffload.timeline import Timeline, chrome_trace, simulate
from fxoffload.verify import check_plan
from fxoffload.words import landmarks_table, sentences

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_WIDTH = 120
_PLANNING = frozenset(
    {
        "memory_budget", "async_transfer", "transfer_buckets", "persistent_buckets", "persistent_bins", "prefetch_limit",
        "max_inflight_prefetch_bytes",
    }
)  # fmt: skip
"""Settings under which a graph that was traced can be planned again."""


@dataclass(frozen=True, slots=True, repr=False)
class Explanation:
    """One graph of a model, with the plan for it. Prints as tables and sentences. Times are predicted, in milliseconds."""

    name: str
    """The class of the model."""
    machine: Machine
    program: Program | None
    """The stages before the plan; None for a model that runs without a compiler."""
    costs: Costs
    """What the plan was made from: per segment and bucket, times and bytes."""
    knobs: Knobs
    plan: Plan
    others: tuple[Explanation, ...] = ()
    """Other graphs of the same model, which ran before this one."""

    @property
    def facts(self) -> Facts:
        """Weights, inputs and nodes of the traced graph."""
        return self._traced.facts

    @property
    def blocks(self) -> Blocks:
        """Blocks and the segments that they are cut into."""
        return self._traced.blocks

    @property
    def buckets(self) -> Buckets:
        """The weights that move together."""
        return self._traced.buckets

    @property
    def prices(self) -> tuple[SegmentPrice, ...]:
        """Segments' flops, times and activations as expressions of the dynamic dimensions."""
        return self._traced.prices

    @property
    def timeline(self) -> Timeline:
        """One forward in steady state."""
        return simulate(self.plan, self.costs)

    @property
    def source(self) -> str:
        """The generated top level, as it runs."""
        return top_level(self._traced, self.plan)

    @property
    def graph_code(self) -> str:
        """The top level as FX code after the passes."""
        return graph_code(self._traced, self.plan)

    @property
    def landmarks(self) -> Landmarks:
        """The budgets that stand out. Made at the first use: some plans, a second each for models of hundreds of segments."""
        return find_landmarks(self._study, self.plan)

    def curve(self, points: int = POINTS) -> Curve:
        """Steps and bounds over about so many budgets, two at least. Raises ConfigError for fewer."""
        return find_curve(self._study, points)

    @property
    def words(self) -> tuple[str, ...]:
        """What bounds the step, what 1 GiB more would buy, the smallest budgets, and from where on streaming is free."""
        return (*sentences(self._study, self.plan, self.landmarks), *self._knees())

    @property
    def head(self) -> str:
        """The model and the machine, in two lines."""
        weights = f"{self.name}  {show_size(sum(b.nbytes for b in self.costs.buckets))} of weights"
        parts = f"{len(self.costs.segments)} segments, {len(self.costs.buckets)} buckets\n{self.machine}"
        if self.program is None:
            return f"{weights}  {parts}"
        blocks = len({segment.block for segment in self.blocks.segments if segment.block})
        tflop = self.facts.value(sum(price.flops for price in self.prices)) / 1e12
        return f"{weights}  {tflop:.3g} TFLOP a forward  {blocks} blocks in {parts}"

    def at(self, memory_budget: int | str) -> Explanation:
        """The same graph, planned for another budget: bytes or a size string. Changes nothing on the model.

        Raises BudgetError where it is too small.
        """
        plan = self._study.plan(parse_size(memory_budget, what="memory_budget"))
        check_plan(plan, self.costs)
        return dataclasses.replace(self, plan=plan, others=())

    def save_trace(self, path: str | Path) -> None:
        """Write the predicted timeline as Chrome trace events: open the file at ui.perfetto.dev."""
        Path(path).write_text(json.dumps(chrome_trace(self.timeline)) + "\n")

    def picture(self) -> Figure:
        """The predicted timeline, drawn. Raises OffloadError where matplotlib is missing."""
        return draw.picture(self.plan, self.timeline)

    def save_picture(self, path: str | Path) -> None:
        """Write `picture`; the suffix of `path` names the format."""
        self.picture().savefig(path)

    def save_curve(self, path: str | Path) -> None:
        """Write the step over the budget as a picture, with both bounds and the knee. Plans at 16 budgets; needs matplotlib."""
        draw.curve_picture(self.curve(), here=self.landmarks.here, title=self.name).savefig(path)

    def __str__(self) -> str:
        table = landmarks_table(self.landmarks, self.plan.compute_ms)
        words = "\n".join(textwrap.fill(sentence, _WIDTH, subsequent_indent="  ") for sentence in self.words)
        parts = [self.head, plan_table(self.plan, self.costs), words, table]
        parts += [f"also, a graph that ran before:\n{plan_table(other.plan)}" for other in self.others]
        return "\n\n".join(parts)

    def __repr__(self) -> str:
        plan = self.plan
        return f"<Explanation {self.name}: budget {show_size(plan.budget_nbytes)}, step {plan.step_ms:.4g} ms; print it>"

    def _repr_html_(self) -> str:
        return explanation_html(
            self.head,
            self.words,
            {
                "Plan": plan_table(self.plan, self.costs),
                "Budgets": landmarks_table(self.landmarks, self.plan.compute_ms),
            },
            self.picture,
        )

    @property
    def _traced(self) -> Program:
        if self.program is None:
            raise OffloadError(
                f"report: {self.name}: it runs without a compiler and was not traced; give fxoffload.explain the inputs of a call"
            )
        return self.program

    @property
    def _study(self) -> Study:
        return Study(self.costs, self.knobs, self.plan.activation_nbytes)

    def _knees(self) -> list[str]:
        if self.program is None:
            return []
        facts, copies_ms = self.facts, sum(bucket.copy_ms for bucket in self.costs.buckets)
        hints = dict(facts.hints)
        found: list[str] = []
        for symbol, _, _ in facts.symbols:
            size = knee(self.prices, symbol, copies_ms, hints)
            if size is not None:
                found.append(
                    f"Computation takes longer than copying every weight from {symbol} = {size} on (traced at {hints[symbol]}): "
                    "streaming is free then, within a budget in which all copies run beside it."
                )
        return found


def explain(model: Any, *inputs: Any, machine: Machine | None = None, dynamic: bool | None = None, **options: Any) -> Explanation:
    """Explain the plan of a model: a module, its compiled wrapper, or a handle.

    Without `inputs`: its plan as it runs, or, with `options` of planning such as `memory_budget`, the one it would have then.

    With `inputs`, the arguments of one call (a dict at the end: keyword arguments): traces that call and plans it, without
    compiling or running anything, and without changing the model. Weights and inputs may be on the meta device. `options` are the
    fields of `OffloadConfig`, by default those that the model is offloaded with; `machine` takes the place of the one that is
    here, which then need not have an accelerator; `dynamic` as in `torch.compile`.

    Raises OffloadError for a model that has not run where there are no inputs, and for what cannot be offloaded; BudgetError for
    a budget that is too small, with the smallest that works.

    >>> with torch.device("meta"):
    ...     model, x = torch.nn.Sequential(*(torch.nn.Linear(4096, 4096) for _ in range(8))), torch.empty(1024, 4096)
    >>> explain(model, x, machine=Machine.nominal(), memory_budget="300MiB")
    <Explanation Sequential: budget 300.00 MiB, step ... ms; print it>
    """
    if not inputs:
        return _explain_run(model, machine, options)
    module = api.module_of(model)
    args, kwargs = (inputs[:-1], inputs[-1]) if isinstance(inputs[-1], dict) else (inputs, {})
    config = _config(module, options)
    device = config.onload_device
    program = trace(module, args, kwargs, config, machine=machine or machine_of(_present(device)), dynamic=dynamic)
    costs = costs_of(program)
    plan = make_plan(costs, _budget_nbytes(config), program.knobs)
    check_plan(plan, costs)
    return Explanation(type(module).__name__, program.machine, program, costs, program.knobs, plan)


def _explain_run(model: Any, machine: Machine | None, options: Mapping[str, Any]) -> Explanation:
    name = type(api.module_of(model)).__name__
    OffloadConfig.check_names(options)
    for word in sorted({*options, *(["machine"] if machine is not None else [])} - _PLANNING):
        raise ConfigError(f"report: {word}: it takes another trace of the model; give the inputs of one call, too")
    try:
        api.get_plan(model)
    except OffloadError as error:
        raise OffloadError(f"{error}, or give fxoffload.explain the inputs of one call") from error
    found = [_explain_planned(name, planned, options) for planned in api.planned_of(model)]
    return dataclasses.replace(found[-1], others=tuple(found[:-1]))


def _explain_planned(name: str, planned: Planned, options: Mapping[str, Any]) -> Explanation:
    program = planned.program if isinstance(planned, Binding) else None
    plan, knobs = planned.plan, planned.knobs
    assert plan is not None
    if options:
        config = OffloadConfig.from_options(options, base=planned.config)
        knobs = knobs_of(config)
        if program is not None:
            program = dataclasses.replace(program, config=config)
        budget_nbytes = _budget_nbytes(config) if "memory_budget" in options else plan.budget_nbytes
        plan = make_plan(planned.costs, budget_nbytes, knobs, activation_nbytes=planned.activation_nbytes)
        check_plan(plan, planned.costs)
    return Explanation(name, planned.machine, program, planned.costs, knobs, plan)


def _config(module: torch.nn.Module, options: Mapping[str, Any]) -> OffloadConfig:
    """The options, over the settings that the model is offloaded with where it is."""
    attachment, engine = attachment_of(module), find_engine([*module.parameters(), *module.buffers()])
    planned = api.planned_of(module) if engine is not None else []
    base = planned[-1].config if planned else attachment.config if attachment is not None else None
    if engine is not None and engine.budget is not None:
        options = {"memory_budget": engine.budget.memory_budget, **options}
    return OffloadConfig.from_options(options, base=base)


def _present(device: torch.device) -> torch.device:
    try:
        return available_device(device)
    except ConfigError as error:
        what = str(error).split("; ")[0].removeprefix("backend: ")
        raise ConfigError(
            f"report: {what}; give a machine to plan for, such as machine=fxoffload.Machine.nominal(), or onload_device='cpu'"
        ) from error


def _budget_nbytes(config: OffloadConfig) -> int:
    budget = config.memory_budget
    if isinstance(budget, int):
        return budget
    try:
        device = available_device(config.onload_device)
    except ConfigError as error:
        raise ConfigError(
            f"report: memory_budget: {budget!r} depends on the memory of {str(config.onload_device)!r}, which is not available "
            "here; give a size such as '8GiB'"
        ) from error
    return resolve_budget(config, *device_memory(device))
