"""Scripts that a GPU runs now and then, here on the CPU device, so that they still run when they are needed."""

from __future__ import annotations

import pytest
import torch

from tests.gpu import sanitize


@torch.no_grad()
def test_what_a_sanitizer_watches(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FXOFFLOAD_POISON", "1")
    assert sanitize.main(["--device", "cpu"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in said] == list(sanitize.WAYS)
    assert [line.endswith("all equal to the resident model's") for line in said] == [True, False, True]
    assert said[1] == "captured: left out: only CUDA captures"
    with pytest.raises(SystemExit, match="'other' is none of uncaptured, captured, hooks"):
        sanitize.main(["--ways", "other", "--device", "cpu"])
