"""Host weights that trace as device weights.

A model's weights stay ordinary CPU tensors, but its activations are on the onload device, and Dynamo refuses to mix
devices. So while Dynamo traces a frame for a registered backend, the *fake* tensors of module state (parameters,
buffers, tensor attributes of modules) carry the onload device. Guards are built from the real tensors and keep
passing; nothing outside such a trace is touched.

State on the meta device traces as device tensors as well: a backend that is to run it refuses it by name. For an analysis, which
traces but never runs, so do inputs there.

Two private functions are wrapped: `FakeTensorMode.from_tensor`, which knows the Dynamo `Source` a tensor came from, and
`MetaTensorDescriber.describe_tensor`, which reads its device. Checked on torch 2.11, 2.13. Alternatives that lost
(zero-storage shells, tensor subclasses, parametrizations) change what `state_dict` or in-place edits see.
"""

# Private names of torch: the two wrapped functions and the tracing state of Dynamo. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch
import torch.fx as fx
from torch._dynamo import symbolic_convert
from torch._dynamo.source import FloatTensorSource
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.meta_utils import MetaTensorDescriber

from fxoffload.errors import OffloadError

_STATE = re.compile(r"(?:\._|\.__dict__\['_)(?:parameters|buffers)")

_INNER = "fxoffload_source"

_onload_device_of: dict[str, Callable[[dict[str, Any]], torch.device]] = {}
_with_meta: set[str] = set()
_moving = threading.local()


def placeholder_source(node: fx.Node) -> Any:
    """Where Dynamo found the input of a placeholder, or None."""
    grapharg = node.meta.get("grapharg")
    return grapharg.source if grapharg is not None else node.meta.get(_INNER)


def is_module_state(source: Any, tensor: torch.Tensor) -> bool:
    """Whether Dynamo found `tensor` as a parameter, a buffer or a tensor attribute of a module."""
    if isinstance(tensor, torch.nn.Parameter):
        return True
    # A float attribute that Dynamo made symbolic comes as a tensor that no module has.
    if source is None or isinstance(source, FloatTensorSource):
        return False
    if _STATE.search(source.name):
        return True
    guard_source = source.guard_source
    return guard_source.is_unspecialized_nn_module() or guard_source.is_specialized_nn_module()


def is_weight(node: fx.Node, real: Any) -> bool:
    """Parameters, buffers and what is part of these, wherever they lie; other attributes only when they lie on the host."""
    if not isinstance(real, torch.Tensor) or _is_float(node):
        return False
    if _INNER in node.meta:
        return True
    source = placeholder_source(node)
    if isinstance(real, torch.nn.Parameter):
        return True
    if not is_module_state(source, real):
        return False
    is_held = source is not None and _STATE.search(source.name) is not None
    return is_held or real.device.type in ("cpu", "meta")


def part_meta(weight: fx.Node, value: torch.Tensor) -> dict[str, Any]:
    """The metadata of a placeholder for a part of a weight, so that it is a weight too. `value`: the fake one.

    What Dynamo keeps for its own placeholders refers to the weight weakly, which a wrapper does not bear for long.
    """
    kept = {key: item for key, item in weight.meta.items() if key != "grapharg"}
    return {**kept, "example_value": value, _INNER: placeholder_source(weight)}


def _is_float(node: fx.Node) -> bool:
    """Whether the input is a Python float, such as an epsilon, that Dynamo made symbolic and passes as a tensor."""
    grapharg = node.meta.get("grapharg")
    return grapharg is not None and grapharg.pass_arg_as_tensor


def register_alias(backend_name: str, onload_device_of: Callable[[dict[str, Any]], torch.device], *, meta: bool = False) -> None:
    """Alias module state while tracing for the backend of this name.

    `onload_device_of` maps the keyword arguments of the `torch.compile` call (`options`, `mode`) to the onload device.
    `meta`: alias all tensors on the meta device too, for a backend whose graphs never run.
    """
    _onload_device_of[backend_name] = onload_device_of
    if meta:
        _with_meta.add(backend_name)


def is_tracing() -> bool:
    """Whether Dynamo is tracing for a registered backend right now."""
    return bool(_tracing()[0])


def _alias_of(tensor: torch.Tensor, source: Any) -> torch.device | None:
    """The device that a tensor is to trace on if Dynamo is tracing for a registered backend right now, else None."""
    if tensor.device.type not in ("cpu", "meta"):
        return None
    name, device = _tracing()
    if device is None:
        return None
    if tensor.device.type == "meta":
        # Weights that are not loaded yet trace too, for the backend to name them.
        return device if name in _with_meta or is_module_state(source, tensor) else None
    return device if device.type != "cpu" and is_module_state(source, tensor) else None


def _tracing() -> tuple[str, torch.device | None]:
    """The registered backend that Dynamo is tracing for right now, and its onload device."""
    tx = getattr(symbolic_convert.tls, "current_tx", None)
    compiler_fn = tx.output.compiler_fn if tx is not None else None
    while compiler_fn is not None:
        name = getattr(compiler_fn, "compiler_name", "")
        if name in _onload_device_of:
            return name, _onload_device_of[name](getattr(compiler_fn, "kwargs", {}))
        compiler_fn = getattr(compiler_fn, "_torchdynamo_orig_backend", None)
    return "", None


@contextmanager
def _descriptions_on(device: torch.device) -> Generator[None, None, None]:
    before = getattr(_moving, "device", None)
    _moving.device = device
    try:
        yield
    finally:
        _moving.device = before


def _check_signatures() -> None:
    expected = {
        FakeTensorMode.from_tensor: {"self", "tensor", "source"},
        MetaTensorDescriber.describe_tensor: {"self", "t", "recurse", "trace"},
    }
    for function, names in expected.items():
        missing = names - set(inspect.signature(function).parameters)
        if missing:
            raise OffloadError(
                f"hostalias: torch {torch.__version__}: {function.__qualname__} has no parameter {sorted(missing)}; "
                "use a torch version that fxoffload was tested with (2.11 to 2.13), or a newer fxoffload"
            )
    if not hasattr(symbolic_convert, "tls"):
        raise OffloadError(
            f"hostalias: torch {torch.__version__}: torch._dynamo.symbolic_convert.tls is gone; use a newer fxoffload"
        )


def _install() -> None:
    _check_signatures()
    from_tensor = FakeTensorMode.from_tensor
    describe_tensor = MetaTensorDescriber.describe_tensor

    @functools.wraps(from_tensor)
    def from_tensor_aliased(self: FakeTensorMode, tensor: torch.Tensor, *, source: Any = None, **kwargs: Any) -> Any:
        device = _alias_of(tensor, source) if source is not None else None
        if device is None:
            return from_tensor(self, tensor, source=source, **kwargs)
        with _descriptions_on(device):
            return from_tensor(self, tensor, source=source, **kwargs)

    @functools.wraps(describe_tensor)
    def describe_tensor_aliased(self: MetaTensorDescriber, t: torch.Tensor, *, recurse: bool = True, trace: bool = False) -> Any:
        description = describe_tensor(self, t, recurse=recurse, trace=trace)
        device = getattr(_moving, "device", None)
        if device is None or t.device.type not in ("cpu", "meta"):
            return description
        return dataclasses.replace(description, device=device)

    FakeTensorMode.from_tensor = from_tensor_aliased
    MetaTensorDescriber.describe_tensor = describe_tensor_aliased


_install()
