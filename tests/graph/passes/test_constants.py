"""Values that depend on no trained value."""

from __future__ import annotations

import pytest
import torch

from tests.graph.passes.graphs import Made, aten, run, targets


def test_equal_masks_are_made_once() -> None:
    made = Made()
    ids, x = made.source("input", 0, 3, dtype=torch.int64), made.source("input", 1, 3)
    masks = [made.call(aten.ne.Scalar, ids, 0) for _ in range(2)]
    y = [made.call(aten.mul.Tensor, x, m) for m in masks]
    work = run("constants", made.work(y))
    assert targets(work) == [aten.ne.Scalar, aten.mul.Tensor, aten.mul.Tensor]
    assert y[1].args[1] is masks[0]
    assert work.constant == {ids, masks[0]}


def test_equal_numbers_of_other_types_are_two() -> None:
    made = Made()
    ids, x = made.source("input", 0, 3, dtype=torch.int64), made.source("input", 1, 3)
    y = [made.call(aten.mul.Tensor, x, made.call(aten.add.Scalar, ids, k)) for k in (1, 1.0, True)]
    assert targets(run("constants", made.work(y))).count(aten.add.Scalar) == 3


@pytest.mark.parametrize("kind", ["trained", "float input", "drawn", "backward"])
def test_no_constant(kind: str) -> None:
    made = Made()
    if kind == "trained":
        base = made.source("param", "w", 3)
    elif kind == "float input":
        base = made.source("input", 0, 3)
    else:
        base = made.source("buffer", "b", 3)
    late = kind == "backward"
    grad = made.source("tangent", 0, 3)
    pair = [made.call(aten.rand_like.default if kind == "drawn" else aten.sin.default, base, backward=late)
            for _ in range(2)]
    read = [made.call(aten.mul.Tensor, n, grad, backward=True) for n in pair]
    x = made.source("param", "x", 3)
    work = run("constants", made.work([], [(x, n) for n in read]))
    assert not work.constant & set(pair)
    assert len(targets(work)) == 4


def test_equal_outputs_are_two() -> None:
    """The caller may write to one of them."""
    made = Made()
    b = made.source("buffer", "b", 3)
    pair = [made.call(aten.sin.default, b) for _ in range(2)]
    work = run("constants", made.work(pair))
    assert work.outputs == tuple(pair)
    assert work.constant == {b, *pair}
