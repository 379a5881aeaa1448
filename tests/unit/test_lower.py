"""The generated top level, as text: what is called with what, when values die, and which names things get."""

from __future__ import annotations

import functools
import traceback
import weakref
from collections.abc import Callable, Mapping
from typing import Any, Literal

import expecttest
import pytest
import torch
from torch import fx, nn

from fxoffload import ops, passes
from fxoffload.config import OffloadConfig
from fxoffload.lower import CONTIGUOUS, Compiled, TopLevel, boxed, compile_segments, generate, with_strides
from fxoffload.names import identifier
from fxoffload.plan import Load, Plan
from fxoffload.program import input_names
from tests.checks import offload
from tests.models import seeded, toy
from tests.tracing import CPU, Traced, read

X = torch.ones(3, 16)
EAGER = OffloadConfig(onload_device=CPU, segment_compiler="eager")


def plan(*segments: str, loads: tuple[Load, ...] = ()) -> Plan:
    return Plan(segments, (), loads, 0, 0, 0, True, 0.0, 0.0, 0.0)


class Log:
    """Operations that only write down what was called."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def _say(self, what: str) -> Callable[..., Callable[[], None]]:
        return lambda *args: lambda: self.calls.append(f"{what}{args}")

    @property
    def operations(self) -> Mapping[Callable[..., Any], Callable[..., Callable[[], None]]]:
        return {ops.prefetch: self._say("prefetch"), ops.wait: self._say("wait"), ops.evict: self._say("evict")}


def lower(
    traced: Traced,
    *sizes: int,
    loads: tuple[Load, ...] = (),
    names: Mapping[str, str] | None = None,
    inputs: Mapping[str, str] | None = None,
    returned: Mapping[int, str | None] | None = None,
    log: Log | None = None,
) -> TopLevel:
    """Segments of so many nodes, lowered with the real weights. `names` renames weights, `inputs` parameters."""
    top, blocks = traced.split(*sizes)
    gm = passes.run(top, plan(*(s.name for s in blocks.segments), loads=loads))
    by_placeholder = {w.placeholder: w.name for w in traced.facts.weights}
    placeholders = [n.name for n in traced.gm.graph.find_nodes(op="placeholder")]
    reals = dict(zip(placeholders, traced.inputs, strict=True))
    weights = frozenset(by_placeholder)
    given = [p for p in placeholders if p not in weights]
    programs, _ = compile_segments(top, EAGER)

    def weight(placeholder: str, segment: str) -> tuple[str, torch.Tensor]:
        name = by_placeholder[placeholder]
        return identifier((names or {}).get(name, name)), reals[placeholder]

    return generate(
        gm,
        programs=programs,
        weights=weights,
        weight=weight,
        inputs=inputs if inputs is not None else dict(zip(given, input_names(given), strict=True)),
        operations=(log or Log()).operations,
        output_weights=returned or {},
        device=CPU,
    )


class Two(nn.Module):
    """Two products; the value between them and the input are read again at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(16, 16)
        self.b = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = self.a(x)
        b = self.b(a)
        return a + b + x


def _none(placeholder: str, segment: str) -> tuple[str, torch.Tensor]:
    raise AssertionError(f"{placeholder} of {segment} is no weight")


def load(name: str, segment: int, before: int, after: str | None = None) -> Load:
    return Load(name, name, 0, 256, (segment,), before, after)


class TestGolden(expecttest.TestCase):
    def test_operations_stand_around_the_segments_and_values_die_after_their_last_reader(self) -> None:
        loads = (load("s0", 0, 1, "s1"), load("s1", 1, 0, None))
        self.assertExpectedInline(
            lower(read(seeded(Two), X), 1, 1, loads=loads).source,
            """\
def forward(x):
    prefetch_s1()
    wait_s0()
    s0_out0, = s0([x, a_weight, a_bias])
    evict_s0()
    prefetch_s0()
    wait_s1()
    s1_out0, = s1([s0_out0, b_weight, b_bias])
    evict_s1()
    arguments = [s0_out0, s1_out0, x]
    del s0_out0, s1_out0
    s2_out0, = s2(arguments)
    return (s2_out0, )
""",
        )

    def test_several_results_and_none(self) -> None:
        def function(x: torch.Tensor, y: torch.Tensor) -> tuple[Any, ...]:
            a, b = x.chunk(2)
            c = a + b
            return c * y, 7, None, a.sin(), x

        self.assertExpectedInline(
            lower(read(function, torch.ones(4, 16), torch.ones(16)), 3, 2).source,
            """\
def forward(x, y):
    s0_out0, s0_out1, = s0([x])
    arguments = [s0_out0, s0_out1, y]
    del s0_out1
    s1_out0, = s1(arguments)
    arguments = [s0_out0]
    del s0_out0
    s2_out0, = s2(arguments)
    return (s1_out0, s2_out0, )
""",
        )

    def test_names_that_collide(self) -> None:
        # Two weights that have one identifier, one with the name of a value, one of a segment, one of a parameter.
        model = seeded(Two)
        names = {"a.weight": "w", "a.bias": "w:", "b.weight": "s0_out0", "b.bias": "l_x"}
        self.assertExpectedInline(
            lower(read(model, X), 1, 1, names=names).source,
            """\
def forward(x):
    s0_out0, = s0([x, w, w_])
    s1_out0, = s1([s0_out0, s0_out0_2, l_x])
    arguments = [s0_out0, s1_out0, x]
    del s0_out0, s1_out0
    s2_out0, = s2(arguments)
    return (s2_out0, )
""",
        )

    def test_outputs_that_are_weights_leave_as_copies(self) -> None:
        class Returning(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.w = nn.Parameter(torch.ones(16, 16))
                self.register_buffer("n", torch.zeros(16))

            def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
                view = self.w.t()
                self.n.add_(1)
                return x @ self.w, view, self.n.view(16)

        traced = read(seeded(Returning), X)
        returned = {i: placeholder if itself else None for i, placeholder, itself in traced.facts.output_weights}
        (written,) = (w.placeholder for w in traced.facts.weights if w.mutated)
        top = lower(traced, 2, returned=returned, inputs={"l_x_": "x", written: "n"})
        self.assertExpectedInline(
            top.source,
            """\
def forward(n, x):
    s0_out0, = s0([w, n_2])
    s1_out0, s1_out1, = s1([x, w, n_2])
    return (s1_out0, s0_out0.clone(), n, )
""",
        )


def test_the_program_gives_the_values_of_the_model() -> None:
    model = toy(3)
    for sizes in ((), (1,), (3, 4), (1, 1, 1, 1, 1, 1)):
        traced = read(model, X)
        with torch.no_grad():
            (got,) = lower(traced, *sizes).forward(X)
            assert torch.equal(got, model(X))


def test_operations_are_called_in_the_order_of_the_plan() -> None:
    log = Log()
    loads = (load("s0", 0, 1, "s1"), load("s1", 1, 0, None))
    lower(read(seeded(Two), X), 1, 1, loads=loads, log=log).forward(X)
    assert log.calls == [
        "prefetch('s1', None)",
        "wait('s0',)",
        "evict('s0',)",
        "prefetch('s0', 's1')",
        "wait('s1',)",
        "evict('s1',)",
    ]


@pytest.mark.parametrize(
    "names",
    [
        {"a.weight": "w", "b.weight": "w"},
        {"a.weight": "s0", "b.weight": "s1"},
        {"a.bias": "_", "b.bias": "s0_out0"},
        {"a.bias": "forward"},
        {"a.bias": "l_x"},
    ],
)
def test_names_that_collide_mean_what_they_say(names: dict[str, str]) -> None:
    model = seeded(Two)
    (got,) = lower(read(model, X), 1, 1, names=names).forward(X)
    assert torch.equal(got, model(X))


def test_a_segment_and_a_value_of_another_never_share_a_name() -> None:
    """Segment `s0` returns `s0_out0`; a segment may be called that too."""
    model = seeded(Two)
    traced = read(model, X)
    top, _ = traced.split(1, 1)
    names = {"s0": "a", "s1": "a_out0", "s2": "a_out0_2"}
    for node in top.graph.find_nodes(op="call_module"):
        child = top.get_submodule(node.target)
        top.delete_submodule(node.target)
        node.target = names[node.target]
        top.add_submodule(node.target, child)
    programs, _ = compile_segments(top, EAGER)
    reals = dict(zip([n.name for n in traced.gm.graph.find_nodes(op="placeholder")], traced.inputs, strict=True))
    program = generate(
        top,
        programs=programs,
        weights=frozenset(w.placeholder for w in traced.facts.weights),
        weight=lambda placeholder, segment: (placeholder, reals[placeholder]),
        inputs={"l_x_": "x"},
        operations=Log().operations,
        output_weights={},
        device=CPU,
    )
    (got,) = program.forward(X)
    assert torch.equal(got, model(X)), program.source


def test_a_parameter_may_have_the_name_of_a_segment() -> None:
    model = seeded(Two)
    (got,) = lower(read(model, X), 1, 1, inputs={"l_x_": "s1"}).forward(X)
    assert torch.equal(got, model(X))


def test_values_are_let_go_in_time() -> None:
    top = lower(read(lambda x: x.sin().cos().tanh().exp(), X), 1, 1, 1)
    deleted = [line.strip() for line in top.source.splitlines() if line.strip().startswith("del")]
    assert deleted == ["del s0_out0", "del s1_out0", "del s2_out0"]


def test_the_source_shows_in_tracebacks() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.cholesky(x.sin()).cos()

    top = lower(read(function, torch.eye(4)), 2)
    with pytest.raises(RuntimeError) as error:
        top.forward(-torch.eye(4))
    assert "s0_out0, = s0([x])" in "".join(traceback.format_exception(error.value))


@pytest.mark.parametrize("compiler", ["inductor", "aot_eager", "eager"])
def test_a_segment_holds_nothing_behind_its_last_use(compiler: Literal["inductor", "aot_eager", "eager"]) -> None:
    """What Python runs as it is holds its arguments to its end, and no longer."""
    held: list[list[bool]] = []
    values: list[weakref.ref[torch.Tensor]] = []

    @torch.library.custom_op("fxoffload_tests::look", mutates_args=())
    def look(x: torch.Tensor) -> torch.Tensor:
        held.append([value() is not None for value in values])
        return x.clone()

    look.register_fake(torch.empty_like)

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return look(look(look(x @ w) @ w) @ w)

    def seen(program: Compiled) -> Compiled:
        def run(arguments: list[Any]) -> Any:
            returned = program(arguments)
            assert arguments == []
            values.extend(map(weakref.ref, returned))
            return returned

        return run

    traced = read(function, X, torch.eye(16))
    top, _ = traced.split(2, 2)
    with torch.no_grad():
        programs, distinct = compile_segments(top, OffloadConfig(onload_device=CPU, segment_compiler=compiler))
        inputs = {node.name: node.name for node in top.graph.find_nodes(op="placeholder")}
        forward = generate(
            top, programs={name: seen(program) for name, program in programs.items()}, weights=frozenset(), weight=_none,
            inputs=inputs, operations={}, output_weights={}, device=CPU,
        ).forward  # fmt: skip
        held.clear()
        (got,) = forward(X, torch.eye(16))
    assert distinct == 1
    assert torch.equal(got, X)
    holds = compiler == "eager"
    assert held == [[], [holds], [False, holds]]


def test_what_compiles_to_something_else_holds_its_arguments_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def inner(x: int, y: int) -> int:
        return x + y

    @functools.wraps(inner)
    def program(*arguments: int) -> int:
        return inner(*arguments)

    arguments = [1, 2]
    with caplog.at_level("WARNING", "fxoffload"):
        assert boxed(program)(arguments) == 3
    assert arguments == []
    assert "segments hold their arguments while they run" in caplog.text


@pytest.mark.parametrize(
    ("shape", "padded", "wanted"),
    [((3, 5), (8, 1), (5, 1)), ((2, 3, 5), (24, 8, 1), (1, 2, 6)), ((4, 5), (5, 1), (0, 1)), ((1, 5), (8, 1), (5, 1))],
    ids=["padded", "padded and permuted", "expanded", "one row has any stride"],
)
def test_results_have_the_strides_that_were_traced(
    shape: tuple[int, ...], padded: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    values = torch.arange(60.0)[: shape[-1]].expand(shape)
    other = torch.ones(2)

    def program(arguments: list[Any]) -> tuple[Any, ...]:
        arguments.clear()
        return torch.empty_strided(shape, padded).copy_(values), other, 7

    run = with_strides(program, [wanted, (1,), None])
    for _ in range(2):
        arguments = [1]
        result, *others = run(arguments)
        assert arguments == []
        assert torch.equal(result, values)
        assert [s for s, n in zip(result.stride(), shape, strict=True) if n > 1] == [
            s for s, n in zip(wanted, shape, strict=True) if n > 1
        ]
        assert others[0] is other
        assert others[1] == 7


def test_results_with_the_strides_that_were_traced_leave_as_they_are() -> None:
    results = (torch.ones(3, 5), torch.ones(0, 5))
    run = with_strides(lambda arguments: results, [(5, 1), (9, 1)])
    assert run([]) is results
    assert run([]) is results


def test_results_of_any_size_are_contiguous_in_each_call() -> None:
    run = with_strides(lambda arguments: (torch.ones(arguments[0], 8)[:, :5],), [CONTIGUOUS])
    for rows in (1, 3, 1, 7):
        (result,) = run([rows])
        assert result.is_contiguous()
        assert result.shape == (rows, 5)


def pad_products(graph: fx.Graph) -> None:
    """As Inductor does on CUDA to widths that are no multiple of 16 bytes."""
    for product in graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default):
        with graph.inserting_after(product):
            padded = graph.call_function(torch.ops.aten.constant_pad_nd.default, (product, [0, 3]))
        with graph.inserting_after(padded):
            result = graph.call_function(torch.ops.aten.slice.Tensor, (padded, 1, 0, product.meta["val"].shape[1]))
        padded.meta["val"] = torch.ops.aten.constant_pad_nd.default(product.meta["val"], [0, 3])
        result.meta["val"] = padded.meta["val"][:, : product.meta["val"].shape[1]]
        product.replace_all_uses_with(result, delete_user_cb=lambda user, padded=padded: user is not padded)


def test_a_padded_product_is_read_by_a_segment_that_was_compiled_for_its_width() -> None:
    traced = read(lambda x, w: ((x @ w).sin() @ w).cos(), X, torch.eye(16))
    top, _ = traced.split(1, 1, 2)
    options = {"post_grad_custom_pre_pass": pad_products}
    with torch.no_grad():
        programs, _ = compile_segments(top, OffloadConfig(onload_device=CPU, inductor=options))
        inputs = {node.name: node.name for node in top.graph.find_nodes(op="placeholder")}
        forward = generate(
            top, programs=programs, weights=frozenset(), weight=_none, inputs=inputs, operations={}, output_weights={}, device=CPU
        ).forward
        (got,) = forward(X, torch.eye(16))
    torch.testing.assert_close(got, X.sin().cos())


@torch.no_grad()
def test_padded_products_of_any_number_of_rows() -> None:
    model = seeded(lambda: nn.Sequential(*(nn.Linear(18, 18, bias=False) for _ in range(4))))
    compiled = offload(
        model,
        dynamic=True,
        segment_compiler="inductor",
        max_bucket_bytes=1500,
        inductor={"post_grad_custom_pre_pass": pad_products},
    )
    for rows in (2, 1, 7):
        x = torch.randn(2, rows, 18, generator=torch.Generator().manual_seed(rows))
        torch.testing.assert_close(compiled(x), model(x))


def test_the_function_is_not_held_by_its_own_globals() -> None:
    top = lower(read(toy(1), X))
    assert "forward" not in top.forward.__globals__


# -- segments ---------------------------------------------------------------------------------------------------------


def test_equal_segments_share_a_program() -> None:
    from fxoffload.blocks import find_blocks
    from fxoffload.split import split_graph

    traced = read(toy(5), X)
    top = split_graph(traced.gm, find_blocks(traced.facts, max_segment_nbytes=1 << 30))
    programs, distinct = compile_segments(top, EAGER)
    assert distinct == 2
    assert programs["blocks_0"] is programs["blocks_4"]
    assert programs["inp"] is programs["out"] is not programs["blocks_0"]


def test_constants_of_the_graph_reach_their_segment() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        table = torch.tensor([1.0, 2.0, 3.0])
        return (x.sum(1) + table).sin() * table

    x = torch.ones(3, 16)
    for size in range(1, 5):
        traced = read(function, x)
        if size < len(traced.facts.nodes):
            (got,) = lower(traced, size).forward(x)
            assert torch.equal(got, function(x))


def test_input_names() -> None:
    assert input_names(["L_hidden_states_", "L_kwargs_timestep_"]) == ["hidden_states", "kwargs_timestep"]
    assert input_names(["L_x_", "L_x__"]) == ["L_x_", "L_x__"]
    assert input_names(["s77", "L_0_"]) == ["s77", "L_0_"]
