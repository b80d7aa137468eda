"""Joint passes: gradients of parameters, as autograd takes them."""

from __future__ import annotations

import operator

import torch
from torch import fx

from rkmate.graph.capture.capture import Source
from rkmate.graph.passes.joint import Joint, is_backward, is_view, owner_of
from rkmate.torch_seam.nodes import VALUE, phase_tag

aten = torch.ops.aten


def take_sums_apart(work: Joint) -> None:
    """Drop the sums that only add up one parameter's gradients.

    Autograd adds the parts itself, in the same order, and each leaves as soon as it is made.
    """
    grads: list[tuple[Source, fx.Node]] = []
    for source, node in work.grads:
        parts: list[fx.Node] = []
        todo = [node]
        while todo:
            n = todo.pop()
            if source.kind == "param" and _is_private_sum(n, node):
                todo += reversed(n.args)  # type: ignore[arg-type]
            else:
                parts.append(n)
        grads += [(source, part) for part in parts]
    work.grads = tuple(grads)


def _is_private_sum(node: fx.Node, total: fx.Node) -> bool:
    if node.target is not aten.add.Tensor or node.kwargs or len(node.args) != 2 \
            or (node is total and node.users) or len(node.users) > 1:
        return False
    shape = node.meta[VALUE].shape
    return all(isinstance(a, fx.Node) and a.op == "call_function" and is_backward(a)
               and set(a.users) == {node} and a.meta[VALUE].shape == shape for a in node.args)


def own_gradients(work: Joint) -> None:
    """A parameter's gradient that is handed to autograd shares its storage with nothing else."""
    count: dict[fx.Node, int] = {}
    for _, node in work.grads:
        count[owner_of(node)] = count.get(owner_of(node), 0) + 1
    grads = list(work.grads)
    for k, (source, node) in enumerate(grads):
        owner = owner_of(node)
        shared = count[owner] > 1 or owner.op != "call_function" or not is_backward(owner) \
            or _is_read_by_operations(owner)
        if source.kind == "param" and shared:
            after = node if node.op == "call_function" else \
                next(n for n in work.graph.nodes if n.op == "call_function" and is_backward(n))
            insert = work.graph.inserting_after if node is after else work.graph.inserting_before
            with insert(after):
                copy = work.graph.call_function(aten.clone.default, (node,))
            copy.meta = {VALUE: node.meta[VALUE], **phase_tag(backward=True)}
            with node.meta[VALUE].fake_mode:
                copy.meta[VALUE] = torch.clone(node.meta[VALUE])
            grads[k] = source, copy
    work.grads = tuple(grads)


def _is_read_by_operations(node: fx.Node) -> bool:
    """Whether anything but views reads the node's storage."""
    todo = list(node.users)
    while todo:
        user = todo.pop()
        if not is_view(user) and user.target is not operator.getitem:
            return True
        todo += user.users
    return False
