"""Hooks that torch runs around the calls of every module of the process (`register_module_forward_hook`).

Uses private names of torch (where these hooks stand); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rkmate.errors import CaptureError
from rkmate.graph.capture.library_paths import is_observer

_COUNTING = ("torch.utils.module_tracker", "torch.distributed._tools.mod_tracker",
             "torch.distributed.tensor.debug._comm_mode")
"""Torch's own, which note what runs (to count operations): they compute nothing."""


def global_forward_hooks() -> list[Callable[..., Any]]:
    """Those around forwards that may compute something."""
    return [h for place in _forward_places() if place for h in place.values() if not _only_looks(h)]


def global_backward_hooks() -> list[Callable[..., Any]]:
    """Those around backwards that may compute something."""
    before, after = (torch.nn.modules.module._global_backward_pre_hooks,
                     torch.nn.modules.module._global_backward_hooks)
    return [h for h in (*before.values(), *after.values()) if not _only_looks(h)]


@contextmanager
def hooks_of_the_model_alone(model: nn.Module) -> Iterator[None]:
    """Global forward hooks run around the modules of a model, and around none of those that a trace puts
    around it. One that changes what the model itself takes or returns raises `CaptureError`: it runs around
    what stands in the model's place, too."""
    places = _forward_places()
    if not any(places):
        yield
        return
    mine, before = {id(m) for m in model.modules()}, [dict(place) for place in places]

    def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any) -> Any:
            found = hook(module, *args) if id(module) in mine else None
            if found is not None and module is model:
                raise CaptureError(
                    f"a forward hook around every module changes what {type(model).__name__} itself takes or "
                    "returns, and would do so a second time around the planned module: register it at the "
                    "modules that it is for (Module.register_forward_hook)")
            return found
        return run

    try:
        for place in places:
            place.update({key: guarded(hook) for key, hook in place.items()})
        yield
    finally:
        for place, hooks in zip(places, before, strict=True):
            place.update(hooks)


def _forward_places() -> tuple[dict[int, Callable[..., Any]], ...]:
    return torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks


def _only_looks(hook: Callable[..., Any]) -> bool:
    return is_observer(hook) or getattr(hook, "__module__", None) in _COUNTING
