"""Locks of planning and capturing, and the pause of the garbage collector during both."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import ContextDecorator, contextmanager

# -- A lock: only one thread at a time captures and measures, and no step begins meanwhile ---------

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


# -- Python's garbage collector, suspended while many objects are made that are not garbage --------

@contextmanager
def gc_pause(*, lasting: bool = False) -> Iterator[None]:
    """Stop Python's garbage collector inside the context, or inside a decorated function. `lasting`: objects
    that are made inside live long."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            if lasting:
                gc.collect(1)
            gc.enable()
