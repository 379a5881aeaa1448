"""Models in which only some weights consist of several tensors, odd uses of such weights, and what cannot be streamed."""

# pyright: reportPrivateUsage=false
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.attached import attachment_of
from fxoffload.errors import BudgetError, GradientError, OffloadError, WeightError
from tests.checks import Trio, assert_state, assert_streams, attached, check_budgets, halve, offload, snapshot
from tests.models import Block, Toy, first, seeded
from tests.wrapped import D, Fickle, Opaque, Packed, PackedLinear, Scaled, Shifted, State, requantized

IDS = [torch.arange(7) + 3 * k for k in range(3)]


def given(k: int) -> torch.Tensor:
    return torch.randn(3, D, generator=torch.Generator().manual_seed(k))


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


class Mixed(nn.Module):
    """A quantized embedding, blocks of which some are quantized, two with a tied weight, and a plain head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, D)
        self.blocks = nn.ModuleList(Block(D) for _ in range(5))
        self.head = nn.Linear(D, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def mixed() -> nn.Module:
    import torchao.quantization as ao

    model: Any = seeded(Mixed)
    per_row = ao.IntxWeightOnlyConfig(weight_dtype=torch.int8, granularity=ao.PerAxis(0))
    ao.quantize_(model.embedding, per_row, filter_fn=lambda module, _: isinstance(module, nn.Embedding))
    ao.quantize_(model.blocks[1], ao.Int8WeightOnlyConfig(version=2))
    ao.quantize_(model.blocks[3], ao.Float8WeightOnlyConfig())
    model.blocks[4].up.weight = model.blocks[1].up.weight
    return model


def assert_calls(model: Any, plain: Any, calls: list[torch.Tensor]) -> None:
    """Bit-equal calls, each of which copies."""
    with torch.no_grad():
        for value in calls:
            assert torch.equal(first(model(value)), first(plain(value)))
            assert fxoffload.stats(model).nbytes_copied > 0


def test_some_layers_an_embedding_and_a_tie() -> None:
    model: Any = mixed()
    check_budgets(model, IDS)
    assert model.blocks[4].up.weight is model.blocks[1].up.weight
    names = [w.name for w in api.bindings_of(model)[-1].program.facts.weights]
    assert {"embedding.weight.qdata", "blocks.0.up.weight", "blocks.1.up.weight.qdata", "blocks.3.down.weight.scale"} <= {*names}
    assert not any(name.startswith("blocks.4.up.weight") for name in names)


def test_some_layers_an_embedding_and_a_tie_without_a_compiler() -> None:
    model, plain = mixed(), mixed()
    attachment = attached(model, 0.8)
    assert_calls(model, plain, IDS)
    attachment.detach()
    assert_state(model, snapshot(plain))


@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("of", [Scaled.of, Shifted.of, Packed.of, "mixed"], ids=["scaled", "nested", "packed", "mixed"])
def test_a_smaller_budget_splits_blocks(of: Any, ran: bool) -> None:
    def make() -> Any:
        layer = PackedLinear if of == Packed.of else nn.Linear
        return mixed() if of == "mixed" else requantized(seeded(lambda: Toy(6, D)), of, layer)

    model, plain = make(), make()
    calls = IDS if of == "mixed" else [given(k) for k in range(3)]
    attachment = attached(model, 1.0)
    with torch.no_grad():
        for value in calls if ran else []:
            assert torch.equal(model(value), plain(value))
    assert "blocks.0" in attachment.module_names
    with pytest.raises(BudgetError, match="raise the budget to at least") as refused:
        fxoffload.set_memory_budget(model, "1KiB")
    fxoffload.set_memory_budget(model, refused.value.smallest_nbytes)
    assert "blocks.0.up" in attachment.module_names
    assert_calls(model, plain, calls + calls)
    assert fxoffload.stats(model).nbytes_arena <= refused.value.smallest_nbytes
    assert_streams(model)
    attachment.detach()
    assert_state(model, snapshot(plain))


class Apart(nn.Linear):
    """Has what its weight consisted of as buffers."""

    data_: torch.Tensor
    scale: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.data_.to(x.dtype) * self.scale, self.bias)


@torch.no_grad()
def test_a_weight_that_is_taken_apart() -> None:
    """The units have the tensors that they had."""
    model, plain = (requantized(seeded(lambda: Toy(5, D)), Scaled.of) for _ in range(2))
    attachment = attached(model, 0.6)
    calls = [given(k) for k in range(3)]
    assert_calls(model, plain, calls)
    units = attachment.units
    for up in (m.get_submodule("blocks.1.up") for m in (model, plain)):
        weight: Any = up.weight
        del up.weight
        up.register_buffer("data_", weight.data_)
        up.register_buffer("scale", weight.scale)
        up.__class__ = Apart
    assert_calls(model, plain, calls)
    assert units.are_same(attachment.units)
    for m in (model, plain):
        m.get_buffer("blocks.1.up.scale").mul_(2)
    assert_calls(model, plain, calls)
    attachment.detach()
    assert_state(model, snapshot(plain))


# -- odd uses ----------------------------------------------------------------------------------------------------------


class Early(nn.Module):
    """Views of all weights are taken before the loop, one weight is read outside its layer, and weights are returned."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(D, D) for _ in range(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        views = [block.weight.t() for block in self.blocks]
        x = F.linear(x, self.blocks[4].weight)
        for block, view in zip(self.blocks, views, strict=True):
            x = x + block(x).relu() @ view
        return x, self.blocks[1].weight, self.blocks[2].weight.t()


class Transposed(Block):
    """A plain weight by its transpose, beside a bias that the same product reads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up: torch.Tensor = torch.addmm(self.up.bias, x, self.up.weight.t())
        return x + self.down(F.gelu(up))


@pytest.mark.parametrize("quantized", [True, False])
def test_blocks_that_are_cut_keep_nothing(quantized: bool) -> None:
    """A cut between a wrapper, or a view, and the product that reads it would make the weight cross, and stay.

    The limit is what a weight takes without its bias.
    """
    model = seeded(lambda: nn.Sequential(*(Block(D) if quantized else Transposed(D) for _ in range(4))))
    model = requantized(model, Scaled.of) if quantized else model
    limit = 2 * D * D + 4 * 2 * D if quantized else 4 * 2 * D * D
    check_budgets(model, [given(k) for k in range(3)], max_bucket_bytes=limit)
    costs = api.last_binding(model).costs
    assert len(costs.segments) >= 8
    assert [bucket.name for bucket in costs.buckets if bucket.keep] == []


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_views_before_the_loop_and_weights_returned(compiler: str) -> None:
    model = requantized(seeded(Early), Scaled.of)
    compiled = offload(model, segment_compiler=compiler)
    with torch.no_grad():
        expected = [compiled(given(k)) for k in range(3)]
        halve(model)
        got = [compiled(given(k)) for k in range(3)]
        for mine, its, plain in zip(got, expected, [model(given(k)) for k in range(3)], strict=True):
            assert torch.equal(mine[0], its[0])
            assert type(mine[1]) is Scaled
            for a, b in zip(mine, plain, strict=True):
                torch.testing.assert_close(a + 0, b + 0, rtol=1e-4, atol=1e-5)
    assert_streams(model)


class Reader(Toy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up: Any = self.blocks[3].up  # type: ignore[union-attr]
        return super().forward(F.linear(x, up.weight)[:, :D])


def test_a_weight_read_outside_its_unit() -> None:
    model, plain = (requantized(seeded(lambda: Reader(5, D)), Shifted.of) for _ in range(2))
    attachment = attached(model, 0.8)
    assert_calls(model, plain, [given(k) for k in range(3)])
    assert "blocks.3" in {r.bucket for r in fxoffload.get_plan(model).residents}
    attachment.detach()


class Writing(Toy):
    """Writes to a quantized weight, as a whole, and gives a plain one other memory."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight: Any = self.out.weight
        weight.copy_(Scaled(weight.data_, weight.scale * 1.5))
        return super().forward(x)


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_wrapper_that_the_forward_writes(compiler: str) -> None:
    trio = Trio(lambda: requantized(seeded(lambda: Writing(4, D)), Scaled.of), given(0), segment_compiler=compiler)
    facts = api.bindings_of(trio.streamed)[-1].program.facts.weights
    assert {w.name for w in facts if w.mutated} == {"out.weight.data_", "out.weight.scale"}
    for k in range(1, 4):
        trio.check(given(k))
        trio.check_state()
    assert_streams(trio.streamed)


class Replacing(Toy):
    """Gives weights other memory while it runs."""

    shrinks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        self.inp.weight.data = self.inp.weight * 1.5
        if self.shrinks:
            self.inp.bias.data = self.inp.bias.half()
        return x


@pytest.mark.parametrize("make", [Writing, Replacing])
def test_writes_without_a_compiler(make: type[Toy]) -> None:
    of = Scaled.of if make is Writing else nn.Identity()
    model, plain = (requantized(seeded(lambda: make(4, D)), of) for _ in range(2))
    attachment = attached(model, 0.6)
    assert_calls(model, plain, [given(k) for k in range(4)])
    assert_state(model, snapshot(plain))
    attachment.detach()


@torch.no_grad()
def test_a_weight_that_becomes_another_in_the_forward_is_refused() -> None:
    model: Any = seeded(lambda: Replacing(4, D))
    attachment = attached(model, 0.6)
    model(given(0))
    model.shrinks = True
    text = r"^managed: inp\.bias: the model made it torch\.float16 \[64\] while it ran, and it is torch\.float32 \[64\] in host"
    with pytest.raises(WeightError, match=text):
        model(given(1))
    model.shrinks = False
    assert model.inp.bias.dtype == torch.float32
    model(given(2))
    attachment.detach()


# -- layerwise casting -------------------------------------------------------------------------------------------------


def cast() -> nn.Module:
    from diffusers.hooks import apply_layerwise_casting

    model = seeded(lambda: Toy(5, D))
    apply_layerwise_casting(model, torch.float8_e4m3fn, torch.float32, skip_modules_pattern=("norm",))
    return model


def test_layerwise_casting_streams_what_is_stored() -> None:
    model, plain = cast(), cast()
    for level in ({}, {"module_filter": lambda _, module: isinstance(module, (nn.Linear, nn.LayerNorm))}):
        attachment = attached(model, 0.5, **level)
        assert_calls(model, plain, [given(k) for k in range(4)])
        assert fxoffload.stats(model).nbytes_copied < 5 * 4 * D * D * 1.3
        assert model.get_parameter("blocks.1.up.weight").dtype == torch.float8_e4m3fn
        attachment.detach()
        assert_state(model, snapshot(plain))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_layerwise_casting_is_not_compiled(fullgraph: bool) -> None:
    compiled = offload(cast(), fullgraph=fullgraph)
    text = r"^foreign: Toy\.inp: layerwise casting of diffusers .*cannot be compiled; offload the model without a compiler"
    with pytest.raises(OffloadError, match=text), torch.no_grad():
        compiled(given(0))


# -- refused by name ---------------------------------------------------------------------------------------------------


def beside(m: Any) -> None:
    m.blocks[1].up.weight.quant_state = State(torch.ones(1))
    m.blocks[1].up.weight.quant_state.codes = {"a": torch.ones(1)}


class Int8Params(nn.Parameter):
    """Has the name of a class of bitsandbytes."""


REFUSED: dict[str, tuple[Callable[[Any], object], str]] = {
    "opaque": (
        lambda m: setattr(m.blocks[1].up, "weight", frozen(Opaque.of(m.blocks[1].up.weight))),
        "weights: blocks.1.up.weight: Opaque is a tensor subclass without __tensor_flatten__ and __tensor_unflatten__, so what "
        "it consists of is unknown; give the class these two methods, or leave that module out of the model, or load it "
        "unquantized",
    ),
    "fickle": (
        lambda m: setattr(m.blocks[1].up, "weight", frozen(Fickle.of(m.blocks[1].up.weight))),
        "weights: blocks.1.up.weight: Fickle.data_ is another tensor at every look, so its memory cannot be moved; leave that "
        "module out of the model, or load it unquantized",
    ),
    "8 bits": (
        lambda m: setattr(m.blocks[1].up, "weight", Int8Params(m.blocks[1].up.weight.data, False)),
        "foreign: Toy.blocks.1.up: the 8-bit layers of bitsandbytes hand their weight on to a state of their own while they run, "
        "so it cannot be moved; load the model in 4 bits, or in 8 bits with torchao",
    ),
}


@pytest.mark.parametrize("way", ["compiled", "eager"])
@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_streamed_is_named(case: str, way: str) -> None:
    change, text = REFUSED[case]
    model = seeded(lambda: Toy(2, D))
    change(model)
    with pytest.raises(OffloadError) as refused, torch.no_grad():
        offload(model)(given(0)) if way == "compiled" else attached(model, 0.5)
    assert str(refused.value).partition("\n\nfrom user code")[0] == text
    assert attachment_of(model) is None


def test_tensors_in_containers_beside_a_weight_are_named() -> None:
    model = seeded(lambda: Toy(2, D))
    beside(model)
    with pytest.raises(WeightError) as refused:
        attached(model, 0.5)
    assert str(refused.value) == (
        "weights: blocks.1.up.weight.quant_state.codes: tensors in a dict do not move with the weight; make them attributes of "
        "their own, or leave that module out of the model, or load it unquantized"
    )


def test_notes_beside_a_plain_weight_are_none_of_ours() -> None:
    model, reference = (seeded(lambda: Toy(2, D)) for _ in range(2))
    notes = [torch.ones(3)]
    model.blocks[1].up.weight.history = notes
    attached(model, 0.5)
    with torch.no_grad():
        assert torch.equal(model(given(0)), reference(given(0)))
    assert model.blocks[1].up.weight.history is notes


@pytest.mark.parametrize("way", ["compiled", "eager"])
def test_gradients_of_wrappers_are_refused(way: str) -> None:
    model = requantized(seeded(lambda: Toy(3, D)), Shifted.of).requires_grad_(True)
    attachment = attached(model, 2.0) if way == "eager" else None
    with pytest.raises(GradientError):
        (model if way == "eager" else offload(model))(given(0))
    if attachment is not None:
        attachment.detach()
