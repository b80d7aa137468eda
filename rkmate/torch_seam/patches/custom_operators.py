"""Custom operators of a program that write to their arguments (``mutates_args``).

A trace makes a higher-order operation of such a call: it takes the tensors that are written to, and returns
their new values. A plan has the same as one operation on tensors, whose other arguments are known by a key.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import OwnOperator, own_operator, register
from rkmate.torch_seam.schema import HigherOrderOperator, OpOverload

_FUNCTIONAL = ("auto_functionalized", "auto_functionalized_v2")


@dataclass(frozen=True)
class _Place:
    """Stands for a tensor among the arguments."""

    number: int


@dataclass(frozen=True)
class _Call:
    """A call of such an operator, with its tensors left out."""

    run: HigherOrderOperator
    written_by: OpOverload
    others: Mapping[str, Any]

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors that the operator returns, and the new values of those that it writes to."""
        filled = pytree.tree_map_only(_Place, lambda place: tensors[place.number], dict(self.others))
        return [t for t in self.run(self.written_by, **filled) if isinstance(t, torch.Tensor)]


_calls: dict[str, _Call] = {}
"""By the key that stands in graphs and in generated source."""


def _run(key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _calls[key](tensors)


register((OwnOperator("written(str key, Tensor[] tensors) -> Tensor[]", _run, shape=_run, reads_host=True,
                      uses_autograd=True),))


def writes_as_values(graph: fx.Graph) -> None:
    """Let calls that write to their arguments be operations that return the new values."""
    for node in graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in _FUNCTIONAL \
                or not isinstance(node.target, HigherOrderOperator):
            continue
        tensors: list[fx.Node] = []

        def place(n: fx.Node, tensors: list[fx.Node] = tensors) -> _Place:
            tensors.append(n)
            return _Place(len(tensors) - 1)

        others = pytree.tree_map_only(fx.Node, place, dict(node.kwargs))
        call = _Call(node.target, node.args[0], others)
        key = f"{call.written_by}:{hashlib.sha256(repr(others).encode()).hexdigest()[:12]}"
        _calls[key] = call
        results = node.meta[VALUE]
        kept = [k for k, value in enumerate(results) if isinstance(value, torch.Tensor)]
        for user in list(node.users):
            if user.target is operator.getitem and user.args[1] in kept:
                user.args = (node, kept.index(user.args[1]))
        node.meta[VALUE] = [results[k] for k in kept]
        node.target, node.args, node.kwargs = own_operator("written"), (key, tensors), {}
