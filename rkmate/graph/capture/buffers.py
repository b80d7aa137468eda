"""Buffers that a forward makes anew (``self.mean = 0.9 * self.mean + ...``), as writes in place.

A trace sees what is written to a tensor, not which tensor a module's buffer is afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from rkmate.errors import CaptureError


@contextmanager
def new_buffers_as_writes(model: nn.Module) -> Iterator[None]:
    """While a model's forward is traced. Raises `CaptureError` as `_Registered.write_back` does."""
    registered = _Registered(model)
    yield
    registered.write_back()


class _Registered:
    """The tensors that a model's modules have registered when a forward begins."""

    def __init__(self, model: nn.Module) -> None:
        self._model = type(model).__name__
        self._buffers = [(path, m, name, t) for path, m in model.named_modules()
                         for name, t in m._buffers.items()]
        self._parameters = [(path, m, name, t) for path, m in model.named_modules()
                            for name, t in m._parameters.items()]

    def write_back(self) -> None:
        """Write each buffer that is another tensor by now into the one that it was.

        Raises `CaptureError` for a parameter that was replaced, and for a buffer of another shape or
        dtype than before.
        """
        for path, module, name, before in self._parameters:
            if module._parameters.get(name) is not before:
                raise CaptureError(f"{self._model}: the forward replaces the parameter "
                                   f"{_full(path, name)!r}, which a captured step would not repeat")
        for path, module, name, before in self._buffers:
            now = module._buffers.get(name)
            if now is before:
                continue
            if now is None or before is None or (now.shape, now.dtype, now.device) != (
                    before.shape, before.dtype, before.device):
                raise CaptureError(
                    f"{self._model}: the forward replaces the buffer {_full(path, name)!r} by "
                    "something of another shape, type or device (or makes or drops it), which a "
                    "captured step would not repeat: write into it in place, or return it. Where "
                    "only the first call on inputs of a size does so (a table that it keeps), call "
                    "the model on such inputs before it is wrapped")
            with torch.no_grad():
                before.copy_(now)
            module._buffers[name] = before


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
