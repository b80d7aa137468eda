"""Models that are sharded over one process, as after a checkpoint is resumed there: buffers of the exchange
are the same in each step, so the smallest budget that an error names is exactly what its steps take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import rkmate
from benchmarks.ranks import GPT, sharded
from rkmate import device as devices
from rkmate.pipeline.settings import Settings
from tests.semantics.ranks import Found

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

RANKS = {"count": 1}
STEPS, WORDS = 8, 64


def _peaks(budget: int) -> list[int]:
    """Return the peaks of the last steps with a budget."""
    model = sharded(model=GPT(WORDS, 32, 2))
    rkmate.apply(model, budget=budget, progress=False, settings=Settings(costs="analytic"))
    peaks = []
    for k in range(STEPS):
        ids = torch.randint(WORDS, (2, 16), generator=torch.Generator().manual_seed(k))
        if k < STEPS - 2:
            model(ids).backward()
        else:
            peaks.append(devices.of(ids).measure_peak(lambda ids=ids: model(ids).backward()).peak)
        model.zero_grad()
    return peaks


def _least(rank: int) -> dict[str, Any]:
    try:
        _peaks(1)
    except rkmate.InfeasibleBudget as error:
        least = error.minimum_bytes or 0
        return {"least": least, "peaks": _peaks(least)}
    return {}


TASKS = {"least": _least}


def test_the_smallest_budget_is_what_its_steps_take(found: Found) -> None:
    mine, = found["least"]
    assert "failed" not in mine, mine["failed"]
    assert mine["least"] > 0 and mine["peaks"] == [mine["least"]] * 2
