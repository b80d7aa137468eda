"""Forms of an operation's results by torch's own kernels for tensors without memory, asked directly.

Fake tensors ask the same kernels, or rules in Python that say the same, and take many times as long. Views
and matrix products have kernels alone, and no rules of a device. Of other everyday operations the kernel is
taken once it has said the same as a fake tensor for two calls of the kind.

Uses private names of torch (the modes that are in force); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

AGREED = 2
"""Calls of a kind for which both said the same, before the kernel is taken alone."""

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._unsafe_view.default}
_EVERYDAY = {
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default, aten.nll_loss_forward.default,
    aten.nll_loss_backward.default, aten._log_softmax.default, aten._log_softmax_backward_data.default,
    aten._softmax.default, aten._safe_softmax.default, aten._softmax_backward_data.default,
    aten.sum.dim_IntList, aten.mean.dim, aten.embedding.default, aten.embedding_dense_backward.default,
    aten.cat.default, aten.clone.default}
_seen: dict[Any, set[Any]] = {}
"""Kind of call -> the calls for which both said the same."""
_never: set[Any] = set()
"""Kinds of calls for which they did not."""
_like_inputs: dict[Any, tuple[torch.dtype, Any] | None] = {}
"""Kinds of pointwise calls -> the type of the result, and how it stands in what is returned, where all seen
of operands of one dense layout had that layout; None where some had not."""


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    offset: int = 0


Answer = tuple[list[TensorForm | None], Any]
"""Forms of results, and how they stand in what the operation returns."""


def form_of(t: torch.Tensor) -> TensorForm:
    """The form of a tensor that an operation takes, or a call."""
    return TensorForm(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad,
                      int(t.storage_offset()))


def like(f: TensorForm) -> torch.Tensor:
    """A tensor of this form without memory."""
    if not f.offset:
        return torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device="meta")
    extent = f.offset + 1 + sum((n - 1) * s for n, s in zip(f.shape, f.stride, strict=True))
    whole = torch.empty(max(extent, 0), dtype=f.dtype, device="meta")
    return whole.as_strided(f.shape, f.stride, f.offset)


def answer(func: Any, args: Any, kwargs: Any, form: Callable[[torch.Tensor], TensorForm],
           ask: Callable[[], Answer]) -> Answer:
    """What an operation returns for tensors of these forms. `ask`: the same of fake tensors."""
    if not (_is_certain(func) or func in _EVERYDAY or torch.Tag.pointwise in func.tags):
        return ask()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    forms = [form(v) for v in leaves if isinstance(v, torch.Tensor)]
    if len({f.device for f in forms}) != 1 or any(isinstance(v, torch.device) for v in leaves) \
            or any(r.alias_info is not None and r.alias_info.is_write for r in func._schema.returns):
        return ask()
    if _is_certain(func):
        return _by_kernel(func, leaves, spec, forms) or ask()
    kind = (func, spec, tuple(_kind(v, form) for v in leaves))
    if kind in _never:
        return ask()
    seen = _seen.setdefault(kind, set())
    pointwise = torch.Tag.pointwise in func.tags and _is_one_layout(forms)
    if len(seen) >= AGREED:
        known = _like_inputs.get(kind) if pointwise else None
        if known is not None:
            f = forms[0]
            return [TensorForm(f.shape, f.stride, known[0], f.device)], known[1]
        return _by_kernel(func, leaves, spec, forms) or ask()
    found = ask()
    if pointwise:
        _note_layout(kind, found, forms[0])
    if found == _by_kernel(func, leaves, spec, forms):
        seen.add(tuple(form(v) if isinstance(v, torch.Tensor) else repr(v) for v in leaves))
    else:
        _never.add(kind)
    return found


def _is_one_layout(forms: Sequence[TensorForm]) -> bool:
    """Whether operands of a pointwise operation have one layout, without gaps or repeats, which is its
    result's too."""
    f = forms[0]
    if any(g.shape != f.shape or g.stride != f.stride for g in forms) or min(f.shape, default=0) < 2:
        return False
    expected = 1
    for stride, n in sorted(zip(f.stride, f.shape, strict=True)):
        if stride != expected:
            return False
        expected *= n
    return True


def _note_layout(kind: Any, found: Answer, f: TensorForm) -> None:
    """Take down what a call of operands of one layout returned."""
    results, around = found
    r = results[0] if len(results) == 1 else None
    alike = r is not None and r == TensorForm(f.shape, f.stride, r.dtype, f.device)
    now = (r.dtype, around) if alike and r is not None else None
    if _like_inputs.setdefault(kind, now) != now:
        _like_inputs[kind] = None


def _is_certain(func: Any) -> bool:
    """Whether fake tensors have no rules of their own for it, that a kernel does not have."""
    returns = func._schema.returns
    return func in _PRODUCTS or (bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns))


def _kind(value: Any, form: Callable[[torch.Tensor], TensorForm]) -> Any:
    """What calls of one kind have in common: all but the sizes, whose order of strides is the same."""
    if not isinstance(value, torch.Tensor):
        return type(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else repr(value)
    f = form(value)
    order = sorted(range(len(f.shape)), key=lambda d: (f.stride[d], f.shape[d] == 1, d))
    dense, expected = [], 1
    for d in order:
        dense.append((f.stride[d] == expected, f.stride[d] == 0))
        expected = f.stride[d] * f.shape[d]
    return (f.dtype, f.device, tuple(min(n, 2) for n in f.shape), tuple(order), tuple(dense), f.offset == 0)


def _by_kernel(func: Any, leaves: Sequence[Any], spec: Any, forms: Sequence[TensorForm]) -> Answer | None:
    """None where the kernel has no answer."""
    each, device = iter(forms), forms[0].device
    try:
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = pytree.tree_unflatten(
                [like(next(each)) if isinstance(v, torch.Tensor) else v for v in leaves], spec)
            found, around = pytree.tree_flatten(func(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if any(x is not None and not (isinstance(x, torch.Tensor) and x.is_meta) for x in found):
        return None
    return [None if x is None else form_of(x)._replace(device=device, requires_grad=False)
            for x in found], around
