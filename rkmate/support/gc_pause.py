"""Python's collector of garbage, suspended where much is made and nothing of it is garbage.

A captured graph is millions of objects that live as long as the plan, and refer to each other. The
collector would look through all of them, again and again: a third of the time that planning takes.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_pause() -> Iterator[None]:
    """Inside, reference cycles are not looked for. Decorates functions, too."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
