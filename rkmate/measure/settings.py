"""What a user may set about measuring costs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasureSettings:
    """How long to measure. The median run of an operation counts, as steps have slow and fast ones."""

    passes: int = 2
    """Times that the blocks are run, one after the other: what disturbs the machine for a second or two
    then disturbs one of the runs of an operation only."""
    repeats: int = 3
    """Timed runs of an operation in each pass, at most."""
    enough_seconds: float = 0.1
    """An operation that has been timed for this long is not repeated further in a pass."""
    share: float = 0.4
    """Where all these runs would take longer than `least_seconds`, they may take this part of the seconds
    that one step's operations take, as far as they are not known, and each operation an equal time: what is
    short runs often, what is long once or twice. Its run for temporary memory is one of them."""
    least_seconds: float = 3.0
    """So long the runs may take in any case."""
    cold: bool | None = None
    """Whether the processor's caches are emptied before each run, but for what was made last, as an operation
    finds them in a step. None: where a step makes more than they hold."""
