"""The machine's formulas, its file, and where measured constants are kept."""

from __future__ import annotations

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch

from fxoffload import calibrate
from fxoffload.calibrate import cache_path, fit_pieces, machine_of
from fxoffload.errors import ConfigError
from fxoffload.machine import Machine

MACHINE = Machine("test", 50.0, 0.01, 2000.0, 0.005, (("bfloat16", 400.0), ("float32", 50.0)))
CPU = torch.device("cpu")
CUDA = torch.device("cuda", 0)


def test_a_copy_takes_its_latency_and_its_bytes_over_the_link() -> None:
    assert MACHINE.copy_ms(0) == pytest.approx(0.01)
    assert MACHINE.copy_ms(50_000_000) == pytest.approx(1.01)
    assert MACHINE.link_bytes_per_ms == pytest.approx(50e6)


@pytest.mark.parametrize(
    ("flops", "nbytes", "dtype", "ms"),
    [
        (400e9, 0, "bfloat16", 1.005),
        (400e9, 0, "float32", 8.005),
        (400e9, 0, "float16", 8.005),  # not in the table: the slowest
        (0, 2e9, "bfloat16", 1.005),
        (400e9, 4e9, "bfloat16", 2.005),  # the longer of both
        (800e9, 2e9, "bfloat16", 2.005),
        (0, 0, "", 0.005),
    ],
)
def test_compute_takes_a_launch_and_the_longer_of_operations_and_bytes(
    flops: float, nbytes: float, dtype: str, ms: float
) -> None:
    assert MACHINE.compute_ms(flops, nbytes, dtype) == pytest.approx(ms)


def test_attention_runs_at_a_rate_of_its_own_where_one_is_known() -> None:
    known = dataclasses.replace(MACHINE, tflop_s=(*MACHINE.tflop_s, ("bfloat16_attention", 200.0)))
    assert known.compute_ms(400e9, 0, "bfloat16_attention") == pytest.approx(2.005)
    assert known.compute_ms(400e9, 0, "bfloat16") == pytest.approx(1.005)
    assert MACHINE.compute_ms(400e9, 0, "bfloat16_attention") == pytest.approx(1.005)
    assert known.compute_ms(400e9, 0, "float16_attention") == pytest.approx(8.005)


def test_what_has_no_rate_runs_at_the_next_more_general_one() -> None:
    rates = {"bfloat16": 8.0, "bfloat16_attention": 4.0, "bfloat16_masked_attention": 2.0, "float8_e4m3fn": 16.0, "float32": 1.0}

    def rate(name: str, *unknown: str) -> float:
        known = tuple((k, v) for k, v in rates.items() if k not in unknown)
        return dataclasses.replace(MACHINE, tflop_s=known).rate(name)

    masked, plain = "bfloat16_masked_attention", "bfloat16_attention"
    assert [rate(name) for name in (masked, plain, "bfloat16")] == [2.0, 4.0, 8.0]
    assert [rate(name, masked) for name in (masked, plain, "bfloat16")] == [4.0, 4.0, 8.0]
    assert [rate(name, masked, plain) for name in (masked, plain, "bfloat16")] == [8.0, 8.0, 8.0]
    assert [rate(name) for name in ("float8_e4m3fn", "float8_e4m3fn_attention", "float16_masked_attention", "")] == [16, 16, 1, 1]
    assert [rate(name, "float8_e4m3fn") for name in ("float8_e4m3fn", "float8_e4m3fn_attention")] == [8.0, 8.0]


def copies_ms(latency_ms: float, bytes_ms: float) -> tuple[float, float]:
    """What one copy takes, and 32 pieces of it in a row."""
    return latency_ms + bytes_ms, 32 * latency_ms + bytes_ms


@pytest.mark.parametrize(("latency_ms", "bytes_ms"), [(0.002, 2.4), (0.01, 5.0), (0.1, 40.0)])
def test_latency_and_link_are_found_in_the_times_of_copies(latency_ms: float, bytes_ms: float) -> None:
    assert fit_pieces(*copies_ms(latency_ms, bytes_ms), 32) == pytest.approx((latency_ms, bytes_ms))


@pytest.mark.parametrize(
    ("times_ms", "latency_ms"),
    [
        ((5.0, 4.9), 0.001),  # the large copy was held up
        ((5.0, 5.0), 0.001),
        ((5.0, 400.0), 2.5),  # the pieces were
        ((0.001, 0.001), 0.0005),
    ],
)
def test_whatever_the_times_of_copies_the_latency_and_the_link_are_positive(
    times_ms: tuple[float, float], latency_ms: float
) -> None:
    assert fit_pieces(*times_ms, 32) == pytest.approx((latency_ms, times_ms[0] - latency_ms))


def test_what_slows_a_machine_for_a_while_is_not_taken_for_a_constant_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times, works = iter([9.0, 2.5, 2.0, 7.0, 2.1, 2.2, 8.0, 3.0]), []

    class Event:
        def __init__(self, *_: object, **__: object) -> None: ...

        def record(self) -> None: ...

        def synchronize(self) -> None: ...

        def elapsed_time(self, _: object) -> float:
            return next(times)

    monkeypatch.setattr(torch, "Event", Event)
    assert calibrate._ms(CPU, lambda: works.append("work"), behind=lambda: works.append("behind")) == 2.0
    assert works == ["work", *["behind", "work"] * 8]


@pytest.mark.parametrize(("lasting", "slowdown"), [(1.25, 1.25), (0.9, 1.0)])
def test_matrix_rates_are_those_of_a_device_that_works_on(
    monkeypatch: pytest.MonkeyPatch, lasting: float, slowdown: float
) -> None:
    clock = iter([0.0, 0.1, 0.15, 0.2, 0.3])
    times = iter([[1.1, 1.0, 1.05], [0.5] * 3, [0.6] * 3, [9.0, lasting, 9.0], [0.1, lasting, lasting]])
    monkeypatch.setattr(calibrate.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(calibrate, "_times_ms", lambda *_: next(times))
    monkeypatch.setattr(calibrate, "_MATRIX", 16)
    assert calibrate._slowdown(CPU) == slowdown


@pytest.mark.parametrize("has_float8", [True, False])
def test_an_accelerator_is_measured(monkeypatch: pytest.MonkeyPatch, has_float8: bool) -> None:
    def product(a: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        if has_float8:
            return a
        raise RuntimeError("torch._scaled_mm is only supported on some devices")

    nbytes, nothing = 128 << 20, lambda *_, **__: 100.0
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.accelerator, "synchronize", lambda _: None)
    monkeypatch.setattr(torch, "_scaled_mm", product)
    monkeypatch.setattr(calibrate, "_MATRIX", 16)
    monkeypatch.setattr(calibrate, "_ms", lambda _, work: (work(), 1e-3)[1])
    monkeypatch.setattr(calibrate, "_copies_ms", lambda _: (*copies_ms(0.01, nbytes / 25e6), 2 * nbytes / 2e9))
    monkeypatch.setattr(calibrate, "_products_ms", lambda _: (0.006 + 0.03, 8 * 0.006 + 0.03))
    monkeypatch.setattr(calibrate, "_matrix_tflop_s", nothing)
    monkeypatch.setattr(calibrate, "_attention_tflop_s", nothing)
    monkeypatch.setattr(calibrate, "_slowdown", lambda _: 1.5)
    machine = calibrate.measure(CPU)
    assert (machine.copy_latency_ms, machine.link_gb_s, machine.memory_gb_s) == pytest.approx((0.01, 25.0, 2000.0))
    assert machine.launch_ms == pytest.approx(0.006)
    assert machine.rate("float32") == 100.0
    # Halfway to what lasts.
    assert machine.rate("float16_masked_attention") == 80.0
    assert machine.rate("float8_e4m3fn") == (pytest.approx(2 * 16**3 / 1e-3 / 1e9 / 1.25) if has_float8 else 80.0)


def test_saved_and_loaded_it_is_equal(tmp_path: Path) -> None:
    path = tmp_path / "made" / "machine.json"
    MACHINE.save(path)
    assert Machine.load(path) == MACHINE
    assert hash(Machine.load(path)) == hash(MACHINE)
    assert path.read_text().endswith("}\n")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"link_gb_s": 0.0}, "link_gb_s: 0.0 is not accepted; give a number from 1e-06 to 1e+09"),
        ({"link_gb_s": float("inf")}, "link_gb_s: inf is not accepted; give a number from 1e-06 to 1e+09"),
        ({"memory_gb_s": float("nan")}, "memory_gb_s: nan is not accepted; give a number from 1e-06 to 1e+09"),
        ({"launch_ms": -1}, "launch_ms: -1 is not accepted; give a number from 0 to 1e+09"),
        ({"copy_latency_ms": float("inf")}, "copy_latency_ms: inf is not accepted; give a number from 0 to 1e+09"),
        ({"tflop_s": (("float32", 1.0), ("bfloat16", 0))}, "bfloat16: 0 is not accepted; give a number from 1e-06 to 1e+09"),
        ({"tflop_s": ()}, "tflop_s has no rate; give one at least, such as ('bfloat16', 100.0)"),
    ],
)
def test_numbers_that_no_machine_has(change: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        dataclasses.replace(MACHINE, **change)
    assert str(refusal.value) == f"machine: test: {text}"


@pytest.mark.parametrize("value", ["5", None, True])
def test_what_is_no_number(value: Any) -> None:
    with pytest.raises(TypeError) as refusal:
        dataclasses.replace(MACHINE, launch_ms=value)
    kind = type(value).__name__
    assert str(refusal.value) == f"machine: test: launch_ms: {value!r} is of type {kind}; give a number from 0 to 1e+09"


def test_nominal_is_the_same_everywhere() -> None:
    assert Machine.nominal() == Machine.nominal()
    assert Machine.nominal("cpu") == dataclasses.replace(Machine.nominal(), name="cpu")
    assert dict(Machine.nominal().tflop_s).keys() == {"bfloat16", "float16", "float32"}


class TestGolden(expecttest.TestCase):
    def test_line(self) -> None:
        self.assertExpectedInline(
            str(MACHINE), """machine  test  link 50.0 GB/s  memory 2000 GB/s  bfloat16 400 TFLOP/s  float32 50 TFLOP/s"""
        )


# -- calibrate --------------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[torch.device]:
    """A CUDA device of a given name, measured at once; the list has what was measured."""
    found: list[torch.device] = []

    def measure(device: torch.device) -> Machine:
        found.append(device)
        return MACHINE

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "measure", measure)
    monkeypatch.setattr(calibrate, "link_gb_s", lambda device: MACHINE.link_gb_s)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A device")
    monkeypatch.setattr(calibrate, "_driver_version", lambda: "1.2.3")
    machine_of.cache_clear()
    return found


@pytest.fixture(autouse=True)
def forget() -> Any:
    yield
    machine_of.cache_clear()


def test_the_cpu_is_nominal_and_leaves_no_file(measured: list[torch.device], tmp_path: Path) -> None:
    assert machine_of(CPU) == Machine.nominal("cpu")
    assert measured == []
    assert not (tmp_path / "cache").exists()


def test_a_device_is_measured_once_a_machine(measured: list[torch.device]) -> None:
    assert machine_of(CUDA) == machine_of(CUDA) == MACHINE
    assert measured == [CUDA]
    assert cache_path(CUDA).is_file()
    machine_of.cache_clear()
    assert machine_of(CUDA) == MACHINE, "another process finds the file"
    assert measured == [CUDA]


@pytest.mark.parametrize(("now", "again"), [(1.09, False), (1.11, True), (0.3, False)])
def test_a_link_that_was_in_use_when_it_was_measured_is_measured_again(
    monkeypatch: pytest.MonkeyPatch, measured: list[torch.device], now: float, again: bool
) -> None:
    slow = dataclasses.replace(MACHINE, link_gb_s=16.0)
    slow.save(cache_path(CUDA))
    monkeypatch.setattr(calibrate, "link_gb_s", lambda device: now * 16.0)
    assert machine_of(CUDA) == (MACHINE if again else slow)
    assert measured == ([CUDA] if again else [])
    assert Machine.load(cache_path(CUDA)) == machine_of(CUDA)


def test_the_link_is_looked_at_with_a_few_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **options: empty(*shape, **options))
    monkeypatch.setattr(calibrate, "_ms", lambda device, work: (work(), 2.0)[1])
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    assert calibrate.link_gb_s(CPU) == 32 * 2**20 / 2e6


def test_the_file_lies_in_the_users_cache(monkeypatch: pytest.MonkeyPatch, measured: list[torch.device], tmp_path: Path) -> None:
    path = cache_path(CUDA)
    assert path.parent == tmp_path / "cache" / "fxoffload"
    assert path.name.startswith("machine-")
    assert path.suffix == ".json"
    for unset in ("", None):
        if unset is None:
            monkeypatch.delenv("XDG_CACHE_HOME")
        else:
            monkeypatch.setenv("XDG_CACHE_HOME", unset)
        monkeypatch.setattr(Path, "home", lambda: tmp_path)
        assert cache_path(CUDA) == tmp_path / ".cache" / "fxoffload" / path.name


def test_device_driver_and_torch_are_the_key(monkeypatch: pytest.MonkeyPatch, measured: list[torch.device]) -> None:
    paths = {cache_path(CUDA)}
    assert cache_path(torch.device("cuda", 1)) in paths, "two devices of one name are one machine"
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_name", lambda device: "Another device")
        paths.add(cache_path(CUDA))
    with monkeypatch.context() as patch:
        patch.setattr(calibrate, "_driver_version", lambda: "1.2.4")
        paths.add(cache_path(CUDA))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        paths.add(cache_path(CUDA))
    assert len(paths) == 4
    assert cache_path(CUDA) in paths


def test_a_cache_that_cannot_be_written_is_a_line_in_the_log(
    monkeypatch: pytest.MonkeyPatch, measured: list[torch.device], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, logger="fxoffload"):
        assert machine_of(CUDA) == MACHINE
    (record,) = caplog.records
    assert record.getMessage().startswith(f"calibrate: {cache_path(CUDA)} cannot be written (")
    assert record.getMessage().endswith("); the machine will be measured again next time")


NO_LINK = json.dumps({**dataclasses.asdict(MACHINE), "link_gb_s": 0})


@pytest.mark.parametrize("content", ["", "{", "{}", '{"name": "half written"', NO_LINK])
def test_a_file_that_cannot_be_read_is_measured_anew(measured: list[torch.device], content: str) -> None:
    cache_path(CUDA).parent.mkdir(parents=True)
    cache_path(CUDA).write_text(content)
    assert machine_of(CUDA) == MACHINE
    assert measured == [CUDA]
    assert Machine.load(cache_path(CUDA)) == MACHINE
