"""Temporary memory of sums on a GPU: parts of sums that blocks of threads leave for the last of them.

A sum over many rows of a matrix is cut among the multiprocessors, and each of them writes what it has. How
many parts there are is decided by `setReduceConfig` in torch's `aten/src/ATen/native/cuda/Reduce.cuh`, which
this file follows, for tensors of which one dimension (or a run of neighbours) is summed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from rkmate.devices import GPU

_THREADS = 512
_WARP = 32
_LEAST_VALUES, _MOST_VALUES = 16, 256
"""Number of values that a thread should add up."""


def reduction_bytes(gpu: GPU, value: torch.Tensor, dims: Sequence[int]) -> int:
    """Return the bytes that a sum or mean over some dimensions takes on a GPU in addition to its result.
    Without `dims`: over all dimensions."""
    summed = {d % value.dim() for d in dims} if dims and value.dim() else set(range(value.dim()))
    kept = [d for d in range(value.dim()) if d not in summed and value.shape[d] > 1]
    summed = {d for d in summed if value.shape[d] > 1}
    outputs = math.prod(value.shape[d] for d in kept)
    each = math.prod(value.shape[d] for d in summed)
    if not summed or not outputs:
        return 0
    fastest = min((*kept, *summed), key=value.stride)
    along = fastest in summed           # whether neighbours in memory are added up
    width, height = (each, outputs) if along else (outputs, each)
    vector = 1
    if value.stride(fastest) == 1:
        if not along:
            vector = _vector(value, fastest, kept, summed)
            width //= vector
        elif not kept and width > 128:
            width //= 4
    x, y = _block(width, height, _THREADS // vector)
    outputs_step, values_step = (1, x) if along else (x, 1)
    across_warps = -(-each // values_step) >= min(16 * y, _MOST_VALUES)
    if across_warps:
        values_step *= y
    else:
        outputs_step *= y
    values = -(-each // values_step)
    blocks = -(-(outputs // vector) // outputs_step)
    target = gpu.multiprocessors * (gpu.threads // (x * y))
    if not across_warps or values < _MOST_VALUES or blocks > target:
        return 0
    parts = max(min(-(-target // blocks), -(-values // _LEAST_VALUES)), -(-values // _MOST_VALUES))
    if parts <= 1:
        return 0
    size = 8 if value.dtype in (torch.float64, torch.int64) else 4
    return size * outputs * parts * (1 if along else x * vector)


def _vector(value: torch.Tensor, fastest: int, kept: Sequence[int], summed: set[int]) -> int:
    """Return how many neighbouring results one thread makes: all rows have to begin at a multiple of this
    number."""
    strides = [value.stride(d) for d in (*kept, *summed) if d != fastest]
    return next(n for n in (4, 2, 1) if value.shape[fastest] % n == 0 and all(s % n == 0 for s in strides))


def _block(width: int, height: int, most: int) -> tuple[int, int]:
    """Return the threads of a block, along and across."""
    wide, high = (_power(n) if n < most else most for n in (width, height))
    x = min(wide, _WARP)
    y = min(high, most // x)
    return min(wide, most // y), y


def _power(n: int) -> int:
    """Return the largest power of two up to a number."""
    return 1 << (max(1, n).bit_length() - 1)
