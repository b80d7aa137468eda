"""Operations whose result nobody reads."""

from __future__ import annotations

from tests.graph.passes.graphs import Made, aten, run, targets


def test_a_chain_that_nobody_reads_goes() -> None:
    made = Made()
    x = made.source("input", 0, 3)
    y = made.call(aten.relu.default, x)
    made.call(aten.exp.default, made.call(aten.neg.default, x))
    assert targets(run("dead code", made.work([y]))) == [aten.relu.default]


def test_assertions_on_metadata_go() -> None:
    made = Made()
    x = made.source("input", 0, 3)
    made.call(aten._assert_tensor_metadata.default, x, dtype=x.meta["val"].dtype)
    y = made.call(aten.relu.default, x)
    assert targets(run("dead code", made.work([y]))) == [aten.relu.default]


def test_draws_of_the_forward_stay() -> None:
    """The generator's state moves on, whoever reads them; the backward's go."""
    made = Made()
    x = made.source("input", 0, 3)
    made.call(aten.rand_like.default, x)
    made.call(aten.rand_like.default, x, backward=True)
    work = run("dead code", made.work())
    assert targets(work) == [aten.rand_like.default]


def test_what_leaves_the_graph_stays() -> None:
    made = Made()
    x, w, b = made.source("input", 0, 3), made.source("param", "w", 3), made.source("buffer", "b", 3)
    y, moved = made.call(aten.relu.default, x), made.call(aten.add.Tensor, b, 1)
    grad = made.call(aten.neg.default, x, backward=True)
    work = run("dead code", made.work([y], [(w, grad)], [(b, moved)]))
    assert targets(work) == [aten.relu.default, aten.add.Tensor, aten.neg.default]
