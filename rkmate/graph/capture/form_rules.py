"""Forms of an operation's results by rules written here: what torch says takes a hundred times as long.

Views and products of contiguous tensors have rules that hold as they stand. The other rules say how results
lie in memory, and are taken for a kind of call once they have said the same as torch for some calls of it.
A rule has no answer (None) where a call is not as it takes it to be: torch is asked then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rkmate.device.forms import contiguous_strides

aten = torch.ops.aten


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    offset: int = 0


Form = Callable[[torch.Tensor], TensorForm]
Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape and strides."""
Certain = Callable[[Sequence[Any], Form], TensorForm | None]
"""(arguments, form of a tensor) -> form of the only result."""
Learned = Callable[[Sequence[Any], Mapping[str, Any], Sequence[TensorForm], Form], list[Layout] | None]
"""(arguments, keywords, forms of all tensors among them, form of a tensor) -> layouts of the results."""


def in_rows(shape: Sequence[int]) -> Layout:
    """A contiguous layout."""
    return tuple(shape), contiguous_strides(shape)


def _is_in_rows(f: TensorForm) -> bool:
    return 0 not in f.shape and in_rows(f.shape)[1] == f.stride


# -- views and products -----------------------------------------------------------------------


def _viewed(args: Sequence[Any], form: Form) -> TensorForm | None:
    f, size = form(args[0]), list(args[1])
    count = math.prod(f.shape)
    if size.count(-1) == 1:
        others = -math.prod(size)
        if others <= 0:
            return None
        size[size.index(-1)] = count // others
    if not _is_in_rows(f) or min(size, default=1) < 1 or math.prod(size) != count:
        return None
    shape, stride = in_rows(size)
    return f._replace(shape=shape, stride=stride, requires_grad=False)


def _same(args: Sequence[Any], form: Form) -> TensorForm | None:
    return form(args[0])._replace(requires_grad=False)


def _permuted(f: TensorForm, dims: Sequence[int]) -> TensorForm:
    return f._replace(shape=tuple([f.shape[d] for d in dims]), stride=tuple([f.stride[d] for d in dims]),
                      requires_grad=False)


def _transposed(args: Sequence[Any], form: Form) -> TensorForm | None:
    f, a, b = form(args[0]), args[1], args[2]
    n = len(f.shape)
    if not (-n <= a < n and -n <= b < n):
        return None
    dims = list(range(n))
    dims[a], dims[b] = dims[b], dims[a]
    return _permuted(f, dims)


def _t(args: Sequence[Any], form: Form) -> TensorForm | None:
    f = form(args[0])
    return _permuted(f, (1, 0)) if len(f.shape) == 2 else None


def _product(a: TensorForm, b: TensorForm) -> TensorForm | None:
    """Of matrices, or of as many in a row."""
    if len(a.shape) != len(b.shape) or a.shape[:-2] != b.shape[:-2] or a.shape[-1] != b.shape[-2] \
            or 0 in a.shape or 0 in b.shape or a.dtype != b.dtype or a.device != b.device:
        return None
    shape, stride = in_rows((*a.shape[:-1], b.shape[-1]))
    return TensorForm(shape, stride, a.dtype, a.device)


def _mm(args: Sequence[Any], form: Form) -> TensorForm | None:
    a, b = form(args[0]), form(args[1])
    return _product(a, b) if len(a.shape) == 2 else None


def _bmm(args: Sequence[Any], form: Form) -> TensorForm | None:
    a, b = form(args[0]), form(args[1])
    return _product(a, b) if len(a.shape) == 3 else None


def _addmm(args: Sequence[Any], form: Form) -> TensorForm | None:
    bias, a, b = map(form, args)
    made = _product(a, b) if len(a.shape) == 2 else None
    if made is None or bias.shape != made.shape[1:] or bias[2:4] != made[2:4]:
        return None
    return made


CERTAIN: dict[int, Certain] = {id(op): rule for op, rule in (
    (aten.view.default, _viewed), (aten._unsafe_view.default, _viewed), (aten.detach.default, _same),
    (aten.transpose.int, _transposed), (aten.t.default, _t), (aten.mm.default, _mm),
    (aten.bmm.default, _bmm), (aten.addmm.default, _addmm))}
"""By an operation's identity, for calls without keywords."""


# -- rules that are learned -------------------------------------------------------------------


def broadcast(forms: Sequence[TensorForm]) -> list[Layout] | None:
    """Of a pointwise operation whose operands have one layout without gaps or repeats, or are contiguous."""
    f = forms[0]
    if all(g[:2] == f[:2] for g in forms):
        return [f[:2]] if _is_dense(f) else None
    shape = torch.broadcast_shapes(*(g.shape for g in forms)) if _fit(forms) else ()
    return [in_rows(shape)] if min(shape, default=0) > 1 and all(map(_is_in_rows, forms)) else None


def _fit(forms: Sequence[TensorForm]) -> bool:
    rank = max(len(f.shape) for f in forms)
    rows = zip(*((1,) * (rank - len(f.shape)) + f.shape for f in forms), strict=True)
    return all(len({n for n in row if n != 1}) < 2 for row in rows)


def _is_dense(f: TensorForm) -> bool:
    if min(f.shape, default=0) < 2:
        return False
    expected = 1
    for stride, n in sorted(zip(f.stride, f.shape, strict=True)):
        if stride != expected:
            return False
        expected *= n
    return True


def _like(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
          ) -> list[Layout] | None:
    f = forms[0]
    return [f[:2]] if all(g[:2] == f[:2] for g in forms) and _is_dense(f) else None


def _copied(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
            ) -> list[Layout] | None:
    if kwargs.get("memory_format") is torch.contiguous_format:
        return [in_rows(forms[0].shape)]
    return _like(args, kwargs, forms, form)


def _summed(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
            ) -> list[Layout] | None:
    f, dims, keep = forms[0], args[1], args[2] if len(args) > 2 else False
    rank = len(f.shape)
    if not dims or not _is_in_rows(f) or not all(-rank <= d < rank for d in dims):
        return None
    gone = {d % rank for d in dims}
    return [in_rows([1 if d in gone else n for d, n in enumerate(f.shape) if keep or d not in gone])]


def _normed(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
            ) -> list[Layout] | None:
    f, last = forms[0], tuple(args[1])
    rest = len(f.shape) - len(last)
    if not _is_in_rows(f) or f.shape[rest:] != last:
        return None
    statistics = in_rows((*f.shape[:rest], *(1 for _ in last)))
    return [f[:2], statistics, statistics]


def _normed_backward(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
                     ) -> list[Layout] | None:
    gradient, f, last = form(args[0]), form(args[1]), tuple(args[2])
    if gradient[:2] != f[:2] or not _is_in_rows(f) or f.shape[len(f.shape) - len(last):] != last:
        return None
    return [f[:2], in_rows(last), in_rows(last)]


def _classes(args: Sequence[Any], form: Form) -> TensorForm | None:
    """The first of the operands of a loss: a row of numbers for each class of the second."""
    f, target = form(args[0]), form(args[1])
    return f if len(f.shape) == 2 and f.shape[:1] == target.shape and _is_in_rows(f) else None


def _lost(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
          ) -> list[Layout] | None:
    reduced = len(args) > 3 and args[3] != 0
    return [((), ()), ((), ())] if reduced and _classes(args, form) is not None else None


def _lost_backward(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
                   ) -> list[Layout] | None:
    f = _classes(args[1:], form)
    return None if f is None else [f[:2]]


def _looked_up(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm], form: Form
               ) -> list[Layout] | None:
    table, rows = form(args[0]), form(args[1])
    return [in_rows((*rows.shape, table.shape[1]))] if len(table.shape) == 2 and 0 not in rows.shape else None


def _looked_up_backward(args: Sequence[Any], kwargs: Mapping[str, Any], forms: Sequence[TensorForm],
                        form: Form) -> list[Layout] | None:
    gradient, rows = form(args[0]), form(args[1])
    return [in_rows((args[2], gradient.shape[-1]))] if gradient.shape[:-1] == rows.shape else None


LEARNED: dict[int, Learned] = {id(op): rule for op, rule in (
    (aten._log_softmax.default, _like), (aten._log_softmax_backward_data.default, _like),
    (aten._softmax.default, _like), (aten._safe_softmax.default, _like),
    (aten._softmax_backward_data.default, _like), (aten.tril.default, _like), (aten.triu.default, _like),
    (aten.cumsum.default, _like), (aten.empty_like.default, _copied), (aten.zeros_like.default, _copied),
    (aten.ones_like.default, _copied), (aten.clone.default, _copied), (aten.sum.dim_IntList, _summed),
    (aten.mean.dim, _summed), (aten.native_layer_norm.default, _normed),
    (aten.native_layer_norm_backward.default, _normed_backward),
    (aten.nll_loss_forward.default, _lost), (aten.nll_loss_backward.default, _lost_backward),
    (aten.embedding.default, _looked_up), (aten.embedding_dense_backward.default, _looked_up_backward))}
"""By an operation's identity."""
