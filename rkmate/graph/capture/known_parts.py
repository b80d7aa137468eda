"""Calls of which a part is known: masks, lengths or counts come from the inputs, what they apply to does not.

The shapes of their results depend on that part alone, so its values are computed before the step, and the
call is written without them: with indices in the place of a mask, with the number of elements in its result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from rkmate.graph.capture.ctc import ctc_loss

_MASKS = (torch.bool, torch.uint8)


class Known(Protocol):
    """What is known of a trace's tensors."""

    def twin(self, t: Any) -> torch.Tensor | None:
        """The value; None where it is not known."""
        ...

    def call(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call of the forward."""
        ...

    def read(self, func: Callable[..., Any], *args: Any) -> Any:
        """What a call of known tensors gives Python."""
        ...

    def compute(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a call of known tensors returns, computed before the step."""
        ...


def _index(known: Known, index: Any) -> tuple[Any, ...]:
    """An index with the places of what known masks pick."""
    found: list[Any] = []
    for part in index if isinstance(index, tuple) else (index,):
        value = known.twin(part)
        if value is not None and value.dtype in _MASKS and value.dim():
            found += known.compute(torch.nonzero, part, as_tuple=True)
        else:
            found.append(part)
    return tuple(found)


def _given(known: Known, t: Any) -> Any:
    """A known tensor, computed before the step: calls that hold it against other values never see one that is
    made up, as where costs are measured."""
    return t if known.twin(t) is None else known.compute(torch.clone, t)


def _get(known: Known, func: Callable[..., Any], x: torch.Tensor, index: Any) -> Any:
    return func(x, _index(known, index))


def _set(known: Known, func: Callable[..., Any], x: torch.Tensor, index: Any, value: Any) -> Any:
    # One number for all that a mask picks needs no number of them.
    some = isinstance(value, torch.Tensor) and value.dim()
    return func(x, _index(known, index) if some else index, value)


def _masked_select(known: Known, func: Callable[..., Any], input: torch.Tensor, mask: torch.Tensor) -> Any:
    if known.twin(mask) is None:
        return func(input, mask)
    shape = torch.broadcast_shapes(input.shape, mask.shape)
    if mask.shape != shape:
        mask = known.call(torch.Tensor.expand, (mask, tuple(shape)), {})
    return input.expand(shape)[known.compute(torch.nonzero, mask, as_tuple=True)]


def _repeat_interleave(known: Known, func: Callable[..., Any], input: torch.Tensor, repeats: Any,
                       dim: int | None = None, *, output_size: int | None = None) -> Any:
    if known.twin(repeats) is not None and output_size is None:
        flat = input.numel() if dim is None else input.shape[dim]
        each = known.call(torch.Tensor.expand, (repeats, (flat,)), {}) if repeats.numel() == 1 else repeats
        output_size = known.read(torch.Tensor.__int__, known.call(torch.Tensor.sum, (each,), {}))
    return func(input, _given(known, repeats), dim, output_size=output_size)


def _ctc_loss(known: Known, func: Callable[..., Any], log_probs: torch.Tensor, targets: torch.Tensor,
              input_lengths: Any, target_lengths: Any, blank: int = 0, reduction: str | int = "mean",
              zero_infinity: bool = False) -> Any:
    if isinstance(target_lengths, torch.Tensor):
        if known.twin(target_lengths) is None:
            return func(log_probs, targets, input_lengths, target_lengths, blank, reduction, zero_infinity)
        longest = known.read(torch.Tensor.__int__, known.call(torch.Tensor.max, (target_lengths,), {}))
    else:
        longest = max(target_lengths)
    lengths = _lengths(known, input_lengths), _lengths(known, target_lengths)
    return ctc_loss(log_probs, targets, *lengths, blank, reduction, zero_infinity, longest)


def _lengths(known: Known, lengths: torch.Tensor | Sequence[int]) -> torch.Tensor:
    return _given(known, lengths) if isinstance(lengths, torch.Tensor) else torch.tensor(lengths)


PARTS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.Tensor.__getitem__: _get,
    torch.Tensor.__setitem__: _set,
    torch.masked_select: _masked_select,
    torch.Tensor.masked_select: _masked_select,
    torch.repeat_interleave: _repeat_interleave,
    torch.Tensor.repeat_interleave: _repeat_interleave,
    F.ctc_loss: _ctc_loss,
    torch.ctc_loss: _ctc_loss,
}
"""By the function that is called: what is called in its place, with what is known before its arguments."""


FILLED: dict[str, Callable[..., Any]] = {
    "zeros_like": lambda *_, **__: 0,
    "ones_like": lambda *_, **__: 1,
    "new_zeros": lambda *_, **__: 0,
    "new_ones": lambda *_, **__: 1,
    "full_like": lambda input, fill_value, **_: fill_value,
    "new_full": lambda self, size, fill_value, **_: fill_value,
}
"""Calls that read of a tensor only its shape, type and device: by name, the number that they fill with."""
