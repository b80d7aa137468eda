"""The errors that only dynamic rematerialization raises."""

from __future__ import annotations

from rkmate.errors import InfeasibleBudget, RkmateError


class LogError(RkmateError, ValueError):
    """A log of operations breaks the format: the message names the file's line.

    ``line`` counts from 1.
    """

    def __init__(self, message: str, line: int) -> None:
        super().__init__(f"line {line}: {message}")
        self.message = message
        self.line = line

    def __reduce__(self) -> tuple[type[LogError], tuple[str, int]]:
        return type(self), (self.message, self.line)


class BudgetExceeded(InfeasibleBudget):
    """The inputs and outputs of one operation do not fit in the budget together.

    ``operation`` is the operation's name; ``minimum_bytes`` what it needs at least, in bytes:
    what cannot be evicted while it runs, plus its outputs and temporary memory.
    """

    def __init__(self, message: str, minimum_bytes: int, operation: str) -> None:
        super().__init__(message, minimum_bytes)
        self.operation = operation

    def __reduce__(self) -> tuple[type[BudgetExceeded], tuple[str, int, str]]:  # type: ignore[override]
        return type(self), (str(self), self.minimum_bytes, self.operation)


class ThrashingError(RkmateError):
    """Work and recomputation together took more than the allowed multiple of the program's own time."""


class RuntimeStateError(RkmateError, RuntimeError):
    """The runtime is used where it cannot work: nested, from two threads, or after it ended."""
