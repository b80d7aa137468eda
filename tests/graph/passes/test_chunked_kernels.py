"""Wide operations of the backward become ones that work part by part."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from rkmate.graph.passes.joint import Joint
from tests.graph.passes.graphs import Made, aten, run, targets

own = torch.ops.rkmate


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rkmate.device.cpu.PART_BYTES", 2**8)


def _cross_entropy(rows: int, *, read_twice: bool = False) -> Joint:
    made = Made()
    x, target = made.source("input", 0, rows, 64), made.source("input", 1, rows, dtype=torch.int64)
    grad = made.source("tangent", 0)
    log_probs = made.call(aten._log_softmax.default, x, 1, False)
    loss = made.call(aten.nll_loss_forward.default, log_probs, target, None, 1, -100)
    value, total = made.item(loss, 0), made.item(loss, 1)
    of_loss = made.call(aten.nll_loss_backward.default, grad, log_probs, target, None, 1, -100, total,
                        backward=True)
    of_x = made.call(aten._log_softmax_backward_data.default, of_loss, log_probs, 1, torch.float32,
                     backward=True)
    grads = [(x, made.call(aten.add.Tensor, of_x, of_loss, backward=True) if read_twice else of_x)]
    return made.work([value], grads)


def test_a_wide_cross_entropys_gradients_become_one() -> None:
    work = run("chunked kernels", _cross_entropy(32))
    assert targets(work)[-1] is own.cross_entropy_backward.default
    assert aten.nll_loss_backward.default not in targets(work)
    assert work.grads[0][1].target is own.cross_entropy_backward.default


@pytest.mark.parametrize(("rows", "read_twice"), [(1, False), (32, True)], ids=["narrow", "read between"])
def test_other_cross_entropies_stay(rows: int, read_twice: bool) -> None:
    work = _cross_entropy(rows, read_twice=read_twice)
    before = targets(work)
    assert targets(run("chunked kernels", work)) == before


def _batch_norm(channels: int, *, train: bool) -> Joint:
    made = Made()
    x, weight = made.source("input", 0, 4, channels, 5), made.source("param", "w", channels)
    mean, invstd = made.source("input", 1, channels), made.source("input", 2, channels)
    grad = made.source("tangent", 0, 4, channels, 5)
    y = made.call(aten.relu.default, x)
    statistics = (None, None) if train else (mean, mean)
    back = made.call(aten.native_batch_norm_backward.default, grad, x, weight, *statistics, mean, invstd,
                     train, 1e-5, [True, True, True], backward=True)
    parts: list[fx.Node] = [made.item(back, k, backward=True) for k in range(3)]
    return made.work([y], [(x, parts[0]), (weight, parts[1]), (weight, parts[2])])


def test_a_wide_batch_norms_gradient() -> None:
    work = run("chunked kernels", _batch_norm(16, train=True))
    assert own.batch_norm_backward.default in targets(work)
    assert aten.native_batch_norm_backward.default not in targets(work)


@pytest.mark.parametrize(("channels", "train"), [(2, True), (16, False)], ids=["narrow", "evaluated"])
def test_other_batch_norms_stay(channels: int, train: bool) -> None:
    work = _batch_norm(channels, train=train)
    before = targets(work)
    assert targets(run("chunked kernels", work)) == before
