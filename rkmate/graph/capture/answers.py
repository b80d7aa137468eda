"""Answers that a forward gets to nearly all of its questions about values: taken for granted in a trace, and
checked after each planned forward.

A forward that asks whether its activations are finite, or whether a drawn number is above 0, has one path
that every ordinary step takes. The trace follows that path. What was asked becomes a further output of the
step: where it says otherwise, the planned forward is undone, and the module's own runs instead. Solvers that
check their result are traced without the check, and whether it would have passed is asked in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rkmate.torch_seam.trace import inside_transform

Call = Callable[[Callable[..., Any], Any, Any], Any]
"""Runs a call of the forward: function, positional arguments and keywords."""

FINITE = {"isfinite": True, "isnan": False, "isinf": False, "isposinf": False, "isneginf": False}
"""Questions about each number, with the answer for ordinary ones."""
_SAME = frozenset(("all", "any", "clone", "detach", "reshape", "view", "flatten", "squeeze"))
"""Calls whose result has the answer of what they take."""
_NOT = frozenset(("logical_not", "bitwise_not", "__invert__"))
_BOTH: dict[str, Callable[[bool, bool], bool]] = {
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), lambda a, b: a and b),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), lambda a, b: a or b)}
_DRAWS = frozenset(("rand", "rand_like"))
"""Calls that draw numbers from 0 to 1, without 1."""
_COMPARED: dict[str, Callable[[float], bool | None]] = {
    **dict.fromkeys(("__gt__", "gt", "greater", "__ge__", "ge", "greater_equal"),
                    lambda p: True if p <= 0 else False if p >= 1 else None),
    **dict.fromkeys(("__lt__", "lt", "less", "__le__", "le", "less_equal"),
                    lambda p: False if p <= 0 else True if p >= 1 else None)}
"""Comparisons of a drawn number with another one: the answer of nearly all draws; None if there is none."""
_READS = frozenset(("__bool__", "item", "is_nonzero"))

SOLVERS: dict[Any, tuple[Callable[..., Any], str]] = {
    torch.linalg.inv: (torch.linalg.inv_ex, "a matrix can be inverted"),
    torch.inverse: (torch.linalg.inv_ex, "a matrix can be inverted"),
    torch.Tensor.inverse: (torch.linalg.inv_ex, "a matrix can be inverted"),
    torch.linalg.solve: (torch.linalg.solve_ex, "a linear system has a solution"),
    torch.linalg.cholesky: (torch.linalg.cholesky_ex, "a matrix is positive-definite"),
}
"""Solvers that check their result: what computes the same without the check, and what is asked."""


class OtherAnswer(Exception):
    """A planned forward has found another answer than the one that its trace took for granted."""


@dataclass(frozen=True)
class Answer:
    """An answer that a plan takes for granted."""

    output: int
    """The number of the step's output that gives it: a tensor of one truth value."""
    value: bool
    what: str
    """The question, in words."""

    def check(self, outputs: Sequence[Any]) -> None:
        """Raise `OtherAnswer` where a step's outputs say otherwise."""
        if bool(outputs[self.output]) is not self.value:
            raise OtherAnswer(self.what)


@dataclass(frozen=True)
class _Sure:
    tensor: torch.Tensor
    value: bool
    what: str


class Questions:
    """Questions of a traced forward that have an ordinary answer."""

    def __init__(self) -> None:
        self._sure: dict[int, _Sure] = {}
        self._drawn: dict[int, torch.Tensor] = {}
        self.answered: list[_Sure] = []

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Call) -> Any:
        """Handle a call of the forward. `run`: runs it."""
        name = getattr(func, "__name__", "")
        sure = self._sure.get(id(args[0])) if args else None
        if name in _READS and sure is not None and not inside_transform():
            self.answered.append(sure)
            return sure.value
        if func in SOLVERS and "out" not in kwargs and not inside_transform():
            solver, what = SOLVERS[func]
            result, info = run(solver, args, kwargs)
            self.answered.append(_Sure(info.eq(0).all(), True, what))
            return result
        out = run(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            self._note(name, args, out)
        return out

    def _note(self, name: str, args: Any, out: torch.Tensor) -> None:
        first = self._sure.get(id(args[0])) if args else None
        other = self._sure.get(id(args[1])) if len(args) > 1 else None
        if name in _DRAWS:
            self._drawn[id(out)] = out
        elif name in FINITE:
            self._sure[id(out)] = _Sure(out, FINITE[name], "values are finite")
        elif name in _COMPARED and id(args[0]) in self._drawn and isinstance(args[1], (int, float)):
            value = _COMPARED[name](args[1])
            if value is not None:
                self._sure[id(out)] = _Sure(out, value, f"a drawn number is not exactly {args[1]:g}")
        elif name in _BOTH and first is not None and other is not None:
            self._sure[id(out)] = _Sure(out, _BOTH[name](first.value, other.value), first.what)
        elif first is not None and name in _SAME | _NOT:
            self._sure[id(out)] = _Sure(out, first.value is (name in _SAME), first.what)
