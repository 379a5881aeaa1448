"""Files for what a pipeline made: one image, or the frames of a video."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from fxoffload.errors import ConfigError, OffloadError

Makes = Literal["image", "video"]
SUFFIXES: dict[Makes, tuple[str, ...]] = {"image": (".png", ".jpg", ".jpeg", ".webp"), "video": (".mp4", ".gif")}
"""By what is made; the first is the default."""
_ENCODER = ("imageio", "imageio_ffmpeg")


def check_output(path: Path, makes: Makes) -> None:
    """Make the folder of an output file. Raises ConfigError for a wrong suffix, OffloadError where it can't be made."""
    if path.suffix.lower() not in SUFFIXES[makes]:
        known = " or ".join((", ".join(SUFFIXES[makes][:-1]), SUFFIXES[makes][-1]))
        raise ConfigError(f"cli: --output: {str(path)!r} is no name for {_article(makes)}; give one that ends in {known}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OffloadError(f"cli: --output: {path.parent}: {error.strerror}; give a file in another folder") from error


def save(made: Any, path: Path, *, fps: int = 1) -> tuple[Path, str]:
    """Write an image of PIL, or a sequence of them as a video of `fps` frames a second. Returns the file, and what to know of it.

    Where nothing encodes MP4, a video becomes a GIF beside `path`. Raises OffloadError for a file that cannot be written.
    """
    note = ""
    if path.suffix.lower() == ".mp4" and not can_encode():
        path = path.with_suffix(".gif")
        note = "a GIF, because nothing here encodes MP4; for that run: pip install imageio imageio-ffmpeg"
    try:
        if not isinstance(made, Sequence):
            made.save(path)
        elif path.suffix.lower() == ".mp4":
            _save_mp4(made, path, fps)
        else:
            made[0].save(path, save_all=True, append_images=made[1:], duration=1000 // fps, loop=0)
    except OSError as error:
        raise OffloadError(f"cli: --output: {path}: {error.strerror or error}; give another file") from error
    return path, note


def can_encode() -> bool:
    """Whether MP4 can be written."""
    return all(importlib.util.find_spec(name) is not None for name in _ENCODER)


def _save_mp4(frames: Sequence[Any], path: Path, fps: int) -> None:
    from diffusers.utils.export_utils import export_to_video

    export_to_video(list(frames), str(path), fps=fps)


def _article(makes: Makes) -> str:
    return "an image" if makes == "image" else "a video"
