"""Which submodules run as they are: those that a user names, or those that a trace stumbles over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

from torch import nn

from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.capture.collectives import CollectiveError
from rkmate.graph.capture.opaque import OpaqueError, traced_as_one
from rkmate.graph.capture.refusals import at_fault
from rkmate.graph.capture.state import MISSING
from rkmate.support.warn import warn
from rkmate.torch_seam.trace import values_refused

Opaque = Literal["auto"] | tuple[str, ...]
"""Names of submodules, or patterns of names; or those that a trace stumbles over."""
T = TypeVar("T")
_here = threading.local()


@contextmanager
def opaque_parts(model: nn.Module) -> Iterator[None]:
    """While a module is captured: a call of each submodule that was chosen is one operation."""
    with ExitStack() as stack:
        for name in getattr(_here, "names", ()):
            module = model.get_submodule(name)
            stack.enter_context(_forward_is(module, traced_as_one(module, name)))
        yield


@contextmanager
def _forward_is(module: nn.Module, forward: Any) -> Iterator[None]:
    before = module.__dict__.get("forward", MISSING)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is MISSING:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def with_opaque(model: nn.Module, opaque: Opaque, capture: Callable[[], T]) -> T:
    """What `capture` returns, with those submodules chosen. Raises `CaptureError`, `ArgumentError`."""
    if opaque != "auto":
        with _chosen(_matching(model, opaque)):
            return capture()
    names: tuple[str, ...] = ()
    while True:
        try:
            with _chosen(names), values_refused():
                found = capture()
            break
        except CollectiveError:         # a submodule that runs as it is communicates as well
            raise
        except OpaqueError as error:
            kind = type(model.get_submodule(error.name))
            around = {n: _around(model, n) for n in names if type(model.get_submodule(n)) is kind}
            if not all(around.values()):
                raise
            names = tuple(dict.fromkeys(around.get(n, n) for n in names))
        except CaptureError as error:
            culprit = at_fault(model, error)
            if not culprit or culprit in names:
                raise
            kind = type(model.get_submodule(culprit))
            alike = [n for n, m in model.named_modules() if type(m) is kind and n]
            torchs = kind.__module__.startswith("torch.")
            names = tuple(dict.fromkeys((*names, *([culprit] if torchs else alike))))
        names = tuple(n for n in names if not any(n.startswith(f"{m}.") for m in names))
    if names:
        warn(f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''} of {type(model).__name__} "
             "cannot be traced: each call runs as it is, as one operation of the plan, and once more in the "
             "backward. The memory that it takes inside is planned as for the sample's values")
    return found


@contextmanager
def _chosen(names: Sequence[str]) -> Iterator[None]:
    _here.names = names
    try:
        yield
    finally:
        _here.names = ()


def _matching(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [n for n, _ in model.named_modules() if n]
    found: dict[str, None] = {}
    for pattern in patterns:
        # A model with its loss has the model as a submodule of this name.
        matching = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"model.{pattern}")]
        if not matching:
            raise ArgumentError(f"opaque names {pattern!r}, and {type(model).__name__} has no such submodule")
        found.update(dict.fromkeys(matching))
    return tuple(n for n in found if not any(n.startswith(f"{m}.") for m in found))


def _around(model: nn.Module, name: str) -> str:
    """The nearest submodule around one that has a forward; empty where only the model has."""
    while name := name.rpartition(".")[0]:
        if type(model.get_submodule(name)).forward is not nn.Module.forward:
            break
    return name
