"""Facts of a graph: what is a weight, what every node reads and costs, and what is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import expecttest
import pytest
import sympy
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._higher_order_ops import triton_kernel_wrap

import fxoffload
from fxoffload import counts
from fxoffload.errors import GradientError, WeightError
from fxoffload.facts import Facts
from fxoffload.machine import Machine
from fxoffload.owner import tensor_names
from fxoffload.read import name_of, read_facts, span_nbytes
from tests.models import seeded, toy
from tests.tracing import CPU, read, trace
from tests.wrapped import Scaled

X = torch.ones(3, 16)
NBYTES_X = 3 * 16 * 4


class Many(nn.Module):
    """A parameter, buffers, a tensor attribute, a tied weight and a plain input."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(16, 16, dtype=torch.bfloat16)
        self.again = self.proj
        self.register_buffer("table", torch.arange(48).reshape(3, 16))
        self.register_buffer("offset", torch.ones(16), persistent=False)
        self.scale = torch.ones(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.again(self.proj(x.bfloat16())).float()
        return y * self.scale + self.offset + self.table


def test_weights_are_parameters_buffers_and_tensor_attributes_of_the_module() -> None:
    traced = read(seeded(Many), X)
    found = {w.name: (w.nbytes, w.dtype, w.shape, w.stride, w.mutated) for w in traced.facts.weights}
    assert found == {
        "proj.weight": (512, "bfloat16", (16, 16), (16, 1), False),
        "proj.bias": (32, "bfloat16", (16,), (1,), False),
        "table": (384, "int64", (3, 16), (16, 1), False),
        "offset": (64, "float32", (16,), (1,), False),
        "scale": (64, "float32", (16,), (1,), False),
    }
    ((name, _, nbytes),) = traced.facts.inputs
    assert (name, nbytes) == ("l_x_", NBYTES_X)
    assert {w.placeholder for w in traced.facts.weights} | {name} == {
        n.name for n in traced.gm.graph.find_nodes(op="placeholder")
    }


def test_names_come_from_the_model_or_else_from_dynamo() -> None:
    block = toy(2).blocks[1]
    assert [w.name for w in read(block, X).facts.weights][:2] == ["norm.weight", "norm.bias"]
    free = nn.Linear(16, 16).requires_grad_(False)
    assert [w.name for w in read(lambda x: free(x), X).facts.weights] == ["weight", "bias"]


class Layouts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.ones(8, 16).t(), requires_grad=False)
        self.holes = nn.Parameter(torch.ones(16, 10)[:, ::3], requires_grad=False)
        self.row = nn.Parameter(torch.ones(1, 4).expand(16, 4), requires_grad=False)
        self.empty = nn.Parameter(torch.ones(0, 16), requires_grad=False)
        self.scalar = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.turned).sum() + (x @ self.holes + (x @ self.row)).sum() + self.empty.sum() + self.scalar


def test_bytes_span_the_memory_of_a_layout() -> None:
    traced = read(Layouts(), X)
    assert {w.name: (w.nbytes, w.stride) for w in traced.facts.weights} == {
        "turned": (512, (1, 16)),
        "holes": (4 * (15 * 10 + 3 * 3 + 1), (10, 3)),
        "row": (16, (0, 1)),
        "empty": (0, (16, 1)),
        "scalar": (4, ()),
    }
    assert span_nbytes(torch.ones(2, 3)[:, :2]) == 20
    assert span_nbytes(torch.ones(5)[2:]) == 12


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(x))


IMAGE = torch.ones(2, 4, 5, 5)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_writes_its_statistics_in_training_only(training: bool) -> None:
    traced = read(seeded(Norms).train(training), IMAGE)
    mutated = {w.name for w in traced.facts.weights if w.mutated}
    assert mutated == ({"norm.num_batches_tracked", "norm.running_mean", "norm.running_var"} if training else set())


class Writing(nn.Module):
    """Writes buffers: in place, through a view, through `data`, by an op with `out`, and in a branch."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("count", "last", "part", "data_", "out", "chosen", "read"):
            self.register_buffer(name, torch.zeros(3, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.last.copy_(x)
        self.part[1].mul_(2)
        self.data_.data.mul_(2)
        torch.add(x, 1, out=self.out)
        torch.cond(x.sum() > 0, lambda t: t.add_(1).sum(), lambda t: t.sum(), (self.chosen,))
        return x + self.count + self.read


@pytest.mark.parametrize("training", [True, False])
def test_kernels_of_batch_norm_do_not_say_that_they_write(training: bool) -> None:
    class Kernel(Norms):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            norm = self.norm
            statistics = (norm.running_mean, norm.running_var)
            return torch.ops.aten.native_batch_norm(self.conv(x), norm.weight, norm.bias, *statistics, training, 0.1, 1e-5)[0]

    traced = read(seeded(Kernel), IMAGE)
    mutated = {w.name for w in traced.facts.weights if w.mutated}
    assert mutated == ({"norm.running_mean", "norm.running_var"} if training else set())


def test_a_weight_that_is_written_is_mutated() -> None:
    assert [w.name for w in read(Writing(), X).facts.weights if w.mutated] == ["count", "last", "part", "data_", "out", "chosen"]


@pytest.mark.parametrize("analysed", [True, False])
def test_what_triton_kernels_write(analysed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that they are given, where torch cannot analyse their code."""
    if analysed:
        monkeypatch.setattr(counts, "get_mutated_tensors", lambda *_: ["out"])

    def look(gm: fx.GraphModule, given: Sequence[Any]) -> Facts:
        table = triton_kernel_wrap.kernel_side_table
        kernel, constants = table.add_kernel(object()), table.add_constant_args({"BLOCK": 4})  # type: ignore[arg-type]
        at = {name_of(node, real, names): node for node, real in zip(gm.graph.find_nodes(op="placeholder"), given, strict=True)}
        with gm.graph.inserting_before(gm.graph.output_node()):
            tensors = {"out": at["table"], "x": at["offset"], "n": 16}
            launch = {"kernel_idx": kernel, "constant_args_idx": constants, "grid": [(1, 1, 1)], "tma_descriptor_metadata": {}}
            node = gm.graph.call_function(triton_kernel_wrap.triton_kernel_wrapper_mutation, (), {**launch, "kwargs": tensors})
        facts = read_facts(gm, given, CPU, names)
        # The graph runs next.
        gm.graph.erase_node(node)
        return facts

    model = seeded(Many)
    names = tensor_names(model)
    with torch.no_grad():
        facts = trace(model, X, look=look)
    assert {w.name for w in facts.weights if w.mutated} == ({"table"} if analysed else {"table", "offset"})


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(16, 16), requires_grad=False)
        self.v = nn.Parameter(torch.ones(16), requires_grad=False)

    def forward(self, x: torch.Tensor) -> tuple[Any, ...]:
        turned = self.w.t()
        y = x.relu()
        z = y.view(-1)[:16]
        w = z @ turned[:, 2:]
        return w, turned, self.v[None], self.v + 1, y


def test_views_count_as_uses_of_what_they_view() -> None:
    traced = read(Views(), X)
    placeholder = traced.weight("w").placeholder
    by_target = {n.target.rpartition(".")[2]: n for n in traced.facts.nodes}
    assert by_target["t"].weights == (placeholder,)
    assert by_target["matmul"].weights == (placeholder,)
    (relu,) = by_target["relu"].allocates
    assert by_target["view"].allocates == ()
    assert by_target["view"].reads == (relu[0],)
    assert by_target["matmul"].reads == (relu[0],)
    assert [by_target[name].kind for name in ("t", "relu", "view", "matmul", "add")] == [
        "view",
        "fused",
        "view",
        "extern",
        "fused",
    ]


def test_outputs_that_alias_a_weight_are_known() -> None:
    traced = read(Views(), X)
    facts = traced.facts
    assert facts.output_weights == ((1, traced.weight("w").placeholder, False), (2, traced.weight("v").placeholder, False))
    made = {storage for node in facts.nodes for storage, _ in node.allocates}
    assert len(facts.outputs) == 3
    assert set(facts.outputs) <= made


class Counter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("n", torch.zeros(3, 16))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.n.add_(x)
        return self.n.view(3, 16), self.n[1:], self.n.t(), self.n + 1


def test_an_output_that_is_a_written_weight_as_a_whole_is_told_from_views_of_it() -> None:
    traced = read(Counter(), X)
    placeholder = traced.weight("n").placeholder
    assert traced.facts.output_weights == ((0, placeholder, True), (1, placeholder, False), (2, placeholder, False))


CASES: list[tuple[str, Callable[..., Any], tuple[Any, ...], int, int]] = [
    # (target, function, arguments, flops, bytes read and written)
    ("linear", F.linear, (X, torch.ones(32, 16), torch.ones(32)), 2 * 3 * 16 * 32, 192 + 2048 + 128 + 384),
    ("linear", F.linear, (X, torch.ones(32, 16)), 2 * 3 * 16 * 32, 192 + 2048 + 384),
    ("matmul", torch.matmul, (X, torch.ones(16, 4)), 2 * 3 * 16 * 4, 192 + 256 + 48),
    ("bmm", torch.bmm, (torch.ones(2, 3, 4), torch.ones(2, 4, 5)), 2 * 2 * 3 * 4 * 5, 96 + 160 + 120),
    ("conv2d", F.conv2d, (IMAGE, torch.ones(8, 4, 3, 3)), 2 * 2 * 8 * 9 * 4 * 9, 800 + 1152 + 576),
    ("gelu", F.gelu, (X,), 0, 2 * NBYTES_X),
    ("relu", torch.relu, (X,), 0, 2 * NBYTES_X),
    ("transpose", torch.transpose, (X, 0, 1), 0, 0),
    ("add", torch.add, (X, X), 0, 2 * NBYTES_X),
]


@pytest.mark.parametrize(("target", "function", "arguments", "flops", "nbytes"), CASES)
def test_flops_and_bytes_of_known_operators(
    target: str, function: Callable[..., Any], arguments: tuple[Any, ...], flops: int, nbytes: int
) -> None:
    node = read(lambda *args: function(*args), *arguments).node(target)
    assert (node.flops, node.touched_nbytes) == (flops, nbytes)


def test_attention_has_the_flops_of_its_two_products() -> None:
    q, k = torch.ones(2, 4, 7, 8), torch.ones(2, 4, 5, 8)
    node = read(lambda q, k: F.scaled_dot_product_attention(q, k, k), q, k).node("scaled_dot_product_attention")
    assert node.flops == 2 * (2 * 4 * 7 * 5 * 8) * 2
    assert node.kind == "extern"
    assert node.rate == "float32_attention"
    mask = torch.ones(7, 5, dtype=torch.bool)
    masked = read(lambda q, k, m: F.scaled_dot_product_attention(q, k, k, attn_mask=m), q, k, mask)
    assert masked.node("scaled_dot_product_attention").rate == "float32_masked_attention"


class Halves(Scaled):
    """A wrapper whose products run in bfloat16, whatever they are given."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            return func(args[0].bfloat16(), args[1].value().bfloat16()).float()
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize(("kind", "rate"), [(Scaled, "float32"), (Halves, "bfloat16")])
def test_the_product_of_a_wrapper_has_the_rate_of_what_it_runs_in(kind: type[Scaled], rate: str) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(kind.of(torch.randn(16, 8)), requires_grad=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.mm(x, self.weight)

    facts = fxoffload.explain(Product(), X, machine=Machine.nominal(), memory_budget="1MiB").program.facts
    (product,) = [node for node in facts.nodes if node.flops]
    assert (product.flops, product.rate) == (2 * 3 * 16 * 8, rate)


def test_causal_attention_computes_half() -> None:
    q, k = torch.ones(2, 4, 7, 8), torch.ones(2, 4, 5, 8)

    def flops(k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        traced = read(lambda q, k: F.scaled_dot_product_attention(q, k, k, *args, **kwargs), q, k)
        return traced.node("scaled_dot_product_attention").flops

    whole = 2 * (2 * 4 * 7 * 7 * 8) * 2
    assert flops(q) == flops(q, is_causal=False) == whole
    assert flops(q, is_causal=True) == flops(q, None, 0.0, True) == whole // 2
    assert flops(k, is_causal=True) == whole * 5 // 7, "other masks are counted as none"
    named = read(lambda q: F.scaled_dot_product_attention(query=q, key=q, value=q, is_causal=True), q)
    assert named.node("scaled_dot_product_attention").flops == whole // 2


def test_a_node_knows_its_modules_outermost_first() -> None:
    traced = read(toy(2), X)
    linears = [n for n in traced.facts.nodes if n.target.endswith("linear")]
    paths = [[(path, name) for _, path, name in n.path] for n in linears]
    assert paths[0] == [("inp", "Linear")]
    assert paths[1] == [("blocks.0", "Block"), ("blocks.0.up", "Linear")]
    assert paths[-1] == [("out", "Linear")]


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)))


def test_dynamic_sizes_stay_expressions() -> None:
    traced = read(mlp(), X, dynamic=True)
    up = traced.facts.nodes[0]
    (batch,) = up.flops.free_symbols
    assert up.flops == 2 * 16 * 32 * batch
    assert up.allocates[0][1] == 4 * 32 * batch
    assert traced.facts.inputs[0][2] == 64 * batch
    assert traced.facts.number(up.flops) == 2 * 16 * 32 * 3
    assert [int(up.flops.subs(batch, n)) for n in (1, 7, 4096)] == [1024, 7168, 4194304]
    assert traced.facts.number(12) == traced.facts.number(sympy.Integer(12)) == 12


def test_reading_facts_adds_no_guard_on_a_dynamic_size() -> None:
    seen: list[Facts] = []

    def backend(gm: Any, inputs: Any) -> Any:
        seen.append(read_facts(gm, inputs, CPU, {}))
        return gm.forward

    compiled = torch.compile(mlp(), backend=backend, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for n in (3, 2, 7, 4096):
            compiled(torch.ones(n, 16))
    assert len(seen) == 1


def test_a_float_that_became_symbolic_is_no_weight() -> None:
    traced = read(toy(1), X, dynamic=True)
    assert {w.name for w in traced.facts.weights} == set(toy(1).state_dict())


def test_reading_facts_leaves_random_numbers_alone() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    read(lambda x: F.dropout(x, 0.5) + torch.randn(16), X)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), wanted)


def test_a_weight_on_the_meta_device_is_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(16, 16).requires_grad_(False)
    with pytest.raises(WeightError) as error:
        read(model, X.to("meta"))
    text = "the weight is on the meta device and has no bytes; load it before the first call"
    assert str(error.value) == f"facts: weight: {text}"


def test_gradients_are_refused() -> None:
    with pytest.raises(GradientError, match=r"^facts: the outputs of this model require gradients"):
        trace(nn.Linear(16, 16), X, look=lambda gm, inputs: read_facts(gm, inputs, CPU, {}))


class TestGolden(expecttest.TestCase):
    def test_table(self) -> None:
        self.assertExpectedInline(
            str(read(seeded(Norms).train(), IMAGE).facts),
            """\
facts  3 nodes  7 weights, 1320 bytes
weight                    bytes  dtype    shape
conv.weight                1152  float32  8x4x3x3
conv.bias                    32  float32  8
norm.num_batches_tracked      8  int64             mutated
norm.running_mean            32  float32  8        mutated
norm.running_var             32  float32  8        mutated
norm.weight                  32  float32  8
norm.bias                    32  float32  8""",
        )
