"""Which module a compiled graph belongs to.

Dynamo hands a backend a graph and tensors, but no module, and calls a compiled function with tensors of whatever module runs: two
models of one class share it, and with a graph break one function serves every block. The host store, the arena and the
budget belong to the model that the user compiled, so it is found where it is certain: on the Python stack of the call.
"""

# Private names of torch: the wrapper module of torch.compile. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import torch
from torch._dynamo.eval_frame import OptimizedModule

from fxoffload.wrappers import inner_name, inner_tensors, is_wrapper


def owner_of(weight: torch.Tensor) -> torch.nn.Module | None:
    """The compiled module around this call that has `weight`, or the outermost running module that has it, or None."""
    outermost = None
    for module, _ in _running_modules():
        compiled = isinstance(module, OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None
        root = module._orig_mod if isinstance(module, OptimizedModule) else module
        if any(tensor is weight for tensor in _tensors(root)):
            if compiled:
                return root
            outermost = root
    return outermost


def running_roots() -> Iterator[torch.nn.Module]:
    """Modules whose code is running, innermost first, with the module itself in place of a compiled wrapper."""
    for module, _ in _running_modules():
        yield module._orig_mod if isinstance(module, OptimizedModule) else module


def calling_line(root: torch.nn.Module) -> str:
    """`file:line` of the innermost call that a method of `root` is in, outside torch."""
    torch_folder = str(Path(torch.__file__).parent)
    for module, frame in _running_modules():
        if module is root and not frame.f_code.co_filename.startswith(torch_folder):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
    return "an unknown line"


def tensor_names(root: torch.nn.Module | None) -> dict[int, str]:
    """The names of `named_tensors` by `id`; of a tied tensor, the first."""
    names: dict[int, str] = {}
    for name, tensor in named_tensors(root):
        names.setdefault(id(tensor), name)
    return names


def named_tensors(root: torch.nn.Module | None) -> Iterator[tuple[str, torch.Tensor]]:
    """A module's parameters and buffers, and behind each wrapper what it consists of, with their qualified names."""
    if root is None:
        return
    for name, tensor in (*root.named_parameters(), *root.named_buffers()):
        yield name, tensor
        if is_wrapper(tensor):
            yield from ((inner_name(name, path), plain) for path, plain in inner_tensors(name, tensor))


def _tensors(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _running_modules() -> Iterator[tuple[torch.nn.Module, FrameType]]:
    """Modules that are `self` of a frame on the stack, with that frame, innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_argcount and code.co_varnames[0] == "self":
            candidate = frame.f_locals.get("self")
            if isinstance(candidate, torch.nn.Module):
                yield candidate, frame
        frame = frame.f_back
