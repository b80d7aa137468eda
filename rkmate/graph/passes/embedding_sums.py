"""A rewriting pass: an embedding's gradient is added to another gradient of its weight, row by row.

Torch makes the gradient of an embedding as large as its table, with zeros for all the words that did not
occur, and autograd adds it to what else is there: where a table is tied to a language model's head, a second
matrix of that size. The operator adds the rows of each word up among themselves, in torch's order, and each
sum to its row of the other gradient, over which it may put its result: the same bits.
"""

from __future__ import annotations

import torch
from torch import fx

from rkmate.graph.passes.chunked_kernels import is_wide
from rkmate.graph.passes.joint import Rewriting, is_backward
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten
_library = torch.library.Library("rkmate", "FRAGMENT")

SORTING, PLACES = 48, 16
"""Bytes for each index: while the indices are put in order, at most, and of what comes out."""


def bytes_of_rows(grad: torch.Tensor, indices: torch.Tensor) -> int:
    """What the operator takes beside its result, at most: a row for each index."""
    count = indices.numel()
    rows = (count + 1) * grad.shape[-1] * grad.element_size()
    copied = 0 if grad.is_contiguous() else grad.nbytes
    return max(SORTING * count, rows + copied + PLACES * count)


def add_embedding_rows_over(total: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor,
                            padding_idx: int, *, out: torch.Tensor) -> torch.Tensor:
    """``total + embedding_dense_backward(grad, indices)``; `out` may be `total` itself.

    total [V, d], grad [..., d], indices [...]; rows of `padding_idx` are left out. No size depends on
    which indices there are: memory is the same in every step, and an accelerator is not waited for.
    """
    rows, slots = _slots(indices, padding_idx)
    count = len(rows)
    sums = aten.embedding_dense_backward(grad, slots, count + 1, count, False)
    torch.add(total, 0, out=out)         # as a sum with a zero does it: of -0.0 it makes 0.0
    return out.index_add_(0, rows, sums[:count])


def _slots(indices: torch.Tensor, padding_idx: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The different indices, smallest first, zeros after them; and for each index its place among them,
    one past the last for `padding_idx`.

    In the indices' own order, so that kernels that sort add up in the same order.
    """
    values, order = indices.reshape(-1).sort(stable=True)
    rank = torch.zeros_like(order)
    torch.cumsum(values[1:] != values[:-1], 0, out=rank[1:])
    rows = torch.zeros_like(values).scatter_(0, rank, values)
    slots = torch.empty_like(order).scatter_(0, order, rank).view(indices.shape)
    return rows, slots.masked_fill_(indices == padding_idx, len(rows))


def add_embedding_rows(total: torch.Tensor, grad: torch.Tensor, indices: torch.Tensor,
                       padding_idx: int) -> torch.Tensor:
    """As above, into memory of its own."""
    return add_embedding_rows_over(total, grad, indices, padding_idx, out=torch.empty_like(total))


_ARGUMENTS = "Tensor total, Tensor grad, Tensor indices, SymInt padding_idx"
for _schema, _function in {
    f"add_embedding_rows({_ARGUMENTS}) -> Tensor": add_embedding_rows,
    f"add_embedding_rows.out({_ARGUMENTS}, *, Tensor(a!) out) -> Tensor(a!)": add_embedding_rows_over,
}.items():
    _library.define(_schema)
    _library.impl(_schema.split("(")[0], _function, "CompositeExplicitAutograd")


def add_rows_of_embeddings(work: Rewriting) -> None:
    """Rewrite the sums of a gradient and an embedding's, where that is wide and made of few rows. Where
    gradients are added in place, each goes there by itself."""
    if work.choices.in_place:
        return
    results = work.results()
    for node in list(work.graph.nodes):
        pair = _summands(node)
        if pair is None or pair[1] in results:
            continue
        total, dense = pair
        grad, indices, _, padding_idx, _ = dense.args
        with work.graph.inserting_before(node):
            new = work.graph.create_node("call_function", torch.ops.rkmate.add_embedding_rows.default,
                                         (total, grad, indices, padding_idx), name="add_embedding_rows")
        given = fx.node.map_arg(new.args, lambda n: n.meta[VALUE])
        with node.meta[VALUE].fake_mode:
            new.meta = dict(node.meta) | {VALUE: new.target(*given)}  # type: ignore[operator]
        work.replace(node, new)
        work.graph.erase_node(node)


def _summands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """A gradient, and the embedding's gradient that is added to it; None for any other node."""
    if node.target is not aten.add.Tensor or node.kwargs or not is_backward(node):
        return None
    values: list[fx.Node] = [a for a in node.args if isinstance(a, fx.Node)]
    if len(values) != 2 or any(_form(v) != _form(node) for v in values):
        return None
    a, b = values
    return (a, b) if _is_sparse(b, node) else (b, a) if _is_sparse(a, node) else None


def _is_sparse(node: fx.Node, reader: fx.Node) -> bool:
    """Whether a node is the gradient of an embedding, for this reader alone, that has mostly zeros."""
    if node.target is not aten.embedding_dense_backward.default or set(node.users) != {reader} \
            or node.args[4]:
        return False
    dense = node.meta[VALUE]
    grad, indices = (n.meta[VALUE] for n in node.args[:2])  # type: ignore[union-attr]
    return is_wide(dense, 0) and indices.numel() > 0 and bytes_of_rows(grad, indices) < dense.nbytes


def _form(node: fx.Node) -> tuple[torch.Size, torch.dtype]:
    return node.meta[VALUE].shape, node.meta[VALUE].dtype
