"""Gradients of parameters, as autograd takes them."""

from __future__ import annotations

from typing import Any

import pytest
from torch import fx

from tests.graph.passes.graphs import Made, aten, run, targets


def _parts(made: Made, count: int) -> list[fx.Node]:
    grad = made.source("tangent", 0, 3)
    return [made.call(aten.mul.Tensor, grad, k + 2, backward=True) for k in range(count)]


def test_a_sum_of_parts_is_its_parts_in_order() -> None:
    made = Made()
    w = made.source("param", "w", 3)
    a, b, c = _parts(made, 3)
    total = made.call(aten.add.Tensor, made.call(aten.add.Tensor, a, b, backward=True), c, backward=True)
    work = run("sums of gradients", made.work([], [(w, total)]))
    assert [n for _, n in work.grads] == [a, b, c]
    assert aten.add.Tensor not in targets(work)


def test_an_inputs_gradient_stays_one() -> None:
    made = Made()
    x = made.source("input", 0, 3)
    total = made.call(aten.add.Tensor, *_parts(made, 2), backward=True)
    assert [n for _, n in run("sums of gradients", made.work([], [(x, total)])).grads] == [total]


@pytest.mark.parametrize("kind", ["read", "scaled", "broadcast", "forward"])
def test_other_sums_stay(kind: str) -> None:
    made = Made()
    w, x = made.source("param", "w", 3), made.source("input", 0, 3)
    early = made.call(aten.exp.default, x)
    a, b = _parts(made, 2)
    more: dict[str, Any] = {"alpha": 2} if kind == "scaled" else {}
    if kind == "broadcast":
        b = made.call(aten.sum.default, b, backward=True)
    total = made.call(aten.add.Tensor, early if kind == "forward" else a, b, backward=True, **more)
    other = made.call(aten.neg.default, total if kind == "read" else a, backward=True)
    work = run("sums of gradients", made.work([early], [(w, total), (x, other)]))
    assert [n for _, n in work.grads] == [total, other]


def test_a_gradient_of_its_own_is_handed_over() -> None:
    made = Made()
    w = made.source("param", "w", 3)
    grad, = _parts(made, 1)
    work = run("shared gradients", made.work([], [(w, grad)]))
    assert [n for _, n in work.grads] == [grad]
    assert aten.clone.default not in targets(work)


@pytest.mark.parametrize("why", ["two parameters", "a view", "read", "the output's", "forward"])
def test_a_gradient_that_shares_its_storage_is_copied(why: str) -> None:
    made = Made()
    w, v = made.source("param", "w", 3), made.source("param", "v", 3)
    x = made.source("input", 0, 3)
    early = made.call(aten.exp.default, w)
    grad, = _parts(made, 1)
    own = made.call(aten.neg.default, grad, backward=True)
    tangent = next(n for n, s in made.sources.items() if s.kind == "tangent")
    pairs = {"two parameters": [(w, own), (v, own)],
             "a view": [(w, own), (v, made.call(aten.view.default, own, [3], backward=True))],
             "read": [(w, own), (x, made.call(aten.sin.default, own, backward=True))],
             "the output's": [(w, tangent)], "forward": [(w, early)]}[why]
    work = run("shared gradients", made.work([early], pairs))
    kept = {id(n) for n in (own, tangent, early)}
    for source, node in work.grads:
        if source.kind == "param":
            assert id(node) not in kept and node.target is aten.clone.default
