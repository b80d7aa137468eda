"""One capture for several plans of a model: most of a small test's time goes into captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch import nn

from rkmate import pipeline
from rkmate.graph.capture import Capture


@contextmanager
def captured_once() -> Iterator[None]:
    """Inside, a model is captured when it is first planned; to be called with the same inputs again."""
    found: dict[int, tuple[nn.Module, Capture]] = {}
    capture = pipeline.capture      # inside another such block: that one's

    def once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
        if id(model) not in found:
            found[id(model)] = model, capture(model, args, kwargs)
        return found[id(model)][1]

    with mock.patch.object(pipeline, "capture", once):
        yield
