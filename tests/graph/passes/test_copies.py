"""Copies that copy nothing."""

from __future__ import annotations

import pytest
import torch

from tests.graph.passes.graphs import Made, aten, run, targets


@pytest.mark.parametrize("target", [aten.alias.default, aten.detach.default, aten.clone.default])
def test_a_copy_with_its_inputs_layout_is_its_input(target: torch._ops.OpOverload) -> None:
    made = Made()
    x = made.source("input", 0, 3, 4)
    y = made.call(aten.relu.default, x)
    z = made.call(aten.exp.default, made.call(target, y))
    assert targets(run("copies", made.work([z]))) == [aten.relu.default, aten.exp.default]
    assert z.args == (y,)


def test_a_copy_in_another_layout_stays() -> None:
    made = Made()
    x = made.source("input", 0, 3, 4)
    turned = made.call(aten.t.default, made.call(aten.relu.default, x))
    z = made.call(aten.exp.default, made.call(aten.clone.default, turned,
                                              memory_format=torch.contiguous_format))
    assert aten.clone.default in targets(run("copies", made.work([z])))


def test_a_copy_of_what_the_forward_overwrites_stays() -> None:
    made = Made()
    b = made.source("buffer", "b", 3)
    z = made.call(aten.exp.default, made.call(aten.clone.default, b))
    moved = made.call(aten.add.Tensor, b, 1)
    assert aten.clone.default in targets(run("copies", made.work([z], (), [(b, moved)])))


@pytest.mark.parametrize("of_input", [True, False])
def test_a_copy_that_the_caller_sees_beside_its_original_stays(of_input: bool) -> None:
    """He may write to one of them."""
    made = Made()
    x = made.source("input", 0, 3)
    y = x if of_input else made.call(aten.relu.default, x)
    copy = made.call(aten.clone.default, y)
    view = made.call(aten.view.default, copy, [3, 1])
    work = run("copies", made.work([view, None if of_input else y]))
    assert aten.clone.default in targets(work)


def test_copies_of_outputs() -> None:
    """They may change layout."""
    made = Made()
    x = made.source("input", 0, 3, 4)
    turned = made.call(aten.t.default, made.call(aten.relu.default, x))
    copy = made.call(aten.clone.default, turned, memory_format=torch.contiguous_format)
    work = run("copies of outputs", made.work([copy]))
    assert targets(work) == [aten.relu.default, aten.t.default]
    assert work.outputs == (turned,)


def test_a_copy_of_an_output_that_is_read_or_overwritten_stays() -> None:
    made = Made()
    x, b = made.source("input", 0, 3), made.source("buffer", "b", 3)
    read, old = made.call(aten.clone.default, x), made.call(aten.clone.default, b)
    z, moved = made.call(aten.exp.default, read), made.call(aten.add.Tensor, b, 1)
    work = run("copies of outputs", made.work([read, old, z], (), [(b, moved)]))
    assert targets(work).count(aten.clone.default) == 2
    assert work.outputs == (read, old, z)
