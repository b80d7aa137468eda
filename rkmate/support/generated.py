"""Generated Python, loaded: the one place that runs text."""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Mapping
from typing import Any


def load(text: str, filename: str, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the names that a module of this text has. `given`: names that it finds."""
    names: dict[str, Any] = dict(given or {})
    exec(compile(text, filename, "exec"), names)
    return names


def show(text: str, filename: str, owner: object) -> None:
    """Let tracebacks and debuggers show the lines of a text as long as its owner lives."""
    linecache.cache[filename] = (len(text), None, text.splitlines(True), filename)
    weakref.finalize(owner, linecache.cache.pop, filename, None).atexit = False
