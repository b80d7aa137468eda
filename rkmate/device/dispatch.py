"""Running operations without asking autograd.

Under ``no_grad`` each operation still passes through autograd's kernel for it, which finds that there is
nothing to record: about a third of what a call costs on the host. Below that kernel, writes in place count
and views know their base; values that nobody else sees need neither, and autograd's own kernels compute
without (a convolution whose kernel goes over its images takes a view of each). Modes see each operation all
the same.

Uses private names of torch (the guards that leave autograd's kernels out); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

_ORDINARY = frozenset((torch.Tensor, nn.Parameter))


def all_ordinary(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether no tensor is of a class of its own, whose operations may use autograd."""
    return _ORDINARY.issuperset(map(type, tensors))


def below_autograd() -> Any:
    """A context in which operations are not recorded, and take less time than under ``no_grad`` alone."""
    return torch._C._AutoDispatchBelowAutograd()


def below_views() -> Any:
    """The same, where views do not know their base either, and writes in place do not count."""
    return torch._C._AutoDispatchBelowADInplaceOrView()
