"""Machine: the constants of one computer that turn bytes and operations into milliseconds.

    copy_ms    = copy_latency_ms + nbytes / link
    compute_ms = launch_ms + max(flops / rate, touched bytes / memory bandwidth)

Rates are by dtype. Attention kernels sustain less than matrix products do, and those that read a mask still less: their rates are
`bfloat16_attention` and `bfloat16_masked_attention` beside `bfloat16`.
`calibrate.measure` fits them on the device in under a second; `Machine.nominal` has round figures for planning without one.
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy

from fxoffload.errors import ConfigError

_BYTES_PER_MS = 1e6  # of one GB/s
_FLOPS_PER_MS = 1e9  # of one TFLOP/s
ATTENTION = "_attention"
MASKED_ATTENTION = "_masked_attention"
_LEAST_RATE = 1e-6
_LARGEST = 1e9
"""Within these, for rates and times alike, no sum or quotient becomes infinite or zero."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates as sustained, not as advertised. `tflop_s` by name: what is not there runs at the next more general rate.

    A dtype that is not there runs at the slowest; one of 8 bits, in which only devices compute that have more of it, as bfloat16.
    Raises ConfigError where there is no rate, and for numbers that no machine has; TypeError for what is no number.
    """

    name: str
    link_gb_s: float
    copy_latency_ms: float
    memory_gb_s: float
    launch_ms: float
    tflop_s: tuple[tuple[str, float], ...]

    def __post_init__(self) -> None:
        if not self.tflop_s:
            raise ConfigError(f"machine: {self.name}: tflop_s has no rate; give one at least, such as ('bfloat16', 100.0)")
        for name, rate in (("link_gb_s", self.link_gb_s), ("memory_gb_s", self.memory_gb_s), *self.tflop_s):
            self._check(name, rate, _LEAST_RATE)
        for name, ms in (("copy_latency_ms", self.copy_latency_ms), ("launch_ms", self.launch_ms)):
            self._check(name, ms, 0)

    def _check(self, name: str, number: Any, least: float) -> None:
        accepted = f"give a number from {least:g} to {_LARGEST:g}"
        if isinstance(number, (bool, str)) or not hasattr(number, "__float__"):
            raise TypeError(f"machine: {self.name}: {name}: {number!r} is of type {type(number).__name__}; {accepted}")
        if not least <= number <= _LARGEST:
            raise ConfigError(f"machine: {self.name}: {name}: {number} is not accepted; {accepted}")

    @classmethod
    def nominal(cls, name: str = "nominal") -> Machine:
        """A round PCIe 4 accelerator."""
        return cls(name, 25.0, 0.01, 1000.0, 0.005, (("bfloat16", 100.0), ("float16", 100.0), ("float32", 20.0)))

    @property
    def link_bytes_per_ms(self) -> float:
        """The rate of copies from the host."""
        return self.link_gb_s * _BYTES_PER_MS

    def copy_ms(self, nbytes: float) -> float:
        """What one copy from the host takes.

        >>> round(Machine.nominal().copy_ms(25_000_000), 3)
        1.01
        """
        return self.copy_latency_ms + nbytes / self.link_bytes_per_ms

    def compute_ms(self, flops: Any, touched_nbytes: Any, rate: str) -> Any:
        """The roofline of one kernel, in ms: a float, or a sympy expression where a count is one with free symbols."""
        parts = (flops / (self.rate(rate) * _FLOPS_PER_MS), touched_nbytes / (self.memory_gb_s * _BYTES_PER_MS))
        if any(getattr(part, "free_symbols", None) for part in parts):
            return self.launch_ms + sympy.Max(*parts)
        return self.launch_ms + max(map(float, parts))

    def rate(self, name: str) -> float:
        """TFLOP/s of a dtype's matrix products, or of its attention."""
        rates = dict(self.tflop_s)
        dtype = name.removesuffix(MASKED_ATTENTION).removesuffix(ATTENTION)
        general = (name, *([dtype + ATTENTION] if name != dtype else []), dtype, *(["bfloat16"] if "float8" in dtype else []))
        return next((rates[known] for known in general if known in rates), min(rates.values()))

    def save(self, path: Path) -> None:
        """Write the constants as JSON; `load` reads them back equal. Makes the folder. Raises OSError as files do."""
        path.parent.mkdir(parents=True, exist_ok=True)
        # Another process may read or write the same file: it sees all of one version, or all of the other.
        partial = path.with_name(f"{path.name}.{os.getpid()}")
        partial.write_text(json.dumps(dataclasses.asdict(self), indent=1) + "\n")
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> Machine:
        """Read what `save` wrote. Raises OSError as files do, and ValueError, KeyError or TypeError for anything else."""
        data: dict[str, Any] = json.loads(path.read_text())
        data["tflop_s"] = tuple((str(k), v) for k, v in data["tflop_s"])
        return cls(**data)

    def __str__(self) -> str:
        rates = "  ".join(f"{dtype} {rate:.0f} TFLOP/s" for dtype, rate in self.tflop_s)
        return f"machine  {self.name}  link {self.link_gb_s:.1f} GB/s  memory {self.memory_gb_s:.0f} GB/s  {rates}"
