"""How much is away at once: of several calls before a backward, and of layers that share a budget. The count
is that of the engine that copies to a real folder."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.budget import Budget
from rkmate.ir.link import Link
from rkmate.offload import target as places
from rkmate.offload.copies import AwayBytes
from rkmate.offload.target import Offload
from rkmate.parts.apply import planned_call_of, put_plan_into, put_plans_into_layers
from rkmate.planners.settings import PlannerSettings
from rkmate.runtime.kept_plans import Planning
from rkmate.show.plan import Plan
from tests.copying import LateEngine, use
from tests.equality import measured_peak
from tests.models import Sample

# Of a file system that is memory.
pytestmark = pytest.mark.filterwarnings("ignore:.*:rkmate.errors.RkmateWarning")

X = torch.randn(2**14, 64, generator=torch.Generator().manual_seed(0))
"""4 MiB, as each tensor of `tower`."""
MIB = 2**20
PLANNER = PlannerSettings(save_set_seconds=0.1, first_seconds=0.1, smallest_seconds=0.0, offload_seconds=30.0)


def settings(offload: Offload | None = None) -> rkmate.Settings:
    return rkmate.Settings(costs="analytic", planner=PLANNER, offload=offload)


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))


class WithLoss(nn.Module):
    """The loss inside: nobody else allocates in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = tower()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tower(x).square().mean()  # type: ignore[no-any-return]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A way on which nothing is waited for, so that plans send what they may."""
    def stated(offload: Offload, device: object, buffer_bytes: int) -> Link:
        return Link(1e12, 1e12, 0.0, buffer_bytes, offload.most_bytes, offload.place)

    monkeypatch.setattr(places, "stated_link", stated)


@pytest.fixture
def most(monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """By count, the most bytes that its calls have had away at once."""
    found: dict[int, int] = {}
    add = AwayBytes.add

    def noted(self: AwayBytes, call: Any, size: int) -> None:
        add(self, call, size)
        found[id(self)] = max(found.get(id(self), 0), sum(c.away_bytes for c in self._calls))

    monkeypatch.setattr(AwayBytes, "add", noted)
    return found


def away_of(plan: Plan) -> int:
    return plan.graph.cd.bytes(plan.schedule.copied)


def two_calls(module: nn.Module) -> None:
    a, b = module(X), module(2 * X)
    (a.mean() + b.square().mean()).backward()


@pytest.mark.usefixtures("fast")
def test_several_calls_share_what_may_be_away(most: dict[int, int], tmp_path: Path) -> None:
    module = rkmate.wrap(tower(), (X,), budget=0.7, calls=2, offload=rkmate.Offload(tmp_path, 24 * MIB),
                         settings=settings(), progress=False)
    sent, twin = away_of(module.plan), tower()
    two_calls(module)
    assert [*most.values()] == [2 * sent]
    assert 0 < 2 * sent <= 24 * MIB
    two_calls(twin)
    for p, q in zip(twin.parameters(), module.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)


@pytest.mark.usefixtures("fast")
def test_the_peak_of_several_calls_is_the_measured_one(monkeypatch: pytest.MonkeyPatch,
                                                       tmp_path: Path) -> None:
    """Each call has copies and buffers of its own."""
    engine = LateEngine()
    engine.buffer_bytes = 2**19
    use(monkeypatch, engine)
    module = rkmate.wrap(WithLoss(), (X,), budget=0.6, calls=2, offload=tmp_path, settings=settings(),
                         progress=False)

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = module

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.inner(x)  # type: ignore[no-any-return]

    plan = module.plan
    assert plan.schedule.copied and plan.calls == 2 and plan.peak_bytes <= plan.budget_bytes
    found = measured_peak(Twice(), Sample(Twice(), (X,), {}, lambda y: y))
    assert 0.95 * plan.peak_bytes <= found <= plan.peak_bytes
    assert engine.opened == engine.closed == 4


def layers_of(tmp_path: Path, limit: int, *widths: int) -> tuple[list[nn.Module], Planning]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, w), nn.GELU(), nn.Linear(w, 64), nn.GELU()) for w in widths]
    return layers, Planning(Budget(fraction=0.7), "rockmate", settings(Offload(tmp_path, limit)), False)


def test_layers_share_it_by_their_parameters(tmp_path: Path) -> None:
    layers, planning = layers_of(tmp_path, 2**30, 64, 64, 192)
    model = nn.Sequential(*layers)
    put_plans_into_layers(model, layers, planning)
    caches = [call.whole._plans for layer in layers if (call := planned_call_of(layer)) is not None]
    bytes_of = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    links = [places.link_of(s.offload, devices.of("cpu"), "analytic", s.calls) for s in
             (cache.planning.settings for cache in caches)]
    shares = [link.most_bytes for link in links if link is not None and link.most_bytes is not None]
    assert shares == [pytest.approx(2**30 * b / sum(bytes_of), abs=1) for b in bytes_of]
    assert sum(shares) <= 2**30
    engine, = {cache._engines.of(torch.device("cpu")) for cache in caches}
    assert engine.most_bytes == 2**30


@pytest.mark.usefixtures("fast")
def test_all_layers_are_counted_together(most: dict[int, int], tmp_path: Path) -> None:
    layers, planning = layers_of(tmp_path, 24 * MIB, 128, 128)
    model = nn.Sequential(*layers)
    put_plans_into_layers(model, layers, planning)
    for _ in range(3):                  # two show what stands outside of the plans
        most.clear()
        model(X).mean().backward()
    sent = sum(away_of(call.latest.plan) for layer in layers if (call := planned_call_of(layer)) is not None)
    assert [*most.values()] == [sent]
    assert 0 < sent <= 24 * MIB


def test_calls_and_forwards_of_one_module_are_counted_together(tmp_path: Path) -> None:
    (layer,), planning = layers_of(tmp_path, MIB, 64)
    call = put_plan_into(layer, planning)
    cpu = torch.device("cpu")
    first, second = (part._plans._engines.of(cpu).open() for part in (call.whole, call.alone))
    some = torch.ones(600 * 2**10, dtype=torch.uint8)
    first.out("a", some)
    with pytest.raises(rkmate.OffloadError, match=r"the limit is 1,048,576 \(most_bytes\)"):
        second.out("a", some)
    first.close()
    second.close()
    mine, copied = call.whole._plans._engines, copy.deepcopy(call.whole._plans._engines)
    assert copied.offload == mine.offload and copied.of(cpu) is not mine.of(cpu)
