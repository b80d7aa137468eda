"""A rewriting pass: what the forward decides from computed numbers, which must be decided once.

A router's top-k, an argmax, a threshold: a number that differs in its last bit may lead to another choice,
and to another result as a whole. On accelerators a computation that runs again may differ so. What was
chosen is kept, then, and never computed again; what a schedule recomputes follows the first choice.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from rkmate.graph.passes.joint import Joint, is_backward, is_random, is_view
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.schema import operator_name

aten = torch.ops.aten

_SIGN_TESTS = (aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar)
_DRAWS = ("uniform", "normal_functional", "exponential", "geometric", "cauchy", "log_normal", "random")
"""Draws that read no value of the tensor whose shape they take."""
_ORDERS = (aten.sort.default, aten.topk.default)
"""They may put equal numbers, integers too, in any order."""
_CHANCES = (aten.bernoulli.default,)
"""Floats that are decisions: draws whose chances are the numbers of a tensor."""


def find_decisions(work: Joint) -> None:
    """Note the operations of the forward that decide, as far as the backward depends on what they decide.

    An operation decides where it makes integers of computed floats (top-k, sort, argmax, multinomial, a
    cast) or puts numbers in an order, and the forward reads the result. What only the backward reads (where
    a maximum stood) picks one of two slopes that a kink has: the value is the same. So does the mask of a
    ReLU written by hand, where the sign of a value selects that value itself. Any other mask of computed
    floats that something else than a mask is made from decides, at one byte an element.
    """
    computed: set[fx.Node] = set()
    masks: set[fx.Node] = set()
    several: set[fx.Node] = set()               # operations whose results may come out otherwise
    found: dict[fx.Node, None] = {}
    for node in work.graph.nodes:
        if node.op != "call_function" or is_backward(node) or node in work.constant:
            continue
        if is_view(node) or node.target is operator.getitem:
            source = node.args[0]
            computed.update([node] if source in computed and _is_float(node) else [])
            masks.update([node] if source in masks else [])
            if node.target is operator.getitem and source in several and _is_integer(node) \
                    and _forward_readers(node):
                found[source] = None
            continue
        inputs = [] if _takes_shape_alone(node) else node.all_input_nodes
        inexact = any(n in computed for n in inputs)
        several.update([node] if inexact or node.target in _ORDERS else [])
        if _is_mask(node):
            if inexact or any(n in masks for n in inputs):
                masks.add(node)
        elif inexact and (node.target in _CHANCES or (_is_integer(node) and _forward_readers(node))):
            found[node] = None
        elif any(_is_float(n) for n in inputs):
            computed.add(node)
    for node in masks:
        readers = [] if is_view(node) else _forward_readers(node)
        if any(not _is_mask(r) and not _is_relu(node, r) for r in readers):
            found[node] = None
    late = _needed_after_the_loss(work)
    work.decisions = frozenset(n for n in found if n in late)


def _values(node: fx.Node) -> list[Any]:
    value = node.meta.get(VALUE)
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _is_float(node: fx.Node) -> bool:
    return any(isinstance(v, torch.Tensor) and (v.is_floating_point() or v.is_complex())
               for v in _values(node))


def _is_mask(node: fx.Node) -> bool:
    return all(isinstance(v, torch.Tensor) and v.dtype is torch.bool for v in _values(node))


def _is_integer(node: fx.Node) -> bool:
    return all(isinstance(v, torch.Tensor) and not v.is_floating_point() and not v.is_complex()
               and v.dtype is not torch.bool for v in _values(node))


def _takes_shape_alone(node: fx.Node) -> bool:
    """Whether an operation reads no value of its input: `zeros_like`, `new_empty`, a draw of that shape."""
    name = operator_name(node.target, "")
    return name.endswith("_like") or name.startswith("new_") or (
        is_random(node) and (name in _DRAWS or (name == "bernoulli" and len(node.args) > 1)))


def _forward_readers(node: fx.Node) -> list[fx.Node]:
    """The operations of the forward that read a value, or a view of it."""
    readers: list[fx.Node] = []
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if is_backward(user):
            continue
        if is_view(user):
            todo += user.users
        else:
            readers.append(user)
    return readers


def _is_relu(mask: fx.Node, reader: fx.Node) -> bool:
    return mask.target in _SIGN_TESTS and bool(mask.args[1] == 0) and mask.args[0] in reader.all_input_nodes


def _needed_after_the_loss(work: Joint) -> set[fx.Node]:
    """The nodes of the forward that some node of the backward depends on."""
    found: set[fx.Node] = set()
    todo = [n for b in work.graph.nodes if is_backward(b) for n in b.all_input_nodes]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += node.all_input_nodes
    return found
