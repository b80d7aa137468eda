"""Kinds of values of arguments, which libraries look at in eager mode: masks of ones, and positions in order.

Transformers leave out a mask of ones in eager mode, and keep every mask in a trace. A trace asks here instead
(`torch_seam.patches.libraries`): where a value depends on arguments of a known kind alone, the answer is
eager's. What was looked at belongs to the key of the plan, so that a call of another kind has another plan.
A kind is known for every size: calls of other sizes are derived from captures of their kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx

from rkmate.graph.capture.structure import TensorForm, form_of
from rkmate.torch_seam.patches.libraries import known_value, node_of, values_told
from rkmate.torch_seam.tensors import outside_trace

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
        """What was looked at."""
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
