"""A tensor without its bytes: the data that is needed to make one like it over another storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Form:
    """Form of a tensor whose storage is copied as bytes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    nbytes: int
    """Bytes of the whole storage."""
    conjugate: bool
    """Whether it stands for the conjugate of its bytes."""
    negative: bool

    @staticmethod
    def of(tensor: torch.Tensor) -> Form:
        """Return the form of a tensor with a storage."""
        return Form(tensor.dtype, tuple(tensor.shape), tensor.stride(),
                    int(tensor.storage_offset()), tensor.untyped_storage().nbytes(), tensor.is_conj(),
                    tensor.is_neg())

    def over(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return a tensor of this form over a storage, which it shares."""
        tensor = _set(self.dtype, storage, self.offset, self.shape, self.strides)
        if self.conjugate:
            tensor = tensor.conj()
        if self.negative:
            tensor = torch.ops.aten._neg_view.default(tensor)
        return tensor


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a new tensor of this shape."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a storage, as bytes."""
    return _set(torch.uint8, storage, 0, (storage.nbytes(),), (1,))


def _set(dtype: torch.dtype, storage: Any, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
         ) -> torch.Tensor:
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, offset, shape, strides)
