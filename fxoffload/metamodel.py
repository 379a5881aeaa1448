"""A model on the meta device from the `config.json` of its weights: all of its structure, no bytes."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from fxoffload.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
_IN_PYTHON = (
    "in Python, build the model under torch.device('meta') and call "
    "fxoffload.explain(model, *inputs, machine=fxoffload.Machine.nominal())"
)


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises OSError and ValueError as `json.load` does."""
    return json.loads(path.read_text())


def is_model_config(data: Any) -> bool:
    """Whether this came from the `config.json` of a diffusers or transformers model, or the index of a pipeline."""
    return isinstance(data, dict) and any(key in data for key in ("_class_name", "architectures", "model_type"))


def build(data: dict[str, Any], path: Path, *, dtype: str | None = None) -> torch.nn.Module:
    """The model of a config, on the meta device, for inference.

    `dtype` of the weights: one of `DTYPES`; None: what the config says, or else bfloat16. Parts that the class itself keeps in
    float32 stay so. Raises ConfigError, naming `path`, for a class that is not known, for a config that its class refuses, for
    one that says another dtype, and for quantized weights.
    """
    _refuse_quantized(data, path)
    dtype = dtype or _dtype_of(data, path)
    make = _diffusers_model if "_class_name" in data else _transformers_model
    try:
        with torch.device("meta"):
            model = make(data, path)
    except ConfigError:
        raise
    except Exception as error:  # Whatever a class raises for numbers that it did not expect.
        name = data.get("_class_name") or data.get("architectures") or data.get("model_type")
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(f"cli: {path}: {name} cannot be built from it ({why}); give the config.json of its weights") from error
    model = model.eval().requires_grad_(False)
    set_dtype(model, getattr(torch, dtype))
    return model


def _refuse_quantized(data: dict[str, Any], path: Path) -> None:
    """What a library makes of modules to hold quantized weights, and how many bytes that takes, no config says."""
    settings = data.get("quantization_config")
    if settings:
        method = settings.get("quant_method") if isinstance(settings, dict) else None
        raise ConfigError(
            f"cli: {path}: its weights are quantized ({method or 'quantization_config'}), and what they take is not known "
            "without them; in Python, load the model and call fxoffload.explain(model, *inputs), or take quantization_config out "
            "of the file for the plan of unquantized weights"
        )


def _diffusers_model(data: dict[str, Any], path: Path) -> torch.nn.Module:
    diffusers = _library("diffusers", path)
    name = data["_class_name"]
    found: Any = getattr(diffusers, name, None)
    kind: Any = found
    if not isinstance(kind, type):
        raise ConfigError(f"cli: {path}: diffusers {diffusers.__version__} has no class {name!r}; {_IN_PYTHON}")
    if not issubclass(kind, torch.nn.Module):
        parts = ", ".join(key for key, value in data.items() if isinstance(value, list) and "Model" in str(value))
        if not parts:
            raise ConfigError(f"cli: {path}: {name} is no model; give the config.json of one")
        raise ConfigError(f"cli: {path}: {name} is no model but has models as parts; give the folder of one ({parts})")
    return found.from_config(data)


def _transformers_model(data: dict[str, Any], path: Path) -> torch.nn.Module:
    transformers = _library("transformers", path)
    kind = data.get("model_type")
    if kind is None:
        raise ConfigError(f"cli: {path}: it has no model_type, by which transformers finds a class; {_IN_PYTHON}")
    if kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(f"cli: {path}: transformers {transformers.__version__} has no model_type {kind!r}; {_IN_PYTHON}")
    config = transformers.CONFIG_MAPPING[kind].from_dict(data)
    architectures = data.get("architectures")
    if not architectures:
        return transformers.AutoModel.from_config(config)
    found: Any = getattr(transformers, architectures[0], None)
    if found is None:
        raise ConfigError(f"cli: {path}: transformers {transformers.__version__} has no class {architectures[0]!r}; {_IN_PYTHON}")
    return found(config)


def _library(name: str, path: Path) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(f"cli: {path}: {name} is not installed; run: pip install 'fxoffload[diffusers]'") from error


def _dtype_of(data: dict[str, Any], path: Path) -> str:
    said = str(data.get("dtype") or data.get("torch_dtype") or DTYPES[0]).removeprefix("torch.")
    if said not in DTYPES:
        raise ConfigError(f"cli: {path}: dtype: {said!r} cannot be planned; give --dtype with one of {', '.join(DTYPES)}")
    return said


def set_dtype(model: Any, dtype: torch.dtype) -> None:
    """As `from_pretrained` does: parameters, but for the parts that the class keeps in float32; no buffers.

    transformers keeps what a class merely lists only from float16, diffusers from bfloat16 too.
    """
    kept = set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16 or not type(model).__module__.startswith("transformers."):
        kept |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.float32 if kept & set(name.split(".")) else dtype)
