"""Plans of other sizes: equal bits, inside the budget, and kept as memory allows."""

from __future__ import annotations

import copy
import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate.graph.sizes import resized
from rkmate.ir.cd import CDGraph, CNode, Cost, DNode
from rkmate.pipeline import sizes as other_sizes
from rkmate.runtime import plan_cache
from rkmate.runtime import plan_cache as sizes
from tests.equality import assert_same_step, measured_peak
from tests.graph.sizes.test_resized import Attention, Branching, convolutions, images, tokens
from tests.models.sample import Sample


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each new signature, whether it was captured in full."""
    found: list[bool] = []

    def trace(*args: Any) -> Any:
        found.append(len(args) < 6 or args[5] is None)
        return plain(*args)

    plain = plan_cache.trace
    monkeypatch.setattr(plan_cache, "trace", trace)
    return found


def loss(output: Any) -> torch.Tensor:
    """A sum with weights."""
    weights = torch.linspace(-1, 1, output.numel()).view(output.shape) if output.dim() else 1.0
    return (output * weights).sum()


@pytest.mark.parametrize(("model", "call", "numbers", "share"), [
    # Some operators compute with 1, 2 and 3 in a way of their own: a length with such a root is captured.
    pytest.param(Attention(), tokens, (24, 32, 27, 48, 10), 0.9, marks=pytest.mark.slow),
    (convolutions(), images, (4, 6, 5, 9, 3), 1.0)])
@pytest.mark.usefixtures("deterministic")
def test_other_sizes_train_alike_inside_the_budget(model: nn.Module, call: Any, numbers: tuple[int, ...],
                                                   share: float, captures: list[bool]) -> None:
    twin, wrapped = copy.deepcopy(model), None
    for n in numbers:
        args, kwargs = call(n)
        if wrapped is None:
            wrapped = rkmate.wrap(model, args, budget=share, progress=False)
        assert_same_step(twin, wrapped, Sample(model, args, kwargs, loss))
    assert captures == [True, True, False, False, False]
    assert wrapped is not None
    for n in numbers:
        peak = measured_peak(wrapped, Sample(model, *call(n), loss))
        assert peak <= wrapped.plan.budget_bytes


@pytest.mark.usefixtures("deterministic")
def test_a_branch_on_the_length_is_captured(captures: list[bool]) -> None:
    model = Branching("branch")
    twin = copy.deepcopy(model)
    wrapped = rkmate.wrap(model, (torch.randn(2, 5, 4),), budget=1.0, progress=False,
                          settings=rkmate.Settings(costs="analytic"))
    for n in (7, 11, 6, 12, 13):
        assert_same_step(twin, wrapped, Sample(model, (torch.randn(2, n, 4),), {}, loss))
    assert captures == [True, True, True, False, True, False]


class Masked(nn.Module):
    """Looks at its mask, except in a trace, as libraries do; the first call sets an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.inner = nn.Embedding(50, 16), nn.Linear(16, 16)
        self.task = SimpleNamespace(kind=None)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if self.task.kind is None:
            self.task.kind = "one of several"
        x = self.words(ids)
        seen = None if not torch.compiler.is_exporting() and mask.all() else mask[:, None, :].bool()
        scores = self.inner(x) @ x.mT
        if seen is not None:
            scores = scores.masked_fill(~seen, -1e9)
        return self.inner(scores.softmax(-1) @ x)


def batch(length: int) -> tuple[tuple[torch.Tensor, torch.Tensor], dict[str, Any]]:
    mask = torch.ones(4, length, dtype=torch.long)
    mask[1, length // 2:] = 0
    return (torch.arange(4 * length).view(4, length) % 50, mask), {}


@pytest.mark.usefixtures("deterministic")
def test_lengths_with_a_mask_are_derived(captures: list[bool]) -> None:
    model = Masked()
    twin = copy.deepcopy(model)
    wrapped = rkmate.wrap(model, batch(24)[0], budget=1.0, progress=False,
                          settings=rkmate.Settings(costs="analytic"))
    for n in (24, 22, 20, 18, 17):
        assert_same_step(twin, wrapped, Sample(model, *batch(n), loss))
    assert captures == [True, True, True, False, False]     # the first one has set an attribute


def test_known_sizes_are_compared_once_and_ahead_of_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    did: list[str] = []
    for name in ("dry_run", "side_by_side"):
        def counted(*args: Any, plain: Any = getattr(resized, name), name: str = name,
                    **options: Any) -> Any:
            did.append(name)
            return plain(*args, **options)

        monkeypatch.setattr(resized, name, counted)
    wrapped = rkmate.wrap(nn.Linear(4, 4), (torch.randn(5, 4),), budget=1.0, progress=False,
                          settings=rkmate.Settings(costs="analytic"))
    assert did == []
    wrapped(torch.randn(7, 4)).sum().backward()
    assert did == ["dry_run", "dry_run", "side_by_side"]
    for n in (6, 7, 5, 9, 7, 8):            # the order in which the known ones were used last changes nothing
        wrapped(torch.randn(n, 4)).sum().backward()
    assert did[3:] == ["dry_run"] * 3


def test_sizes_0_and_1_are_captured(captures: list[bool]) -> None:
    wrapped = rkmate.wrap(nn.Linear(4, 4), (torch.randn(5, 4),), budget=1.0, progress=False,
                          settings=rkmate.Settings(costs="analytic"))
    for n in (7, 1, 6):
        wrapped(torch.randn(n, 4)).sum().backward()
    assert captures == [True, True, True, False]


def test_another_dimension_is_captured_once(captures: list[bool]) -> None:
    wrapped = rkmate.wrap(nn.Linear(4, 4), (torch.randn(5, 3, 4),), budget=1.0, progress=False,
                          settings=rkmate.Settings(costs="analytic"))
    for shape in ((5, 4), (5, 6), (7, 6), (8, 9), (6, 3)):
        wrapped(torch.randn(*shape, 4)).sum().backward()
    assert captures == [True, True, False, True, False, False]


def test_plans_are_kept_while_they_stay_within_memory() -> None:
    def kept(most: int) -> int:
        settings = rkmate.Settings(costs="analytic", kept_plans_bytes=most)
        wrapped = rkmate.wrap(nn.Linear(4, 4), (torch.randn(5, 4),), budget=1.0, progress=False,
                              settings=settings)
        for n in range(6, 16):
            wrapped(torch.randn(n, 4)).sum().backward()
        return len(wrapped._plans)

    assert kept(1 << 30) == 11
    assert 2 < kept(1 << 19) < 11


def test_how_long_plans_took_is_said_at_the_tenth(caplog: pytest.LogCaptureFixture) -> None:
    count = sizes.NewSizes()
    with caplog.at_level(logging.WARNING, logger="rkmate"):
        for k in range(12):
            count.add(k > 0, 0.25)
    assert [r.getMessage() for r in caplog.records] == [
        "10 new signatures planned in 2.5 s so far, 9 of them from captures of other sizes"]


def graph(size: int) -> CDGraph:
    """One computation, from one storage to another."""
    return CDGraph((DNode("a", size), DNode("b", size)), (CNode("a", "forward", (), (0,)),
                                                         CNode("b", "forward", (0,), (1,))), 2, (), (1,))


def test_scaled_costs_lie_between_and_never_lose_memory() -> None:
    class Plan:
        def __init__(self, size: int, cost: Cost) -> None:
            self.graph, self.costs = type("Summary", (), {"cd": graph(size)}), (cost, cost)

    plans: Any = [Plan(1000, Cost(1.0, 600)), Plan(3000, Cost(3.0, 1500))]
    assert other_sizes.scaled_costs(plans, graph(2000))[1] == Cost(2.0, 1500)
    assert other_sizes.scaled_costs(plans, graph(1000))[1] == Cost(1.0, 600)
    larger = other_sizes.scaled_costs(plans, graph(6000))[1]
    assert larger.time == pytest.approx(6.0)
    assert larger.overhead == 3072
    assert other_sizes.scaled_costs(plans[:1], graph(500))[1] == Cost(1.0, 600)
