"""Outputs that are left out of the step: which, what is kept for them, and which are put back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.table import REWRITES, rewrite
from tests.graph.passes.graphs import Made, aten, run, targets

own = torch.ops.rkmate
ROWS, WIDTH, CLASSES = 32, 8, 64


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.device.cpu.PART_BYTES", 2**8)


def _head(*, capped: bool = False, wanted: tuple[bool, ...] = (True, False), read: bool = False,
          deferred_outputs: bool = True, chunked_loss: bool = True, overwritten: bool = False,
          wide: int = WIDTH, batch: int = 2) -> tuple[Made, Joint]:
    """A linear loss, and the logits beside it. `capped`: something is done to what is returned; `read`:
    something else of the step reads the logits."""
    made = Made()
    x, w = made.source("input", 0, ROWS, wide), made.source("param", "head.weight", CLASSES, wide)
    target, grad = made.source("input", 1, ROWS, dtype=torch.int64), made.source("tangent", 0)
    hidden = made.call(aten.relu.default, x)
    turned = made.call(aten.t.default, w)
    logits = made.call(aten.mm.default, hidden, turned)
    returned = made.call(aten.view.default, logits, [batch, ROWS // batch, CLASSES])
    if capped:
        returned = made.call(aten.mul.Tensor, made.call(aten.tanh.default, returned), 30.0)
    log_probs = made.call(aten._log_softmax.default, logits, 1, False)
    loss = made.call(aten.nll_loss_forward.default, log_probs, target, None, 1, -100)
    value, total = made.item(loss, 0), made.item(loss, 1)
    outputs: list[fx.Node | None] = [value, returned]
    if read:
        outputs.append(made.call(aten.amax.default, logits, [0]))
    back = made.call(own.cross_entropy_backward.default, grad, log_probs, target, None, 1, -100, total, 1,
                     backward=True)
    grads = [(w, made.call(aten.mm.default, made.call(aten.t.default, back, backward=True), hidden,
                           backward=True))]
    written = [(w, made.call(aten.mul.Tensor, w, 2.0))] if overwritten else []
    work = made.work(outputs, grads, written, wanted=(*wanted, *([False] * read)), chunked_loss=chunked_loss,
                     deferred_outputs=deferred_outputs)
    return made, work


def _passed(work: Joint) -> Joint:
    names = ("deferred outputs", "chunked loss", "outputs that stay")
    rewrite(work, [p for p in REWRITES if p.name in names], verify=True)
    return work


@pytest.mark.parametrize("capped", [False, True])
def test_logits_are_left_out_and_what_they_are_computed_from_is_kept(capped: bool) -> None:
    _, work = _head(capped=capped)
    _passed(work)
    assert aten.mm.default not in targets(work)
    assert work.outputs[1] is None
    deferred, = work.deferred
    assert deferred.output == 1
    assert [n.target for n in work.kept] == [aten.relu.default]
    assert {s.kind for s in deferred.sources.values()} == {"kept", "param"}
    done = [n.target for n in deferred.graph.nodes if n.op == "call_function"]
    assert done == [aten.t.default, aten.mm.default, aten.view.default,
                    *([aten.tanh.default, aten.mul.Tensor] if capped else [])]
    assert set(work.kept) <= work.results()


def test_the_logits_of_one_sequence_are_left_out_too() -> None:
    _, work = _head(batch=1)
    _passed(work)
    assert work.outputs[1] is None


@pytest.mark.parametrize("how", [
    {"deferred_outputs": False}, {"wanted": (True, True)}, {"overwritten": True}, {"wide": CLASSES}], ids=str)
def test_outputs_that_are_ordinary(how: dict[str, Any]) -> None:
    _, work = _head(**how)
    before = work.outputs
    assert run("deferred outputs", work).outputs == before
    assert not work.deferred


@pytest.mark.parametrize(("how", "products"), [
    ({"read": True}, 1), ({"chunked_loss": False}, 2)], ids=["read elsewhere", "whole"])
def test_outputs_whose_values_are_there_anyway_are_put_back(how: dict[str, Any], products: int) -> None:
    _, work = _head(**how)
    run("deferred outputs", work)
    assert work.outputs[1] is None
    _passed(work)
    assert not work.deferred
    back = work.outputs[1]
    assert back is not None
    assert back.target is aten.view.default
    assert targets(work).count(aten.mm.default) == products    # it; and the weight's gradient, if by itself
    assert tuple(back.meta["val"].shape) == (2, ROWS // 2, CLASSES)


def test_what_takes_the_place_of_a_kept_value_is_kept() -> None:
    made, work = _head()
    run("deferred outputs", work)
    kept, = work.kept
    with made.graph.inserting_after(kept):
        other = made.graph.call_function(aten.relu.default, kept.args)
    other.meta = dict(kept.meta)
    work.replace(kept, other)
    assert work.kept == (other,)


def test_a_draw_is_never_repeated_for_an_output() -> None:
    made = Made()
    x, w = made.source("input", 0, ROWS, WIDTH), made.source("param", "w", WIDTH, CLASSES)
    product = made.call(aten.mm.default, made.call(aten.relu.default, x), w)
    noisy = made.call(aten.rand_like.default, product)
    work = made.work([x, made.call(aten.add.Tensor, product, noisy)], wanted=(False, False),
                     deferred_outputs=True)
    assert not run("deferred outputs", work).deferred


def test_a_small_part_of_something_large_is_not_kept() -> None:
    made = Made()
    x, w = made.source("input", 0, ROWS, WIDTH), made.source("param", "w", WIDTH, CLASSES)
    large = made.call(aten.cat.default, [made.call(aten.relu.default, x)] * 8)
    product = made.call(aten.mm.default, made.call(aten.slice.Tensor, large, 0, 0, ROWS), w)
    work = made.work([x, product], wanted=(False, False), deferred_outputs=True)
    assert not run("deferred outputs", work).deferred
