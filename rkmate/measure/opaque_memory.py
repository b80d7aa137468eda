"""Temporary memory of submodules that run as they are, for costs that are estimated and not measured."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import fx

from rkmate import device as devices
from rkmate.device.random_state import unchanged_random_state
from rkmate.graph.capture.opaque import BACKWARD, FORWARD, kind_of, random_state
from rkmate.torch_seam.nodes import VALUE

_known: dict[Any, int] = {}


def opaque_bytes(node: fx.Node) -> int | None:
    """Return the bytes that a call of an opaque module takes in addition to its results; None for other
    operations.

    No rule knows what is inside: it runs, on ones, with zeros and with ones as indices (a mask of ones picks
    all rows; as an index, one may be too many).
    """
    if node.target not in (FORWARD, BACKWARD):
        return None
    key = str(node.args[0])
    forms = [(tuple(n.meta[VALUE].shape), n.meta[VALUE].dtype) for n in node.all_input_nodes]
    at = (node.target, kind_of(key), tuple(forms), repr(node.args[3:5]))
    if at not in _known:
        _known[at] = _peak(node, torch.zeros)
        with contextlib.suppress(IndexError, RuntimeError):
            _known[at] = max(_known[at], _peak(node, torch.ones))
    return _known[at]


def _peak(node: fx.Node, integers: Any) -> int:
    def made(n: fx.Node) -> torch.Tensor:
        like = n.meta[VALUE]
        if like.dtype is torch.uint8 and node.target is BACKWARD and n is node.args[5]:
            return random_state(like.device)
        make = torch.ones if like.is_floating_point() else integers
        result: torch.Tensor = make(tuple(like.shape), dtype=like.dtype, device=like.device)
        return result

    target: Any = node.target
    args: Any = fx.node.map_arg(node.args, made)
    device = devices.common(args[1])
    results = node.meta[VALUE]
    with torch.no_grad(), unchanged_random_state(device):
        peak = device.measure_peak(lambda: target(*args), timeline=False).peak
    kept: int = sum(t.nbytes for t in results)
    return max(0, peak - kept)
