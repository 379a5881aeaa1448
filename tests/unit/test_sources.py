"""Where pipelines come from, and what is said where they are not there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fxoffload import cli, sources

diffusers = pytest.importorskip("diffusers")


def refused(model: str | None, capsys: pytest.CaptureFixture[str]) -> str:
    """What the last line on stderr says of the preset flux, or of another model."""
    assert cli.main(["generate", "flux", *([] if model is None else ["--model", model])]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    return printed.err.splitlines()[-1].removeprefix("fxoffload: cli: ")


WANTED = "give one that save_pretrained of a diffusers pipeline wrote"


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (None, f"--model: FOLDER: there is no model_index.json in this folder; {WANTED}"),
        ("{", "--model: FOLDER/model_index.json: Expecting property name enclosed in double quotes"),
        ("[]", f"--model: FOLDER/model_index.json: it names no class; {WANTED}"),
        (
            '{"_class_name": "Nothing"}',
            "--model: FOLDER: diffusers VERSION has no pipeline 'Nothing'; install another version, or",
        ),
        ('{"_class_name": "AutoencoderKL"}', "--model: FOLDER: diffusers VERSION has no pipeline 'AutoencoderKL'; install"),
    ],
)
def test_folders(index: str | None, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if index is not None:
        (tmp_path / "model_index.json").write_text(index)
    expected = text.replace("FOLDER", str(tmp_path)).replace("VERSION", diffusers.__version__)
    assert refused(str(tmp_path), capsys).startswith(expected)


def test_no_folder(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused("./models/flux", capsys)
    what = "give a folder in diffusers format, or a hub id such as black-forest-labs/FLUX.1-dev"
    assert line == f"--model: ./models/flux: no such folder; {what}"


def test_no_network(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fail(model: str, **_: Any) -> None:
        raise LocalEntryNotFoundError(f"Got: ConnectError for {model}\nPlease check your connection.")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    line = refused(None, capsys)
    what = "black-forest-labs/FLUX.1-dev cannot be loaded (Got: ConnectError for black-forest-labs/FLUX.1-dev)"
    assert line == f"--model: {what}; check the name and the network, or give a local folder"


def test_weights_that_are_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model_index.json").write_text(
        json.dumps({"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"]})
    )
    (tmp_path / "transformer").mkdir()
    (tmp_path / "transformer" / "config.json").write_text(json.dumps({"_class_name": "FluxTransformer2DModel"}))
    assert refused(str(tmp_path), capsys).startswith(f"--model: {tmp_path} cannot be loaded (")


def test_another_error_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    def fail(model: str, **_: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ZeroDivisionError):
        sources.find_source("flux", None, tiny=False)
