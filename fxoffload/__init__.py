"""fxoffload: run models whose weights do not fit on the accelerator, compiled.

model = torch.compile(model, backend="layerwise", options={"memory_budget": "8GiB"})
"""

from fxoffload.api import get_plan, refresh, set_memory_budget, smallest_budget, stats
from fxoffload.backend import layerwise
from fxoffload.budget import Budget
from fxoffload.config import OffloadConfig
from fxoffload.errors import BudgetError, ConfigError, GradientError, OffloadError, OffloadWarning, PlanError, WeightError
from fxoffload.machine import Machine
from fxoffload.measure import Measurement, measure
from fxoffload.plan import Plan
from fxoffload.report import Explanation, explain

__version__ = "0.1.0"

__all__ = [
    "Budget",
    "BudgetError",
    "ConfigError",
    "Explanation",
    "GradientError",
    "Machine",
    "Measurement",
    "OffloadConfig",
    "OffloadError",
    "OffloadWarning",
    "Plan",
    "PlanError",
    "WeightError",
    "explain",
    "get_plan",
    "layerwise",
    "measure",
    "refresh",
    "set_memory_budget",
    "smallest_budget",
    "stats",
]
