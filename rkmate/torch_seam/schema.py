"""Operators: their classes, names and schemas, and the kernels that the dispatcher chooses from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._C import DispatchKey as DispatchKey
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch.utils.flop_counter import flop_registry

_COMPOSITE = DispatchKey.CompositeImplicitAutograd
TRACED_KEYS = (DispatchKey.Autograd, _COMPOSITE)
"""Dispatch keys of the kernels that decompose an operator while it is traced."""


def schema_of(operator: OpOverload) -> Any:
    """Return the schema: arguments, returns, and which of those are written to or are views."""
    return operator._schema


def given_to(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments that a call gives, by their names. Those left to their defaults are not there."""
    names = (a.name for a in schema_of(operator).arguments)
    return {**dict(zip(names, args, strict=False)), **(kwargs or {})}


def operator_name(operator: Any, otherwise: str = "") -> str:
    """Return the name without namespace and overload, such as ``add``; `otherwise` for anything else."""
    return str(getattr(operator, "_opname", otherwise))


def overload_name(operator: Any) -> str:
    """Return the name of the overload, such as ``Tensor``."""
    return str(operator._overloadname)


def native_call(operator: OpOverload) -> Callable[..., Any]:
    """Return the function in C++ that an overload calls, which takes less time than the overload."""
    function: Callable[..., Any] = operator._op
    return function


@contextmanager
def python_kernels_replaced(kernels: Mapping[OpOverload, Callable[..., Any] | None], *,
                            below_autograd: bool = False) -> Iterator[None]:
    """Replace the Python kernels that decompose operators in a trace, in all threads.

    kernels: operator -> the kernel to run instead; None to run the kernel in C++. below_autograd: whether a
    replacement also runs where autograd is left out and torch has no decomposition.
    """
    before = {operator: dict(operator.py_kernels) for operator in kernels}
    for operator, kernel in kernels.items():
        for key in TRACED_KEYS:
            had = operator.py_kernels.pop(key, None) is not None or (
                key is _COMPOSITE and operator.has_kernel_for_dispatch_key(key))
            if kernel is not None and (had or below_autograd or key is DispatchKey.Autograd):
                operator.py_kernels[key] = kernel
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, old in before.items():
            operator.py_kernels.clear()
            operator.py_kernels.update(old)
            operator._dispatch_cache.clear()


def composed(operator: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Call what torch composes an operator of, in C++, whatever kernel in Python there is for it."""
    return operator._op_dk(_COMPOSITE, *args, **kwargs)


def without_python_kernels() -> Any:
    """Return a context in which the next operator runs its kernel in C++, also if that was replaced.

    Each layer of a torch.func transform inside dispatches to kernels in Python again, so that these must stay
    switched on as such (torch's own switch leaves a layer that looks for them, and fails)."""
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(DispatchKey.PythonDispatcher))


def below_autograd() -> Any:
    """Return a context in which operations skip autograd's kernels: nothing is recorded, and a call takes
    about a third less time on the host than under ``no_grad``. Dispatch modes still see each operation."""
    return torch._C._AutoDispatchBelowAutograd()


def below_views() -> Any:
    """Return a context like `below_autograd` in which views also do not know their base, and writes in place
    are not counted."""
    return torch._C._AutoDispatchBelowADInplaceOrView()


def flop_formula(function: Any) -> Callable[..., int] | None:
    """Return what counts the floating-point operations of a call, from its arguments and ``out_val``, as
    torch does; None where torch has no formula.

    Keys and values of grouped-query attention have fewer heads than queries, and torch 2.11 counts attention
    with equal numbers only: all count as many as there are at most.
    """
    count: Callable[..., int] | None = flop_registry.get(getattr(function, "overloadpacket", None))
    if count is None or not operator_name(function).startswith("_scaled_dot_product"):
        return count

    def counted(*args: Any, **kwargs: Any) -> int:
        shapes = {k: a.shape for k, a in enumerate(args) if isinstance(a, torch.Tensor) and a.dim() == 4}
        heads = max(shape[1] for shape in shapes.values())
        return count(*((shapes[k][0], heads, *shapes[k][2:]) if k in shapes else a
                       for k, a in enumerate(args)), **kwargs)
    return counted
