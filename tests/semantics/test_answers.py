"""Forwards that ask for values to which nearly all calls have one answer: whether they are finite, whether a
drawn number is above zero, whether a matrix can be inverted, whether a check that raises an error passes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.errors import CaptureError
from rkmate.measure.step import measure_step
from rkmate.torch_seam.patches.numerics import one_hot_of_positions

Asks = Callable[["Layer", torch.Tensor], torch.Tensor]


class Layer(nn.Module):
    """Draws, writes to buffers, and asks."""

    def __init__(self, asks: Asks) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(16, 48), nn.Linear(48, 16), nn.BatchNorm1d(16)
        self.asks = asks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.asks(self, self.norm(x + F.dropout(self.down(F.gelu(self.up(x))), 0.1)))

    @property
    def matrix(self) -> torch.Tensor:
        square: torch.Tensor = self.down.weight[:, :16].tanh()
        return square + 3 * torch.eye(16)


def _finite(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x if torch.isfinite(x).all() else x.nan_to_num().clamp(-1, 1)


def _not_finite(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if torch.isnan(x).any() or x.isinf().any().item():
        x = x.nan_to_num()
    return x


def _neither(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x.nan_to_num() if bool((x.isnan() | x.isinf()).any()) else x


def _drawn(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x * 2 if torch.rand(1) > 0.0 else x


def _inverted(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x @ torch.linalg.inv(layer.matrix)


def _solved(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.linalg.solve(layer.matrix, x.T).T


def _factorised(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x @ torch.linalg.cholesky(layer.matrix @ layer.matrix.T)


def _raising(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if layer.training and not ((x > -1e5).all() and torch.all(x < 1e4)):
        message = "large"
        raise ValueError(message)
    return x


def _asserting(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    assert x.max() < 1e4, "large"
    return x


def _else_raising(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    if torch.all(x < 1e4):
        return x
    else:
        raise ValueError("large")


def _asserted_by_torch(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    torch._assert((x < 1e4).all(), "large")
    return x


def _checked_by_torch(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    torch._check_tensor_all(x < 1e4, lambda: "large")
    torch._assert(bool((x.abs() < 1e5).all()), "large")
    torch._check((x < 1e4).all().item(), lambda: "large")
    torch._check_with(ValueError, (x < 1e4).all().item(), lambda: "large")      # type: ignore[attr-defined]
    return x


def _asserted_later(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    torch._assert_async((x < 1e4).all())
    return x


def _variance(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return F.gaussian_nll_loss(x, torch.zeros_like(x), 1e4 - x, reduction="none")


def _distributed(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Normal(x, 1e4 - x, validate_args=True).rsample()


def _one_hot(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x + F.one_hot((x > 1e4).any(-1).long() * 16, num_classes=16)


def _one_hot_positions(layer: Layer, x: torch.Tensor) -> torch.Tensor:
    return x * F.one_hot(x.topk(2)[1], 16).sum(1) + F.one_hot(x.softmax(-1).multinomial(1).squeeze(1), 16)


CHECKS = (_raising, _asserting, _else_raising, _asserted_by_torch, _checked_by_torch, _asserted_later,
          _variance, _distributed, _one_hot)
KINDS = (_one_hot_positions, _finite, _not_finite, _neither, _drawn, _inverted, _solved, _factorised)


def trained(asks: Asks, budget: float | None, *, infinite: bool = False) -> tuple[
        nn.Module, list[torch.Tensor]]:
    """Return the model, and everything that four steps leave."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer(asks) for _ in range(2))), torch.randn(64, 16)
    if budget is not None:
        rkmate.apply(model, budget=budget, progress=False, settings=rkmate.Settings(
            parts="never", costs="analytic"))
    left = []
    for number in range(4):
        given = x.clone()
        if infinite and number == 2:
            given[0, 0] = torch.inf
        torch.manual_seed(number)
        loss = model(given).square().mean()
        loss.backward()
        left += [loss.detach(), torch.rand(2), *(b.clone() for b in model.buffers())]
    return model, left + [p.grad for p in model.parameters() if p.grad is not None]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one, other, strict=True))


class Positions(nn.Module):
    def forward(self, x: torch.Tensor, n: torch.Tensor) -> list[torch.Tensor]:
        """Return first what is in range, then what may not be."""
        found = [x.argmax(1), x.argmax(), x.max(0)[1], x.topk(2, dim=1)[1].t(), n.sort(1)[1][:, 0],
                 x.exp().multinomial(1).squeeze(1), n.argsort(dim=0).unbind(1)[0]]
        unknown = [n[0], n.sort(1)[0], n.amax(1), x.argmax(0) + 3, torch.cat([x.argmax(0)])]
        return [F.one_hot(t, x.numel() if t.dim() == 0 else 16) for t in found] + [
            F.one_hot(t, 16) for t in unknown] + [F.one_hot(x.argmax(0), 3), F.one_hot(x.argmax(), 16)]


def test_one_hot_positions_are_not_checked() -> None:
    model, given = Positions(), (torch.randn(4, 16), torch.arange(64).reshape(4, 16) % 7)
    program: Any = torch.export.export(model, given).module()
    one_hot_of_positions(program)
    left = [n for n in program.graph.nodes if n.target is torch.ops.aten.one_hot.default]
    assert len(left) == 7
    given = given[0].fill_(-1), given[1]
    given[0][:, 0] = 1
    torch.manual_seed(0)
    expected = model(*given)
    torch.manual_seed(0)
    for a, b in zip(expected, program(*given), strict=True):
        assert torch.equal(a, b) and a.dtype is b.dtype and a.stride() == b.stride()


@pytest.mark.parametrize("asks", [*KINDS, _raising])
def test_ordinary_steps_follow_a_plan(asks: Asks) -> None:
    plain, planned = trained(asks, None)[1], trained(asks, 0.9)
    assert same(plain, planned[1])
    assert rkmate.applied(planned[0]).has_plan


def test_what_undoes_a_forward_is_in_the_budget() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(*(Layer(_finite) for _ in range(2))), torch.randn(64, 16)
    run = lambda: model(x).sum().backward()     # noqa: E731
    plain = measure_step(model, run).peak
    rkmate.apply(model, budget=int(0.9 * plain), progress=False, settings=rkmate.Settings(parts="never"))
    run()
    assert measure_step(model, run).peak <= int(0.9 * plain)


@pytest.mark.parametrize("asks", [_finite, _not_finite, _neither])
def test_a_forward_with_another_answer_is_undone_and_runs_as_it_is(asks: Asks) -> None:
    plain = trained(asks, None, infinite=True)[1]
    with pytest.warns(rkmate.RkmateWarning, match="takes for granted that values are finite") as said:
        planned = trained(asks, 0.9, infinite=True)[1]
    assert same(plain, planned)
    assert len([w for w in said if "takes for granted" in str(w.message)]) == 1


@pytest.mark.filterwarnings("error::rkmate.RkmateWarning")
@pytest.mark.parametrize("check", CHECKS)
def test_a_check_raises_what_it_raises(check: Asks) -> None:
    def left(budget: float | None) -> list[object]:
        torch.manual_seed(0)
        model, x, found = Layer(check), torch.randn(64, 16), []
        if budget is not None:
            rkmate.apply(model, budget=budget, progress=False, settings=rkmate.Settings(
                parts="never", costs="analytic"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for number in range(5):
            with torch.no_grad():
                model.norm.bias.fill_(1e5 if number in (2, 3) else 0.0)
            try:
                loss = model(x).square().mean()
                loss.backward()
                optimizer.step()
                found.append(loss.item())
            except (ValueError, AssertionError, RuntimeError) as error:
                found.append(type(error).__name__)
        assert budget is None or rkmate.applied(model).has_plan
        return [*found, *(t.tolist() for t in model.state_dict().values()), torch.rand(1).item()]

    assert left(None) == left(0.9)
    assert sum(isinstance(x, str) for x in left(None)) == 2


def test_a_check_that_its_caller_handles_is_told_of() -> None:
    def handling(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        try:
            return _raising(layer, x)
        except ValueError:
            return x.clamp(-1, 1)

    plain = trained(handling, None, infinite=True)[1]
    with pytest.warns(rkmate.RkmateWarning, match=r"the check at .*:\d+ passes, and a call"):
        planned = trained(handling, 0.9, infinite=True)[1]
    assert same(plain, planned)


def test_a_solver_raises_what_it_raises() -> None:
    class Solver(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x @ torch.linalg.inv(self.weight)).sin()

    model = rkmate.wrap(Solver(), (torch.randn(8, 4),), budget=1.0, progress=False)
    model(torch.randn(8, 4)).sum().backward()
    with torch.no_grad():
        model.weight.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", rkmate.RkmateWarning)
        with pytest.raises(torch.linalg.LinAlgError):
            model(torch.randn(8, 4))


def test_an_answer_that_may_be_either_is_refused() -> None:
    def dropped(layer: Layer, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if torch.rand(1) > 0.1 else x

    with pytest.raises(CaptureError, match="A random number decides"):
        trained(dropped, 0.9)
