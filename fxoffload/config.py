"""Settings: one frozen, validated class behind `layerwise_offload(...)`, `options={...}` of the backend and the command line.

A value of a wrong type is a TypeError, a value that is not accepted a ConfigError (a ValueError). Both name the keyword,
the value and what is accepted. A field left on auto holds None (`"auto"` where the field says so): the planner chooses it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, cast

from fxoffload.accepted import (
    at_least,
    bool_or_none,
    device,
    device_or_none,
    function_or_none,
    is_auto,
    names_or_none,
    nearest,
    refused,
    settings_or_none,
    size_or_none,
    true_or_false,
    wrong_type,
)
from fxoffload.budget import Budget
from fxoffload.errors import ConfigError
from fxoffload.sizes import ACCEPTED_SIZES, MIB, parse_size

if TYPE_CHECKING:
    import torch

SEGMENT_COMPILERS = ("inductor", "aot_eager", "eager")
MODES = ("default", "max-autotune-no-cudagraphs", "reduce-overhead", "max-autotune")
AUTO_MARGIN_NBYTES = 256 * MIB

_CAPTURED_MODES: dict[str | None, str | None] = {"reduce-overhead": None, "max-autotune": "max-autotune-no-cudagraphs"}
_ACCELERATORS = frozenset({"cuda", "xpu", "mtia", "hpu", "mps"})
_NO_ASYNC_COPIES = frozenset({"mps", "meta"})


def _cuda() -> torch.device:
    return device("onload_device", "cuda")


def _cpu() -> torch.device:
    return device("offload_device", "cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadConfig:
    """All settings, checked and in one form: bytes are ints, names a tuple, devices `torch.device`.

    The annotations give the form that is stored. `from_options` (and the constructor, at run time) takes every form that the
    documentation lists, such as size strings, device names and a single module name.
    """

    memory_budget: int | float | Literal["auto"] | Budget = "auto"
    """Device bytes for resident weights, staging and activations together: bytes, a fraction of the device, or what is free.

    A `Budget` is shared by all models that it is given to.
    """
    module_names: tuple[str, ...] | None = None
    """Dotted names to offload; `""` is the root. For a pipeline, names of components."""
    module_filter: Callable[..., bool] | None = None
    """`(name, module) -> bool`, instead of `module_names`."""
    onload_device: torch.device = field(default_factory=_cuda)
    offload_device: torch.device = field(default_factory=_cpu)
    output_device: torch.device | None = None
    """Where results are returned; None leaves them on the onload device."""
    async_transfer: bool = cast("bool", None)
    """Copies overlap compute. None becomes True or False by the pair of devices."""
    transfer_buckets: int | None = None
    """How many buckets may be in flight or ready ahead of use."""
    persistent_buckets: int | None = None
    """How many buckets stay on the device for good."""
    persistent_bins: int | None = None
    """Over how many evenly spaced ranges the persistent buckets are spread."""
    prefetch_limit: bool = False
    """Cap prefetched but unused buckets at `min(4 * transfer_buckets, 8)`."""
    max_copy_streams: int = 1
    max_inflight_prefetch_bytes: int | None = None
    """Cap on the bytes of pending and ready prefetches together."""
    non_blocking: bool = False
    eager_offload: bool = True
    """Move weights to the host store when offloading begins, rather than at their first use."""
    segment_compiler: Literal["inductor", "aot_eager", "eager"] = "inductor"
    inductor: dict[str, Any] | None = field(default=None, hash=False)
    """Patches of Inductor's configuration while segments compile."""
    max_bucket_bytes: int | Literal["auto"] = "auto"
    """The largest piece that a block is cut into."""
    profile: bool = False
    """Time each distinct segment once on the device, and plan with these times instead of the cost model's."""
    mode: str | None = None
    """`torch.compile`'s mode; None is the default one. `"reduce-overhead"` and `"max-autotune"` set `cuda_graph`."""
    cuda_graph: bool | Literal["strict"] = False
    """Capture the whole forward, copies too, as one CUDA graph and replay it. `"strict"`: raise where that does not work."""

    def __post_init__(self) -> None:
        for name, check in _CHECKS.items():
            object.__setattr__(self, name, check(name, getattr(self, name)))
        _check_devices(self)
        if cast("bool | None", self.async_transfer) is None:
            object.__setattr__(self, "async_transfer", has_async_copies(self))
        if self.mode in _CAPTURED_MODES:
            object.__setattr__(self, "cuda_graph", self.cuda_graph or True)
            object.__setattr__(self, "mode", _CAPTURED_MODES[self.mode])
        if self.module_names is not None and self.module_filter is not None:
            names = ", ".join(map(repr, self.module_names))
            raise ConfigError(f"config: module_filter: module_names is given too ({names}); give one of the two")

    @classmethod
    def from_options(
        cls, options: Mapping[str, object] | None, *, mode: str | None = None, base: OffloadConfig | None = None
    ) -> OffloadConfig:
        """The config for `torch.compile(..., options=options, mode=mode)`, or for the keywords of `layerwise_offload`.

        `base` has the settings that are not given, instead of the defaults.

        `torch.compile` takes either `mode` or `options`, so a mode may also be one of the options.
        Raises ConfigError for an unknown key (with the nearest names) and for a bad value, TypeError for a wrong type.

        >>> OffloadConfig.from_options({"memory_budget": "8GiB", "module_names": "blocks"}).module_names
        ('blocks',)
        >>> OffloadConfig.from_options({"memory_bugdet": "8GiB"})
        Traceback (most recent call last):
        fxoffload.errors.ConfigError: config: options: unknown key 'memory_bugdet'; did you mean 'memory_budget'?
        """
        if options is not None and not isinstance(options, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise wrong_type("options", options, "a dict of settings by name")
        values = dict(options or {})
        cls.check_names(values)
        if mode is not None and values.setdefault("mode", mode) != mode:
            raise ConfigError(f"config: mode: {mode!r} is given, and {values['mode']!r} among the options; give one of the two")
        before = {} if base is None else {f.name: getattr(base, f.name) for f in fields(cls)}
        return cls(**cast("dict[str, Any]", {**before, **values}))

    @classmethod
    def check_names(cls, names: Iterable[str]) -> None:
        """Raises ConfigError for the first that is no setting, with the nearest that are."""
        known = [f.name for f in fields(cls)]
        for name in names:
            if name not in known:
                raise ConfigError(f"config: options: unknown key {name!r}; {nearest(str(name), known)}")


def resolve_budget(config: OffloadConfig, total_nbytes: int, free_nbytes: int) -> int:
    """The budget in bytes, on a device of `total_nbytes` of which this process could allocate `free_nbytes` now.

        bytes     as given
        fraction  floor(fraction * total)
        auto      free - max(free / 16, 256 MiB), but never less than free / 2

    The margin of auto is for what no plan sees: library workspaces, compiled code, fragmentation, other processes. The result
    may be less than a model needs, or 0: that is the planner's to report.

    >>> resolve_budget(OffloadConfig(memory_budget=0.5), 80 * 2**30, 60 * 2**30) == 40 * 2**30
    True
    """
    shared = config.memory_budget
    budget = shared.memory_budget if isinstance(shared, Budget) else shared
    if isinstance(budget, str):
        margin = max(free_nbytes // 16, AUTO_MARGIN_NBYTES)
        return max(free_nbytes - margin, free_nbytes // 2)
    if isinstance(budget, float):
        return int(budget * total_nbytes)
    return budget


def has_async_copies(config: OffloadConfig) -> bool:
    """Whether copies between the two devices can run beside compute. Between two host buffers they do, on a thread."""
    return config.offload_device.type == "cpu" and config.onload_device.type not in _NO_ASYNC_COPIES


def _check_devices(config: OffloadConfig) -> None:
    onload, offload = config.onload_device, config.offload_device
    if config.async_transfer and not has_async_copies(config):
        raise ConfigError(
            f"config: async_transfer: True, but copies from offload_device {str(offload)!r} to onload_device {str(onload)!r} "
            "are not asynchronous; leave async_transfer out or pass False, or give an accelerator with streams and 'cpu'"
        )
    if offload.type != "cpu":
        raise refused("offload_device", str(offload), "'cpu'")
    if onload.type != "cpu" and onload.type not in _ACCELERATORS and not _is_current_accelerator(onload):
        raise refused("onload_device", str(onload), "an accelerator such as 'cuda' or 'cuda:1', or 'cpu'")
    if config.output_device is not None and config.output_device.type == "meta":
        raise refused("output_device", "meta", "a device that holds values, or None for the onload device")


def _is_current_accelerator(device: torch.device) -> bool:
    """True for an accelerator that torch knows from a plug-in only."""
    import torch

    current = torch.accelerator.current_accelerator(check_available=False)
    return current is not None and current.type == device.type


def _budget(name: str, value: object) -> int | float | str | Budget:
    return value if isinstance(value, Budget) else check_budget(name, value)


def check_budget(name: str, value: object) -> int | float | str:
    """The checked form of one budget: bytes, a fraction of the device, or `"auto"`."""
    accepted = f"'auto', a fraction of the device as a float with 0 < fraction <= 1, or {ACCEPTED_SIZES}"
    if is_auto(value):
        return "auto"
    if isinstance(value, float):
        if not 0 < value <= 1:
            raise refused(name, value, accepted)
        return value
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise wrong_type(name, value, accepted)
    return parse_size(value, what=name)


def _auto_or_size(name: str, value: object) -> int | str:
    return "auto" if value is None or is_auto(value) else parse_size(cast("str | int", value), what=name)


def _segment_compiler(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise wrong_type(name, value, f"one of {', '.join(map(repr, SEGMENT_COMPILERS))}")
    if value not in SEGMENT_COMPILERS:
        raise ConfigError(f"config: {name}: {value!r} is not accepted; {nearest(value, SEGMENT_COMPILERS)}")
    return value


def _mode(name: str, value: object) -> str | None:
    accepted = f"one of {', '.join(map(repr, MODES))}"
    if value is None or value == "default":
        return None
    if not isinstance(value, str):
        raise wrong_type(name, value, accepted)
    if value not in MODES:
        raise ConfigError(f"config: {name}: {value!r} is not accepted; {nearest(value, MODES)}")
    return value


def _cuda_graph(name: str, value: object) -> bool | str:
    if isinstance(value, bool) or value == "strict":
        return cast("bool | str", value)
    raise (refused if isinstance(value, str) else wrong_type)(name, value, "True, False or 'strict'")


_CHECKS: dict[str, Callable[[str, object], object]] = {
    "memory_budget": _budget,
    "module_names": names_or_none,
    "module_filter": function_or_none,
    "onload_device": device,
    "offload_device": device,
    "output_device": device_or_none,
    "async_transfer": bool_or_none,
    "transfer_buckets": at_least(1, unset=None),
    "persistent_buckets": at_least(0, unset=None),
    "persistent_bins": at_least(1, unset=None),
    "prefetch_limit": true_or_false,
    "max_copy_streams": at_least(1, unset=1),
    "max_inflight_prefetch_bytes": size_or_none,
    "non_blocking": true_or_false,
    "eager_offload": true_or_false,
    "segment_compiler": _segment_compiler,
    "inductor": settings_or_none,
    "max_bucket_bytes": _auto_or_size,
    "profile": true_or_false,
    "mode": _mode,
    "cuda_graph": _cuda_graph,
}
