"""One capture for several plans of a model: most of a small test's time goes into captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from rkmate import pipeline
from rkmate.graph.capture import Capture

_LATEST: dict[str, Capture] = {}


@contextmanager
def captured_once(kind: str | None = None) -> Iterator[None]:
    """Inside, a model is captured when it is first planned; to be called with the same inputs again.

    `kind`: one capture serves all models that are made this way, one after the other; the latest kind
    is remembered.
    """
    found: dict[int, tuple[nn.Module, Capture]] = {}
    capture = pipeline.capture      # inside another such block: that one's

    def once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
        if id(model) not in found:
            result = _LATEST.get(kind or "") or capture(model, args, kwargs)
            found[id(model)] = model, result
            if kind:
                _LATEST.clear()
                _LATEST[kind] = result
        return found[id(model)][1]

    with mock.patch.object(pipeline, "capture", once):
        yield
