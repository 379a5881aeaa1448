"""Settings: every form that is accepted, every refusal by its text, the budget's arithmetic, the debug switches."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import pytest
import torch

from fxoffload.config import _CHECKS, OffloadConfig, resolve_budget
from fxoffload.debug import Switches, start_logging, switches
from fxoffload.errors import ConfigError
from fxoffload.sizes import GIB, MIB

SIZES = (
    "a whole number of bytes > 0, as an int or as text such as '512MiB', '4 gb', '0.5KiB' "
    "(units B, KiB, MiB, GiB, TiB or KB, MB, GB, TB, all binary)"
)
BUDGETS = f"'auto', a fraction of the device as a float with 0 < fraction <= 1, or {SIZES}"
NAMES = "dotted module names, as one string or as a list of strings"
DEVICES = "a torch.device, or its name such as 'cuda', 'cuda:1' or 'cpu'"
ONLOADS = "an accelerator such as 'cuda' or 'cuda:1', or 'cpu'"


def config(**options: object) -> OffloadConfig:
    return OffloadConfig.from_options(options)


def test_defaults() -> None:
    expected = {
        "memory_budget": "auto",
        "module_names": None,
        "module_filter": None,
        "onload_device": torch.device("cuda"),
        "offload_device": torch.device("cpu"),
        "output_device": None,
        "async_transfer": True,
        "transfer_buckets": None,
        "persistent_buckets": None,
        "persistent_bins": None,
        "prefetch_limit": False,
        "max_copy_streams": 1,
        "max_inflight_prefetch_bytes": None,
        "non_blocking": False,
        "eager_offload": True,
        "segment_compiler": "inductor",
        "inductor": None,
        "max_bucket_bytes": "auto",
        "profile": False,
        "mode": None,
        "cuda_graph": False,
    }
    assert dataclasses.asdict(OffloadConfig.from_options(None)) == expected
    assert OffloadConfig() == config() == OffloadConfig.from_options(None, mode="default")


@pytest.mark.parametrize(
    ("name", "given", "stored"),
    [
        ("memory_budget", 8 * GIB, 8 * GIB),
        ("memory_budget", "8 GiB", 8 * GIB),
        ("memory_budget", 0.5, 0.5),
        ("memory_budget", 1.0, 1.0),
        ("memory_budget", "AUTO", "auto"),
        ("module_names", "blocks.0", ("blocks.0",)),
        ("module_names", "", ("",)),
        ("module_names", ["blocks.0", "blocks.1", "blocks.0"], ("blocks.0", "blocks.1")),
        ("module_names", (name for name in ("a", "b")), ("a", "b")),
        ("module_filter", callable, callable),
        ("onload_device", "cuda:1", torch.device("cuda", 1)),
        ("onload_device", torch.device("cpu"), torch.device("cpu")),
        ("onload_device", "xpu", torch.device("xpu")),
        ("offload_device", "cpu", torch.device("cpu")),
        ("output_device", "cpu", torch.device("cpu")),
        ("async_transfer", False, False),
        ("async_transfer", None, True),
        ("transfer_buckets", 1, 1),
        ("transfer_buckets", "auto", None),
        ("persistent_buckets", 0, 0),
        ("persistent_bins", 4, 4),
        ("prefetch_limit", True, True),
        ("max_copy_streams", 4, 4),
        ("max_copy_streams", None, 1),
        ("max_inflight_prefetch_bytes", "4gib", 4 * GIB),
        ("max_inflight_prefetch_bytes", 1, 1),
        ("non_blocking", True, True),
        ("eager_offload", False, False),
        ("segment_compiler", "eager", "eager"),
        ("inductor", {"max_autotune": True}, {"max_autotune": True}),
        ("max_bucket_bytes", "96MiB", 96 * MIB),
        ("max_bucket_bytes", None, "auto"),
        ("profile", True, True),
        ("mode", "max-autotune-no-cudagraphs", "max-autotune-no-cudagraphs"),
        ("mode", "reduce-overhead", None),
        ("mode", "max-autotune", "max-autotune-no-cudagraphs"),
        ("cuda_graph", True, True),
        ("cuda_graph", "strict", "strict"),
    ],
)
def test_accepted(name: str, given: object, stored: object) -> None:
    assert getattr(config(**{name: given}), name) == stored


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory_budget", "4g", f"'4g' is not a size; give {SIZES}"),
        ("memory_budget", "0", f"'0' comes to 0 bytes; give {SIZES}"),
        ("memory_budget", 0, f"0 is not a size; give {SIZES}"),
        ("memory_budget", -1, f"-1 is not a size; give {SIZES}"),
        ("memory_budget", 0.0, f"0.0 is not accepted; give {BUDGETS}"),
        ("memory_budget", 1.5, f"1.5 is not accepted; give {BUDGETS}"),
        ("memory_budget", float("nan"), f"nan is not accepted; give {BUDGETS}"),
        ("module_names", [], "the list is empty; give at least one name, or leave it out to offload the whole model"),
        ("onload_device", "meta", f"'meta' is not accepted; give {ONLOADS}"),
        ("onload_device", "gpu", f"'gpu' is not accepted; give {DEVICES}"),
        ("offload_device", "cuda", "'cuda' is not accepted; give 'cpu'"),
        ("offload_device", "meta", "'meta' is not accepted; give 'cpu'"),
        ("output_device", "meta", "'meta' is not accepted; give a device that holds values, or None for the onload device"),
        ("transfer_buckets", 0, "0 is not accepted; give an int >= 1, or leave it out"),
        ("persistent_buckets", -1, "-1 is not accepted; give an int >= 0, or leave it out"),
        ("persistent_bins", 0, "0 is not accepted; give an int >= 1, or leave it out"),
        ("max_copy_streams", 0, "0 is not accepted; give an int >= 1, or leave it out"),
        ("max_inflight_prefetch_bytes", "0.1b", f"'0.1b' comes to 0.1 bytes; give {SIZES}"),
        ("max_inflight_prefetch_bytes", 0, f"0 is not a size; give {SIZES}"),
        ("max_bucket_bytes", "4ib", f"'4ib' is not a size; give {SIZES}"),
        ("segment_compiler", "aot-eager", "'aot-eager' is not accepted; did you mean 'aot_eager' or 'eager'?"),
        ("segment_compiler", "tvm", "'tvm' is not accepted; give one of 'inductor', 'aot_eager', 'eager'"),
        (
            "mode",
            "fast",
            "'fast' is not accepted; give one of 'default', 'max-autotune-no-cudagraphs', 'reduce-overhead', 'max-autotune'",
        ),
        ("cuda_graph", "yes", "'yes' is not accepted; give True, False or 'strict'"),
    ],
)
def test_refused(name: str, value: object, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**{name: value})
    assert str(caught.value) == f"config: {name}: {text}"


@pytest.mark.parametrize(
    ("name", "value", "shown", "accepted"),
    [
        ("memory_budget", True, "True is of type bool", BUDGETS),
        ("memory_budget", None, "None is of type NoneType", BUDGETS),
        ("module_names", 3, "3 is of type int", NAMES),
        ("module_names", b"blocks", "b'blocks' is of type bytes", NAMES),
        ("module_names", ["blocks.0", 1], "1 is of type int", NAMES),
        ("module_names", [["blocks.0"]], "['blocks.0'] is of type list", NAMES),
        ("module_filter", "blocks", "'blocks' is of type str", "a function (name, module) -> bool"),
        ("onload_device", None, "None is of type NoneType", DEVICES),
        ("output_device", 0, "0 is of type int", DEVICES),
        ("async_transfer", 1, "1 is of type int", "True or False"),
        ("transfer_buckets", True, "True is of type bool", "an int >= 1, or leave it out"),
        ("transfer_buckets", 2.0, "2.0 is of type float", "an int >= 1, or leave it out"),
        ("transfer_buckets", "2", "'2' is of type str", "an int >= 1, or leave it out"),
        ("persistent_buckets", False, "False is of type bool", "an int >= 0, or leave it out"),
        ("persistent_bins", True, "True is of type bool", "an int >= 1, or leave it out"),
        ("prefetch_limit", 1, "1 is of type int", "True or False"),
        ("prefetch_limit", None, "None is of type NoneType", "True or False"),
        ("max_copy_streams", "1", "'1' is of type str", "an int >= 1, or leave it out"),
        ("max_inflight_prefetch_bytes", True, "True is of type bool", SIZES),
        ("max_inflight_prefetch_bytes", 0.5, "0.5 is of type float", SIZES),
        ("non_blocking", "yes", "'yes' is of type str", "True or False"),
        ("eager_offload", 0, "0 is of type int", "True or False"),
        ("segment_compiler", None, "None is of type NoneType", "one of 'inductor', 'aot_eager', 'eager'"),
        ("inductor", [1], "[1] is of type list", "a dict of Inductor settings by name, such as {'max_autotune': True}"),
        ("inductor", {1: True}, "1 is of type int", "a dict of Inductor settings by name, such as {'max_autotune': True}"),
        ("max_bucket_bytes", 1.0, "1.0 is of type float", SIZES),
        ("profile", "yes", "'yes' is of type str", "True or False"),
        ("mode", 1, "1 is of type int", "one of 'default', 'max-autotune-no-cudagraphs', 'reduce-overhead', 'max-autotune'"),
        ("cuda_graph", 1, "1 is of type int", "True, False or 'strict'"),
    ],
)
def test_wrong_type(name: str, value: object, shown: str, accepted: str) -> None:
    with pytest.raises(TypeError) as caught:
        config(**{name: value})
    assert str(caught.value) == f"config: {name}: {shown}; give {accepted}"


def test_every_field_is_checked() -> None:
    assert set(_CHECKS) == {field.name for field in dataclasses.fields(OffloadConfig)}


def test_an_unknown_key_is_named_with_the_nearest() -> None:
    with pytest.raises(ConfigError) as caught:
        config(memory_bugdet="8GiB")
    assert str(caught.value) == "config: options: unknown key 'memory_bugdet'; did you mean 'memory_budget'?"
    with pytest.raises(ConfigError, match=re.escape("unknown key 'zzz'; give one of 'memory_budget', 'module_names', ")):
        config(zzz=1)


def test_options_are_a_dict() -> None:
    with pytest.raises(TypeError) as caught:
        OffloadConfig.from_options(["memory_budget"])  # type: ignore[arg-type]
    assert str(caught.value) == "config: options: ['memory_budget'] is of type list; give a dict of settings by name"


@pytest.mark.parametrize(("onload", "expected"), [("cuda", True), ("cuda:1", True), ("xpu", True), ("cpu", True), ("mps", False)])
def test_async_transfer_follows_the_pair(onload: str, expected: bool) -> None:
    assert config(onload_device=onload).async_transfer is expected


@pytest.mark.parametrize(("onload", "offload"), [("mps", "cpu"), ("meta", "cpu"), ("cuda", "cuda"), ("cpu", "meta")])
def test_async_transfer_that_the_pair_has_not(onload: str, offload: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config(onload_device=onload, offload_device=offload, async_transfer=True)
    assert str(caught.value) == (
        f"config: async_transfer: True, but copies from offload_device '{offload}' to onload_device '{onload}' are not "
        "asynchronous; leave async_transfer out or pass False, or give an accelerator with streams and 'cpu'"
    )


def test_names_and_filter_exclude_each_other() -> None:
    with pytest.raises(ConfigError) as caught:
        config(module_names=["a", "b"], module_filter=callable)
    assert str(caught.value) == "config: module_filter: module_names is given too ('a', 'b'); give one of the two"


def test_the_mode_may_come_with_the_options() -> None:
    mode = "max-autotune-no-cudagraphs"
    assert config(mode=mode) == OffloadConfig.from_options({}, mode=mode) == OffloadConfig.from_options({"mode": mode}, mode=mode)
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_options({"mode": mode}, mode="default")
    assert str(caught.value) == (
        "config: mode: 'default' is given, and 'max-autotune-no-cudagraphs' among the options; give one of the two"
    )


@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_modes_that_capture(mode: str) -> None:
    captured = OffloadConfig.from_options({}, mode=mode)
    assert captured.cuda_graph is True
    assert captured == config(cuda_graph=True, mode=captured.mode)
    assert config(mode=mode, cuda_graph="strict").cuda_graph == "strict"
    assert config(mode="max-autotune-no-cudagraphs").cuda_graph is False


def test_equal_settings_are_one_key() -> None:
    spelled = [
        config(memory_budget="8GiB", module_names="a", onload_device="cpu", inductor={"max_autotune": True}),
        config(memory_budget=8 * GIB, module_names=["a"], onload_device=torch.device("cpu"), inductor={"max_autotune": True}),
    ]
    assert spelled[0] == spelled[1]
    assert len(set(spelled)) == 1
    assert config(inductor={"a": 1}) != config(inductor={"a": 2})


def test_frozen_and_apart_from_the_caller() -> None:
    patches = {"max_autotune": True}
    made = config(inductor=patches)
    patches.clear()
    assert made.inductor == {"max_autotune": True}
    with pytest.raises(dataclasses.FrozenInstanceError):
        made.prefetch_limit = True  # type: ignore[misc]


@pytest.mark.parametrize(
    ("budget", "nbytes"),
    [
        ("3GiB", 3 * GIB),
        ("100GiB", 100 * GIB),
        (0.5, 40 * GIB),
        (1.0, 80 * GIB),
        ("auto", 60 * GIB),
    ],
)
def test_resolved_budget(budget: object, nbytes: int) -> None:
    assert resolve_budget(config(memory_budget=budget), total_nbytes=80 * GIB, free_nbytes=64 * GIB) == nbytes


@pytest.mark.parametrize(
    ("free", "nbytes"), [(0, 0), (100 * MIB, 50 * MIB), (512 * MIB, 256 * MIB), (GIB, 768 * MIB), (4 * GIB, 3840 * MIB)]
)
def test_auto_keeps_a_margin(free: int, nbytes: int) -> None:
    assert resolve_budget(config(), total_nbytes=80 * GIB, free_nbytes=free) == nbytes


def test_switches(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text("{}")
    given = {"LOG": "1", "DUMP": str(tmp_path / "new"), "PLAN": str(plan), "POISON": "1"}
    found = switches({f"FXOFFLOAD_{name}": value for name, value in given.items()})
    assert found == Switches(log_level=logging.INFO, dump=tmp_path / "new", plan=plan, poison=True)
    assert switches({}) == switches({f"FXOFFLOAD_{name}": "" for name in given}) == Switches()


def test_switches_are_read_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FXOFFLOAD_POISON", "1")
    assert switches().poison
    monkeypatch.setenv("FXOFFLOAD_POISON", "0")
    assert not switches().poison


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("LOG", "3", "'3' is not accepted; give one of 0, 1, 2, or unset it"),
        ("POISON", "yes", "'yes' is not accepted; give one of 0, 1, or unset it"),
        ("PLAN", "no/such.json", "there is no file 'no/such.json'; give a file that Plan.save wrote"),
        ("DUMP", __file__, f"{__file__!r} is not a directory; give a directory, or one to be made"),
    ],
)
def test_a_bad_switch(name: str, value: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        switches({f"FXOFFLOAD_{name}": value})
    assert str(caught.value) == f"debug: FXOFFLOAD_{name}: {text}"


def test_the_log_level_is_the_applications_unless_chosen() -> None:
    log = logging.getLogger("fxoffload")
    before = log.level, list(log.handlers)
    try:
        start_logging(Switches())
        assert (log.level, list(log.handlers)) == before
        start_logging(Switches(log_level=logging.DEBUG))
        assert log.level == logging.DEBUG
    finally:
        log.setLevel(before[0])
        log.handlers[:] = before[1]
