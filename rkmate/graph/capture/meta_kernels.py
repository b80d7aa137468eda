"""Forms of an operation's results by torch's own kernels for tensors without memory, asked directly.

Fake tensors ask the same kernels, or rules in Python that say the same, and take many times as long. Views
and matrix products have kernels alone, and no rules of a device. Of other everyday operations the kernel is
taken once it has said the same as a fake tensor for two calls of the kind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from rkmate.graph.capture.form_rules import CERTAIN, LEARNED, Layout, broadcast
from rkmate.graph.capture.form_rules import TensorForm as TensorForm
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.schema import schema_of
from rkmate.torch_seam.tensors import without_modes

aten = torch.ops.aten

AGREED = 2
"""Calls of a kind for which both said the same, before the kernel is taken alone."""

_PRODUCTS = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten._unsafe_view.default}
_EVERYDAY = {*LEARNED, id(aten.cat.default)}
"""By their identity."""
_seen: dict[Any, set[Any]] = {}
"""Kind of call -> the calls for which both said the same."""
_never: set[Any] = set()
"""Kinds of calls for which they did not."""
_by_rule: dict[Any, tuple[list[torch.dtype | None], Any] | None] = {}
"""Kinds of calls -> the types of the results, and how they stand in what is returned, where all seen had the
layouts of a rule (`form_rules`); None where some had not."""


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
    rule = None if kwargs else CERTAIN.get(id(func))
    by_rule = None if rule is None else rule(args, form)
    if by_rule is not None:
        return [by_rule], _ALONE
    pointwise = torch.Tag.pointwise in func.tags
    if not (pointwise or id(func) in _EVERYDAY or _is_certain(func)):
        return ask()
    leaves, spec = pytree.tree_flatten((args, kwargs))
    forms = [form(v) for v in leaves if isinstance(v, torch.Tensor)]
    if len({f.device for f in forms}) != 1 or any(isinstance(v, torch.device) for v in leaves) \
            or any(r.alias_info is not None and r.alias_info.is_write for r in schema_of(func).returns):
        return ask()
    if _is_certain(func):
        return _by_kernel(func, leaves, spec, forms) or ask()
    kind = (func, spec, tuple([_kind(v, form) for v in leaves]))
    if kind in _never:
        return ask()
    seen = _seen.setdefault(kind, set())
    learned = LEARNED.get(id(func))
    layouts = learned(args, kwargs, forms, form) if learned is not None else \
        broadcast(forms) if pointwise else None
    if len(seen) >= AGREED:
        known = _by_rule.get(kind) if layouts is not None else None
        if known is not None and layouts is not None:
            return [None if dtype is None else TensorForm(*layout, dtype, forms[0].device)
                    for dtype, layout in zip(known[0], layouts, strict=True)], known[1]
        return _by_kernel(func, leaves, spec, forms) or ask()
    found = ask()
    if layouts is not None:
        _note(kind, found, layouts, forms[0].device)
    if found == _by_kernel(func, leaves, spec, forms):
        seen.add(tuple(form(v) if isinstance(v, torch.Tensor) else repr(v) for v in leaves))
    else:
        _never.add(kind)
    return found


_ALONE = pytree.tree_flatten(torch.empty(0))[1]
"""How one result stands in what is returned."""


def _note(kind: Any, found: Answer, layouts: Sequence[Layout], device: torch.device) -> None:
    """Take down what a call returned that a rule has layouts for."""
    results, around = found
    agree = len(results) == len(layouts) and all(
        r is None or r == TensorForm(*layout, r.dtype, device)
        for r, layout in zip(results, layouts, strict=True))
    now = ([None if r is None else r.dtype for r in results], around) if agree else None
    if _by_rule.setdefault(kind, now) != now:
        _by_rule[kind] = None


def _is_certain(func: Any) -> bool:
    """Whether fake tensors have no rules of their own for it, that a kernel does not have."""
    returns = schema_of(func).returns
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
        with without_modes(), torch.no_grad():
            args, kwargs = pytree.tree_unflatten(
                [like(next(each)) if isinstance(v, torch.Tensor) else v for v in leaves], spec)
            found, around = pytree.tree_flatten(func(*args, **kwargs))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if any(x is not None and not (isinstance(x, torch.Tensor) and x.is_meta) for x in found):
        return None
    return [None if x is None else form_of(x)._replace(device=device, requires_grad=False)
            for x in found], around
