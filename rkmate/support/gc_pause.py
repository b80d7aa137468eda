"""Python's garbage collector, suspended while many objects are made that are not garbage.

A captured graph is millions of objects that live as long as the plan, and refer to each other. The
collector would look through all of them, again and again: a third of the time that planning takes.

What lives long is looked through once, when it is made, and counts as old from then on. Left to the
collector, it would be looked through three times, the last time with all else that is old.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
