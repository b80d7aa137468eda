"""Forwards that differentiate by themselves: forces of an energy, gradient penalties.

`torch.export` cannot record them. The trace of the joint graph can: to it, the inner gradient is made of
operations as any others. So such a forward is traced without an export before it.

Uses private names of torch (the call of autograd's engine); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from rkmate.errors import CaptureError


class OwnBackwardError(CaptureError):
    """A forward that calls ``backward()``."""


@contextmanager
def noting_inner_gradients(note: Callable[[], None]) -> Iterator[None]:
    """Inside, `note` is called where a gradient is asked for. One that would be added to ``.grad`` is refused
    with an `OwnBackwardError`."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def noted(*args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if accumulate_grad:
            raise OwnBackwardError("the forward calls backward(), which adds to the .grad of parameters, "
                                   "which a plan cannot repeat: torch.autograd.grad returns a gradient")
        note()
        return run(*args, accumulate_grad=accumulate_grad, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", noted):
        yield
