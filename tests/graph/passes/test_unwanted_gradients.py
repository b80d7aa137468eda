"""Gradients of outputs that the loss leaves out."""

from __future__ import annotations

from typing import Any

from torch import fx

from rkmate.graph.passes.joint import Joint
from tests.graph.passes.graphs import Made, aten, run, targets


def _two_outputs(wanted: tuple[bool, bool], shape: tuple[int, ...] = (3,),
                 join: Any = aten.add.Tensor) -> tuple[Joint, fx.Node, fx.Node]:
    """The gradient of `x` comes from both outputs, that of `w` from the second alone."""
    made = Made()
    x, w = made.source("input", 0, 3), made.source("param", "w", *shape)
    first, second = made.source("tangent", 0, 3), made.source("tangent", 1, *shape)
    y, z = made.call(aten.relu.default, x), made.call(aten.exp.default, w)
    a = made.call(aten.neg.default, first, backward=True)
    b = made.call(aten.sin.default, second, backward=True)
    both = made.call(join, a, b, backward=True)
    return made.work([y, z], [(x, both), (w, b)], wanted=wanted), a, both


def test_all_stays_where_all_are_wanted() -> None:
    work, _, both = _two_outputs((True, True))
    before = targets(work)
    assert targets(run("unwanted gradients", work)) == before
    assert next(n for _, n in work.grads) is both


def test_a_sum_is_what_is_left_of_it() -> None:
    work, a, _ = _two_outputs((True, False))
    run("unwanted gradients", work)
    assert targets(work) == [aten.relu.default, aten.exp.default, aten.neg.default]
    assert [(s.key, n) for s, n in work.grads] == [(0, a)]


def test_a_sum_that_also_broadcasts_gets_zeros() -> None:
    made = Made()
    x = made.source("input", 0, 2, 3)
    first, second = made.source("tangent", 0, 3), made.source("tangent", 1, 2, 3)
    y, z = made.call(aten.sum.dim_IntList, x, [0]), made.call(aten.exp.default, x)
    both = made.call(aten.add.Tensor, first, second, backward=True)
    work = run("unwanted gradients", made.work([y, z], [(x, both)], wanted=(True, False)))
    zeros = both.args[1]
    assert isinstance(zeros, fx.Node)
    assert zeros.target is aten.full.default
    assert zeros.meta["val"].shape == (2, 3)
    assert [n for _, n in work.grads] == [both]


def test_other_operations_get_zeros() -> None:
    work, _, both = _two_outputs((True, False), join=aten.mul.Tensor)
    run("unwanted gradients", work)
    assert targets(work)[-2:] == [aten.full.default, aten.mul.Tensor]
    assert [n for _, n in work.grads] == [both]


def test_nothing_is_left_where_nothing_is_wanted() -> None:
    work, _, _ = _two_outputs((False, False))
    run("unwanted gradients", work)
    assert work.grads == ()
    assert targets(work) == [aten.relu.default, aten.exp.default]


def test_what_reads_the_rest_of_a_sum_is_laid_out_as_it_is() -> None:
    """A product of two layouts has its first factor's: a later sum takes its elements in that order."""
    made = Made()
    x = made.source("input", 0, 2, 3)
    first, second = made.source("tangent", 0, 3, 2), made.source("tangent", 1, 2, 3)
    y, z = made.call(aten.t.default, x), made.call(aten.exp.default, x)
    turned = made.call(aten.t.default, made.call(aten.neg.default, first, backward=True), backward=True)
    both = made.call(aten.add.Tensor, second, turned, backward=True)
    product = made.call(aten.mul.Tensor, both, x, backward=True)
    flat = made.call(aten.view.default, product, [6], backward=True)
    back = made.call(aten.view.default, flat, [2, 3], backward=True)
    again = made.call(aten.mul.Tensor, product, x, backward=True)
    assert product.meta["val"].stride() == (3, 1)
    run("unwanted gradients", made.work([y, z], [(x, again), (x, back)], wanted=(True, False)))
    assert turned.meta["val"].stride() == product.meta["val"].stride() == again.meta["val"].stride() == (1, 2)
    assert flat.meta["val"].stride() == (1,)
