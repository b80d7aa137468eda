"""The operations of one tile: what each of them overwrites."""

from __future__ import annotations

import torch
from torch import fx

from rkmate.graph.passes.tiles.source import steps_of
from rkmate.torch_seam.nodes import VALUE


def test_the_last_operation_does_not_overwrite_a_result_that_is_put_after_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    added = graph.call_function(torch.ops.aten.add.Tensor, (x, x))
    last = graph.call_function(torch.ops.aten.silu.default, (added,))
    graph.output((added, last))
    for node in (x, added, last):
        node.meta[VALUE] = torch.empty(4, device="meta")
    assert steps_of(graph)[-1].way is not None
    assert steps_of(graph, held=[added])[-1].way is None
