"""All errors and warnings that rkmate raises."""

from __future__ import annotations

import pickle


class RkmateError(Exception):
    """Base of all errors of this package."""


class ArgumentError(RkmateError, ValueError):
    """An argument of a public function is wrong: the message names the argument and what it should be."""


class UnknownOption(ArgumentError, TypeError):
    """A public function was called with a keyword that is not one of its options. The message names the
    nearest one."""


class CaptureError(RkmateError):
    """The model cannot be captured as one graph: the message names the operation and the line."""


class GraphError(RkmateError):
    """A graph breaks an invariant (a bug in a stage, or a plan file that was edited)."""


class ScheduleError(RkmateError):
    """A schedule is not executable: it reads what is not in memory."""


class SolverError(RkmateError):
    """A solver failed for a reason other than infeasibility or its time limit."""


class DeviceMemoryError(RkmateError, RuntimeError):
    """A device has too little free memory for what planning runs on it."""


class InfeasibleBudget(RkmateError):
    """No schedule fits in the budget.

    ``minimum_bytes`` is the smallest budget that the planner can meet, in bytes. If the message says that
    nothing was measured (for a large model whose step takes long), ``minimum_bytes`` is an estimate: a plan
    for it measures, and may need a little more.
    """

    def __init__(self, message: str, minimum_bytes: int) -> None:
        super().__init__(message)
        self.minimum_bytes = minimum_bytes

    def __reduce__(self) -> tuple[type[InfeasibleBudget], tuple[str, int]]:
        return type(self), (str(self), self.minimum_bytes)


class PlanningTimeout(RkmateError):
    """A planner ran out of time before it found a schedule."""


class WishError(ArgumentError):
    """A wish for a plan (`Settings(pins=...)`, `rkmate.keep`, `rkmate.recompute`) cannot be met, whatever the
    budget is: the message names the wish. A budget that is too small for the wishes raises
    `InfeasibleBudget`, which names them, too."""


class PlanError(RkmateError):
    """A saved plan is truncated, edited, or belongs to another model."""


class RankError(RkmateError, RuntimeError):
    """The ranks of a process group are about to plan different things, or a rank takes no part: the message
    names the ranks and what differs."""


class BackwardError(RkmateError, RuntimeError):
    """A backward is impossible: for example, a second one through one forward, or after a change of a tensor
    that the backward reads."""


class DeferredOutputError(RkmateError, RuntimeError):
    """An output whose computation was deferred to its first read cannot be computed any more: the message
    says what has changed since the forward."""


class MissingExtra(RkmateError, ImportError):
    """An optional package is not installed: the message names the extra that brings it."""


class TorchVersionError(RkmateError, ImportError):
    """The installed torch lacks what rkmate needs: the message names it, and the releases to install."""


class CompilerError(RkmateError):
    """Groups of operations cannot be compiled: the message names what to install, or what the compiler
    said."""


class OffloadError(RkmateError, RuntimeError):
    """Data cannot be sent away, or comes back changed: the message names the target and the bytes."""


class RkmateWarning(UserWarning):
    """Something works, but not as requested: the message says what is lost."""


def sendable(error: RkmateError) -> RkmateError:
    """Return an error that another process can read: this one if it can be pickled, else the nearest of its
    classes with its message."""
    for kind in type(error).__mro__:
        if not issubclass(kind, RkmateError):
            continue
        try:
            sent = error if kind is type(error) else kind(str(error))
            pickle.loads(pickle.dumps(sent))
        except Exception:       # its class takes other arguments than its message
            continue
        return sent
    return RkmateError(str(error))
