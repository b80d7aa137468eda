"""Numbers that change from step to step: an annealed temperature, a schedule's weight, a growing step count.

Each number takes a plan of its own. From the third one on, its graph is derived from those of other numbers
by a dry run, where operators compute with all of them in one way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.measure.step import measure_step
from tests.semantics.steps import Reversed

pytestmark = pytest.mark.filterwarnings("ignore:.*changed before each of the latest plans")


class _Net(nn.Module):
    def __init__(self, use: Callable[[_Net, torch.Tensor], Any]) -> None:
        super().__init__()
        self.use, self.number, self.steps, self.held = use, 0.9, 10, {"number": 0.9}
        self.last: Any = None
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> Any:
        return self.use(self, self.second(F.gelu(self.first(x))))


def _assigned(net: _Net, x: torch.Tensor) -> torch.Tensor:
    net.last = net.number * 2
    return (x * net.last).square().mean()


def _made_of_it(net: _Net, x: torch.Tensor) -> torch.Tensor:
    return (x * torch.tensor([net.number, 1.0]).repeat(4)).square().mean()


USES: dict[str, Callable[[_Net, torch.Tensor], Any]] = {
    "temperature": lambda net, x: F.softmax(x / net.number, -1).square().mean(),
    "exponent": lambda net, x: x.abs().pow(net.number + 1.03).mean(),
    "dropout": lambda net, x: F.dropout(x, net.number).square().mean(),
    "reversal": lambda net, x: Reversed.apply(x, net.number).square().mean(),  # type: ignore[no-untyped-call]
    "filled": lambda net, x: (x + torch.full((8,), net.number)).square().mean(),
    "in a dictionary": lambda net, x: (x * net.held["number"]).square().mean(),
    "returned": lambda net, x: {"loss": (x * net.number).square().mean(), "number": net.number},
    "weight of steps": lambda net, x: (x * min(1.0, net.steps / 31)).square().mean(),
    "assigned": _assigned,
    "a constant's": _made_of_it,
}


def _planned(net: _Net, x: torch.Tensor) -> rkmate.PlannedModule:
    return rkmate.wrap(net, (x,), budget=1.0, progress=False, settings=rkmate.Settings(costs="analytic"))


@pytest.mark.parametrize("use", USES)
def test_steps_are_the_originals(use: str) -> None:
    results: list[Any] = []
    for is_planned in (False, True):
        torch.manual_seed(0)
        net = _Net(USES[use]).train()
        x, counted = torch.randn(32, 8), None
        run: Any = _planned(net, x) if is_planned else net
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for step in range(5):
            net.number, net.steps, net.held["number"] = 0.9 - 0.07 * step, 10 + step, 0.9 - 0.07 * step
            torch.manual_seed(step)
            out = run(x)
            loss = out["loss"] if isinstance(out, dict) else out
            loss.backward()
            results.append((loss.item(), out["number"] if isinstance(out, dict) else net.last,
                            [p.grad.clone() for p in net.parameters() if p.grad is not None]))
            optimizer.step()
            optimizer.zero_grad()
        counted = run._plans.new_sizes if is_planned else None
    for plain, planned in zip(results[:5], results[5:], strict=True):
        assert plain[:2] == planned[:2]
        assert all(map(torch.equal, plain[2], planned[2]))
    assert counted is not None
    assert counted.derived == (0 if use in ("assigned", "a constant's") else 2)


def test_numbers_with_ways_of_their_own_are_captured() -> None:
    net = _Net(USES["exponent"])
    x, wrapped = torch.randn(32, 8), None
    for exponent in (1.4, 1.6, 1.8, 2.0, 2.2):
        net.number = exponent - 1.03
        if wrapped is None:
            wrapped = _planned(net, x)
        wrapped(x).backward()
    assert wrapped is not None
    assert (wrapped._plans.new_sizes.derived, wrapped._plans.new_sizes.captured) == (1, 3)


def test_plans_of_earlier_numbers_are_not_kept() -> None:
    net, x = _Net(USES["temperature"]), torch.randn(32, 8)
    wrapped = _planned(net, x)
    for step in range(30):
        net.number = 0.9 - 0.01 * step
        wrapped(x).backward()
    assert len(wrapped._plans) <= 20


def test_room_for_the_callers_loss_goes_over_to_other_numbers() -> None:
    def step() -> None:
        y = net(x)
        for _ in range(8):
            y = (y.exp().log() + y.sin()) * 0.5
        y.square().mean().backward()

    def use(net: _Net, x: torch.Tensor) -> torch.Tensor:
        return x + net.number * net.second(F.gelu(net.first(x))) + net.second(F.gelu(net.first(x * 0.3)))

    net, x = _Net(use), torch.randn(512, 8)
    step()
    budget = int(0.9 * measure_step(net, step).peak)
    rkmate.apply(net, budget=budget, progress=False, settings=rkmate.Settings(costs="analytic"))
    for number in (0.9, 0.87, 0.85, 0.84, 0.83):
        net.number = number
        step()
    net.number = 0.82
    assert measure_step(net, step).peak <= budget
