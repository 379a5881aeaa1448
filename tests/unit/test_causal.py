"""Constant masks of attention become `is_causal` or none where that says the same; all others stay, with all that makes them."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.fx as fx
import torch.nn.functional as F

import fxoffload
from fxoffload import causal
from fxoffload.causal import attention_arguments, drop_masks
from fxoffload.machine import Machine
from fxoffload.passes.base import copy_graph
from fxoffload.read import find_written
from tests.models import CASES
from tests.tracing import CPU, trace
from tests.writing import bump

Q = torch.randn(2, 4, 6, 8, generator=torch.Generator().manual_seed(0))
LONGER = torch.randn(2, 4, 9, 8, generator=torch.Generator().manual_seed(1))


def dropped(model: Callable[..., Any], *args: Any, dynamic: bool = False, **kwargs: Any) -> fx.GraphModule:
    """The graph of a call without its constant masks. It computes what it did."""

    def look(gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        mine = fx.GraphModule(gm, copy_graph(gm.graph))
        drop_masks(mine, find_written(mine, inputs, CPU, {}))
        mine.graph.lint()
        mine.recompile()
        torch.manual_seed(0)
        wanted = gm(*inputs)
        torch.manual_seed(0)
        torch.testing.assert_close(mine(*inputs), wanted)
        return mine

    with torch.no_grad():
        return trace(model, *args, look=look, dynamic=dynamic, **kwargs)


def attention(gm: fx.GraphModule) -> list[dict[str, Any]]:
    return [given for node in gm.graph.nodes if (given := attention_arguments(node))]


def said(gm: fx.GraphModule) -> list[tuple[bool, bool]]:
    """Of every attention, whether it has a mask, and whether it is causal."""
    return [(given.get("attn_mask") is not None, bool(given.get("is_causal"))) for given in attention(gm)]


def targets(gm: fx.GraphModule) -> list[str]:
    return [str(getattr(n.target, "__name__", n.target)) for n in gm.graph.nodes if n.op in ("call_function", "call_method")]


def attend(make: Callable[[], torch.Tensor], keys: torch.Tensor = Q, **settings: Any) -> fx.GraphModule:
    return dropped(lambda q, k: F.scaled_dot_product_attention(q, k, k, attn_mask=make(), **settings), Q, keys)


def lower(rows: int = 6, columns: int = 6) -> torch.Tensor:
    return torch.arange(columns)[None, :] <= torch.arange(rows)[:, None]


def additive(allowed: torch.Tensor) -> torch.Tensor:
    return torch.zeros(allowed.shape).masked_fill(~allowed, -torch.inf)


CAUSAL: dict[str, Callable[[], torch.Tensor]] = {
    "boolean": lower,
    "expanded": lambda: lower()[None, None].expand(2, 4, 6, 6),
    "in full": lambda: lower()[None, None].repeat(2, 4, 1, 1),
    "of several": lambda: lower() & (lower() | ~lower()) & torch.tril(torch.ones(6, 6, dtype=torch.bool)),
    "additive": lambda: additive(lower()),
    "triu": lambda: torch.full((6, 6), -torch.inf).triu(1),
    "moved": lambda: lower().to("cpu").to(torch.device("cpu")).to(device="cpu"),
    "of half precision": lambda: additive(lower()).half().float(),
}
EVERYTHING: dict[str, Callable[[], torch.Tensor]] = {
    "boolean": lambda: torch.ones(6, 6, dtype=torch.bool),
    "one query": lambda: torch.ones(1, 1, 1, 6, dtype=torch.bool),
    "one": lambda: lower(1, 1),
    "zeros": lambda: torch.zeros(2, 1, 6, 6),
}
OTHERS: dict[str, Callable[[], torch.Tensor]] = {
    "window": lambda: lower() & (torch.arange(6)[None, :] > torch.arange(6)[:, None] - 3),
    "prefix": lambda: lower() | (torch.arange(6)[None, :] < 2),
    "upper": lambda: ~lower(),
    "of a batch": lambda: torch.stack([lower(), lower() | lower().t()])[:, None],
    "bias": lambda: additive(lower()) - 0.5 * torch.arange(6),
    "least number": lambda: torch.zeros(6, 6).masked_fill(~lower(), torch.finfo(torch.float32).min),
}


@pytest.mark.parametrize("make", CAUSAL.values(), ids=CAUSAL)
def test_the_lower_triangle_becomes_causal(make: Callable[[], torch.Tensor]) -> None:
    gm = attend(make)
    assert said(gm) == [(False, True)]
    assert targets(gm) == ["scaled_dot_product_attention"]


@pytest.mark.parametrize("make", EVERYTHING.values(), ids=EVERYTHING)
def test_a_mask_that_allows_everything_is_dropped(make: Callable[[], torch.Tensor]) -> None:
    gm = attend(make)
    assert said(gm) == [(False, False)]
    assert targets(gm) == ["scaled_dot_product_attention"]


@pytest.mark.parametrize("make", OTHERS.values(), ids=OTHERS)
def test_others_stay(make: Callable[[], torch.Tensor]) -> None:
    assert said(attend(make)) == [(True, False)]


def test_more_keys_than_queries() -> None:
    assert said(attend(lambda: lower(6, 9), LONGER)) == [(True, False)], "aligned at the first key"
    assert said(attend(lambda: lower(6, 9) | (torch.arange(9) < 4), LONGER)) == [(True, False)]
    assert said(attend(lambda: torch.ones(6, 9, dtype=torch.bool), LONGER)) == [(False, False)]


def test_by_position_and_with_other_arguments() -> None:
    positional = dropped(lambda q: F.scaled_dot_product_attention(q, q, q, lower(), 0.0, False, scale=0.3), Q)
    (node,) = positional.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
    assert len(node.args) == 3
    assert node.kwargs == {"attn_mask": None, "dropout_p": 0.0, "is_causal": True, "scale": 0.3}
    named = dropped(
        lambda q, k: F.scaled_dot_product_attention(query=q, key=k, value=k, attn_mask=lower(), enable_gqa=True), Q, Q[:, :2]
    )
    assert said(named) == [(False, True)]
    assert attention(named)[0]["enable_gqa"] is True
    assert attention(attend(lower, dropout_p=0.5))[0]["dropout_p"] == 0.5
    assert said(attend(lambda: None, is_causal=True)) == [(False, True)]  # type: ignore[arg-type,return-value]


def test_a_mask_with_two_readers_is_evaluated_once_and_stays_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    evaluated: list[str] = []
    evaluate = causal._evaluate
    monkeypatch.setattr(causal, "_evaluate", lambda nodes: evaluated.append(nodes[-1].name) or evaluate(nodes))

    def twice(q: torch.Tensor) -> torch.Tensor:
        mask = lower()
        return F.scaled_dot_product_attention(F.scaled_dot_product_attention(q, q, q, mask), q, q, mask)

    gm = dropped(twice, Q)
    assert said(gm) == [(False, True)] * 2
    assert targets(gm) == ["scaled_dot_product_attention"] * 2
    assert len(evaluated) == 1

    def read(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = lower()
        return F.scaled_dot_product_attention(q, q, q, mask) * mask.sum(), mask

    gm = dropped(read, Q)
    assert said(gm) == [(False, True)]
    assert targets(gm).count("le") == 1


def test_a_mask_of_inputs_stays() -> None:
    by_argument = dropped(lambda q, m: F.scaled_dot_product_attention(q, q, q, m), Q, lower())
    partly = dropped(lambda q, m: F.scaled_dot_product_attention(q, q, q, lower() & m), Q, torch.ones(6, dtype=torch.bool))
    assert said(by_argument) == said(partly) == [(True, False)]
    ids = CASES["llama"].given(0)["input_ids"]
    padded = dropped(
        CASES["llama"].build(), input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, return_dict=False
    )
    assert set(said(padded)) == {(True, False)}


def test_dynamic_sizes_stay() -> None:
    gm = dropped(lambda q: F.scaled_dot_product_attention(q, q, q, lower(q.shape[-2], q.shape[-2])), Q, dynamic=True)
    assert said(gm) == [(True, False)]
    fixed = dropped(lambda q: F.scaled_dot_product_attention(q, q, q, lower()), Q, dynamic=True)
    assert said(fixed) == [(False, True)]


def test_a_mask_of_other_devices_is_evaluated_on_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    def graph(*moved: Any) -> fx.GraphModule:
        graph = fx.Graph()
        q = graph.placeholder("q")
        ones = graph.call_function(torch.ones, ((6, 6),), {"dtype": torch.bool, "device": torch.device("cuda:7")})
        mask = graph.call_method("to", (graph.call_method("tril", (ones,)), *moved))
        graph.output(graph.call_function(F.scaled_dot_product_attention, (q, q, q), {"attn_mask": mask}))
        gm = fx.GraphModule(torch.nn.Module(), graph)
        drop_masks(gm, frozenset())
        return gm

    assert said(graph("cuda")) == said(graph(torch.device("cuda:7"), torch.bool)) == [(False, True)]
    with caplog.at_level(logging.DEBUG, "fxoffload"):
        assert said(graph("cuda", torch.bool, 1, 2, 3)) == [(True, False)]
    assert "causal: to: the mask cannot be evaluated, so it stays: to()" in caplog.text


def test_a_mask_larger_than_the_limit_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    expanded = CAUSAL["expanded"]
    monkeypatch.setattr(causal, "_LARGEST_NBYTES", 6 * 8 + 1)
    assert said(attend(expanded)) == [(False, True)], "what is expanded takes no memory"
    monkeypatch.setattr(causal, "_LARGEST_NBYTES", 6 * 6 - 1)
    assert said(attend(lambda: torch.ones(6, 6, dtype=torch.bool).tril())) == [(True, False)]


def test_llama_has_no_mask_and_is_priced_without_one() -> None:
    case = CASES["llama"]
    ids = case.given(0)["input_ids"]
    gm = dropped(case.build(), input_ids=ids, use_cache=False)
    assert set(said(gm)) == {(False, True)}
    assert not {"le", "and_", "diff", "cumsum", "new_ones"} & set(targets(gm))
    with torch.device("meta"):
        model = case.make().eval().requires_grad_(False)
    found = fxoffload.explain(
        model, {"input_ids": ids.to("meta"), "use_cache": False}, machine=Machine.nominal(), memory_budget="1GiB"
    )
    priced = [node for node in found.facts.nodes if node.target.endswith("scaled_dot_product_attention")]
    batch, tokens = ids.shape
    config: Any = model.config
    assert {node.rate for node in priced} == {"float32_attention"}
    assert {node.flops for node in priced} == {2 * batch * tokens**2 * config.hidden_size}, "half of the two products"
    assert len(priced) == config.num_hidden_layers


def _written() -> torch.Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[:, 3:] = False
    return mask


def _written_through_a_view() -> torch.Tensor:
    mask = torch.ones(6, 6, dtype=torch.bool)
    mask[2:].fill_(False)
    return mask


def _written_by_a_foreign_operator() -> torch.Tensor:
    mask = torch.zeros(6, 6)
    bump(mask, torch.ones(1))
    return mask


def _written_in_a_list() -> torch.Tensor:
    mask = torch.zeros(6, 6)
    torch._foreach_sub_([torch.zeros(1), mask], 1.0)
    return mask


@torch.compiler.allow_in_graph
def _foreign() -> torch.Tensor:
    return lower()


REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "random": (lambda: torch.rand(6, 6) > -1, "aten::rand"),
    "random choice": (lambda: torch.bernoulli(torch.ones(6, 6)) > 0, "aten::bernoulli"),
    "not initialized": (lambda: torch.empty(6, 6).isnan() | True, "aten::empty.memory_format"),
    "in place": (lambda: torch.zeros(6, 6).add_(1) > 0, ""),
    "written": (_written, ""),
    "written through a view": (_written_through_a_view, ""),
    "written by a foreign operator": (_written_by_a_foreign_operator, ""),
    "written in a list": (_written_in_a_list, ""),
    "foreign code": (_foreign, ""),
    "mapped": (lambda: torch.vmap(lambda i: torch.arange(6) <= i)(torch.arange(6)), ""),
}


@pytest.mark.parametrize(("make", "why"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_function_of_constants_stays(
    make: Callable[[], torch.Tensor], why: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "fxoffload"):
        assert said(attend(make)) == [(True, False)]
    assert why in caplog.text
    assert bool(why) == ("the mask cannot be evaluated, so it stays" in caplog.text)
