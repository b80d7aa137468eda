"""Plans for parts of a step."""

from __future__ import annotations

import torch
from torch import nn

from rkmate.ir.simulate import simulate
from rkmate.pipeline.part_plans import LEAN, ways_of
from rkmate.pipeline.prepare import trace
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress


def test_the_bytes_that_other_parts_take_count_in_every_schedule() -> None:
    model = nn.Sequential(*(layer for _ in range(3) for layer in (nn.Linear(16, 16), nn.GELU())))
    traced = trace(model, (torch.randn(64, 16, requires_grad=True),), {},
                   Settings(costs="analytic", loss_bytes=0), Progress(False))
    ways = ways_of(traced, "rockmate", lambda blocked: 1 << 30, 0.5)
    extra = 1 << 20
    for number, schedule in enumerate(ways.schedules):
        plan, prepared = (found := ways.planned(number, extra)).plan, found.prepared
        peak = simulate(prepared.graph, plan.schedule).peak
        assert plan.peak_bytes == peak > extra, schedule
    assert any(s is ways.solved.prepared.whole for s in ways.schedules)


class Residual(nn.Module):
    """A block whose activations are larger than its result."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_part_that_holds_least_takes_little_more_than_its_smallest_peak_while_it_runs() -> None:
    traced = trace(nn.Sequential(Residual(), Residual()), (torch.randn(64, 16, requires_grad=True),), {},
                   Settings(costs="analytic", loss_bytes=0), Progress(False))
    found = ways_of(traced, "rockmate", lambda blocked: 1 << 30, 0.0)
    leanest = min(found.ways, key=lambda way: (way.saved, way.extra))
    least = min(way.saved + way.extra for way in found.ways)
    whole = found.whole.saved + found.whole.extra
    assert leanest.saved + leanest.extra <= least + LEAN * (whole - least)
    assert leanest.saved < found.whole.saved // 4
