"""What a forward decides from computed numbers, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from tests.graph.passes.graphs import Made, aten, run, targets


def decided(forward: Callable[[Made, fx.Node], tuple[fx.Node, fx.Node]], *, used: bool = True) -> list[str]:
    """The operations that decide in ``forward(made, input)``, which returns an output and what the backward
    reads (`used`: that it reads something at all)."""
    made = Made()
    x, tangent = made.source("input", 0, 4, 3), made.source("tangent", 0, 4, 3)
    output, read = forward(made, x)
    grad = made.call(aten.mul.Tensor, tangent, read if used else tangent, backward=True)
    work = run("decisions", made.work([output], [(x, grad)]))
    return [str(n.target) for n in targets_in_order(work.graph) if n in work.decisions]


def targets_in_order(graph: fx.Graph) -> list[fx.Node]:
    return [n for n in graph.nodes if n.op == "call_function"]


def _chosen(made: Made, x: fx.Node, scores: fx.Node) -> tuple[fx.Node, fx.Node]:
    best = made.call(aten.argmax.default, scores, 1, True)
    picked = made.call(aten.gather.default, made.call(aten.sin.default, x), 1, best)
    return picked, picked


def test_what_an_index_of_computed_scores_picks_is_decided() -> None:
    assert decided(lambda m, x: _chosen(m, x, m.call(aten.exp.default, x))) == ["aten.argmax.default"]


def test_of_several_results_the_whole_operation_decides() -> None:
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        best = m.call(aten.topk.default, m.call(aten.exp.default, x), 2)
        picked = m.call(aten.gather.default, x, 1, m.item(best, 1))
        weighed = m.call(aten.mul.Tensor, picked, m.item(best, 0))
        return weighed, m.call(aten.sum.dim_IntList, weighed, [1], True)

    assert decided(forward) == ["aten.topk.default"]


def test_the_order_of_equal_numbers_is_decided() -> None:
    """Of integers, too: a sort is free to put equal ones in any order."""
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        ordered = m.call(aten.sort.default, m.source("input", 1, 4, 3, dtype=torch.int64), 1)
        picked = m.call(aten.gather.default, x, 1, m.item(ordered, 1))
        return picked, picked

    assert decided(forward) == ["aten.sort.default"]


def test_scores_that_the_caller_holds_choose_the_same_again() -> None:
    assert decided(lambda m, x: _chosen(m, x, m.call(aten.view.default, x, [4, 3]))) == []


def test_a_choice_that_no_gradient_depends_on_may_go() -> None:
    assert decided(lambda m, x: _chosen(m, x, m.call(aten.exp.default, x)), used=False) == []


def test_where_a_maximum_stood_decides_nothing() -> None:
    """The value is the same: only the backward reads the place."""
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        most = m.call(aten.max.dim, m.call(aten.exp.default, x), 1, True)
        return m.item(most, 0), m.item(most, 1)

    assert decided(forward) == []


def _where(m: Made, mask: fx.Node, a: fx.Node, b: fx.Node) -> tuple[fx.Node, fx.Node]:
    picked = m.call(aten.where.self, mask, a, b)
    return picked, mask


def test_a_threshold_decides() -> None:
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        y = m.call(aten.exp.default, x)
        mask = m.call(aten.ge.Tensor, y, m.call(aten.mean.dim, y, [1], True))
        return _where(m, mask, y, x)

    assert decided(forward) == ["aten.ge.Tensor"]


def test_a_relu_by_hand_does_not() -> None:
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        y = m.call(aten.sin.default, x)
        return _where(m, m.call(aten.gt.Scalar, y, 0), y, x)

    assert decided(forward) == []


def test_of_a_chain_of_masks_the_last_is_kept() -> None:
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        y = m.call(aten.exp.default, x)
        mask = m.call(aten.any.default, m.call(aten.logical_not.default, m.call(aten.gt.Scalar, y, 0.5)))
        return _where(m, mask, y, x)

    assert decided(forward) == ["aten.any.default"]


def test_a_drawn_mask_comes_out_the_same_again() -> None:
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        y = m.call(aten.exp.default, x)
        return _where(m, m.call(aten.gt.Scalar, m.call(aten.rand_like.default, y), 0.5), y, x)

    assert decided(forward) == []


@pytest.mark.parametrize("draw", [
    lambda m, p: m.call(aten.bernoulli.default, p), lambda m, p: m.call(aten.multinomial.default, p, 3),
    lambda m, p: m.call(aten._to_copy.default, p, dtype=torch.int64)])
def test_draws_by_computed_chances_and_casts_decide(draw: Callable[[Made, fx.Node], fx.Node]) -> None:
    def forward(m: Made, x: fx.Node) -> tuple[fx.Node, fx.Node]:
        chosen = m.call(aten.mul.Tensor, draw(m, m.call(aten.sigmoid.default, x)), x)
        return chosen, chosen

    assert len(decided(forward)) == 1


def test_nothing_is_changed() -> None:
    made = Made()
    x = made.source("input", 0, 4, 3)
    output, _ = _chosen(made, x, made.call(aten.exp.default, x))
    before = targets(made.work([output]))
    assert targets(run("decisions", made.work([output]))) == before
