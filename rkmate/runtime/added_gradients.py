"""Gradients that a planned backward adds by itself: where they are, and whether the backward may add to them.

What can change after a module was wrapped is looked at before each forward and before each backward: hooks
on parameters, the form of what stands in ``.grad``, and what the backward was called for. A step that fails
half-way leaves a mark at the gradients that it has begun to add to: the next forward refuses to add to them
until they are zeroed, replaced or set to None.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
from torch.autograd.graph import increment_version

from rkmate.errors import ArgumentError, BackwardError
from rkmate.graph.capture.refusals import IN_PLACE, RETURNED, obstacle
from rkmate.torch_seam.tensors import will_accumulate

_MARK = "_rkmate_half_added"
"""Attribute of a gradient: a step failed that had begun to add."""

adding = threading.RLock()
"""Held around every addition to a parameter's gradient: another thread's step may add to the same one."""


class Held(dict[str, torch.Tensor]):
    """Tensors of the caller, by source key. A parameter's gradient is looked up at each access, and made (of
    zeros) if there is none."""

    def __init__(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        super().__init__(tensors)
        self.additions: Additions | None = None

    def __missing__(self, key: str) -> torch.Tensor:
        kind, _, name = key.partition(":")
        if kind != "grad":
            raise KeyError(key)
        parameter = self[f"param:{name}"]
        if self.additions is not None:
            self.additions.begun = True
        with adding:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            elif why := obstacle(parameter):
                raise BackwardError(f"{IN_PLACE}: the parameter {name!r} {why}. {RETURNED}")
            return parameter.grad


class Additions:
    """The parameters whose gradients one call's backward adds to."""

    __slots__ = ("_names", "_parameters", "begun")

    def __init__(self, held: Held, names: Sequence[str]) -> None:
        """Begin with a forward. Raises `ArgumentError` if it is known that the backward may not add to
        gradients, or that a backward before this one failed half-way."""
        self.begun = False
        """Whether a gradient was looked up to be added to."""
        held.additions = self
        self._names = names
        self._parameters = [held[f"param:{name}"] for name in names]
        for name, parameter in zip(names, self._parameters, strict=True):
            if why := obstacle(parameter):
                raise ArgumentError(f"{IN_PLACE}: the parameter {name!r} {why}. {RETURNED}")
            if _is_half_added(parameter.grad):
                raise ArgumentError(f"{IN_PLACE}: a backward failed when it had added a part of its "
                                    f"gradients (to that of {name!r}, say): zero them first (zero_grad), "
                                    "before anything else adds to them, or set them to None")

    def check(self) -> None:
        """Check the parameters before a backward adds anything. Raises `BackwardError` if a gradient is
        needed as a separate tensor."""
        for name, parameter in zip(self._names, self._parameters, strict=True):
            if why := obstacle(parameter):
                raise BackwardError(f"{IN_PLACE}: the parameter {name!r} {why}. {RETURNED}")
            if not parameter.requires_grad or not will_accumulate(parameter):
                raise BackwardError(
                    f"{IN_PLACE}: this backward does not add to the gradient of {name!r}, as "
                    "torch.autograd.grad and backward(inputs=...) do not, or not to all; a planned one "
                    f"always does. Call loss.backward() alone. {RETURNED}")

    def count(self) -> None:
        """Count the gradients as written, after the backward."""
        if self.begun:
            increment_version([p.grad for p in self._parameters if p.grad is not None])

    def were_interrupted(self) -> None:
        """Mark the gradients after a failed backward, if it had begun to add to them."""
        self.count()
        for parameter in self._parameters if self.begun else ():
            if parameter.grad is not None:
                setattr(parameter.grad, _MARK, True)


def _is_half_added(grad: torch.Tensor | None) -> bool:
    """Return whether a gradient has a mark, and is anything but zeros; the mark of zeros is taken away."""
    if grad is None or not hasattr(grad, _MARK):
        return False
    if grad.any():
        return True
    delattr(grad, _MARK)
    return False
