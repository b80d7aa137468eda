"""Rewrites for values that a step computes once, even if a schedule runs their operations several times:
collectives, constants, decisions, and values that the forward overwrites."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from torch import fx

from rkmate.errors import WishError
from rkmate.graph.capture.collectives import communicates, group_of
from rkmate.graph.capture.hints import hints_in
from rkmate.graph.ops.collectives import is_collective, with_wait
from rkmate.graph.ops.properties import is_random, is_view
from rkmate.graph.passes.joint import Joint, inserted, makers_of, readers_of
from rkmate.torch_seam.collectives import is_wait
from rkmate.torch_seam.nodes import VALUE, carry_wish, is_backward, phase_tag, wish_of
from rkmate.torch_seam.schema import operator_name

aten = torch.ops.aten


def hand_hints_on(joint: Joint) -> None:
    """Let the value of each hint (`rkmate.keep`, `rkmate.recompute`) carry the wish, and take the hint off.
    Raises `WishError` if two of them contradict each other."""
    for number, hint in hints_in(joint.graph).items():
        value = hint.node.args[0]
        assert isinstance(value, fx.Node)
        before = wish_of(value)
        if before is not None and before[1] != hint.wish:
            raise WishError(f"rkmate.{before[1]} at {before[2]} and rkmate.{hint.wish} at {hint.place} "
                            "contradict each other: they are about one value; leave one of them out")
        carry_wish(value, (number, hint.wish, hint.place))
        joint.replace(hint.node, value)
        joint.graph.erase_node(hint.node)


# -- Collectives -----------------------------------------------------------------------------------


def wait_at_once(joint: Joint) -> None:
    """Replace each functional collective between several ranks, and its wait, by one operation where the
    collective starts."""
    for node in list(joint.graph.nodes):
        if node.op != "call_function" or not communicates(node.target, node.args, node.kwargs):
            continue
        waits = [u for u in node.users if is_wait(u.target)]
        with joint.graph.inserting_after(node):
            new = joint.graph.call_function(with_wait(operator_name(node.target)),
                                            (*node.args[:-1], group_of(node)))
        new.meta = dict(node.meta)
        if waits:
            new.meta[VALUE] = waits[0].meta[VALUE]
        for old in (*waits, node):
            joint.replace(old, new)
            joint.graph.erase_node(old)


def gathers_parameters(joint: Joint, node: fx.Node) -> bool:
    """Return whether an operation gathers what the ranks hold of a parameter. All ranks follow one schedule,
    so it may run again, at one place on all of them."""
    return node.target is with_wait("all_gather_into_tensor") and all(
        joint.sources[n].kind == "param" if n in joint.sources else not is_random(n)
        for n in makers_of([node]))


# -- Constants -------------------------------------------------------------------------------------
#
# Values that depend on no trained value (masks, position ids).


def find_constants(joint: Joint) -> None:
    """Note the values of the forward that depend on no trained value, no float input, no chance and no other
    rank.

    Equal ones are computed once: every layer of a transformer asks for the same mask.
    """
    constant: set[fx.Node] = set()
    seen: dict[Any, fx.Node] = {}
    for node in list(joint.graph.nodes):
        if node.op == "placeholder" or node.op == "get_attr":
            source = joint.sources[node]
            value = node.meta.get(VALUE)
            fixed = source.kind in ("buffer", "constant") or (
                source.kind == "input" and isinstance(value, torch.Tensor)
                and not value.is_floating_point() and not value.is_complex())
            if fixed:
                constant.add(node)
        elif node.op == "call_function" and not is_backward(node) and not is_random(node) \
                and not is_collective(node.target) and all(n in constant for n in node.all_input_nodes):
            if joint.leaves(node):          # the caller may write to it
                constant.add(node)
                continue
            key = _key(node)
            if key in seen:
                joint.replace(node, seen[key])
                joint.graph.erase_node(node)
            else:
                seen[key] = node
                constant.add(node)
    joint.constant = frozenset(constant)


def _key(node: fx.Node) -> Any:
    """Return a key that equal calls share."""
    def freeze(a: Any) -> Any:
        if isinstance(a, fx.Node):
            return ("node", a)
        if isinstance(a, (list, tuple)):
            return tuple(freeze(x) for x in a)
        return (type(a).__name__, repr(a))
    return (node.target, freeze(node.args), tuple((k, freeze(v)) for k, v in sorted(node.kwargs.items())))


# -- Decisions -------------------------------------------------------------------------------------
#
# A router's top-k, an argmax, a threshold: a number that differs in its last bit may lead to another choice,
# and to another result as a whole. On accelerators a computation that runs again may differ so. What was
# chosen is kept, then, and never computed again; what a schedule recomputes follows the first choice.

_SIGN_TESTS = (aten.gt.Scalar, aten.ge.Scalar, aten.lt.Scalar, aten.le.Scalar)
_DRAWS = ("uniform", "normal_functional", "exponential", "geometric", "cauchy", "log_normal", "random")
"""Draws that read no value of the tensor whose shape they take."""
_ORDERS = (aten.sort.default, aten.topk.default)
"""Operators that may put equal numbers, also integers, in any order."""
_CHANCES = (aten.bernoulli.default,)
"""Floats that are decisions: draws whose chances are the numbers of a tensor."""


def find_decisions(joint: Joint) -> None:
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
    for node in joint.graph.nodes:
        if node.op != "call_function" or is_backward(node) or node in joint.constant:
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
    late = makers_of(n for n in joint.graph.nodes if is_backward(n))
    joint.decisions = frozenset(n for n in found if n in late)


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
    """Return whether an operation reads no value of its input: `zeros_like`, `new_empty`, a draw of that
    shape."""
    name = operator_name(node.target, "")
    return name.endswith("_like") or name.startswith("new_") or (
        is_random(node) and (name in _DRAWS or (name == "bernoulli" and len(node.args) > 1)))


def _forward_readers(node: fx.Node) -> list[fx.Node]:
    """Return the operations of the forward that read a value, or a view of it."""
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


# -- What the forward overwrites -------------------------------------------------------------------
#
# Running statistics above all; and who reads them.


def protect_overwritten(joint: Joint) -> None:
    """Copy what the forward overwrites, for readers that need the value from before."""
    overwritten = joint.overwritten()
    for node in [n for n in joint.sources if n in overwritten]:
        readers = [u for u in node.users if not _is_statistics_of(u, node)]
        if all(_makes_new_value(joint, u) for u in readers):
            continue
        first = next(n for n in joint.graph.nodes if n.op == "call_function")
        copy = inserted(joint.graph, first, node, aten.clone.default, (node,),
                        meta=phase_tag(backward=False))
        for user in readers:
            user.replace_input_with(node, copy)


def unrepeatable(joint: Joint) -> list[fx.Node]:
    """Return the placeholders of tensors that a second run of the forward would find changed.

    What the forward overwrites, and reads other than as batch-norm statistics, was copied
    (`protect_overwritten`). A second run may find another value where it leads to new values of such things
    only (a counter).
    """
    results = {n for n in joint.outputs if n is not None} | {n for _, n in joint.grads} | joint.additions()
    written = joint.written()
    return [n for n, s in joint.sources.items() if s in written and any(
        u.target is aten.clone.default and not results.isdisjoint({u, *readers_of([u])}) for u in n.users)]


def _makes_new_value(joint: Joint, user: fx.Node) -> bool:
    """Return whether the result is a new value of a tensor that the forward overwrites, and nothing else: it
    is needed once, and before that."""
    return not user.users and not is_view(user) and user not in joint.outputs \
        and any(n is user for _, n in joint.mutations) and not any(n is user for _, n in joint.grads)


def _is_statistics_of(user: fx.Node, node: fx.Node) -> bool:
    """Return whether an argument does not affect the result in training mode: a second run is then
    harmless."""
    args: tuple[Any, ...] = user.args
    if user.target is torch.ops.rkmate.cudnn_batch_norm.default:
        return node in args[3:5] and node not in args[:3]
    return user.target is aten._native_batch_norm_legit_functional.default and args[5] is True \
        and node in args[3:5] and node not in args[:3]


def take_counters_off(joint: Joint) -> None:
    """Note what integers of the caller's the forward only counts up: they are no value of the step."""
    place = {s: n for n, s in joint.sources.items()}
    pairs = (*joint.grads, *joint.mutations)
    handed = Counter((*joint.outputs, *(n for _, n in pairs)))
    kept = []
    for source, node in joint.mutations:
        if _counts_up(node, place[source]) and handed[node] == 1:
            joint.counters += ((source, node.args[1]),)  # type: ignore[operator]
        else:
            kept.append((source, node))
    joint.mutations = tuple(kept)


def _counts_up(node: fx.Node, old: fx.Node) -> bool:
    """Return whether a value is `old` plus a number, and nothing else reads either."""
    return node.target is aten.add.Tensor and node.args[0] is old and len(node.args) == 2 \
        and type(node.args[1]) is int and not node.kwargs and not node.users and set(old.users) == {node} \
        and not old.meta[VALUE].is_floating_point() and not old.meta[VALUE].is_complex()
