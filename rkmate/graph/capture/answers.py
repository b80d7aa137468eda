"""Answers that a forward gets, while it is traced, to its questions about values.

Of activations, a trace takes the answer of nearly all values for granted, and each planned forward checks it.
A forward that asks whether its activations are finite, or whether a drawn number is above 0, has one path
that every ordinary step takes. The trace follows that path. What was asked becomes a further output of the
step: where it says otherwise, the planned forward is undone, and the module's own runs instead. Solvers that
check their result are traced without the check, and whether it would have passed is asked in the same way.
So is a check of values that only raises an error (`if (x < 0).any(): raise`, `assert`): it passes in nearly
all calls, and where it does not, the module's own forward raises the error.

Of arguments, a trace knows the kind: masks of ones, and positions in order. Transformers leave out a mask of
ones in eager mode, and keep every mask in a trace. A trace asks here instead: where a value depends on
arguments of a known kind alone, the answer is eager's (`torch_seam.patches.libraries`). What was looked at
belongs to the key of the plan, so that a call of another kind has another plan. A kind is known for every
size: calls of other sizes are derived from captures of their kind.
"""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from rkmate.graph.capture.structure import ReadLater, TensorForm, form_of
from rkmate.support.warn import PACKAGE
from rkmate.torch_seam.patches.libraries import known_value, node_of, values_told
from rkmate.torch_seam.tensors import outside_trace
from rkmate.torch_seam.trace import inside_transform

# -- Ordinary answers ------------------------------------------------------------------------------

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
_ASSERTS = frozenset(("_assert", "_assert_async"))
_READS = frozenset(("__bool__", "item", "is_nonzero")) | _ASSERTS

_KEPT = frozenset(("item", "tolist"))
"""Reads whose result a forward may return or keep: it is read when a planned forward is over."""

SOLVERS: dict[Any, tuple[Callable[..., Any], str]] = {
    torch.linalg.inv: (torch.linalg.inv_ex, "a matrix can be inverted"),
    torch.inverse: (torch.linalg.inv_ex, "a matrix can be inverted"),
    torch.Tensor.inverse: (torch.linalg.inv_ex, "a matrix can be inverted"),
    torch.linalg.solve: (torch.linalg.solve_ex, "a linear system has a solution"),
    torch.linalg.cholesky: (torch.linalg.cholesky_ex, "a matrix is positive-definite"),
}
"""Solvers that check their result: what computes the same without the check, and what is asked."""


CHECKING = frozenset((F.gaussian_nll_loss,))
"""Functions of torch that check values in their own source, which the trace has to run through."""
CHECKS = {"_assert": 0, "_check": 0, "_check_index": 0, "_check_value": 0, "_check_with": 1}
"""Names of torch's functions that raise an error where an argument is false, with the argument's number."""


class OtherAnswer(Exception):
    """A planned forward has found another answer than the one that its trace took for granted."""

    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.what)
        self.raises = answer.raises
        """Whether the module's own forward probably raises an error."""


@dataclass(frozen=True)
class Answer:
    """An answer that a plan takes for granted."""

    output: int
    """The number of the step's output that gives it: a tensor of one truth value."""
    value: bool
    what: str
    """The question, in words."""
    raises: bool = False
    """Whether the forward raises an error for the other answer."""

    def check(self, outputs: Sequence[Any]) -> None:
        """Raise `OtherAnswer` where a step's outputs say otherwise."""
        if bool(outputs[self.output]) is not self.value:
            raise OtherAnswer(self)


@dataclass(frozen=True)
class _Sure:
    tensor: torch.Tensor
    value: bool
    what: str
    raises: bool = False


class Questions:
    """Questions of a traced forward that have an ordinary answer. `known`: returns whether the value of a
    tensor is known, so that its real answer is given."""

    def __init__(self, known: Callable[[Any], bool]) -> None:
        self._known = known
        self._sure: dict[int, _Sure] = {}
        self._drawn: dict[int, torch.Tensor] = {}
        self.answered: list[_Sure] = []

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Call) -> Any:
        """Handle a call of the forward. `run`: runs it."""
        name = getattr(func, "__name__", "")
        sure = self._sure.get(id(args[0])) if args else None
        if name in _READS and sure is None and args and not self._known(args[0]):
            sure = _checked(name, args[0])
        if name in _READS and sure is not None and not inside_transform():
            self.answered.append(sure)
            return sure.value
        if func in SOLVERS and "out" not in kwargs and not inside_transform():
            solver, what = SOLVERS[func]
            result, info = run(solver, args, kwargs)
            self.answered.append(_Sure(info.eq(0).all(), True, what))
            return result
        if func is F.one_hot and not self._known(args[0]) and not inside_transform():
            return self._one_hot(run, *args, **kwargs)
        if name in _KEPT and args and not self._known(args[0]) and not inside_transform():
            return ReadLater(run(torch.Tensor.clone, (args[0].detach(),), {}), name)
        out = run(func, args, kwargs)
        if isinstance(out, torch.Tensor):
            self._note(name, args, out)
        return out

    def _one_hot(self, run: Call, t: torch.Tensor, num_classes: int = -1) -> Any:
        if num_classes < 0:
            return run(F.one_hot, (t, num_classes), {})
        inside = run(torch.logical_and, (run(torch.ge, (t, 0), {}), run(torch.lt, (t, num_classes), {})), {})
        self.answered.append(_Sure(run(torch.all, (inside,), {}), True, "the classes of one_hot are in range",
                                   raises=True))
        classes = run(torch.arange, (num_classes,), {"device": t.device})
        same = run(torch.eq, (run(torch.unsqueeze, (t, -1), {}), classes), {})
        return run(torch.Tensor.to, (same, torch.int64), {"memory_format": torch.contiguous_format})

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


# -- Checks that raise -----------------------------------------------------------------------------

def _checked(name: str, t: Any) -> _Sure | None:
    """Return the answer with which the statement that asks for a truth value raises nothing; None where
    another statement asks, or for a number."""
    frame: FrameType | None = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(str(PACKAGE)):
        frame = frame.f_back
    if frame is None or not isinstance(t, torch.Tensor) or t.numel() != 1 or t.dtype is not torch.bool:
        return None
    file, line = frame.f_code.co_filename, frame.f_lineno
    value = True if name in _ASSERTS else passes(file, line)
    return None if value is None else _Sure(t, value, f"the check at {file}:{line} passes", raises=True)


def passes(file: str, line: int) -> bool | None:
    """Return the truth value that each part of a check in a line has to have: of an `if` that only raises an
    error, an `assert`, or a call of `torch._check`. None where there is no check, or its parts have
    different values."""
    checks = [(t, v) for t, v in _checks_of(file) if t.lineno <= line <= (t.end_lineno or 0)]
    if not checks:
        return None
    parts = list(_parts(*checks[-1]))
    computed = [p for p in parts if not isinstance(p[0], (ast.Name, ast.Attribute, ast.Constant))
                and not (isinstance(p[0], ast.Compare) and isinstance(p[0].ops[0], (ast.Is, ast.IsNot)))]
    values = {value for _, value in computed or parts}
    return values.pop() if len(values) == 1 else None


@functools.lru_cache(maxsize=64)
def _checks_of(file: str) -> tuple[tuple[ast.expr, bool], ...]:
    """Return the conditions of a file's checks that raise, each with the value for which it does not."""
    try:
        nodes = list(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except (SyntaxError, ValueError):
        return ()
    branches = [n for n in nodes if isinstance(n, ast.If) and _raises(n.body) != _raises(n.orelse)]
    calls = [(n, CHECKS.get(getattr(n.func, "attr", getattr(n.func, "id", ""))))
             for n in nodes if isinstance(n, ast.Call)]
    return (*((n.test, True) for n in nodes if isinstance(n, ast.Assert)),
            *((n.args[at], True) for n, at in calls if at is not None and at < len(n.args)),
            *((n.test, not _raises(n.body)) for n in branches))


def _raises(body: Sequence[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Raise)


def _parts(test: ast.expr, value: bool) -> Iterator[tuple[ast.expr, bool]]:
    """Yield the parts of a condition, with the values that make the whole have one."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield from _parts(test.operand, not value)
    elif isinstance(test, ast.BoolOp):
        for part in test.values:
            yield from _parts(part, value)
    else:
        yield test, value


# -- Kinds of arguments ----------------------------------------------------------------------------

Kinds = tuple[tuple[int, str], ...]
"""Numbers of arguments' tensors, in order, each with the kind of its values; empty for other values."""

_KINDS: dict[str, Callable[[TensorForm], torch.Tensor]] = {
    "all ones": lambda f: torch.ones(f.shape, dtype=f.dtype, device=f.device),
    "in order": lambda f: torch.arange(f.shape[-1], dtype=f.dtype, device=f.device).expand(f.shape),
}
"""Values of each kind, for tensors of a form."""


def may_have_kind(form: TensorForm) -> bool:
    """Return whether a tensor may be a mask or positions: a row of integers for each member of a batch."""
    return len(form.shape) == 2 and min(form.shape) > 0 and form.device != torch.device("meta") \
        and not form.dtype.is_floating_point and not form.dtype.is_complex


def kind_of(t: torch.Tensor) -> str:
    """Return the kind of an argument's values; empty for other values."""
    form = form_of(t)
    if not may_have_kind(form):
        return ""
    with torch.no_grad():
        kinds = list(_KINDS)[:1] if t.dtype is torch.bool else _KINDS
        return next((kind for kind in kinds if torch.equal(t, _KINDS[kind](form))), "")


def kinds_of(tensors: Sequence[torch.Tensor]) -> dict[int, str]:
    """Return the kinds of those arguments that may have one, by number."""
    return {k: kind_of(t) for k, t in enumerate(tensors) if type(t) is torch.Tensor
            and t.layout is torch.strided and may_have_kind(form_of(t))}


class Looked:
    """The arguments of one trace whose values were looked at."""

    def __init__(self, kinds: Mapping[int, str]) -> None:
        self._kinds = kinds
        self._asked: set[int] = set()

    @property
    def found(self) -> Kinds:
        """The arguments that were looked at, with their kinds."""
        return tuple((k, self._kinds[k]) for k in sorted(self._asked))

    def value(self, number: int, form: TensorForm) -> torch.Tensor | None:
        """Return the values of an argument; None if they are of no kind."""
        if number not in self._kinds:
            return None
        self._asked.add(number)
        kind = self._kinds[number]
        with outside_trace():
            return _KINDS[kind](form) if kind else None

    @contextmanager
    def begun(self, traced: Sequence[torch.Tensor]) -> Iterator[None]:
        """Answer for a forward on these tensors, while it is exported."""
        numbers = {node_of(t): k for k, t in enumerate(traced) if k in self._kinds}

        def argument(node: fx.Node) -> torch.Tensor | None:
            k = numbers.get(node)
            return None if k is None else self.value(k, form_of(traced[k]))

        with values_told(lambda t: known_value(t, argument)):
            yield
