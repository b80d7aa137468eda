"""Texts of blocks, labels of their classes, and the modules that they come from."""

from __future__ import annotations

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.blocks.identity import block_infos, block_texts, module_of
from rkmate.graph.blocks.lower import lower
from rkmate.graph.blocks.partition import Partition, partition
from rkmate.graph.capture.captured import Source
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.tiles.source import Give
from rkmate.graph.passes.tiles.tiled import Tiled
from tests.graph.blocks.graphs import chain, node, program_of, trained

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


@pytest.mark.parametrize(("path", "expected"), [
    ("model.layers.0", "layers.0"), ("model", ""), ("", ""), ("layers.model.0", "layers.model.0")])
def test_module_of_an_operation(path: str, expected: str) -> None:
    assert module_of(node(path)) == expected


def test_module_of_what_stands_in_several() -> None:
    stack = {"0": ("", object), "1": ("model.layers", object), "2": ("model.layers.3", object)}
    assert module_of(node(nn_module_stack=stack)) == "layers.3"
    stack["3"] = ("", object)                                  # without a path: of the module around it
    assert module_of(node(nn_module_stack=stack)) == "layers.3"


def test_module_of_a_backward_operation() -> None:
    assert module_of(node(fwd_nn_module_stack={"1": ("model.head", object)})) == "head"


def parts_of(paths: list[str], least: int) -> Partition:
    """A row of nodes that come from these modules."""
    return partition(program_of(trained(chain(len(paths))), paths=dict(enumerate(paths))),
                     CutSettings(least, 45))


def test_infos() -> None:
    parts = parts_of(["model.a.0", "model.a.1", "model.a.2.x", "model.a.2.y", "model.b", "model"], 2)
    infos = block_infos(parts, [0, 1, 0])
    assert [i.label for i in infos] == ["A", "B", "A"]
    assert [i.path for i in infos] == ["a", "a.2", "b"]
    assert [(i.forward_nodes, i.backward_nodes, i.options) for i in infos] == [(2, 2, 0)] * 3


def test_the_module_of_most_where_they_have_nothing_in_common() -> None:
    assert [i.path for i in block_infos(parts_of(["model.a", "model.b", "model.b"], 3), [0])] == ["b"]
    assert [i.path for i in block_infos(parts_of(["model"] * 3, 3), [0])] == [""]


def test_labels_go_on_after_z() -> None:
    parts = parts_of([""] * 54, 1)
    labels = [i.label for i in block_infos(parts, range(54))]
    assert labels[:2] + labels[24:28] + labels[51:] == ["A", "B", "Y", "Z", "AA", "AB", "AZ", "BA", "BB"]
