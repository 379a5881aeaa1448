"""Explanations of models that ran and of models that never will: text, values, files, errors; and that they change nothing."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
from torch import nn

import fxoffload
from fxoffload import api
from fxoffload.errors import BudgetError, ConfigError, GradientError, OffloadError, WeightError
from fxoffload.machine import Machine
from fxoffload.report import Explanation
from tests.models import Block, Toy, rows, toy

NOMINAL = Machine.nominal()
OPTIONS: dict[str, Any] = {"onload_device": "cpu", "segment_compiler": "eager", "memory_budget": "200KiB"}
PNG = b"\x89PNG"


def explained(**options: Any) -> Explanation:
    return fxoffload.explain(toy(6, 64), rows(0, 64, 32), machine=NOMINAL, **{"memory_budget": "200KiB", **options})


def run(model: nn.Module, *inputs: Any, **options: Any) -> Any:
    compiled = torch.compile(model, backend="layerwise", options={**OPTIONS, **options})
    with torch.no_grad():
        compiled(*inputs)
    return compiled


def meta_toy() -> nn.Module:
    with torch.device("meta"):
        return Toy(6, 64).eval().requires_grad_(False)


class TestGolden(expecttest.TestCase):
    """`EXPECTTEST_ACCEPT=1` writes the text that is printed now."""

    def test_text(self) -> None:
        self.assertExpectedInline(
            str(explained()),
            """\
Toy  424.00 KiB of weights  6.82e-06 TFLOP a forward  6 blocks in 8 segments, 8 buckets
machine  nominal  link 25.0 GB/s  memory 1000 GB/s  bfloat16 100 TFLOP/s  float16 100 TFLOP/s  float32 20 TFLOP/s

plan  budget 200.00 KiB  peak 194.75 KiB  step 0.1074 ms = 0.1012 compute + 0.0062 stall  (bound 0.1012 ms)
arena 146.75 KiB = 0 B persistent + 146.75 KiB staging  activations 48.00 KiB  streamed 424.00 KiB a forward
bucket            KiB  state            prefetch before  wait before  evict after  copy ms  stall ms
inp              16.2  streamed, wraps  blocks.5         inp          inp           0.0107    0.0000
blocks.0         65.2  streamed, wraps  out              blocks.0     blocks.0      0.0127    0.0062
blocks.1         65.2  streamed         inp              blocks.1     blocks.1      0.0127    0.0000
blocks.2-5 (x4)  65.2  streamed         blocks.1-4       blocks.2-5   blocks.2-5    0.0127    0.0000
out              16.2  streamed         blocks.4         out          out           0.0107    0.0000
copy    |0==========[1=========   [2=========   [3==========  [4==========  [5==========[out======[inp======[
compute |[inp=      [0============[1============[2============[3============[4============[5============[out=

Compute bounds most of the step, the link a part of it: copies take 0.0974 ms a step (424.00 KiB), computation 0.1012
  ms, yet it waits 0.0062 ms for copies, where weights are dense and there is too little room to copy them ahead.
1 GiB more would save 0.0062 ms a step (6%), and hold every weight.
The smallest budget that works is 113.5KiB (0.1935 ms a step); with copies beside compute, 212KiB (0.1012 ms).
Streaming is free (within 1% of computation alone) from 212KiB on, 45% of the 472.00 KiB that hold everything.

at a budget of                            size        step ms  bound ms  x compute  streamed a step
smallest that works                       113.25 KiB   0.1935    0.1012       1.91  424.00 KiB
this plan                                 200.00 KiB   0.1074    0.1012       1.06  424.00 KiB
smallest with overlap, streaming is free  211.25 KiB   0.1012    0.1012       1.00  391.50 KiB
everything stays                          472.00 KiB   0.1012    0.1012       1.00  0 B
1 GiB more                                1.00 GiB     0.1012    0.1012       1.00  0 B""",
        )

    def test_words_where_everything_stays(self) -> None:
        self.assertExpectedInline(
            "\n".join(explained(memory_budget="1MiB").words),
            """\
Compute bounds the step: every weight stays on the device, and a forward computes for 0.1012 ms.
1 GiB more would buy nothing.
The smallest budget that works is 113.5KiB (0.1935 ms a step); with copies beside compute, 212KiB (0.1012 ms).
Streaming is free (within 1% of computation alone) from 212KiB on, 45% of the 472.00 KiB that hold everything.""",
        )

    def test_words_where_the_link_bounds(self) -> None:
        slow = dataclasses.replace(NOMINAL, link_gb_s=0.5)
        explanation = fxoffload.explain(toy(6, 64), rows(0, 64, 32), machine=slow, memory_budget="300KiB")
        self.assertExpectedInline(
            "\n".join(explanation.words),
            """\
The link bounds the step: copies take 0.5745 ms a step (261.00 KiB), computation 0.1012 ms; it waits 0.5341 ms for copies.
1 GiB more would save 0.5341 ms a step (84%), and hold every weight.
The smallest budget that works is 113.5KiB (1.04 ms a step); with copies beside compute, 179KiB (0.8857 ms).
Streaming is never free (within 1% of computation alone) here: all weights have to stay, which takes 472KiB.""",
        )

    def test_words_where_there_is_no_room(self) -> None:
        self.assertExpectedInline(
            textwrap.fill(explained(memory_budget="115KiB").words[0], 100),
            """\
The budget bounds the step: copies take 0.0974 ms a step (424.00 KiB), computation 0.1012 ms, and
with so little room much of that happens in turn; it waits 0.0923 ms for copies.""",
        )

    def test_words_without_overlap(self) -> None:
        self.assertExpectedInline(
            "\n".join(textwrap.fill(sentence, 100) for sentence in explained(async_transfer=False).words),
            """\
Copies and computation take turns, because async_transfer is off: copies take 0.0740 ms a step
(342.50 KiB), computation 0.1012 ms.
1 GiB more would save 0.0740 ms a step (42%), and hold every weight.
The smallest budget that works is 113.5KiB (0.1985 ms a step).
Streaming is never free (within 1% of computation alone) here: all weights have to stay, which takes
472KiB.""",
        )

    def test_words_without_weights(self) -> None:
        found = fxoffload.explain(nn.ReLU(), torch.empty(4, 4), machine=NOMINAL, memory_budget="1MiB")
        words = "There are no weights to stream: a forward computes for 0.0050 ms and needs 128 B of activations."
        assert found.words == (words,)

    def test_words_where_not_everything_may_stay(self) -> None:
        explanation = explained(persistent_buckets=1)
        assert explanation.landmarks.everything is None
        assert "everything stays" not in str(explanation)
        self.assertExpectedInline(
            explanation.words[-1].replace("; ", ";\n"),
            """\
Streaming is free (within 1% of computation alone) from 212KiB on;
with these settings some weights are streamed at every budget.""",
        )


def test_streaming_is_free_at_the_smallest_budget_with_overlap_where_no_smaller_one_is() -> None:
    landmarks = explained().landmarks
    assert landmarks.overlap.step_ms <= 1.01 * explained().plan.compute_ms
    assert landmarks.free is not None
    assert landmarks.free.budget_nbytes <= landmarks.overlap.budget_nbytes


# -- what is explained ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("onload", ["cpu", "cuda"])
def test_weights_and_inputs_on_the_meta_device(onload: str) -> None:
    expected = str(explained())
    x = rows(0, 64, 32)
    for model, given in ((toy(6, 64), x.to("meta")), (meta_toy(), x), (meta_toy(), x.to("meta"))):
        found = fxoffload.explain(model, given, machine=NOMINAL, memory_budget="200KiB", onload_device=onload)
        assert str(found) == expected


def test_a_model_that_ran_is_explained_as_it_runs() -> None:
    x = rows(0, 64, 32)
    model = toy(6, 64)
    compiled = run(model, x)
    expected = fxoffload.explain(toy(6, 64), x, **OPTIONS)
    for form in (model, compiled):
        found = fxoffload.explain(form)
        assert str(found) == str(expected)
        assert found.plan is fxoffload.get_plan(model)
    binding = api.bindings_of(model)[-1]
    assert binding.top is not None
    assert found.source == binding.top.source == expected.source
    assert str(fxoffload.explain(compiled, x)) == str(expected), "the settings of the compiled model hold"


def test_another_budget_of_a_model_that_ran() -> None:
    compiled = run(toy(6, 64), rows(0, 64, 32))
    before = fxoffload.get_plan(compiled)
    more = fxoffload.explain(compiled, memory_budget="300KiB", transfer_buckets=1)
    assert more.plan.budget_nbytes == 300 << 10
    assert more.program.knobs.transfer_buckets == 1
    assert fxoffload.explain(compiled, persistent_buckets=2).plan.budget_nbytes == 200 << 10
    assert fxoffload.get_plan(compiled) is before
    assert explained().at("300KiB").plan == explained(memory_budget="300KiB").plan


def test_several_graphs() -> None:
    model = toy(2, 16)
    compiled = run(model, rows(0, 16, 3))
    torch._dynamo.mark_static(x := rows(0, 16, 5))
    with torch.no_grad():
        compiled(x)
    found = fxoffload.explain(model)
    assert len(found.others) == 1
    assert "\nalso, a graph that ran before:\nplan  budget " in str(found)


def test_keyword_inputs_and_names() -> None:
    class Add(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block(16) for _ in range(3))

        def forward(self, first: torch.Tensor, *more: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
            x = sum(more, first)
            for block in self.blocks:
                x = block(x)
            return x if scale is None else x * scale

    x = rows(0)
    found = fxoffload.explain(Add(), x, x + 1, {"scale": x + 2}, machine=NOMINAL, memory_budget="1MiB")
    assert found.source.startswith("def forward(args_1, first, scale):\n")
    with pytest.raises(TypeError) as refusal:
        fxoffload.explain(Add(), {"scale": x}, machine=NOMINAL, memory_budget="1MiB")
    assert str(refusal.value) == "analysis: Add.forward: missing a required argument: 'first'; give the inputs of one call"


def test_dynamic_sizes_have_a_knee() -> None:
    found = explained(dynamic=True)
    assert found.facts.symbols
    # However many rows: launches take longer than the copies of such a small model.
    fast = Machine("fast", 1.0, 0.0001, 1e6, 1e-6, (("float32", 1.0),))
    words = fxoffload.explain(toy(6, 64), rows(0, 64, 32), machine=fast, memory_budget="200KiB", dynamic=True).words
    assert len(words) == 5
    assert re.fullmatch(
        r"Computation takes longer than copying every weight from s\d+ = \d+ on \(traced at 32\): "
        r"streaming is free then, within a budget in which all copies run beside it\.",
        words[-1],
    )


def test_beyond_the_knee_streaming_is_free_where_copies_run_beside_compute_only() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(4096, 4096, dtype=torch.bfloat16) for _ in range(12))).requires_grad_(False)
    x = torch.empty(1024, 4096, dtype=torch.bfloat16, device="meta")
    words = fxoffload.explain(model, x, machine=NOMINAL, memory_budget="1GiB", dynamic=True).words
    knee = re.search(r"from s\d+ = (\d+) on", words[-1])
    assert knee is not None
    x = torch.empty(2 * int(knee[1]), 4096, dtype=torch.bfloat16, device="meta")
    found = fxoffload.explain(model, x, machine=NOMINAL, memory_budget="1GiB", dynamic=False)
    compute_ms = found.plan.compute_ms
    assert sum(bucket.copy_ms for bucket in found.costs.buckets) < 0.6 * compute_ms
    least = found.at(found.landmarks.smallest.budget_nbytes).plan
    assert least.step_ms > 1.3 * compute_ms, "copies and computation take turns"
    beside = found.at(found.landmarks.smallest.budget_nbytes + 2 * max(bucket.nbytes for bucket in found.costs.buckets)).plan
    assert beside.streamed_nbytes > 0
    assert beside.step_ms <= 1.01 * compute_ms


def test_stages_are_values() -> None:
    found = explained()
    assert [segment.name for segment in found.blocks.segments] == ["inp", *(f"blocks.{i}" for i in range(6)), "out"]
    assert [bucket.name for bucket in found.costs.buckets] == [bucket.name for bucket in found.buckets.buckets]
    assert found.timeline.step_ms == pytest.approx(found.plan.step_ms)
    assert len(found.facts.weights) == len(list(toy(6, 64).parameters()))
    assert len(found.prices) == len(found.costs.segments)
    assert "wait_blocks_3()\n" in found.source
    assert "fxoffload_ops_wait('blocks.3')" in found.graph_code


def test_curve() -> None:
    found = explained()
    with pytest.raises(ConfigError, match="curve: points: 1 make no curve"):
        found.curve(1)
    curve = found.curve(8)
    assert len(curve.points) in (8, 9)
    assert [p.budget_nbytes for p in curve.points] == sorted(p.budget_nbytes for p in curve.points)
    assert curve.points[-1].streamed_nbytes == 0
    assert all(p.step_ms >= p.bound_ms - 1e-9 and p.bound_ms >= p.naive_ms - 1e-9 for p in curve.points)
    head, names, *rows = str(curve).splitlines()
    assert head == f"curve  compute {curve.compute_ms:.4g} ms"
    knee = dataclasses.replace(curve, knee_nbytes=3 << 20)
    assert str(knee).startswith(f"{head}  knee of the naive bound 3.00 MiB\n")
    assert names.split()[:3] == ["budget", "step", "ms"]
    assert [row.split()[2] for row in rows] == [f"{p.step_ms:.4g}" for p in curve.points]
    landmarks = found.landmarks
    assert landmarks.free is not None
    assert landmarks.free.step_ms <= 1.01 * curve.compute_ms
    with pytest.raises(BudgetError):
        found.at(landmarks.smallest.budget_nbytes - 1)


# -- nothing changes -----------------------------------------------------------------------------------------------


class Remembers(nn.Module):
    """Changes itself when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(16) for _ in range(3))
        self.register_buffer("seen", torch.zeros(3, 16))
        self.last: torch.Tensor | None = None
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        self.seen.add_(x)
        self.last = x
        self.calls += 1
        return x


def test_nothing_on_the_model_changes() -> None:
    model = Remembers().eval().requires_grad_(False)
    before = {name: (id(t), t.data_ptr(), t._version, t.clone()) for name, t in model.state_dict(keep_vars=True).items()}
    fxoffload.explain(model, rows(0), machine=NOMINAL, memory_budget="1MiB")
    assert (model.last, model.calls) == (None, 0)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert before[name][:3] == (id(tensor), tensor.data_ptr(), tensor._version)
        assert torch.equal(before[name][3], tensor)
    with pytest.raises(OffloadError, match="its weights are not offloaded yet"):
        fxoffload.stats(model)


def test_explaining_counts_as_no_recompile() -> None:
    model = toy(3)
    compiled = run(model, rows(0))
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for n in range(2, 14):
            fxoffload.explain(model, rows(0, n=n), machine=NOMINAL, memory_budget="1MiB")
        with torch.no_grad():
            compiled(rows(1))


def test_a_model_that_is_compiled_in_place() -> None:
    model = toy(6, 64)
    model.compile(backend="layerwise", options=OPTIONS)
    assert str(fxoffload.explain(model, rows(0, 64, 32), machine=NOMINAL, memory_budget="200KiB")) == str(explained())


# -- files ---------------------------------------------------------------------------------------------------------


def test_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = explained()
    found.save_trace(tmp_path / "trace.json")
    names = {event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]}
    assert {*found.plan.segments, *(load.name for load in found.plan.loads)} <= names
    for name, save in (("timeline.png", found.save_picture), ("curve.png", found.save_curve)):
        save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(PNG)


def test_html(monkeypatch: pytest.MonkeyPatch) -> None:
    found = explained()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    page = found._repr_html_()
    assert "<img" not in page
    assert "<h4>Plan</h4>\n<pre>plan  budget 200.00 KiB" in page
    assert page.count("<table>") == page.count("</table>") == 2
    for cell in ("streamed, wraps", "blocks.2-5 (x4)", "smallest that works"):
        assert f">{cell}</td>" in page
    assert all(sentence in page for sentence in found.words)


def test_html_with_a_picture() -> None:
    pytest.importorskip("matplotlib")
    assert '<img alt="predicted timeline" src="data:image/png;base64,iVBOR' in explained()._repr_html_()


# -- errors --------------------------------------------------------------------------------------------------------


def no_accelerator(check_available: bool = False) -> None:
    return None


class Breaks(Toy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        torch._dynamo.graph_break()
        return x + 1


def refusal_of(error: type[Exception], *inputs: Any, model: Any = None, **options: Any) -> str:
    with pytest.raises(error) as refusal:
        fxoffload.explain(toy(2) if model is None else model, *inputs, **options)
    return str(refusal.value)


def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", no_accelerator)
    x = rows(0)
    assert refusal_of(OffloadError) == (
        "api: Toy: its weights are not offloaded yet; compile it with torch.compile(model, backend='layerwise') and call it once"
        ", or give fxoffload.explain the inputs of one call"
    )
    assert refusal_of(TypeError, model="x").startswith("api: str: give a torch.nn.Module")
    assert refusal_of(ConfigError, x, memory_budget="1MiB") == (
        "report: onload_device: 'cuda' is not available, this machine has no accelerator; give a machine to plan for, "
        "such as machine=fxoffload.Machine.nominal(), or onload_device='cpu'"
    )
    assert refusal_of(ConfigError, x, machine=NOMINAL) == (
        "report: memory_budget: 'auto' depends on the memory of 'cuda', which is not available here; give a size such as '8GiB'"
    )
    assert refusal_of(ConfigError, x, machine=NOMINAL, memory_size=3).startswith("config: options: unknown key 'memory_size'")
    misspelt = "config: options: unknown key 'memory_bugdet'; did you mean 'memory_budget'?"
    assert refusal_of(ConfigError, memory_bugdet="1MiB", max_bucket_bytes="4MiB") == misspelt
    assert refusal_of(ConfigError, memory_budget="1MiB", max_bucket_bytes="4MiB", model=toy(2)) == (
        "report: max_bucket_bytes: it takes another trace of the model; give the inputs of one call, too"
    )
    assert "raise the budget to at least" in refusal_of(BudgetError, x, machine=NOMINAL, memory_budget="1KiB")


def test_a_model_that_is_not_one_graph() -> None:
    text = refusal_of(OffloadError, rows(0), model=Breaks(2), machine=NOMINAL, memory_budget="1MiB")
    assert text.startswith("analysis: Breaks: with these inputs it does not trace as one graph (")
    assert text.endswith("); compile and run it, then call fxoffload.explain(model) without inputs, which shows every graph")


def test_a_call_that_fails() -> None:
    text = refusal_of(OffloadError, rows(0, 8), machine=NOMINAL, memory_budget="1MiB")
    assert "does not trace as one graph (RuntimeError when making fake tensor call: RuntimeError(" in text
    assert "must have same reduction dim, but got [3, 8] X [16, 16]" in text


def test_a_meta_model_does_not_run() -> None:
    with pytest.raises(WeightError, match="is on the meta device and has no bytes; load it before the first call"):
        run(meta_toy(), rows(0, 64, 32))


def test_weights_that_ask_for_gradients_do_not_matter() -> None:
    assert (
        explained().plan
        == fxoffload.explain(toy(6, 64).requires_grad_(True), rows(0, 64, 32), machine=NOMINAL, memory_budget="200KiB").plan
    )
    assert issubclass(GradientError, OffloadError)
