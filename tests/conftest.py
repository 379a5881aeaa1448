"""What every test has: devices looked for once, Dynamo left clean."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """A benchmark runs once, as a test, unless one asks for benchmarks: `pytest tests/bench --benchmark-only`."""
    asked = config.getoption("benchmark_only", False) or config.getoption("benchmark_enable", False)
    if not asked:
        config.option.benchmark_disable = True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is marked `gpu` where there is no accelerator."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if torch.accelerator.is_available():
        return
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs an accelerator"))


@pytest.fixture(autouse=True)
def clean_dynamo() -> Iterator[None]:
    """No compiled code, guard or recompile count goes from one test to the next. A test without torch does not load it."""
    yield
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].reset()
