"""Closed-over tensors: none of the module's parameters, buffers or arguments."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import rkmate
from tests.semantics.steps import assert_same_gradients, planned

FACTORS = torch.rand(8) + 1
COLUMNS = torch.tensor([5, 0, 3])


class Holder(nn.Module):
    """Computes with a tensor that it gets at by any way."""

    def __init__(self, reach: Callable[[Holder], torch.Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.factor = torch.rand(8) + 1
        self.taught = torch.rand(8, requires_grad=True)
        self.more = [torch.rand(8), nn.Parameter(torch.rand(8))]
        self.reach = reach

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(F.linear(x, self.weight) * self.reach(self))


@pytest.mark.parametrize("reach", [
    lambda m: m.factor,
    lambda m: m.factor * m.factor[COLUMNS].sum(),
    lambda m: m.more[0],
    lambda m: FACTORS,
    lambda m: torch.tensor([1.0, 2.0] * 4) * FACTORS,
    lambda m: m.taught.detach(),
    lambda m: m.weight.data[0] * m.taught.data,
    lambda m: m.weight[0] + (m.weight.round() - m.weight).data[0],
], ids=["attribute", "twice", "list", "global", "made of numbers", "detached", "data", "straight through"])
def test_computes_with_a_closed_over_tensor(reach: Callable[[Holder], torch.Tensor]) -> None:
    x = torch.randn(4, 8, requires_grad=True)
    model = nn.Sequential(Holder(reach), nn.Dropout(0.3), Holder(reach))
    module = planned(model, x)
    for _ in range(2):
        assert_same_gradients(model, module, lambda run: run(x).pow(2).sum())
        with torch.no_grad():           # its values are read when a step runs
            FACTORS.mul_(1.5)
            model[0].factor.add_(1)
    assert sorted(model.state_dict()) == ["0.weight", "2.weight"]
    assert not dict(model.named_buffers())


@pytest.mark.parametrize("reach", [lambda m: m.taught, lambda m: m.more[1]], ids=["leaf", "parameter"])
def test_one_that_wants_a_gradient_is_refused(reach: Callable[[Holder], torch.Tensor]) -> None:
    with pytest.raises(rkmate.CaptureError, match=r"at .*closed_over_tensors.py:\d+: .*nn.ParameterList"):
        planned(Holder(reach), torch.randn(4, 8))


@pytest.mark.parametrize("reach", [
    lambda m: m.factor.add_(1),
    lambda m: F.batch_norm(torch.ones(4, 8), m.factor, m.factor, training=True)[0],
    lambda m: F.instance_norm(torch.ones(2, 8, 4), m.factor, m.factor)[0, 0, 0],
    lambda m: torch.add(m.factor, 1, out=m.factor),
], ids=["method", "batch norm", "instance norm", "out"])
def test_one_that_is_written_is_refused_and_left_as_it_was(
        reach: Callable[[Holder], torch.Tensor]) -> None:
    model = Holder(reach)
    before = model.factor.clone()
    with pytest.raises(rkmate.CaptureError, match=r"writes to a tensor.*register_buffer"):
        planned(model, torch.randn(4, 8))
    assert torch.equal(model.factor, before)


def test_one_that_is_written_between_forward_and_backward() -> None:
    model, x = Holder(lambda m: m.factor), torch.randn(4, 8)
    module = planned(model, x)
    loss = module(x).sum()
    model.factor.mul_(2)
    with pytest.raises(rkmate.BackwardError, match="factor"):
        loss.backward()
