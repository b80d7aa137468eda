"""Regions under ``torch.utils.checkpoint``: a trace runs through them, and remembers which they were.

What is kept and what is computed again is the plan's business, so checkpointing does nothing in a trace. Each
operation that the forward calls inside of a region carries the region's number, by which the step as the
program runs it can be simulated.

Uses private names of torch (what saves nothing in a region without reentrance, the modes of a trace); tested
with torch 2.11, 2.13, 2.14 and 2.15.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch.fx.traceback
import torch.utils.checkpoint
from torch import fx
from torch.fx.experimental import proxy_tensor

_KEY = "rkmate_region"
_numbers = itertools.count()


@contextmanager
def region() -> Iterator[None]:
    """Operations that are traced inside belong to one region, a new one unless there is one around it."""
    if _KEY in torch.fx.traceback.current_meta.get("custom", {}):
        yield
        return
    with torch.fx.traceback.preserve_node_meta(), torch.fx.traceback.annotate({_KEY: next(_numbers)}):
        yield


@contextmanager
def regions_marked() -> Iterator[None]:
    """Mark regions without reentrance, while a module is exported; `custom_functions` sees the others.

    What autograd saves inside passes through no hooks, as these would be recorded. Calls in other threads run
    as usual.
    """
    here = threading.get_ident()
    plain = torch.utils.checkpoint._checkpoint_hook

    def marked(frame: Any) -> AbstractContextManager[None]:
        elsewhere = proxy_tensor.get_proxy_mode() is None or threading.get_ident() != here
        return plain(frame) if elsewhere else region()

    with mock.patch.object(torch.utils.checkpoint, "_checkpoint_hook", marked):
        yield


def region_of(node: fx.Node) -> int | None:
    """The region that an operation of the forward was called in."""
    number: int | None = node.meta.get("custom", {}).get(_KEY)
    return number
