"""Views as methods of their tensors, in generated source."""

from __future__ import annotations

import torch
from torch import fx

_METHODS: dict[object, str] = {
    # A kernel may lay its result out otherwise than the tracer was told; reshape then copies.
    torch.ops.aten.view.default: "reshape", torch.ops.aten._unsafe_view.default: "reshape",
    torch.ops.aten.t.default: "t", torch.ops.aten.transpose.int: "transpose",
    torch.ops.aten.unsqueeze.default: "unsqueeze", torch.ops.aten.squeeze.dim: "squeeze",
    torch.ops.aten.expand.default: "expand", torch.ops.aten.permute.default: "permute",
    torch.ops.aten.select.int: "select", torch.ops.aten.split.Tensor: "split",
}


def view_method(node: fx.Node) -> str | None:
    """Return the tensor method that a common view is written as; None for every other operation."""
    return _METHODS.get(node.target)
