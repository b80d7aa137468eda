"""The CPU's fused recurrent layer, as an operation whose every output is real.

`aten.mkldnn_rnn_layer` makes the workspace that its backward reads only while gradients are
recorded, and its fake result does not know the workspace's size. The operation registered here
always makes it, and reports its size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

aten = torch.ops.aten

_library = torch.library.Library("rkmate", "DEF")
_library.define(
    "recurrent_layer(Tensor input, Tensor w1, Tensor w2, Tensor w3, Tensor w4, Tensor hx, Tensor cx, "
    "bool reverse, int[] batch_sizes, int mode, int hidden_size, int num_layers, bool has_biases, "
    "bool bidirectional, bool batch_first, bool train) -> (Tensor, Tensor, Tensor, Tensor)")


def _run(*args: Any) -> Any:
    plain = [a.detach() if isinstance(a, torch.Tensor) else a for a in args]
    with torch.enable_grad():
        return aten.mkldnn_rnn_layer.default(*plain)


_library.impl("recurrent_layer", _run, "CPU")


def make_recurrent_layers_whole(graph: fx.Graph) -> None:
    """Let every fused recurrent layer of a captured graph be the operation of this file."""
    for node in graph.nodes:
        if node.target is aten.mkldnn_rnn_layer.default:
            node.target = torch.ops.rkmate.recurrent_layer.default
            y, h, c, workspace = node.meta["val"]
            size = _workspace_bytes(node)
            with y.fake_mode:
                workspace = torch.empty(size, dtype=torch.uint8, device=y.device)
            node.meta["val"] = (y, h, c, workspace)
            for user in node.users:
                if user.args[1] == 3:
                    user.meta["val"] = workspace


def _workspace_bytes(node: fx.Node) -> int:
    """Measured on zeros of the layer's own shapes."""
    def real(argument: Any) -> Any:
        if not isinstance(argument, fx.Node):
            return argument
        like = argument.meta["val"]
        return torch.zeros(like.shape, dtype=like.dtype)
    workspace = _run(*map(real, node.args))[3]
    return int(workspace.numel() * workspace.element_size())
