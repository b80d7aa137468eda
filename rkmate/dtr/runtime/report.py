"""Figures of a run between two points."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass
class Report:
    """Counts and times of one batch; times are seconds, sizes are bytes."""

    operations: int = 0
    """Operations that the program asked for, views left out."""
    evictions: int = 0
    """Buffers that the heuristic evicted."""
    rematerializations: int = 0
    """Operations that ran again."""
    operation_seconds: float = 0.0
    """Seconds in the program's own operations."""
    recompute_seconds: float = 0.0
    """Seconds in operations that ran again."""
    bookkeeping_seconds: float = 0.0
    """Seconds of the runtime's own work around the operations."""
    peak_bytes: int = 0
    """Greatest number of bytes held for the program at one time, temporary memory included."""

    def copy(self) -> Report:
        """Return a copy of the report."""
        return Report(**{field.name: getattr(self, field.name) for field in fields(self)})
