"""The package's own operators: one record for each, which says all that the package knows about it.

`register` gives the operators to torch. Whoever has a question about an operator (what it may overwrite, how
much temporary memory it takes, whether it uses autograd inside) asks its record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from rkmate.torch_seam.schema import OpOverload, native_call

NAMESPACE = "rkmate"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


@dataclass(frozen=True)
class Over:
    """An operator that writes the first result of another one over an argument."""

    name: str
    """The operator that overwrites, such as ``scale_`` or ``batch_norm_backward.over``."""
    argument: int
    """Position of the argument that may be overwritten."""
    keyword: str | None = None
    """The keyword under which the argument is passed once more, as the place of the result."""


@dataclass(frozen=True)
class Gradient:
    """Derivative of an operator while a model is traced."""

    backward: Callable[..., Any]
    save: Callable[..., None]
    """Keeps what `backward` reads; takes the context, the arguments and the result."""


@dataclass(frozen=True)
class OwnOperator:
    """An overload of one of the package's operators."""

    schema: str
    """Name, arguments and results, without namespace."""
    kernel: Callable[..., Any]
    key: str = "CompositeExplicitAutograd"
    """The dispatch key of the kernel: a device's, where it runs nowhere else."""
    shape: Callable[..., Any] | None = None
    """Makes results of the right shapes from arguments without values; None where the kernel does."""
    gradient: Gradient | None = None
    tags: tuple[torch.Tag, ...] = ()
    direct: bool = False
    """Whether generated code calls the kernel itself: the dispatcher would choose that, too."""
    in_place: Over | None = None
    temporaries: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], int] | None = None
    """Computes the most bytes that the operator takes on the CPU in addition to its results, from the tensors
    that it reads and makes."""
    stands_for: OpOverload | None = None
    """The operator of torch that this one replaces. Its rule of temporary memory holds for this one, too."""
    rows_like: OpOverload | None = None
    """The operator of torch whose row rule cuts this one into tiles."""
    linear: bool = False
    """Whether the result is linear in the first operand, whatever the others are."""
    flops: Callable[..., int] | None = None
    """Floating-point operations, by the shapes of the arguments; for all overloads."""
    reads_host: bool = False
    """Whether the operator may read values on the host, for which an accelerator is waited for."""
    uses_autograd: bool = False
    """Whether the operator uses autograd inside, so that it cannot run below autograd."""
    communicates: bool = False
    """Whether the operator exchanges data with other ranks: it runs once in a step, on all ranks, in one
    order."""

    @property
    def name(self) -> str:
        """Name and overload, such as ``scale`` or ``batch_norm_backward.over``."""
        return self.schema.split("(")[0]


_records: dict[OpOverload, OwnOperator] = {}


def register(operators: Iterable[OwnOperator]) -> None:
    """Define operators in torch, with their kernels, and keep their records."""
    for record in operators:
        _library.define(record.schema, tags=record.tags)
        _library.impl(record.name, record.kernel, record.key)
        if record.shape is not None:
            torch.library.register_fake(f"{NAMESPACE}::{record.name}", record.shape, lib=_library)
        if record.gradient is not None:
            torch.library.register_autograd(f"{NAMESPACE}::{record.name}", record.gradient.backward,
                                            setup_context=record.gradient.save, lib=_library)
        operator = own_operator(record.name)
        if record.flops is not None:
            register_flop_formula(operator.overloadpacket)(record.flops)
        _records[operator] = record


def own_operator(name: str) -> OpOverload:
    """Return the package's operator of this name, such as ``scale_`` or ``batch_norm_backward.over``."""
    base, _, overload = name.partition(".")
    found: OpOverload = getattr(getattr(torch.ops.rkmate, base), overload or "default")
    return found


def record_of(operator: Any) -> OwnOperator | None:
    """Return the record of an operator; None for what is not the package's own."""
    return _records.get(operator) if isinstance(operator, OpOverload) else None


def quickest(function: Any) -> Any:
    """Return what an operator calls, where `function` is one: that itself takes less time than its call."""
    if not isinstance(function, OpOverload):
        return function
    record = record_of(function)
    return record.kernel if record is not None and record.direct else native_call(function)
