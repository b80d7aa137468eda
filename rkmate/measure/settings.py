"""Settings of measuring."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MeasureSettings:
    """How costs are measured. The median run of an operation counts, because steps have slow and fast
    runs."""

    passes: int = 2
    """Number of passes over the blocks. A disturbance of a second or two then affects only one of an
    operation's runs."""
    repeats: int = 2
    """Walks over the blocks in each pass, in which each operation is timed once, at most."""
    enough_seconds: float = 0.05
    """Seconds of timing after which an operation is not repeated further in a pass."""
    share: float = 0.4
    """Fraction of the seconds of one step's operations that all runs may take together, if they would take
    longer than `least_seconds` (operations that are already known do not count). Each operation gets equal
    time: short operations run often, long ones once or twice. The run for temporary memory counts, too."""
    least_seconds: float = 3.0
    """Seconds that the runs may always take."""
    cold: bool | None = None
    """Flush the CPU caches before each run of a block's forward or backward, except for the outputs of the
    preceding operations, to reproduce what an operation finds in a real step. None: if a step produces more
    than the caches hold."""
