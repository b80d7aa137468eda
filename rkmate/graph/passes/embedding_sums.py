"""A rewriting pass: an embedding's gradient is added to another gradient of its weight, row by row.

Torch makes the gradient of an embedding as large as its table, with zeros for all the words that did not
occur, and autograd adds it to what else is there: where a table is tied to a language model's head, a second
matrix of that size. The operator adds the rows of each word up among themselves, in torch's order, and each
sum to its row of the other gradient, over which it may put its result: the same bits.
"""

from __future__ import annotations

import torch
from torch import fx

from rkmate.graph.ops.embeddings import ADD_ROWS, bytes_of_rows
from rkmate.graph.passes.chunked_kernels import is_wide
from rkmate.graph.passes.joint import Joint, is_backward
from rkmate.torch_seam.nodes import VALUE

aten = torch.ops.aten


def add_rows_of_embeddings(work: Joint) -> None:
    """Rewrite the sums of a gradient and an embedding's, where that is wide and made of few rows."""
    results = work.results()
    for node in list(work.graph.nodes):
        pair = _summands(node)
        if pair is None or pair[1] in results:
            continue
        total, dense = pair
        grad, indices, _, padding_idx, _ = dense.args
        with work.graph.inserting_before(node):
            new = work.graph.create_node("call_function", ADD_ROWS,
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
