"""A lock: only one thread at a time captures and measures, and no step begins meanwhile."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator


class PlanningLock(ContextDecorator):
    """A lock that its thread may take again, and that knows whose it is. Decorates functions, too."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._owner: int | None = None
        self._depth = 0

    def __enter__(self) -> PlanningLock:
        self._lock.acquire()
        self._owner = threading.get_ident()
        self._depth += 1
        return self

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._owner = None
        self._lock.release()

    def is_mine(self) -> bool:
        """Return whether the calling thread holds it."""
        return self._owner == threading.get_ident()

    def is_others(self) -> bool:
        """Return whether another thread holds it, for now."""
        return self._owner not in (None, threading.get_ident())


planning_lock = PlanningLock()
"""Held while the plans of a wrapped module are made, and in each stage that uses torch."""
capture_lock = PlanningLock()
"""Held while a module is captured, as tracing sets flags and changes functions of the whole process, and
while operations are measured, as that draws from the generators and reads what the process allocates. A
step that begins meanwhile waits for its end; the search for a plan disturbs no step."""
