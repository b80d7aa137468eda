"""The operators that work part by part: torch's bits, and no more memory than one part."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from rkmate.device import cpu
from rkmate.graph.passes.table import simplify
from rkmate.measure.step import measure_peak
from rkmate.pipeline import prepare as pipeline
from rkmate.show.replay import replay
from tests.capturing import captured_once
from tests.equality import assert_same_step, measured_peak
from tests.models import Sample

aten = torch.ops.aten
own = torch.ops.rkmate


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of a kibibyte, so that small tensors have many."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2**10)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("shape", [(37, 50), (1, 700), (3, 5, 11, 13)])
def test_cross_entropy_backward(shape: tuple[int, ...], weighted: bool, reduction: str) -> None:
    logits = torch.randn(shape, requires_grad=True)
    target = torch.randint(0, shape[1], (shape[0], *shape[2:]))
    target.view(-1)[::4] = -100
    weight = torch.rand(shape[1]) if weighted else None
    log_probs = F.log_softmax(logits, 1)
    loss = F.nll_loss(log_probs, target, weight, reduction=reduction)
    grad = torch.randn_like(loss)
    expected, = torch.autograd.grad(loss, logits, grad)
    kind = {"none": 0, "mean": 1, "sum": 2}[reduction]
    forward = aten.nll_loss2d_forward if len(shape) == 4 else aten.nll_loss_forward
    total = forward(log_probs.detach(), target, weight, kind, -100)[1]
    arguments = (grad, log_probs.detach().clone(), target, weight, kind, -100, total, 1)
    assert torch.equal(own.cross_entropy_backward(*arguments), expected)
    over = own.cross_entropy_backward.out(*arguments, out=arguments[1])
    assert over is arguments[1]
    assert torch.equal(over, expected)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("shape", [(6, 7, 5), (3, 8, 9, 10), (2, 5, 3, 4, 5), (1, 3, 2, 2), (40, 9)])
@pytest.mark.parametrize("layout", ["contiguous", "other"])
def test_batch_norm_backward(shape: tuple[int, ...], layout: str) -> None:
    x, grad = torch.randn(shape), torch.randn(shape)
    if layout == "other":
        grad = grad.transpose(0, 1).contiguous().transpose(0, 1)
    weight = torch.rand(shape[1])
    dims = [d for d in range(len(shape)) if d != 1]
    mean, invstd = x.mean(dims), 1 / x.var(dims, unbiased=False).add(1e-5).sqrt()
    expected = aten.native_batch_norm_backward(grad, x, weight, None, None, mean, invstd, True, 1e-5,
                                               [True, True, True])
    found = own.batch_norm_backward(grad, x, weight, mean, invstd, 1e-5)
    over = own.batch_norm_backward.over(grad, x, weight, mean, invstd, 1e-5, out=grad)
    assert over[0] is grad
    for a, b, c in zip(expected, found, over, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


@pytest.mark.parametrize("operator", [aten._log_softmax, aten._softmax])
def test_softmax_over_its_own_input(operator: Any) -> None:
    for shape in ((3, 5000), (64, 33), (2, 3, 1)):
        x = torch.randn(shape)
        expected = operator(x, -1, False)
        assert operator.out(x, -1, False, out=x) is x
        assert torch.equal(x, expected)


def test_no_more_memory_than_one_part() -> None:
    log_probs = torch.randn(1024, 4096).log_softmax(1)
    target = torch.randint(0, 4096, (1024,))
    one = torch.ones(())
    peak = measure_peak(lambda: own.cross_entropy_backward.out(
        one, log_probs, target, None, 1, -100, one, 1, out=log_probs)).peak
    assert peak <= 1.1 * cpu.PART_BYTES, peak


class _Wide(nn.Module):
    """A wide image after a batch norm, and a wide loss."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
                                  nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
                                  nn.AdaptiveAvgPool2d(4), nn.Flatten())
        self.head = nn.Linear(512, 600)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.stem(images)), labels)


def wide() -> Sample:
    """A sample of it, the same each time."""
    torch.manual_seed(0)
    return Sample(_Wide(), (torch.randn(96, 3, 16, 16), torch.randint(0, 600, (96,))), {},
                  lambda loss: loss)


@pytest.mark.parametrize("budget", [1.0, 0.9])
def test_a_wrapped_module_uses_them(budget: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "PART_BYTES", 2**16)
    sample = wide()
    wrapped = rkmate.wrap(sample.model, sample.args, budget=budget, progress=False,
                          settings=rkmate.Settings(chunked_loss="never"))
    assert "rkmate_batch_norm_backward_over(" in wrapped.source
    assert "rkmate_cross_entropy_backward_out(" in wrapped.source
    assert_same_step(wide().model, wrapped, sample)
    assert measured_peak(wrapped, sample) <= wrapped.plan.budget_bytes


class _Squares(nn.Module):
    """The loss inside: nothing is reserved for one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * x).sum()


@pytest.mark.parametrize(("planner", "counts"), [("rockmate", [5, 0]), ("recompute-all", [2, 3])])
def test_unchunked_where_there_is_room(planner: str, counts: list[int],
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the budget leaves room torch's kernel runs, which is faster and takes more; the peak stays as
    predicted."""
    monkeypatch.setattr(cpu, "PART_BYTES", 2**16)
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 3, padding=1)]
    for _ in range(5):
        layers += [nn.BatchNorm2d(16), nn.GELU()]
    model = nn.Sequential(*layers, _Squares())
    sample = Sample(model, (torch.randn(32, 3, 16, 16),), {}, lambda loss: loss)
    budget = 7 * 2**20      # of 6: they alone leave one of them out, or not, for a few bytes of a sum
    if planner == "recompute-all":
        with pytest.raises(rkmate.InfeasibleBudget) as caught:
            rkmate.wrap(copy.deepcopy(model), sample.args, budget=1,
                        settings=rkmate.Settings(planner=planner, costs="analytic"), progress=False)
        budget = caught.value.minimum_bytes
    module = rkmate.wrap(copy.deepcopy(model), sample.args, budget=budget,
                         settings=rkmate.Settings(planner=planner, costs="analytic"), progress=False)
    found = [module.source.count(f"= {name}") for name in
             ("aten_native_batch_norm_backward", "rkmate_batch_norm_backward")]
    assert found == counts
    assert_same_step(model, module, sample)
    peak = measured_peak(module, sample)
    assert 0.99 * module.plan.peak_bytes <= peak <= module.plan.peak_bytes
    # The prediction has the kernels that run.
    assert module.plan.step_seconds == module.plan.schedule.seconds(module.plan.graph.cd)
    assert replay(module.plan).seconds == pytest.approx(module.plan.step_seconds)
    assert sum(m.kernel for m in replay(module.plan).moments) == counts[0]
    assert module.plan.bound_seconds is None or module.plan.bound_seconds <= module.plan.step_seconds


def test_updated_statistics_do_not_wait_for_the_backward() -> None:
    """Many channels of few pixels: running statistics that live on until the backward show."""
    model = nn.Sequential(*(m for _ in range(12) for m in (nn.BatchNorm2d(256), nn.Tanh())))
    x = torch.randn(2, 256, 2, 2)
    sample = Sample(model, (x,), {}, lambda y: (y * y).sum())
    with captured_once():
        captured = pipeline.capture(model, (x,), {})  # type: ignore[attr-defined]
        graph = simplify(captured, captured.differentiable).graph
        backward = [n for n in graph.nodes if n.target is aten.native_batch_norm_backward.default]
        assert [n.args[3:5] for n in backward] == [(None, None)] * 12
        module = rkmate.wrap(model, (x,), budget="1GiB", progress=False)
    twin = copy.deepcopy(model)
    assert_same_step(twin, module, sample)
    # They are 24 KiB; the few gradients that leave together with others are less than half of it.
    assert measured_peak(module, sample) <= measured_peak(twin, sample) + 12 * 2**10
