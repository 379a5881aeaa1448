"""What end-to-end tests share: a model under a list of budgets, with late copies and poison, against fully resident."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import transform_subclass

import fxoffload
from fxoffload import api
from fxoffload.buckets import align
from fxoffload.config import OffloadConfig
from fxoffload.eager import attach
from fxoffload.select import tensors_below
from fxoffload.storages import plain_tensors
from fxoffload.transfer import ThreadTransfer
from fxoffload.wrappers import is_wrapper
from tests.models import first

EVERYTHING = "1GiB"
"""A budget in which all of a tiny model is resident."""
DELAY_S = 0.001


def offload(model: nn.Module, *, fullgraph: bool = True, dynamic: bool | None = False, **options: Any) -> Any:
    """Compile a model for the CPU device. Segments run as they are unless `segment_compiler` says otherwise."""
    settings = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": EVERYTHING, **options}
    return torch.compile(model, backend=fxoffload.layerwise, fullgraph=fullgraph, dynamic=dynamic, options=settings)


def attached(model: nn.Module, part: float, **settings: Any) -> Any:
    """Offload without a compiler, in a part of the weights and with late copies."""
    budget = int(sum(align(t.numel() * t.element_size()) for _, t in tensors_below(model)) * part)
    attachment = attach(model, OffloadConfig.from_options({"onload_device": "cpu", "memory_budget": budget, **settings}))
    assert isinstance(attachment.engine.transfer, ThreadTransfer)
    attachment.engine.transfer.delay_s = DELAY_S
    return attachment


def delay_copies(model: Any, seconds: float = DELAY_S) -> None:
    """Every copy from now on ends late, so that a missing wait reads poison."""
    transfer = api.engine_of(model).transfer
    assert isinstance(transfer, ThreadTransfer)
    transfer.delay_s = seconds


def weight_nbytes(model: Any) -> int:
    """Bytes of all buckets of the graph that ran last."""
    return sum(bucket.nbytes for bucket in api.bindings_of(model)[-1].costs.buckets)


def budgets(model: Any) -> dict[str, int]:
    """Budgets of a model that has run, from the smallest to everything."""
    activations = api.bindings_of(model)[-1].activation_nbytes
    smallest, weights = fxoffload.smallest_budget(model), weight_nbytes(model)
    return {
        "smallest": smallest,
        "quarter": max(smallest, activations + weights // 4),
        "half": max(smallest, activations + weights // 2),
        "almost all": max(smallest, activations + weights - 256),
        "all": activations + weights,
    }


def halve(model: Any) -> None:
    """Give a model that has run about half of its weights as its budget, and late copies."""
    fxoffload.set_memory_budget(model, budgets(model)["half"])
    delay_copies(model)


def resident(make: Callable[[], nn.Module], inputs: Sequence[Any], **options: Any) -> list[torch.Tensor]:
    """Results of a fresh model under the same backend, with everything resident."""
    model = make()
    compiled = offload(model, **options)
    with torch.no_grad():
        return [first(call(compiled, given)).clone() for given in inputs]


def call(model: Callable[..., Any], given: Any) -> Any:
    """Call a model with keyword arguments, with a tuple of arguments, or with one."""
    if isinstance(given, Mapping):
        return model(**given)
    if isinstance(given, tuple):
        return model(*given)
    return model(given)


def assert_streams(model: Any) -> None:
    """The last forward was one in steady state: it copied what its plan says, and that was not nothing."""
    stats, plan = fxoffload.stats(model), fxoffload.get_plan(model)
    assert plan.streamed_nbytes > 0
    got = (stats.nbytes_copied, stats.nbytes_resident, stats.prefetches)
    wanted = (plan.streamed_nbytes, plan.resident_nbytes, len(plan.loads))
    assert got == wanted, f"(bytes copied, bytes resident, prefetches) {got}, planned {wanted}"


def snapshot(model: nn.Module) -> dict[str, torch.Tensor]:
    """`state_dict`, as copies."""
    return {name: copied(tensor) for name, tensor in model.state_dict().items()}


def copied(tensor: torch.Tensor) -> torch.Tensor:
    """A copy, bit for bit: some wrappers quantize again when they are cloned."""
    if not is_wrapper(tensor):
        return tensor.clone()
    return transform_subclass(tensor, lambda _, inner: copied(inner) if isinstance(inner, torch.Tensor) else inner)


def assert_state(model: nn.Module, expected: Mapping[str, torch.Tensor]) -> None:
    """`state_dict` has these keys, in this order, and these values on the host."""
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, tensor in state.items():
        assert tensor.device.type == "cpu"
        assert type(tensor) is type(expected[name])
        for got, wanted in zip(plain_tensors(tensor), plain_tensors(expected[name]), strict=True):
            assert torch.equal(got, wanted), name


def check_budgets(model: nn.Module, inputs: Sequence[Any], *, fullgraph: bool = True, **options: Any) -> Any:
    """Run a model resident, then under every budget with late copies; results must be equal. Returns the compiled model."""
    before = snapshot(model)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    compiled = offload(model, fullgraph=fullgraph, **options)
    with torch.no_grad():
        eager = [first(call(model, given)).clone() for given in inputs]
        expected = [first(call(compiled, given)).clone() for given in inputs]
        for got, wanted in zip(expected, eager, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
        assert fxoffload.stats(model).nbytes_copied == 0
        delay_copies(model)
        for label, budget in budgets(model).items():
            fxoffload.set_memory_budget(model, budget)
            plan = fxoffload.get_plan(model)
            assert plan.peak_nbytes <= budget, label
            for k, given in enumerate(inputs):
                assert torch.equal(first(call(compiled, given)), expected[k]), (label, k)
            if label == "all":
                assert fxoffload.stats(model).nbytes_copied == 0
            else:
                assert_streams(model)
            assert fxoffload.stats(model).nbytes_arena <= budget, label
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs + 1
    assert_state(model, before)
    return compiled


class Trio:
    """One model three times: streamed in half of its weights with late copies, resident, and eager. Edits go to all three."""

    def __init__(self, make: Callable[[], nn.Module], first_input: Any, **options: Any) -> None:
        self.streamed, self.resident, self.eager = make(), make(), make()
        self._run_streamed = offload(self.streamed, **options)
        self._run_resident = offload(self.resident, **options)
        self.check(first_input)
        halve(self.streamed)
        assert fxoffload.get_plan(self.streamed).streamed_nbytes > 0

    def edit(self, change: Callable[[Any], object]) -> None:
        with torch.no_grad():
            for model in (self.streamed, self.resident, self.eager):
                change(model)

    def check(self, given: Any) -> torch.Tensor:
        """One call of each: streamed equals resident bit for bit, and eager within a tolerance."""
        with torch.no_grad():
            got = first(call(self._run_streamed, given))
            wanted = first(call(self._run_resident, given))
            eager = first(call(self.eager, given))
        torch.testing.assert_close(wanted, eager, rtol=1e-4, atol=1e-5)
        assert torch.equal(got, wanted)
        return got

    def check_state(self) -> None:
        """All three have the same `state_dict`, by keys and values."""
        assert_state(self.streamed, snapshot(self.eager))
        assert_state(self.resident, snapshot(self.eager))
