"""Weights that consist of several tensors: wrappers of torchao and of our own, packed bytes with a state beside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tests.models import Toy, seeded

D = 64
aten = torch.ops.aten


class Opaque(torch.Tensor):
    """A wrapper that does not say what it consists of: int8 data times a scale for every row.

    Operators that it does not know compute with its value.
    """

    data_: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data_: torch.Tensor, scale: torch.Tensor) -> Any:
        layout: Any = {"strides": data_.stride(), "dtype": scale.dtype, "device": data_.device}
        return torch.Tensor._make_wrapper_subclass(cls, data_.shape, **layout)

    def __init__(self, data_: torch.Tensor, scale: torch.Tensor) -> None:
        self.data_, self.scale = data_, scale

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Any:
        scale = tensor.abs().amax(1, keepdim=True) / 127
        return cls((tensor / scale).round().to(torch.int8), scale)

    def value(self) -> torch.Tensor:
        return self.data_.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.clone.default, aten.alias.default):
            return cls(func(args[0].data_), func(args[0].scale))
        if func is aten.copy_.default and type(args[1]) is cls:
            args[0].data_.copy_(args[1].data_)
            args[0].scale.copy_(args[1].scale)
            return args[0]
        return func(*(a.value() if isinstance(a, Opaque) else a for a in args), **(kwargs or {}))


class Scaled(Opaque):
    """The same, and says so."""

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["data_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Any], context: Any, size: Any, stride: Any) -> Any:
        return cls(inner["data_"], inner["scale"])


class Shifted(Scaled):
    """A wrapper in a wrapper: the value of `data_`, which is a `Scaled`, plus a `scale`, which is a shift here."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Any:
        shift = tensor.mean(1, keepdim=True)
        return cls(Scaled.of(tensor - shift), shift)

    def value(self) -> torch.Tensor:
        inner: Any = self.data_
        return inner.value() + self.scale


class Fickle(Scaled):
    """Makes its inner tensor anew at every look."""

    @property
    def data_(self) -> torch.Tensor:  # type: ignore[override]
        return self.scale.round().to(torch.int8).expand(self.shape)

    @data_.setter
    def data_(self, value: torch.Tensor) -> None:
        pass


class State:
    """What is needed to read packed bytes, as bitsandbytes keeps it: tensors, and a state of its own for one of them."""

    def __init__(self, absmax: torch.Tensor, state2: State | None = None) -> None:
        self.absmax = absmax
        self.state2 = state2
        self.code = torch.linspace(-1, 1, 16)
        self.blocksize = D


class Packed(nn.Parameter):
    """Four bits an element, two in a byte, with its `quant_state` as an attribute."""

    quant_state: State

    @staticmethod
    def of(tensor: torch.Tensor) -> Packed:
        absmax = tensor.abs().amax(1)
        codes = ((tensor / absmax[:, None] + 1) * 7.5).round().to(torch.uint8)
        packed = torch.Tensor._make_subclass(Packed, (codes[:, ::2] << 4) + codes[:, 1::2])
        packed.quant_state = State((absmax / absmax.max() * 255).round().to(torch.uint8), State(absmax.max()))
        return packed


class PackedLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state: Any = self.weight.quant_state
        rows = state.code[torch.stack([self.weight >> 4, self.weight & 15], -1).flatten(1).int()]
        absmax = state.absmax.to(x.dtype) / 255 * state.state2.absmax
        return F.linear(x, rows * absmax[:, None], self.bias)


class Bytes(nn.Parameter):
    """Raw bytes of float16 values, as `GGUFParameter` is: a class without a flatten, which its operators' results are of too."""

    kind = "none"

    @staticmethod
    def of(tensor: torch.Tensor) -> Bytes:
        return Bytes.named(tensor.half().view(torch.uint8), "half")

    @staticmethod
    def named(tensor: torch.Tensor, kind: str) -> Bytes:
        result = torch.Tensor._make_subclass(Bytes, tensor)
        result.kind = kind
        return result

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        kinds = [a.kind for a in args if isinstance(a, Bytes)]
        return cls.named(result, kinds[0]) if isinstance(result, torch.Tensor) and kinds else result


class BytesLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.weight.kind == "half"  # type: ignore[attr-defined]
        raw = torch.Tensor._make_subclass(torch.Tensor, self.weight)
        return F.linear(x, raw.view(torch.float16).to(x.dtype), self.bias)


def requantized(model: nn.Module, of: Callable[[torch.Tensor], torch.Tensor], layer: type[nn.Linear] = nn.Linear) -> nn.Module:
    """The model with `of` its weight in every linear layer, which becomes a `layer`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            weight = of(module.weight.data)
            module.weight = weight if isinstance(weight, nn.Parameter) else nn.Parameter(weight, requires_grad=False)
            module.__class__ = layer
    return model


def _toy() -> nn.Module:
    return seeded(lambda: Toy(4, D))


def _by_torchao(config: str, **options: Any) -> nn.Module:
    import torchao.quantization as ao

    model = _toy()
    ao.quantize_(model, getattr(ao, config)(**options))
    return model


def _float8_dynamic() -> nn.Module:
    """As `Float8DynamicActivationFloat8WeightConfig` makes it, which refuses CPUs."""
    from torchao.float8.inference import Float8MMConfig
    from torchao.quantization import PerRow
    from torchao.quantization.quantize_.common import KernelPreference
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor, QuantizeTensorToFloat8Kwargs

    kernel: Any = {"granularity": PerRow(), "kernel_preference": KernelPreference.TORCH}
    activations, fast = QuantizeTensorToFloat8Kwargs(**kernel), Float8MMConfig(use_fast_accum=False)
    model = _toy().to(torch.bfloat16)
    return requantized(model, lambda w: Float8Tensor.from_hp(w, mm_config=fast, act_quant_kwargs=activations, **kernel))


def _nf4() -> nn.Module:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

    return requantized(seeded(lambda: Toy(4, 2 * D)), to_nf4)


def _int4() -> nn.Module:
    """Two values in a byte, as CPUs take them; `Int4WeightOnlyConfig` makes what GPUs take."""
    from torchao.prototype.quantization.int4.int4_opaque_tensor import Int4OpaqueTensor

    return requantized(_toy().to(torch.bfloat16), lambda w: Int4OpaqueTensor.from_hp(w, [1, D]))


KINDS: dict[str, tuple[Callable[[], nn.Module], float]] = {
    "int8": (lambda: _by_torchao("Int8WeightOnlyConfig", version=2, set_inductor_config=False), 1 / 4),
    "int8 dynamic": (lambda: _by_torchao("Int8DynamicActivationInt8WeightConfig"), 1 / 4),
    "int4 in int8": (lambda: _by_torchao("IntxWeightOnlyConfig", weight_dtype=torch.int4), 1 / 4),
    "int4": (_int4, 1 / 8),
    "float8": (lambda: _by_torchao("Float8WeightOnlyConfig", set_inductor_config=False), 1 / 4),
    "float8 dynamic": (_float8_dynamic, 1 / 4),
    "nf4": (_nf4, 1 / 8),
    "scaled": (lambda: requantized(_toy(), Scaled.of), 1 / 4),
    "nested": (lambda: requantized(_toy(), Shifted.of), 1 / 4),
    "packed": (lambda: requantized(_toy(), Packed.of, PackedLinear), 1 / 8),
    "bytes": (lambda: requantized(_toy(), Bytes.of, BytesLinear), 1 / 2),
}
"""A toy of each kind, and the part of the bytes of float32 that its linear weights have, but for scales."""


def rows(model: nn.Module, k: int) -> torch.Tensor:
    """The `k`-th input of one of these."""
    bias: Any = model.get_parameter("inp.bias")
    return torch.randn(3, len(bias), generator=torch.Generator().manual_seed(k)).to(bias.dtype)
