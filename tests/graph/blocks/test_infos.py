"""What is told about blocks: labels of their classes, and modules."""

from __future__ import annotations

import pytest

from rkmate.graph.blocks.cut import CutSettings
from rkmate.graph.blocks.identity import block_infos, module_of
from rkmate.graph.blocks.partition import Partition, partition
from tests.graph.blocks.graphs import chain, node, program_of, trained


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
