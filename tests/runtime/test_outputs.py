"""Outputs that the backward does not read: after the forward, only the caller holds them."""

from __future__ import annotations

import torch
from torch import nn

import rkmate
from rkmate.measure.step import measure_step
from rkmate.pipeline.part_plans import ways_of
from rkmate.pipeline.prepare import trace
from rkmate.pipeline.settings import Settings
from rkmate.support.progress import Progress
from tests.equality import measured_peak
from tests.models import Sample

X = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
SETTINGS = Settings(costs="analytic", loss_bytes=0)


def _plans(model: nn.Module) -> list[rkmate.Plan]:
    """Plans that keep more or less between forward and backward."""
    traced = trace(model, (X,), {}, SETTINGS, Progress(False))
    ways = ways_of(traced, "rockmate", lambda blocked: 1 << 30, 0.0)
    return [ways.planned(number, 0).plan for number in range(len(ways.schedules))]


def test_a_step_lets_go_of_outputs_that_its_caller_drops() -> None:
    """Where least is kept, the backward computes the output once more, with the statistics that it reads."""
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64), nn.LayerNorm(64))
    plans = _plans(model)
    assert len(plans) > 2
    for plan in plans:
        module = rkmate.wrap(model, (X,), plan=plan, progress=False, settings=SETTINGS)
        held = measured_peak(module, Sample(model, (X,), {}, torch.sum))
        dropped = measure_step(module, lambda module=module: module(X).sum().backward()).peak
        assert held <= plan.peak_bytes
        assert dropped <= held - X.nbytes
