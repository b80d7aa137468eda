"""Modules that a forward moves to where they are: a router's `classifier.to(dtype)`.

Uses private names of torch (how it reads the arguments of `to`); tested with torch 2.13.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import nn


@contextmanager
def standing_modules_stay() -> Iterator[None]:
    """While a module is captured: `Module.to` does nothing where it would move nothing. Else it makes its
    parameters anew, which a trace cannot follow. Other threads' calls run as ever."""
    here = threading.get_ident()
    plain = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        stays = threading.get_ident() == here and _moves_nothing(self, *args, **kwargs)
        return self if stays else plain(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "to", to):
        yield


def _moves_nothing(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    tensors = (*module.parameters(), *module.buffers())
    return layout is None and all(
        (device is None or torch.empty(0, device=device).device == t.device)
        and (dtype is None or t.dtype is dtype or not (t.is_floating_point() or t.is_complex()))
        for t in tensors)
