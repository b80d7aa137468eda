"""Python numbers in a forward: those that it reads from its tensors, and those that it counts outside of the
model's objects."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import rkmate
from rkmate.errors import CaptureError

STEP = 0


class Logs(nn.Module):
    """Returns and keeps numbers of its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 4))
        self.last, self.history = 0.0, list[float]()
        self.logs: dict[str, Any] = {}

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        found = self.net(x)
        loss = F.cross_entropy(found, y)
        self.last = loss.item()
        self.history.append(loss.detach().item())
        right = (found.argmax(1) == y).sum()
        self.logs["right"] = right.item()
        first = found[0].tolist()
        right += 1                          # what was read before stays
        return {"loss": loss, "logs": {"more": right.item(), "first": first}}


def test_numbers_that_a_forward_reads_and_hands_on() -> None:
    def trained(budget: float | None) -> list[Any]:
        torch.manual_seed(0)
        model, x, y = Logs(), torch.randn(16, 8), torch.arange(16) % 4
        if budget is not None:
            rkmate.apply(model, budget=budget, progress=False, settings=rkmate.Settings(
                costs="analytic", parts="never"))
        optimizer, left = torch.optim.SGD(model.parameters(), lr=0.5), []
        for _ in range(4):
            optimizer.zero_grad()
            out = model(x, y)
            out["loss"].backward()
            optimizer.step()
            left.append((out["loss"].item(), out["logs"], model.last, [*model.history], dict(model.logs)))
        if budget is not None:
            plans = rkmate.applied(model)
            assert plans is not None and plans.has_plan
        assert [type(v) for v in (model.last, model.history[-1], model.logs["right"])] == [float, float, int]
        return [*left, *(p.tolist() for p in model.parameters())]

    assert trained(None) == trained(1.0)


def test_computing_with_such_a_number_is_refused() -> None:
    class Scales(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x / x.abs().max().item()

    with pytest.raises(CaptureError, match=r"test_numbers.py:\d+: return x / .* value of a tensor decides"):
        rkmate.wrap(Scales(4, 4), (torch.randn(2, 4),), budget=1.0, progress=False)


def _endless() -> Iterator[float]:
    value = 1.0
    while True:
        yield value
        value *= 0.5


class Counts(nn.Linear):
    """Counts its calls in one of several ways."""

    calls = 0

    def __init__(self, way: str) -> None:
        super().__init__(4, 4)
        self.way, self.counter = way, Counter[str]()
        self.numbers: Any = {"count": itertools.count(1), "cycle": itertools.cycle([1.0, 2.0]),
                             "generator": _endless()}.get(way)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self._count()

    def _count(self) -> float:
        global STEP
        if self.numbers is not None:
            return float(next(self.numbers))
        if self.way == "global":
            STEP += 1
            return STEP
        if self.way == "class":
            Counts.calls += 1
            return Counts.calls
        self.counter["calls"] += 1
        return self.counter["calls"]


WAYS = {"count": "advances the iterator numbers", "cycle": "advances the iterator numbers",
        "generator": "advances the iterator numbers", "global": "changes the global variable STEP",
        "class": "changes Counts.calls", "counter": "assigns counter"}


@pytest.mark.parametrize("way", WAYS)
def test_counting_outside_of_the_model_is_refused(way: str) -> None:
    global STEP
    STEP = Counts.calls = 0
    model, x = Counts(way), torch.ones(2, 4)
    with pytest.raises(CaptureError, match=WAYS[way]):
        rkmate.wrap(model, (x,), budget=1.0, progress=False)
    assert torch.equal(model(x), nn.Linear.forward(model, x)), "a trace leaves counts as they were"
