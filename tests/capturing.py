"""One capture for several plans of a model: most of a small test's time goes into captures."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from rkmate.graph.capture.capture import Capture, capture
from rkmate.pipeline import prepare as pipeline

_HERE = threading.local()
"""What the blocks of this thread have captured."""
_LATEST: dict[str, Capture] = {}


@contextmanager
def captured_once(kind: str | None = None) -> Iterator[None]:
    """Inside, in this thread, a model is captured when it is first planned; to be called with the same
    inputs again.

    `kind`: one capture serves all models that are made this way, one after the other; the latest kind
    is remembered.
    """
    outer = getattr(_HERE, "found", None)
    if outer is None:
        _HERE.found, _HERE.kind = {}, kind
    try:
        yield
    finally:
        if outer is None:
            del _HERE.found, _HERE.kind


def _capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    found: dict[int, tuple[nn.Module, Capture]] | None = getattr(_HERE, "found", None)
    if found is None:
        return capture(model, args, kwargs)
    if id(model) not in found:
        result = _LATEST.get(_HERE.kind or "") or capture(model, args, kwargs)
        found[id(model)] = model, result
        if _HERE.kind:
            _LATEST.clear()
            _LATEST[_HERE.kind] = result
    return found[id(model)][1]


# For good: patched anew by each block, it would not come back where two threads' blocks overlap.
pipeline.capture = _capture  # type: ignore[attr-defined]
