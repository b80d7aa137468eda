"""Products of matrices by oneDNN, the library that convolves on a CPU.

Torch multiplies matrices of single precision by another one, MKL where it was built with it. Which is faster
depends on the processor, the shapes and the number of threads.
"""

from __future__ import annotations

import torch

from rkmate.torch_seam.compiler import onednn_product
from rkmate.torch_seam.versions import ONEDNN, is_off


def is_available() -> bool:
    """Return whether torch was built with oneDNN, and lets it multiply single precision."""
    return _linear is not None and not is_off(ONEDNN)


_linear = onednn_product()
_STRIP = 64
"""Columns that are brought together for a thread."""


def product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Return ``a @ b + bias`` on a CPU, in single precision and without a gradient: a [n, k], b [k, m], bias
    [m].

    If `a` is not contiguous, it is copied first.
    """
    assert _linear is not None
    result: torch.Tensor = _linear(a, b.t(), bias, "none", [], "")
    return result


def temporary_bytes(a: torch.Tensor) -> int:
    """Return an upper bound of the bytes that `product` takes in addition to its result: a copy of `a`, and
    for each thread a strip of the other matrix, whose depth is rounded up to a vector's width."""
    copied = 0 if a.is_contiguous() else a.numel() * a.element_size()
    strip = _STRIP * -(-a.shape[1] // 16) * 16 * a.element_size()
    return copied + torch.get_num_threads() * (strip + 1024) + 4096
