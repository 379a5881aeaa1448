"""Where a pipeline comes from: a hub id, a folder in diffusers format, or nowhere (a tiny one). Configs are read first."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fxoffload import metamodel
from fxoffload.components import find_components
from fxoffload.errors import ConfigError
from fxoffload.presets import PRESETS, Preset
from fxoffload.tiny import tiny_pipeline

_INDEX = "model_index.json"
_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
_NETWORK = ("httpx", "requests", "huggingface_hub")


@dataclass(frozen=True, slots=True)
class Source:
    """A pipeline that is not loaded yet. `model`: hub id or folder; None: a tiny one of the preset's class, with no `folder`."""

    name: str
    model: str | None
    folder: Path
    index: Mapping[str, Any]
    """By component: its library and class. `_class_name`: that of the pipeline."""

    @property
    def preset(self) -> Preset:
        return PRESETS[self.name]

    @property
    def kind(self) -> Any:
        """The pipeline's class. Raises ConfigError where diffusers has none of that name."""
        diffusers, name = _library("diffusers"), self.index["_class_name"]
        kind = getattr(diffusers, name, None)
        if not isinstance(kind, type) or not issubclass(kind, diffusers.DiffusionPipeline):
            what = f"diffusers {diffusers.__version__} has no pipeline {name!r}"
            raise ConfigError(f"cli: --model: {self.folder}: {what}; install another version, or give another model")
        return kind

    def load(self, dtype: str) -> Any:
        """The pipeline with its weights, on the CPU. Raises ConfigError for what is not there."""
        if self.model is None:
            return tiny_pipeline(self.name, dtype=getattr(torch, dtype))
        from diffusers.pipelines import pipeline_utils

        dtypes = {"default": getattr(torch, dtype), **{n: torch.float32 for n in self.preset.float32 if n in self.index}}
        # diffusers renamed the argument, and warns of the old name since.
        option = "dtype" if hasattr(pipeline_utils, "_resolve_dtype") else "torch_dtype"
        try:
            return _library("diffusers").DiffusionPipeline.from_pretrained(self.model, **{option: dtypes})
        except Exception as error:
            raise _explained(error, self.model) from error

    def components(self, dtype: str) -> dict[str, torch.nn.Module | ConfigError]:
        """The components as far as a plan needs them: on the meta device, or what is wrong with their configs."""
        if self.model is None:
            return dict(find_components(self.load(dtype)))
        found: dict[str, torch.nn.Module | ConfigError] = {}
        for name in self.index:
            path = self.folder / name / "config.json"
            if path.is_file():
                found[name] = _on_meta(path, "float32" if name in self.preset.float32 else dtype)
        return found


def find_source(name: str, model: str | None, *, tiny: bool) -> Source:
    """Where preset `name` comes from, or `model` instead. Of a hub id, the configs are fetched.

    Raises ConfigError for a folder that is not there or no pipeline's, and for an id that cannot be fetched.
    """
    preset = PRESETS[name]
    if tiny:
        return Source(name, None, Path(), {"_class_name": preset.pipeline})
    model = model or preset.model
    folder = Path(model) if Path(model).is_dir() else _fetch_configs(model, preset)
    return Source(name, model, folder, _read_index(folder))


def _fetch_configs(model: str, preset: Preset) -> Path:
    if _HUB_ID.fullmatch(model) is None:
        what = "give a folder in diffusers format, or a hub id such as"
        raise ConfigError(f"cli: --model: {model}: no such folder; {what} {preset.model}")
    hub = _library("huggingface_hub")
    try:
        return Path(hub.snapshot_download(model, allow_patterns=["*.json"]))
    except Exception as error:
        raise _explained(error, model) from error


def _read_index(folder: Path) -> dict[str, Any]:
    wanted = "give one that save_pretrained of a diffusers pipeline wrote"
    try:
        index = json.loads((folder / _INDEX).read_text())
    except FileNotFoundError as error:
        raise ConfigError(f"cli: --model: {folder}: there is no {_INDEX} in this folder; {wanted}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"cli: --model: {folder / _INDEX}: {error}; {wanted}") from error
    if not isinstance(index, dict) or not isinstance(index.get("_class_name"), str):
        raise ConfigError(f"cli: --model: {folder / _INDEX}: it names no class; {wanted}")
    return index


def _on_meta(path: Path, dtype: str) -> torch.nn.Module | ConfigError:
    try:
        return metamodel.build(metamodel.read_json(path), path, dtype=dtype)
    except ConfigError as error:
        return error
    except (OSError, ValueError) as error:
        return ConfigError(f"cli: {path}: {error}")


def _explained(error: Exception, model: str) -> Exception:
    """What to raise for an error of a download or a file; the error itself where it is something else."""
    if not isinstance(error, (OSError, ValueError)) and type(error).__module__.partition(".")[0] not in _NETWORK:
        return error
    what = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__).rstrip(".")
    return ConfigError(f"cli: --model: {model} cannot be loaded ({what}); check the name and the network, or give a local folder")


def _library(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"cli: {name} is not installed; run: pip install 'fxoffload[diffusers]'") from error
