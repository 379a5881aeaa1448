"""Files for images and videos."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fxoffload import media
from fxoffload.errors import OffloadError

Image = pytest.importorskip("PIL.Image")
FRAMES = [Image.new("RGB", (16, 16), color) for color in ("red", "blue")]


def test_a_video_without_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media, "_ENCODER", ("no_such_encoder",))
    path, note = media.save(FRAMES, tmp_path / "boat.mp4", fps=10)
    assert path == tmp_path / "boat.gif"
    assert note == "a GIF, because nothing here encodes MP4; for that run: pip install imageio imageio-ffmpeg"
    with Image.open(path) as video:
        assert (video.n_frames, video.info["duration"]) == (2, 100)


def test_a_video_with_an_encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Any] = []
    monkeypatch.setattr(media, "_ENCODER", ())
    monkeypatch.setattr(media, "_save_mp4", lambda *given: saved.append(given))
    assert media.save(FRAMES, tmp_path / "boat.mp4", fps=10) == (tmp_path / "boat.mp4", "")
    assert saved == [(FRAMES, tmp_path / "boat.mp4", 10)]


@pytest.mark.parametrize("suffix", media.SUFFIXES["image"])
def test_images(suffix: str, tmp_path: Path) -> None:
    media.check_output(tmp_path / f"cat{suffix}", "image")
    assert media.save(FRAMES[0], tmp_path / f"cat{suffix}") == (tmp_path / f"cat{suffix}", "")
    with Image.open(tmp_path / f"cat{suffix}") as image:
        assert image.size == (16, 16)


def test_a_file_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "cat.png").mkdir()
    with pytest.raises(OffloadError) as raised:
        media.save(FRAMES[0], tmp_path / "cat.png")
    assert str(raised.value) == f"cli: --output: {tmp_path / 'cat.png'}: Is a directory; give another file"
