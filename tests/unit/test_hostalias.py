"""The alias: module state traces on the onload device for a registered backend, and for nothing else.

The onload device of the stub backend is "meta", which no other tensor here is on.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from fxoffload import hostalias
from fxoffload.hostalias import is_module_state, is_weight, placeholder_source, register_alias
from fxoffload.storages import plain_tensors
from tests.models import Toy, toy
from tests.wrapped import Shifted, requantized

X = torch.ones(3, 16, device="meta")


class Stub:
    """A backend that writes down the devices that its graphs were traced with."""

    def __init__(self, name: str) -> None:
        self.__name__ = name
        self.devices: dict[str, str] = {}
        self.weights: set[str] = set()
        self.state: set[str] = set()
        self.real: set[str] = set()
        self.graphs = 0

    def __call__(self, gm: Any, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
        self.graphs += 1
        for node, real in zip(gm.graph.find_nodes(op="placeholder"), example_inputs, strict=True):
            value = node.meta["example_value"]
            if isinstance(value, torch.Tensor):
                name = placeholder_source(node).name
                self.devices[name] = value.device.type
                self.real.add(real.device.type)
                if is_weight(node, real):
                    self.weights.add(name)
                if is_module_state(placeholder_source(node), real):
                    self.state.add(name)
        outputs = [n.meta["example_value"] for n in gm.graph.output_node().args[0]]
        return lambda *_: tuple(torch.zeros(o.shape, device=o.device) for o in outputs)


@pytest.fixture
def stub() -> Iterator[Stub]:
    name = "fxoffload_test_stub"
    register_alias(name, lambda kwargs: torch.device(kwargs.get("options", {}).get("onload_device", "meta")))
    yield Stub(name)
    del hostalias._onload_device_of[name]


def run(stub: Stub, model: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with torch.no_grad():
        return torch.compile(model, backend=stub, fullgraph=True, options=options or None)(*args)


class Everything(nn.Module):
    """A parameter, a buffer, a buffer that is not saved, a tensor attribute, one in a list, and a tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16)
        self.tied = self.proj
        self.register_buffer("b", torch.ones(16))
        self.register_buffer("n", torch.ones(16), persistent=False)
        self.attribute = torch.ones(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.proj(x)) * self.b + self.n + self.attribute


def test_all_state_of_a_module_traces_on_the_onload_device(stub: Stub) -> None:
    model = Everything()
    out = run(stub, model, X)
    assert out.device.type == "meta"
    assert set(stub.devices.values()) == {"meta"}
    assert len(stub.devices) == 6
    assert len(stub.weights) == 5
    assert stub.weights == stub.state
    assert stub.real == {"cpu", "meta"}
    state = [*model.parameters(), *model.buffers(), model.attribute]
    assert all(t.device.type == "cpu" for t in state)


def test_wrappers_trace_on_the_onload_device_with_all_that_they_hold(stub: Stub) -> None:
    model = requantized(toy(1), Shifted.of)
    inner: list[torch.Tensor] = []

    def backend(gm: Any, inputs: Any, **_: Any) -> Callable[..., Any]:
        inner.extend(t for n in gm.graph.find_nodes(op="placeholder") for t in plain_tensors(n.meta["example_value"]))
        return stub(gm, inputs)

    backend.__name__ = stub.__name__
    with torch.no_grad():
        out = torch.compile(model, backend=backend, fullgraph=True)(X)
    assert out.device.type == "meta"
    assert set(stub.devices.values()) == {t.device.type for t in inner} == {"meta"}
    assert len(inner) == 1 + 4 * (3 + 1) + 2
    assert {t.device.type for p in model.parameters() for t in plain_tensors(p)} == {"cpu"}


def test_edits_and_replacements_do_not_recompile(stub: Stub) -> None:
    model = toy(2)
    compiled = torch.compile(model, backend=stub, fullgraph=True)
    with torch.no_grad():
        compiled(X)
        model.inp.weight.add_(1)
        model.inp.weight.data = torch.ones(16, 16)
        model.out.weight = nn.Parameter(torch.ones(16, 16), requires_grad=False)
        model.load_state_dict(toy(2, seed=1).state_dict())
        compiled(X)
    assert stub.graphs == 1


class Decorated(Toy):
    """A forward in a decorator: Dynamo finds the module in a closure's arguments."""

    @staticmethod
    def _decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs)

        return wrapper


Decorated.forward = Decorated._decorator(Toy.forward)  # type: ignore[method-assign]


def test_a_decorated_forward(stub: Stub) -> None:
    model = Decorated(2)
    run(stub, model, X)
    assert set(stub.devices.values()) == {"meta"}
    assert len(stub.weights) == len(list(model.parameters()))


def test_a_closure_over_a_module(stub: Stub) -> None:
    model = Everything()

    def function(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2

    run(stub, function, X)
    assert set(stub.devices.values()) == {"meta"}
    assert len(stub.weights) == 5


def test_a_plain_input_keeps_its_device(stub: Stub) -> None:
    model = toy(1)
    with pytest.raises(Exception, match="device"):
        run(stub, model, torch.ones(3, 16))
    torch._dynamo.reset()
    run(stub, lambda x, y: x + y, torch.ones(3), torch.ones(3))
    assert set(stub.devices.values()) == {"cpu"}
    assert stub.weights == set()


def test_the_device_comes_from_the_options_of_the_call(stub: Stub) -> None:
    run(stub, toy(1), torch.ones(3, 16), onload_device="cpu")
    assert set(stub.devices.values()) == {"cpu"}
    assert len(stub.weights) == len(toy(1).state_dict())


@pytest.mark.parametrize("name", ["another_backend", ""])
def test_another_backend_sees_the_host(stub: Stub, name: str) -> None:
    other = Stub(name)
    if not name:
        del other.__name__
    run(other, Everything(), torch.ones(3, 16))
    assert set(other.devices.values()) == {"cpu"}
    torch._dynamo.reset()
    run(stub, Everything(), X)
    assert set(stub.devices.values()) == {"meta"}
    torch._dynamo.reset()
    again = Stub("another_backend")
    run(again, Everything(), torch.ones(3, 16))
    assert set(again.devices.values()) == {"cpu"}


def test_the_alias_ends_with_the_trace(stub: Stub) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def devices() -> set[str]:
        with FakeTensorMode() as mode:
            return {mode.from_tensor(p).device.type for p in toy(1).parameters()}

    assert devices() == {"cpu"}
    run(stub, toy(1), X)
    assert devices() == {"cpu"}
    seen: list[set[str]] = []
    inner = Stub(stub.__name__)
    call = inner.__class__.__call__

    class Looking(Stub):
        def __call__(self, gm: Any, example_inputs: Any, **kwargs: Any) -> Callable[..., Any]:
            seen.append(devices())
            return call(self, gm, example_inputs, **kwargs)

    torch._dynamo.reset()
    run(Looking(stub.__name__), toy(1), X)
    assert seen == [{"cpu"}], "a fake tensor without a source is no module state"


def test_the_alias_ends_when_a_trace_fails(stub: Stub) -> None:
    class Failing(Toy):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ torch.ones(3, 3, device="meta")

    with pytest.raises(Exception, match=r"shape|size|mult"):
        run(stub, Failing(1), X)
    assert getattr(hostalias._moving, "device", None) is None
    torch._dynamo.reset()
    other = Stub("another_backend")
    run(other, toy(1), torch.ones(3, 16))
    assert set(other.devices.values()) == {"cpu"}


def test_the_layerwise_backend_is_registered() -> None:
    import fxoffload.backend

    assert fxoffload.backend.BACKEND in hostalias._onload_device_of
    device_of = hostalias._onload_device_of[fxoffload.backend.BACKEND]
    assert device_of({"options": {"onload_device": "cpu"}}) == torch.device("cpu")
    for options in ({"onload_device": "nonsense"}, {"onload_device": 7}, {"onload_device": None}):
        assert device_of({"options": options}) == torch.device("cpu"), "bad options are reported by the backend, not in Dynamo"


PRIVATE = {
    "torch._dynamo.symbolic_convert": ["tls"],
    "torch._dynamo.eval_frame": ["OptimizedModule"],
    "torch._dynamo.source": ["FloatTensorSource"],
    "torch._dynamo.utils": ["preserve_rng_state", "counters"],
    "torch._dynamo.backends.debugging": ["aot_eager"],
    "torch._dispatch.python": ["enable_python_dispatcher"],
    "torch._dynamo.exc": ["TorchRuntimeError"],
    "torch._guards": ["TracingContext"],
    "torch._inductor": ["list_mode_options"],
    "torch._inductor.compile_fx": ["compile_fx"],
    "torch._subclasses.fake_tensor": ["FakeTensorMode", "unset_fake_temporarily"],
    "torch._subclasses.meta_utils": ["MetaTensorDescriber"],
    "torch.utils._python_dispatch": ["TorchDispatchMode", "is_traceable_wrapper_subclass"],
    "torch.utils._pytree": ["tree_leaves"],
    "torch.utils.flop_counter": ["flop_registry", "sdpa_flop"],
    "torch.utils.weak": ["WeakTensorKeyDictionary"],
}


@pytest.mark.parametrize("module", PRIVATE)
def test_private_names_of_torch_are_there(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in PRIVATE[module] if not hasattr(found, name)] == []


def test_private_members_of_torch_are_there() -> None:
    from torch._guards import TracingContext

    assert isinstance(torch.ones(1).untyped_storage()._cdata, int)
    assert isinstance(torch.ones(1)._version, int)
    assert hasattr(torch.ops.aten.add.Tensor, "_overloadpacket")
    assert torch.ops.aten.add_.Tensor._schema.is_mutable
    assert hasattr(torch.Tensor, "_make_wrapper_subclass")
    assert hasattr(torch._C, "DisableTorchFunction")
    assert torch.Tensor.__torch_dispatch__ is torch._C._disabled_torch_dispatch_impl
    assert isinstance(torch.ops.aten.view.default.is_view, bool)
    assert "tensor_to_context" in vars(TracingContext(None))  # type: ignore[arg-type]


def test_the_wrapped_functions_keep_their_names_and_parameters() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch._subclasses.meta_utils import MetaTensorDescriber

    for function in (FakeTensorMode.from_tensor, MetaTensorDescriber.describe_tensor):
        original = inspect.unwrap(function)
        assert original is not function
        assert function.__qualname__ == original.__qualname__
        assert inspect.signature(function) == inspect.signature(original)
    hostalias._check_signatures()


def test_a_torch_without_them_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def from_tensor(self: Any, tensor: Any) -> None:
        raise NotImplementedError

    monkeypatch.setattr(FakeTensorMode, "from_tensor", from_tensor)
    with pytest.raises(Exception, match=r"^hostalias: torch .*from_tensor has no parameter \['source'\]; use a torch version"):
        hostalias._check_signatures()


@pytest.mark.parametrize("fullgraph", [True, False])
def test_an_input_on_the_host_meets_weights_on_the_onload_device(stub: Stub, fullgraph: bool) -> None:
    """An error that names both, not a graph break behind which all runs on the host."""
    model = torch.compile(toy(2), backend=stub, fullgraph=fullgraph)  # type: ignore[arg-type]
    with torch.no_grad(), pytest.raises(RuntimeError, match="device") as refused:
        model(X.new_ones(3, 16, device="cpu"))
    assert "meta" in str(refused.value)
    assert "cpu" in str(refused.value)
    with torch.no_grad():
        assert model(X).shape == X.shape
    assert stub.graphs == 1
