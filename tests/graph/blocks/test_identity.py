"""Which of several devices of a kind a model stands on is no part of what a block is."""

from __future__ import annotations

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rkmate.graph.blocks.identity import block_texts
from rkmate.graph.blocks.lower import lower
from rkmate.graph.blocks.partition import partition
from rkmate.graph.capture.captured import Source
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.tiles.source import Give
from rkmate.graph.passes.tiles.tiled import Tiled

aten = torch.ops.aten


def _text(device: str) -> str:
    """Of a block that makes tensors on a device, and has a tiled computation there."""
    tile = fx.Graph()
    tile.placeholder("n")
    rows = tile.placeholder("rows")
    tile.output((tile.call_function(aten.neg.default, (rows,)),))
    give = Give((4, 3), torch.float32, torch.device(device), 1)
    tiled = Tiled("negated", tile, 4, 2, (1,), ((4, 3),), (give,))
    graph = fx.Graph()
    x = graph.placeholder("x")
    ones = graph.call_function(aten.ones.default, ([4, 3],), {"device": torch.device(device)})
    total = graph.call_function(aten.add.Tensor, (x, ones))
    several = graph.call_function(tiled, (total,))
    with FakeTensorMode():
        for node in (x, ones, total):
            node.meta["val"] = torch.empty((4, 3), device=device)
        several.meta["val"] = (torch.empty((4, 3), device=device),)
    parts = partition(lower(Joint(graph, {x: Source("input", 0)}, (total,), wanted=(True,))))
    return "\n".join(block_texts(parts))


def test_the_index_of_a_device_is_left_out() -> None:
    text = _text("cuda:1")
    assert text == _text("cuda:0")
    assert 'torch.device("cuda")' in text
    assert 'device="cuda")' in text
    assert "cuda:float32[4, 3]" in text


def test_the_kind_of_a_device_is_not() -> None:
    assert _text("cpu") == _text("cuda:0").replace("cuda", "cpu").replace(" 512 bytes", " 48 bytes")
