"""Writes to many small tensors by few kernels.

Uses private names of torch (its operations on lists of tensors); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch

_form = attrgetter("dtype", "device")


def copy_all(targets: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> None:
    """Write each value into its target, those of one type on one device together."""
    if len({*map(_form, targets), *map(_form, values)}) == 1:
        torch._foreach_copy_([*targets], [*values])
        return
    for members in _groups((t.dtype, t.device, v.dtype, v.device)
                           for t, v in zip(targets, values, strict=True)):
        torch._foreach_copy_([targets[k] for k in members], [values[k] for k in members])


def add_to_all(targets: Sequence[torch.Tensor], number: int) -> None:
    """Add a number to each, to those of one type on one device together."""
    if len({*map(_form, targets)}) == 1:
        torch._foreach_add_([*targets], number)
        return
    for members in _groups((t.dtype, t.device) for t in targets):
        torch._foreach_add_([targets[k] for k in members], number)


def _groups(forms: Iterable[object]) -> Iterable[list[int]]:
    """The places of equal ones."""
    groups: dict[object, list[int]] = {}
    for k, form in enumerate(forms):
        groups.setdefault(form, []).append(k)
    return groups.values()
