"""What stands in a model that is offloaded without a compiler: around the methods that callers begin with, and at every unit.

A stand-in for a method is an attribute of the root itself, around what was there before: the method of its class, or what another
library put over that. Copies and pickles of the model have none of this.
"""

# Private names of torch: constants of Dynamo, what calls a module. Checked on torch 2.11 and 2.13.
# pyright: reportPrivateUsage=false, reportPrivateImportUsage=false

from __future__ import annotations

import copy
import functools
import sys
import types
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch

from fxoffload.errors import OffloadWarning
from fxoffload.hostalias import is_tracing

if TYPE_CHECKING:
    from fxoffload.eager import Attachment


class Entry:
    """Stands in for a method of the root. A copy of the root gets its class's method."""

    def __init__(self, attachment: Attachment, name: str, method: Callable[..., Any]) -> None:
        functools.update_wrapper(self, method)
        self._attachment = attachment
        self._name = name
        self._method = method
        self._former: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and _traces_for_us():
            return self._method(*args, **kwargs)
        return _enclosing(self._attachment.call, self._name, self._method, args, kwargs)

    def stand_in(self, root: torch.nn.Module) -> None:
        self._former = vars(root).get(self._name)
        setattr(root, self._name, self)

    def step_aside(self, root: torch.nn.Module) -> None:
        """Undo `stand_in`, unless somebody else stands in for this by now: it is of no effect then."""
        if vars(root).get(self._name) is self:
            delattr(root, self._name)
            if self._former is not None:
                setattr(root, self._name, self._former)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._former is not None:
            return copy.deepcopy(self._former, memo)
        return _method_of(memo.get(id(self._attachment.root), self._attachment.root), self._name)

    def __reduce__(self) -> Any:
        if self._former is not None:
            return _itself, (self._former,)
        return _method_of, (self._attachment.root, self._name)


def _method_of(root: torch.nn.Module, name: str) -> Any:
    return types.MethodType(getattr(type(root), name), root)


def _itself(what: Any) -> Any:
    return what


class Hook:
    """Before or behind a unit's forward. A copy of the module gets one that does nothing."""

    def __init__(self, attachment: Attachment, unit: int, *, enters: bool) -> None:
        self._attachment = attachment
        self._unit = unit
        self._enters = enters

    def __call__(self, _module: torch.nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling() and _traces_for_us():
            return None
        if self._enters:
            return apart(self._attachment.enter, self._unit, args, kwargs)
        return apart(self._attachment.leave, self._unit, *output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _no_hook

    def __reduce__(self) -> Any:
        return _get_no_hook, ()


class RootHook:
    """Before or behind a call of the root, whose forward may be somebody's who put it in place of the entry."""

    def __init__(self, attachment: Attachment, *, enters: bool) -> None:
        self._attachment = attachment
        self._enters = enters

    def __call__(self, _module: torch.nn.Module, args: Any, kwargs: Any, *output: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return None
        return self._attachment.enter_root(args, kwargs) if self._enters else self._attachment.leave_root(*output)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _no_hook

    def __reduce__(self) -> Any:
        return _get_no_hook, ()


def _no_hook(*_: Any) -> None:
    pass


def _get_no_hook() -> Callable[..., None]:
    return _no_hook


def is_compiled(method: Callable[..., Any]) -> bool:
    """Whether a method is what torch.compile made of one."""
    return hasattr(method, "_torchdynamo_orig_callable")


@torch._dynamo.assume_constant_result
def _traces_for_us() -> bool:
    """Asked by Dynamo while it traces an offloaded model, for a backend of ours or for another one."""
    if is_tracing():
        return True
    warnings.warn(
        "eager: an offloaded model is compiled by another backend, which breaks the graph around every unit; "
        "torch.compile(model, backend='layerwise') compiles it as one graph, and streams by the same settings",
        OffloadWarning,
        stacklevel=2,
    )
    return False


def _call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


# Another backend's graphs break here: around what is done at a unit, and before and behind the code of an entry.
apart = cast("Callable[..., Any]", torch.compiler.disable(_call))
_enclosing = cast("Callable[..., Any]", torch.compiler.disable(_call, recursive=False))


def is_called(module: torch.nn.Module, *, beyond: bool) -> bool:
    """Whether a call of this module is on the Python stack; `beyond` the innermost one, which is known."""
    frame: types.FrameType | None = sys._getframe(1)
    found = 0
    while frame is not None:
        found += frame.f_code is torch.nn.Module._call_impl.__code__ and frame.f_locals.get("self") is module
        frame = frame.f_back
    return found > int(beyond)
