"""A captured graph, as if it had been captured on a device that is not here."""

from __future__ import annotations

from typing import Any

import torch

from rkmate import device as devices
from rkmate.graph.capture.capture import Capture
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.tensors import FakeTensor, storage_id


def as_there(captured: Capture, device: torch.device) -> Capture:
    """A captured graph whose values are on another device. Changes the graph in place."""
    storages: dict[int, torch.UntypedStorage] = {}

    def moved(value: Any) -> Any:
        if not isinstance(value, FakeTensor) or value.device == device:
            return value
        own = value.untyped_storage()
        held = storages.setdefault(storage_id(own), torch.UntypedStorage(own.nbytes(), device="meta"))
        plain = torch.empty(0, dtype=value.dtype, device="meta").set_(
            held, value.storage_offset(), value.shape, value.stride())
        return FakeTensor(value.fake_mode, plain, device)

    def argument(value: torch.device) -> torch.device:
        return value if devices.of(value).elsewhere is None else device

    kept = [n.meta[VALUE] for n in captured.graph.nodes if VALUE in n.meta]      # their storages stay apart
    for node in captured.graph.nodes:
        node.args, node.kwargs = (pytree.tree_map_only(torch.device, argument, a)
                                  for a in (node.args, node.kwargs))
        if VALUE in node.meta:
            node.meta[VALUE] = pytree.tree_map(moved, node.meta[VALUE])
    del kept
    return captured
