"""What stands in an autocast or no-grad region keeps its module, and its checkpointed region."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from rkmate.graph.blocks.identity import module_of
from rkmate.graph.capture.capture import capture
from rkmate.torch_seam.patches.autograd import region_of


class _Mixed(nn.Module):
    """Two layers in a region of mixed precision, as libraries put it around a forward."""

    def __init__(self, checkpoints: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(2))
        self.checkpoints = checkpoints

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = x * self.layers[0][0].weight.abs().sum()
        with torch.autocast("cpu", torch.bfloat16):
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False) if self.checkpoints else layer(x)
        return x.float()


@pytest.mark.parametrize("checkpoints", [False, True])
def test_operations_of_a_region_know_where_they_are(checkpoints: bool) -> None:
    nodes = [n for n in capture(_Mixed(checkpoints), (torch.randn(4, 8),), {}).graph.nodes
             if n.op == "call_function"]
    names = {module_of(n) for n in nodes if n.target is torch.ops.aten.addmm.default}
    assert names == {"layers.0.0", "layers.1.0"}
    names = {module_of(n) for n in nodes if n.target is torch.ops.aten.tanh_backward.default}
    assert names == {"layers.0.1", "layers.1.1"}
    regions = {region_of(n) for n in nodes if n.target is torch.ops.aten.tanh.default}
    assert len(regions) == (2 if checkpoints else 1) and (None in regions) is not checkpoints
