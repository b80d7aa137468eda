"""The wrapped module: the original's face, inside the budget."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import rkmate.dtr
from rkmate.errors import ArgumentError, BackwardError
from rkmate.measure.step import measure_peak


def make() -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.GELU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach()


class WithLoss(nn.Module):
    """What a loss outside of the module takes comes on top of a budget."""

    def __init__(self) -> None:
        super().__init__()
        self.body = make()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        loss: torch.Tensor = self.body(x).square().mean()
        return loss


@pytest.mark.parametrize("ratio", [1.0, 0.5])
def test_same_training(ratio: float) -> None:
    x = torch.randn(256, 64)
    eager = WithLoss()
    peak = measure_peak(lambda: eager(x).backward()).peak
    # What operations take beside their results is learned where nothing else measures.
    rkmate.dtr.wrap(WithLoss(), int(peak * ratio), overhead_limit=1000)(x).backward()
    model = WithLoss()
    wrapped = rkmate.dtr.wrap(model, int(peak * ratio), overhead_limit=1000)
    seen = measure_peak(lambda: wrapped(x).backward())
    gradients = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    assert seen.peak - gradients <= int(peak * ratio)
    for left, right in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    for left, right in zip(eager.buffers(), model.buffers(), strict=True):
        assert torch.equal(left, right)
    assert (wrapped.reports[-1].evictions > 0) == (ratio < 1)


def test_the_original_s_face() -> None:
    model = make()
    wrapped = rkmate.dtr.wrap(model, "1GiB")
    assert list(wrapped.state_dict()) == list(model.state_dict())
    assert all(a is b for a, b in zip(wrapped.parameters(), model.parameters(), strict=True))
    assert wrapped.original is model
    wrapped.eval()
    assert not model.training
    x = torch.randn(8, 64)
    with torch.no_grad():
        assert torch.equal(wrapped(x), model(x))
    again = pickle.loads(pickle.dumps(wrapped))
    assert torch.equal(again(x), model(x))
    assert copy.deepcopy(wrapped).original is not model


def test_gradient_of_the_input_and_structures() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, *, scale: float) -> dict[str, object]:
            y = self.linear(x)
            return {"y": y * scale, "size": y.shape[0], "index": y.argmax(1)}

    model = Pair()
    wrapped = rkmate.dtr.wrap(model, "1MiB")
    grads = []
    for call in (model, wrapped):
        x = torch.ones(3, 4, requires_grad=True)
        found = call(x, scale=2.0)
        assert found["size"] == 3
        assert not found["index"].requires_grad
        found["y"].sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)


def test_a_second_backward_is_refused() -> None:
    wrapped = rkmate.dtr.wrap(make(), None)
    loss = wrapped(torch.randn(8, 64)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(BackwardError):
        loss.backward()


def test_after_a_budget_error_the_model_is_as_before() -> None:
    model = make()
    before = copy.deepcopy(model.state_dict())
    wrapped = rkmate.dtr.wrap(model, 1000)
    torch.manual_seed(5)
    random = torch.get_rng_state()
    with pytest.raises(rkmate.dtr.BudgetExceeded):
        wrapped(torch.randn(64, 64, generator=torch.Generator().manual_seed(1)))
    assert torch.equal(torch.get_rng_state(), random)
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_two_calls_before_a_backward() -> None:
    x = torch.randn(16, 64)
    eager, model = make(), make()
    wrapped = rkmate.dtr.wrap(model, "1MiB")
    for call, inner in ((eager, eager), (wrapped, model)):
        torch.manual_seed(2)
        (call(x).sum() * call(x * 2).square().sum()).backward()
        assert inner is not None
    for left, right in zip(eager.parameters(), model.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)


@pytest.mark.parametrize(
    ("model", "options"),
    [(3, {}), (nn.Linear(2, 2), {"heuristics": "lru"}), (nn.Linear(2, 2), {"log": "x"})],
)
def test_bad_arguments(model: object, options: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        rkmate.dtr.wrap(model, 100, **options)  # type: ignore[arg-type]
