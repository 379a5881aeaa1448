"""Sessions: a model that runs resident or by this project, as `fxoffload bench` drives it; peers are in `peers`.

A session is made for one model in one process. For each setting it is set up (`apply`, which is timed), called, asked for what it
knows of that (`facts`), and undone before the next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fxoffload import api
from fxoffload.backend import layerwise
from fxoffload.cost import Costs
from fxoffload.curve import Study
from fxoffload.doors import layerwise_offload
from fxoffload.errors import ConfigError
from fxoffload.sizes import GIB, TIB, parse_size
from fxoffload.timing import time_steps
from fxoffload.workloads import Workload, blocks_of, weight_nbytes

Setting = Mapping[str, Any]
"""What JSON can hold. `budget`: a size, `all`, `smallest` (with overlap), `least` (that runs at all), `60%` of the weights."""
BUDGETS = ("all", "smallest", "least")
"""Budgets that are no sizes."""
FLAGS = "flags"
"""In a setting: flags that were found for its budget."""

_LINK_NBYTES = 4 * GIB
_BOUND_POINTS = 64
_WARM_UPS = 4
"""Forwards until ours has measured what activations take, runs the plan that it made then, and has captured it."""


@dataclass(frozen=True, slots=True, eq=False)
class Scene:
    """What a session is about. `inputs` are on `device`; `model` is on the host, or on `device` where the contender says so."""

    workload: Workload
    model: torch.nn.Module
    inputs: Mapping[str, Any]
    device: torch.device
    compiler: str
    """`inductor`, `aot_eager` or `eager`: what everything that is compiled is compiled with."""

    def blocks(self) -> list[torch.nn.Module]:
        return [block for _, block in blocks_of(self.workload, self.model)]


class Session:
    """A contender on one model."""

    warmups = 0
    """Forwards that it needs besides those of every contender. There may be more (`settled`)."""
    equals_itself = False
    """Every setting's output must equal, bit for bit, that of the first setting, which has everything resident."""

    def __init__(self, scene: Scene, *, compiled: bool = False) -> None:
        """`compiled`: a first call may compile."""
        self.scene = scene
        self.compiled = compiled
        self.runs: Any = scene.model
        self.first_output: torch.Tensor | None = None

    def apply(self, setting: Setting) -> None:
        """Set it up."""

    def call(self) -> torch.Tensor:
        """One forward: the first of the model's outputs."""
        return self.runs(**self.scene.inputs)[0]

    def settled(self) -> bool:
        """Whether forwards run as they will from now on."""
        return True

    def facts(self) -> dict[str, Any]:
        """What it knows of the last forward, as fields of a row."""
        return {}

    def bounds(self, step_ms: float) -> dict[str, Any] | None:
        """The bound over memory, from a resident step of that long; None where it does not know."""
        del step_ms
        return None

    def next_try(self, setting: Setting, tried: Sequence[tuple[Setting, int | None]]) -> Setting | None:
        """What to measure next for a setting, after tries of which the reserved peaks are given; None: no more."""
        return None if tried else setting

    def undo(self) -> None:
        """Before another setting."""


class Resident(Session):
    """Everything on the device; compiled block by block, as diffusers' `compile_repeated_blocks` does it."""

    def apply(self, setting: Setting) -> None:
        del setting
        if self.compiled:
            for block in self.scene.blocks():
                block.compile(backend=self.scene.compiler)


class Ours(Session):
    """This project by budget. The first setting has everything resident."""

    equals_itself = True
    warmups = _WARM_UPS

    def nbytes_of(self, setting: Setting) -> int:
        """The budget in bytes."""
        budget = str(setting["budget"])
        if budget == "all":
            return TIB
        if budget in ("smallest", "least"):
            return self.smallest(overlap=budget == "smallest")
        if budget.endswith("%"):
            return round(float(budget[:-1]) / 100 * weight_nbytes(self.scene.model))
        return parse_size(budget, what="--budgets")

    def smallest(self, *, overlap: bool) -> int:
        return api.smallest_budget(self.scene.model, overlap=overlap)

    def facts(self) -> dict[str, Any]:
        plan, stats = api.get_plan(self.scene.model), api.stats(self.scene.model)
        return {
            "budget_nbytes": plan.budget_nbytes,
            "planned_nbytes": plan.peak_nbytes,
            "copied_nbytes": stats.nbytes_copied,
            "pinned_nbytes": stats.nbytes_pinned,
            "predicted_ms": plan.step_ms,
            "loads": len(plan.loads),
        }


class Compiled(Ours):
    """The backend, with more of its options, such as `cuda_graph`: compiled once, then planned anew for each budget."""

    def __init__(self, scene: Scene, **options: Any) -> None:
        super().__init__(scene, compiled=True)
        self._options = options

    def apply(self, setting: Setting) -> None:
        if self._options.get("cuda_graph") and self.scene.device.type != "cuda":
            # Before `smallest` is asked of a model that never ran.
            raise ConfigError(f"sessions: {self.scene.workload.name}: forwards as CUDA graphs: only CUDA captures")
        nbytes = self.nbytes_of(setting)
        if self.runs is not self.scene.model:
            api.set_memory_budget(self.scene.model, nbytes)
            return
        device, compiler = self.scene.device, self.scene.compiler
        options: Any = {"memory_budget": nbytes, "onload_device": device, "segment_compiler": compiler, **self._options}
        self.runs = torch.compile(self.scene.model, backend=layerwise, fullgraph=True, dynamic=False, options=options)

    def settled(self) -> bool:
        return api.last_binding(self.scene.model).settled

    def bounds(self, step_ms: float) -> dict[str, Any] | None:
        """The windowed bound: this program's segment times, as a share of `step_ms`, and the link as it is now."""
        if self._options.get("cuda_graph"):
            # A replay has no segments that could be timed; `fxoffload-compiled` runs the same ones.
            return None
        model = self.scene.model
        costs = api.profile(model, self.call)
        link = link_bytes_per_ms(model, self.scene.device) or costs.link_bytes_per_ms
        study = Study(scaled(costs, step_ms, link), api.last_binding(model).knobs, api.get_plan(model).activation_nbytes)
        low, high = study.smallest_nbytes(overlap=False), study.everything_nbytes
        budgets = [low + (high - low) * i // (_BOUND_POINTS - 1) for i in range(_BOUND_POINTS)]
        return {
            "resident_ms": step_ms,
            "link_gb_s": link / 1e6,
            "activation_nbytes": study.activation_nbytes,
            "nbytes": budgets,
            "bound_ms": [study.bound_ms(budget) for budget in budgets],
        }


class Eager(Ours):
    """The hooks: offloaded anew for each budget, since a small one takes smaller pieces."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(scene)
        self._handle: Any = None
        self._smallest: dict[bool, int] = {}

    def apply(self, setting: Setting) -> None:
        nbytes = self.nbytes_of(setting)
        self._handle = layerwise_offload(self.scene.model, memory_budget=nbytes, onload_device=self.scene.device)

    def smallest(self, *, overlap: bool) -> int:
        if not self._smallest:
            raise ConfigError("sessions: the smallest budget is known after a run; give 'all' before 'smallest' and 'least'")
        return self._smallest[overlap]

    def undo(self) -> None:
        if self._handle is None:
            return
        if not self._smallest and self._handle.plan is not None:
            self._smallest = {overlap: self._handle.smallest_budget(overlap=overlap) for overlap in (False, True)}
        self._handle.remove()


def scaled(costs: Costs, step_ms: float, link: float) -> Costs:
    """Costs whose segments add up to `step_ms`, with another link."""
    factor = step_ms / max(sum(segment.compute_ms for segment in costs.segments), 1e-9)
    segments = tuple(dataclasses.replace(s, compute_ms=s.compute_ms * factor) for s in costs.segments)
    return dataclasses.replace(costs, segments=segments, link_bytes_per_ms=link)


def link_bytes_per_ms(model: torch.nn.Module, device: torch.device) -> float | None:
    """The link's rate now: some GiB of weights, copied from where they lie on the host; None on the CPU device."""
    if device.type == "cpu":
        return None
    buckets = list(api.engine_of(model).store.buckets.values())
    buckets = buckets[:: max(1, sum(b.nbytes for b in buckets) // _LINK_NBYTES)]
    there = torch.empty(max(b.nbytes for b in buckets), dtype=torch.uint8, device=device)

    def copy() -> None:
        for bucket in buckets:
            there[: bucket.nbytes].copy_(bucket.flat, non_blocking=True)

    steps, _ = time_steps(copy, 1, device)
    return sum(b.nbytes for b in buckets) / steps.median_ms
