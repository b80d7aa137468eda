"""Batch norm with a cumulative average, traced without its data-dependent factor.

With ``momentum=None`` the module reads the number of batches back from its buffer, which no static
graph can. Here the factor stays a tensor; values are those of the kernel, which computes the average
in double precision.

Uses private names of torch (the class of all batch norms); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm


@contextmanager
def cumulative_averages_as_tensors(model: nn.Module) -> Iterator[None]:
    """Inside, such modules run the traceable forward."""
    changed = [m for m in model.modules()
               if isinstance(m, _BatchNorm) and type(m).forward is _BatchNorm.forward
               and m.momentum is None and m.training and m.track_running_stats
               and "forward" not in m.__dict__]
    for m in changed:
        m.__dict__["forward"] = partial(_forward, m)
    try:
        yield
    finally:
        for m in changed:
            m.__dict__.pop("forward", None)


def _forward(m: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    m._check_input_dim(x)
    assert m.running_mean is not None
    assert m.running_var is not None
    assert m.num_batches_tracked is not None
    m.num_batches_tracked.add_(1)
    factor = 1.0 / m.num_batches_tracked.double()
    # At momentum one the running statistics become the batch's own.
    mean, var = torch.zeros_like(m.running_mean), torch.zeros_like(m.running_var)
    y = F.batch_norm(x, mean, var, m.weight, m.bias, True, 1.0, m.eps)
    for running, own in ((m.running_mean, mean), (m.running_var, var)):
        average = factor * own.double() + (1 - factor) * running.double()
        running.copy_(average.to(running.dtype))
    return y
