"""Heads that run a few rows at a time: what is recognised, and what takes its place."""

from __future__ import annotations

import pytest
import torch

from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.tiles.tiled import Tiled
from rkmate.torch_seam.nodes import is_backward
from tests.graph.passes.graphs import Made, aten, run, targets

own = torch.ops.rkmate
ROWS, WIDTH, CLASSES = 32, 8, 64


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.device.cpu.PART_BYTES", 2**8)


def _linear_loss(*, biased: bool = True, returned: bool = False, between: bool = False, read: bool = False,
                 chunked_loss: bool = True) -> Joint:
    """`between`: what stands between product and loss mixes the rows; `read`: so does a reader of the logits'
    gradient."""
    made = Made()
    x, w = made.source("input", 0, ROWS, WIDTH), made.source("param", "head.weight", CLASSES, WIDTH)
    b = made.source("param", "head.bias", CLASSES)
    target, grad = made.source("input", 1, ROWS, dtype=torch.int64), made.source("tangent", 0)
    turned = made.call(aten.t.default, w)
    logits = made.call(aten.addmm.default, b, x, turned) if biased else made.call(aten.mm.default, x, turned)
    entering = made.call(aten.cumsum.default, logits, 0) if between else logits
    log_probs = made.call(aten._log_softmax.default, entering, 1, False)
    loss = made.call(aten.nll_loss_forward.default, log_probs, target, None, 1, -100)
    value, total = made.item(loss, 0), made.item(loss, 1)
    back = made.call(own.cross_entropy_backward.default, grad, log_probs, target, None, 1, -100, total, 1,
                     backward=True)
    of_w = made.call(aten.mm.default, made.call(aten.t.default, back, backward=True), x, backward=True)
    of_x = made.call(aten.mm.default, back, made.call(aten.t.default, turned, backward=True), backward=True)
    grads = [(x, of_x), (w, of_w)]
    if biased:
        summed = made.call(aten.sum.dim_IntList, back, [0], True, backward=True)
        grads.append((b, made.call(aten.view.default, summed, [CLASSES], backward=True)))
    if read:
        grads.append((x, made.call(aten.mm.default, made.call(aten.cumsum.default, back, 0, backward=True), w,
                                   backward=True)))
    return made.work([value, logits if returned else None], grads, wanted=(True, False),
                     chunked_loss=chunked_loss)


def _tiled(work: Joint) -> list[tuple[torch.fx.Node, Tiled]]:
    return [(n, n.target) for n in work.graph.nodes if isinstance(n.target, Tiled)]


@pytest.mark.parametrize("biased", [True, False])
def test_no_logits_are_left(biased: bool) -> None:
    work = run("chunked loss", _linear_loss(biased=biased))
    assert work.concerned["chunked-loss"] == ("head.weight",)
    (node, tiled), = _tiled(work)
    assert not is_backward(node) and [g.shape for g in tiled.gives][1:3] == [(CLASSES, WIDTH), (ROWS, WIDTH)]
    found = targets(work)
    assert found.count(own.scale.default) == 2 + biased
    assert not {aten.mm.default, aten.addmm.default, aten._log_softmax.default,
                own.cross_entropy_backward.default} & set(found)


def test_logits_that_are_returned_are_taken_as_they_are() -> None:
    work = run("chunked loss", _linear_loss(returned=True))
    found = targets(work)
    assert aten.addmm.default in found and aten._log_softmax.default not in found
    (node, tiled), = _tiled(work)
    assert work.outputs[1] in node.args
    assert "addmm.default" not in tiled.text


def test_it_is_noted_where_it_is_not_asked_for() -> None:
    work = _linear_loss(chunked_loss=False)
    before = targets(work)
    assert targets(run("chunked loss", work)) == before
    assert work.concerned["chunked-loss"] == ("head.weight",)


@pytest.mark.parametrize("how", [{"between": True}, {"read": True}], ids=["rows are mixed", "read elsewhere"])
def test_others_are_left_alone(how: dict[str, bool]) -> None:
    work = _linear_loss(**how)
    before = targets(work)
    assert targets(run("chunked loss", work)) == before
    assert work.concerned["chunked-loss"] == ()
