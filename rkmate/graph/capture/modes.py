"""Whether somebody else's trace is running.

Uses private names of torch (the stack of its transforms, its fake modes); tested with torch 2.13.
"""

from __future__ import annotations

import torch
from torch._guards import detect_fake_mode


def inside_transform() -> bool:
    """Whether a torch.func transform (vmap, grad, jvp) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def inside_fake_mode() -> bool:
    """Whether a trace on fake tensors is running, which have no values."""
    return detect_fake_mode() is not None
