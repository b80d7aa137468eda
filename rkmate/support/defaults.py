"""The default planner's name, and default values that can be changed for a while: a test suite needs any
plan, not seconds of solving."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

T = TypeVar("T")
DEFAULT_PLANNER = "rockmate"
"""Name of the planner that is taken unless a caller names one."""


class Default(Generic[T]):
    """A value that holds in all threads if nobody sets another one."""

    def __init__(self, value: T) -> None:
        self._values = [value]

    def now(self) -> T:
        """Return the value that holds."""
        return self._values[-1]

    @contextmanager
    def within(self, value: T) -> Iterator[None]:
        """Set another value inside the context."""
        self._values.append(value)
        try:
            yield
        finally:
            self._values.pop()
