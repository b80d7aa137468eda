"""Hooks that torch runs around the calls of every module of the process (`register_module_forward_hook`).

Uses private names of torch (where these hooks stand); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from rkmate.graph.capture.library_paths import is_observer

_COUNTING = ("torch.utils.module_tracker", "torch.distributed._tools.mod_tracker",
             "torch.distributed.tensor.debug._comm_mode")
"""Torch's own, which note what runs (to count operations): they compute nothing."""


def global_forward_hooks() -> list[Callable[..., Any]]:
    """Those around forwards that may compute something."""
    places = torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks
    return [h for place in places if place for h in place.values()
            if not is_observer(h) and getattr(h, "__module__", None) not in _COUNTING]


def global_backward_hooks() -> list[Callable[..., Any]]:
    """Those around backwards."""
    before, after = (torch.nn.modules.module._global_backward_pre_hooks,
                     torch.nn.modules.module._global_backward_hooks)
    return [*before.values(), *after.values()]
