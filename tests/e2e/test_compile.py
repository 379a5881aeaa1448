"""How the backend sits in torch.compile: one graph, no recompile, the module untouched, and the generated program as text."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxoffload
from fxoffload import api, backend, cut, lower
from fxoffload.blocks import find_blocks
from fxoffload.machine import Machine
from tests.checks import assert_streams, budgets, check_budgets, delay_copies, halve, offload
from tests.dit import DiT
from tests.models import Toy, rows, seeded, toy


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.fixture
def segment_compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the first inputs of every segment that was compiled."""
    compiled: list[str] = []
    make = lower._compiler

    def counting(config: Any) -> Any:
        compile_one = make(config)

        def compile_and_count(child: Any, inputs: list[Any]) -> Any:
            compiled.append(next(iter(child.graph.nodes)).name)
            return compile_one(child, inputs)

        return compile_and_count

    monkeypatch.setattr(lower, "_compiler", counting)
    return compiled


@torch.no_grad()
def test_no_recompile_whatever_the_budget(segment_compiles: list[str]) -> None:
    model = toy(6)
    before = graphs()
    compiled = offload(model)
    expected = [compiled(rows(k)) for k in range(3)]
    delay_copies(model)
    after = len(segment_compiles)
    plans, tops = set(), set()
    for budget in budgets(model).values():
        fxoffload.set_memory_budget(model, budget)
        for k in range(3):
            assert torch.equal(compiled(rows(k)), expected[k])
        plans.add(fxoffload.get_plan(model))
        tops.add(api.bindings_of(model)[0].top.source)
    assert (graphs(), len(segment_compiles)) == (before + 1, after)
    assert len(plans) == len(tops) == len(set(budgets(model).values()))


@torch.no_grad()
def test_compile_in_place_and_by_function_agree() -> None:
    in_place, wrapped = toy(5), toy(5)
    options = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "1GiB"}
    in_place.compile(backend=fxoffload.layerwise, fullgraph=True, dynamic=False, options=options)
    compiled = torch.compile(wrapped, backend=fxoffload.layerwise, fullgraph=True, dynamic=False, options=options)
    in_place(rows(0)), compiled(rows(0))
    for model in (in_place, wrapped, compiled):
        halve(model)
    for k in range(4):
        assert torch.equal(in_place(rows(k)), compiled(rows(k)))
    for model in (in_place, wrapped, compiled):
        assert_streams(model)
    assert api.engine_of(compiled) is api.engine_of(wrapped)
    assert api.engine_of(in_place) is not api.engine_of(wrapped)


@torch.no_grad()
def test_the_number_of_compiled_segments_does_not_grow_with_depth(segment_compiles: list[str]) -> None:
    counts = []
    for n in (4, 16, 48):
        segment_compiles.clear()
        model = toy(n)
        compiled = offload(model)
        compiled(rows(0))
        halve(model)
        for k in range(3):
            torch.testing.assert_close(compiled(rows(k)), model(rows(k)), rtol=1e-4, atol=1e-5)
        assert_streams(model)
        assert len(fxoffload.get_plan(model).segments) == n + 2
        counts.append((len(segment_compiles), api.bindings_of(model)[0].program.distinct))
    assert counts == [(2, 2)] * 3


def _surface(model: nn.Module) -> list[Any]:
    """What another library sees of a module: signatures, hooks, attributes, types and names."""
    return [
        (
            name,
            type(module),
            inspect.signature(module.forward),
            sorted(k for k in module.__dict__ if k != "_compiled_call_impl"),
            sorted(vars(type(module))),
            {k: len(v) for k, v in module.__dict__.items() if k.endswith("_hooks")},
            {k: (type(p), id(p), p.shape, p.stride(), p.dtype, p.device, p.requires_grad) for k, p in module._parameters.items()},
            {k: id(b) for k, b in module._buffers.items()},
            module.training,
        )
        for name, module in model.named_modules()
    ]


@torch.no_grad()
def test_the_module_stays_what_it_was() -> None:
    model = toy(4)
    before = _surface(model)
    model.compile(backend=fxoffload.layerwise, options={"onload_device": "cpu", "segment_compiler": "eager"})
    for k in range(3):
        model(rows(k))
    halve(model)
    model(rows(4))
    assert _surface(model) == before


class TestGolden(expecttest.TestCase):
    def test_top_level_of_toy_4(self) -> None:
        model = toy(4)
        compiled = offload(model, transfer_buckets=1, persistent_buckets=0)
        with torch.no_grad():
            compiled(rows(0))
            fxoffload.set_memory_budget(model, budgets(model)["half"])
            compiled(rows(1))
        source = re.sub(r", (blocks_\d_(norm|up|down)_weight)", r",\n        \1", api.bindings_of(model)[0].top.source)
        self.assertExpectedInline(
            source,
            """\
def forward(x):
    prefetch_blocks_0()
    wait_inp()
    inp_out0, = inp([x, inp_weight, inp_bias])
    evict_inp()
    prefetch_blocks_1()
    wait_blocks_0()
    arguments = [inp_out0,
        blocks_0_norm_weight, blocks_0_norm_bias,
        blocks_0_up_weight, blocks_0_up_bias,
        blocks_0_down_weight, blocks_0_down_bias]
    del inp_out0
    blocks_0_out0, = blocks_0(arguments)
    evict_blocks_0()
    prefetch_blocks_2()
    wait_blocks_1()
    arguments = [blocks_0_out0,
        blocks_1_norm_weight, blocks_1_norm_bias,
        blocks_1_up_weight, blocks_1_up_bias,
        blocks_1_down_weight, blocks_1_down_bias]
    del blocks_0_out0
    blocks_1_out0, = blocks_1(arguments)
    evict_blocks_1()
    prefetch_blocks_3()
    wait_blocks_2()
    arguments = [blocks_1_out0,
        blocks_2_norm_weight, blocks_2_norm_bias,
        blocks_2_up_weight, blocks_2_up_bias,
        blocks_2_down_weight, blocks_2_down_bias]
    del blocks_1_out0
    blocks_2_out0, = blocks_2(arguments)
    evict_blocks_2()
    prefetch_out()
    wait_blocks_3()
    arguments = [blocks_2_out0,
        blocks_3_norm_weight, blocks_3_norm_bias,
        blocks_3_up_weight, blocks_3_up_bias,
        blocks_3_down_weight, blocks_3_down_bias]
    del blocks_2_out0
    blocks_3_out0, = blocks_3(arguments)
    evict_blocks_3()
    prefetch_inp()
    wait_out()
    arguments = [blocks_3_out0, out_weight, out_bias]
    del blocks_3_out0
    out_out0, = out(arguments)
    evict_out()
    return (out_out0, )
""",
        )


@torch.library.custom_op("fxoffload_tests::read_only", mutates_args=())
def _read_only(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    _seen.append(weight.data_ptr())
    return x @ weight.t()


@_read_only.register_fake
def _(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


_seen: list[int] = []


class Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Reading() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class _Reading(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3))
        self.weight = nn.Parameter(torch.randn(16, 16) * 0.3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + _read_only(x, self.weight) + self.bias.sum()


@torch.no_grad()
@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_a_custom_op_reads_the_weight_where_it_was_planned(compiler: str) -> None:
    torch.manual_seed(0)
    model = Reading()
    compiled = offload(model, segment_compiler=compiler)
    compiled(rows(0))
    halve(model)
    for k in range(3):
        _seen.clear()
        compiled(rows(k))
    assert_streams(model)
    engine, plan = api.engine_of(model), fxoffload.get_plan(model)
    bucket_at = {r.bucket: r.offset for r in plan.residents} | {load.bucket: load.offset for load in plan.loads}
    found = [engine.store.find(block.weight).parts[0] for block in model.blocks]
    assert _seen == [engine.arena.view(0, 1).data_ptr() + bucket_at[w.bucket.name] + w.offset for w in found]
    assert all((bucket_at[w.bucket.name] + w.offset) % 256 == 0 for w in found)
    assert engine.arena.view(0, 1).data_ptr() % 16 == 0


@torch.no_grad()
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_a_dynamic_batch_is_one_graph(compiler: str) -> None:
    model = toy(4)
    before = graphs()
    compiled = offload(model, dynamic=True, segment_compiler=compiler)
    compiled(rows(0, n=3))
    halve(model)
    # Activations grow with the batch, and count against the budget.
    fxoffload.set_memory_budget(model, fxoffload.get_plan(model).budget_nbytes + (2 << 10))
    for n in (2, 3, 5, 7, 9, 3, 3):
        torch.testing.assert_close(compiled(rows(n, n=n)), model(rows(n, n=n)), rtol=1e-4, atol=1e-5)
    assert_streams(model)
    assert graphs() == before + 1


class Pooling(nn.Module):
    """Sizes inside are the input's divided by 2, 4 and 8, rounded down."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = F.max_pool2d(block(x).relu(), 2)
        return x


@torch.no_grad()
def test_dynamic_sizes_that_are_divided() -> None:
    model = seeded(Pooling)
    compiled = offload(model, dynamic=True)
    for size in (32, 64, 49, 34):
        x = torch.rand(1, 4, size, size + 3)
        assert torch.equal(compiled(x), model(x))
    assert len(api.bindings_of(model)) == 1


@torch.no_grad()
def test_calls_that_alternate_between_two_shapes() -> None:
    model = toy(5)
    compiled = offload(model)
    expected = {n: compiled(rows(n, n=n)) for n in (3, 5)}
    halve(model)
    for n in (3, 5, 3, 5, 5, 3, 3, 5):
        assert torch.equal(compiled(rows(n, n=n)), expected[n])
    for n in (3, 5):
        compiled(rows(1, n=n)), compiled(rows(2, n=n))
        assert_streams(model)
    assert len(api.bindings_of(model)) == 2


class Named(nn.Module):
    """Its last module has some name, and nothing between it and the blocks."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.name = name
        self.add_module(name, nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return self._modules[self.name](x)  # type: ignore[misc]


@pytest.mark.parametrize("name", ["output", "getitem", "l_x_", "submod_0", "submod_4", "graph", "code", "meta", "recompile"])
@torch.no_grad()
def test_modules_whose_names_graphs_have_too(name: str) -> None:
    model = seeded(lambda: Named(name))
    compiled = offload(model)
    for k in range(2):
        assert torch.equal(compiled(rows(k)), model(rows(k)))


@pytest.mark.parametrize("last", [lambda x: x[:, 0], lambda x: x.to(torch.float64), lambda x: x.half()])
@pytest.mark.filterwarnings("ignore:.*graph break")
@torch.no_grad()
def test_a_graph_without_weights_behind_a_break(last: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = toy(3)

    def run(x: torch.Tensor) -> torch.Tensor:
        x = model(x)
        torch._dynamo.graph_break()
        return last(x)

    compiled = offload(run, fullgraph=False)
    for k in range(2):
        assert torch.equal(compiled(rows(k)), run(rows(k)))


@torch.no_grad()
def test_two_models_of_one_class_share_code_and_nothing_else() -> None:
    a, b = toy(5, seed=1), toy(5, seed=2)
    before = graphs()
    run_a, run_b = offload(a), offload(b)
    run_a(rows(0)), run_b(rows(0))
    halve(a)
    fxoffload.set_memory_budget(b, budgets(b)["smallest"])
    for k in range(4):
        torch.testing.assert_close(run_a(rows(k)), a(rows(k)), rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(run_b(rows(k)), b(rows(k)), rtol=1e-4, atol=1e-5)
    assert_streams(a)
    assert_streams(b)
    assert graphs() == before + 1
    assert api.engine_of(a) is not api.engine_of(b)
    assert fxoffload.get_plan(a) != fxoffload.get_plan(b)
    del a, run_a
    torch.testing.assert_close(run_b(rows(9)), b(rows(9)), rtol=1e-4, atol=1e-5)


class Counting(Toy):
    def __init__(self) -> None:
        super().__init__(3, 128)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.calls.add_(1)


@torch.no_grad()
@pytest.mark.parametrize(("link_gb_s", "settings", "cuts"), [(1.0, {}, 2), (1e5, {}, 1), (1.0, {"max_bucket_bytes": "1MiB"}, 1)])
def test_where_copies_take_far_longer_than_compute_pieces_are_finer(
    monkeypatch: pytest.MonkeyPatch, link_gb_s: float, settings: dict[str, Any], cuts: int
) -> None:
    """Not where they take less, nor where a size was asked for. A buffer that the graph writes is written once a call."""
    machine = dataclasses.replace(Machine.nominal(), link_gb_s=link_gb_s)
    limits: list[int] = []

    def find(*args: Any, max_segment_nbytes: int, **options: Any) -> Any:
        limits.append(max_segment_nbytes)
        return find_blocks(*args, max_segment_nbytes=max_segment_nbytes, **options)

    monkeypatch.setattr(backend, "machine_of", lambda _: machine)
    monkeypatch.setattr(cut, "find_blocks", find)
    monkeypatch.setattr(cut, "_LEAST_BUCKET_NBYTES", 1 << 20)
    monkeypatch.setattr(cut, "_LEAST_FINER_NBYTES", 128 << 10)
    model, plain = (seeded(Counting) for _ in range(2))
    compiled = offload(model, **settings)
    for _ in range(3):
        x = torch.ones(2, 128)
        torch.testing.assert_close(compiled(x), plain(x))
    assert model.calls.item() == 3
    assert limits == [1 << 20, 128 << 10][:cuts]
    program = api.bindings_of(model)[0].program
    assert [stage for stage, _ in program.seconds].count("facts") == 1
    largest = max(bucket.nbytes for bucket in program.buckets.buckets)
    # A layer's matrix has just that size, and its bias comes with it.
    assert (largest < 130 << 10) == (cuts == 2)


@torch.no_grad()
def test_attention_over_many_tokens_holds_no_weights() -> None:
    model = seeded(lambda: DiT(3, 64))
    check_budgets(model, [torch.randn(1, 512, 64) for _ in range(2)], max_bucket_bytes="256KiB")
    program = api.bindings_of(model)[0].program
    nodes = {node.name: node for node in program.facts.nodes}
    attending = [s for s in program.blocks.segments if any(nodes[name].rate.endswith("attention") for name in s.nodes)]
    assert [(s.block, s.weights) for s in attending] == [("blocks.0", ()), ("blocks.1", ()), ("blocks.2", ())]
