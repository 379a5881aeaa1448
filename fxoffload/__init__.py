"""fxoffload: run models whose weights do not fit on the accelerator, compiled.

model = torch.compile(model, backend="layerwise", options={"memory_budget": "8GiB"})
"""

from fxoffload.api import get_plan, refresh, set_memory_budget, smallest_budget, stats
from fxoffload.backend import layerwise
from fxoffload.budget import Budget
from fxoffload.config import OffloadConfig
from fxoffload.doors import (
    enable_layerwise_offload,
    get_layerwise_offload_handles,
    layerwise_cpu_offload,
    layerwise_offload,
    remove_layerwise_offload,
)
from fxoffload.errors import BudgetError, ConfigError, GradientError, OffloadError, OffloadWarning, PlanError, WeightError
from fxoffload.handle import LayerwiseOffloadHandle
from fxoffload.loading import load_safetensors
from fxoffload.machine import Machine
from fxoffload.measure import Measurement, measure
from fxoffload.pipelines import LayerwiseOffloadHandleGroup
from fxoffload.plan import Plan
from fxoffload.report import Explanation, explain

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "ConfigError",
    "Explanation",
    "GradientError",
    "LayerwiseOffloadHandle",
    "LayerwiseOffloadHandleGroup",
    "Machine",
    "Measurement",
    "OffloadConfig",
    "OffloadError",
    "OffloadWarning",
    "Plan",
    "PlanError",
    "WeightError",
    "enable_layerwise_offload",
    "explain",
    "get_layerwise_offload_handles",
    "get_plan",
    "layerwise",
    "layerwise_cpu_offload",
    "layerwise_offload",
    "load_safetensors",
    "measure",
    "refresh",
    "remove_layerwise_offload",
    "set_memory_budget",
    "smallest_budget",
    "stats",
]
