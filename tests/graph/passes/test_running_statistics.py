"""What the forward overwrites, and who reads it."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import fx

from rkmate.torch_seam.patches import cudnn_batch_norm
from tests.device.fake import FakeDevice
from tests.graph.passes.graphs import Made, aten, run, targets


def _batch_norm(made: Made, *, train: bool,
                weighted: bool = True) -> tuple[fx.Node, fx.Node, fx.Node, fx.Node]:
    """A batch norm and its gradient: the running mean, its new value, the output and the gradient."""
    x = made.source("input", 0, 4, 3, 5)
    weight = made.source("param", "w", 3) if weighted else None
    mean, var = made.source("buffer", "mean", 3), made.source("buffer", "var", 3)
    grad = made.source("tangent", 0, 4, 3, 5)
    norm = made.call(aten._native_batch_norm_legit_functional.default, x, weight, None, mean, var, train,
                     0.1, 1e-5)
    y, saved_mean, saved_invstd, new_mean, new_var = (made.item(norm, k) for k in range(5))
    back = made.call(aten.native_batch_norm_backward.default, grad, x, weight, new_mean, new_var, saved_mean,
                     saved_invstd, train, 1e-5, [True, True, False], backward=True)
    return mean, new_mean, y, made.item(back, 0, backward=True)


@pytest.mark.parametrize("train", [True, False])
def test_statistics_are_read_outside_of_training_only(train: bool) -> None:
    made = Made()
    _, _, y, grad = _batch_norm(made, train=train)
    work = run("unread statistics", made.work([y], [(next(iter(made.sources)), grad)]))
    back = next(n for n in work.graph.nodes if n.target is aten.native_batch_norm_backward.default)
    assert (back.args[3] is None and back.args[4] is None) == train
    assert back.args[5] is not None


@pytest.mark.parametrize("accelerator", [True, False])
def test_some_kernels_take_their_type_from_them(accelerator: bool) -> None:
    made = Made()
    _, _, y, grad = _batch_norm(made, train=True, weighted=False)
    work = made.work([y], [(next(iter(made.sources)), grad)])
    with FakeDevice() if accelerator else nullcontext():
        run("unread statistics", work)
    back = next(n for n in work.graph.nodes if n.target is aten.native_batch_norm_backward.default)
    assert (back.args[3] is not None) == accelerator


def test_a_batch_norm_may_run_twice() -> None:
    made = Made()
    mean, new_mean, y, _ = _batch_norm(made, train=True)
    work = run("overwritten values", made.work([y], (), [(mean, new_mean)]))
    assert aten.clone.default not in targets(work)


def test_who_needs_the_value_from_before_reads_a_copy() -> None:
    made = Made()
    x, b = made.source("input", 0, 3), made.source("buffer", "b", 3)
    y, moved = made.call(aten.mul.Tensor, x, b), made.call(aten.add.Tensor, b, 1)
    run("overwritten values", made.work([y], (), [(b, moved)]))
    copy = y.args[1]
    assert isinstance(copy, fx.Node)
    assert copy.target is aten.clone.default and copy.args == (b,)
    assert moved.args[0] is copy


def test_what_nobody_overwrites_is_read_as_it_is() -> None:
    made = Made()
    x, b = made.source("input", 0, 3), made.source("buffer", "b", 3)
    y = made.call(aten.mul.Tensor, x, b)
    assert targets(run("overwritten values", made.work([y]))) == [aten.mul.Tensor]


def test_what_only_makes_its_new_value_reads_no_copy() -> None:
    made = Made()
    x, b = made.source("input", 0, 3), made.source("buffer", "b", 3)
    moved = made.call(aten.add.Tensor, b, 1)
    work = run("overwritten values", made.work([made.call(aten.neg.default, x)], (), [(b, moved)]))
    assert targets(work) == [aten.add.Tensor, aten.neg.default]


def test_a_batch_norm_of_cudnn_may_run_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn_batch_norm, "reserve_bytes", lambda x: 16)
    made = Made()
    x, weight = made.source("input", 0, 4, 3, 5), made.source("param", "w", 3)
    mean, var = made.source("buffer", "mean", 3), made.source("buffer", "var", 3)
    norm = made.call(torch.ops.rkmate.cudnn_batch_norm.default, x, weight, None, mean, var, 0.1, 1e-5)
    y, new_mean = made.item(norm, 0), made.item(norm, 3)
    work = run("overwritten values", made.work([y], (), [(mean, new_mean)]))
    assert aten.clone.default not in targets(work)


def test_integers_that_are_counted_up_are_no_values() -> None:
    made = Made()
    x = made.source("input", 0, 3)
    counters = [made.source("buffer", k, dtype=torch.long) for k in ("a", "b")]
    new = [made.call(aten.add.Tensor, c, by) for c, by in zip(counters, (1, 2), strict=True)]
    y = made.call(aten.neg.default, x)
    work = run("counters", made.work([y], (), list(zip(counters, new, strict=True))))
    assert targets(work) == [aten.neg.default] and not work.mutations
    assert [(s.key, by) for s, by in work.counters] == [("a", 1), ("b", 2)]
    assert {s.key for s in work.written()} == {"a", "b"}


@pytest.mark.parametrize("why", ["read", "returned", "read before", "of floats", "twice", "by a tensor"])
def test_other_values_stay(why: str) -> None:
    made = Made()
    x = made.source("input", 0, 3)
    counter = made.source("buffer", "n", dtype=torch.float32 if why == "of floats" else torch.long)
    by = made.source("buffer", "by", dtype=torch.long) if why == "by a tensor" else 1
    new = made.call(aten.add.Tensor, counter, by)
    last = made.call(aten.add.Tensor, new, 1) if why == "twice" else new
    y = made.call(aten.mul.Tensor, x, new if why == "read" else counter if why == "read before" else x)
    before = [n.target for n in made.graph.nodes if n.op == "call_function"]
    outputs = [y, new] if why == "returned" else [y]
    work = run("counters", made.work(outputs, (), [(counter, last)]))
    assert targets(work) == before and len(work.mutations) == 1 and not work.counters
