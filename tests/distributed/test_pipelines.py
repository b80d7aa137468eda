"""Two gloo processes with planned pipeline stages, several microbatches in flight: losses and gradients are
those of the original, within the budget, also of what a schedule keeps of microbatches that are through.
Zero bubble schedules split the backward; the stages of a rank may share one budget."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from tests.distributed.ranks import Found

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

QUICK = Settings(costs="analytic", options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
MICROBATCHES, STEPS, WIDTH = 4, 5, 64
SCHEDULES = {"1F1B": "Schedule1F1B", "GPipe": "ScheduleGPipe", "interleaved": "ScheduleInterleaved1F1B",
             "sharded": "ScheduleInterleaved1F1B", "looped": "ScheduleLoopedBFS",
             "ZBV": "ScheduleZBVZeroBubble", "zero bubble": "ScheduleInterleavedZeroBubble"}
ONE_STAGE, SPLIT = ("1F1B", "GPipe"), ("ZBV", "zero bubble")
ONE_BUDGET = "interleaved", "sharded", "looped"
"""Kinds of steps with two stages on a rank, which share a budget."""
KINDS = [kind for kind in SCHEDULES
         if not (kind in SPLIT and torch.__version__.startswith(("2.11.", "2.12.")))]
"""Before torch 2.13, torch cannot split the backward of a function that is written in Python."""


def _stage(number: int, kind: str) -> nn.Sequential:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(number)
    stage = nn.Sequential(*(nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(2)))
    if kind == "sharded":
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("stages", "shards"))["shards"]
        for module in (*stage, stage):
            fully_shard(module, mesh=mesh, reshard_after_forward=False)
    return stage


def _trained(rank: int, kind: str, budget: float | int | None) -> tuple[list[torch.Tensor], int, int]:
    """Return losses and gradients of steps, the peak of the last, and the budget of the rank's stages.
    `budget`: of a rank whose calls are counted, in bytes; or a share for each stage."""
    from torch.distributed import pipelining
    from torch.distributed.tensor import DTensor

    mine = [rank] if kind in ONE_STAGE else [rank, 3 - rank if kind == "ZBV" else 2 + rank]
    count = 2 * len(mine)
    models = [_stage(k, kind) for k in mine]
    x = torch.randn(32, 16, WIDTH, generator=torch.Generator().manual_seed(0))
    runs: list[Any] = models
    if budget is not None and kind in ONE_STAGE:
        runs = [rkmate.apply(m, budget=budget, progress=False, settings=QUICK) for m in models]
    elif budget is not None and kind in ONE_BUDGET:
        runs = [*rkmate.apply(nn.ModuleList(models), budget=budget, progress=False, settings=QUICK)]
    elif budget is not None:
        runs = [rkmate.wrap(m, (x[:8].clone().requires_grad_(k > 0),), budget=budget, calls=MICROBATCHES,
                            progress=False, settings=QUICK) for k, m in zip(mine, models, strict=True)]
    stages = [pipelining.PipelineStage(run, k, count, torch.device("cpu"), input_args=(x[:8],))
              for k, run in zip(mine, runs, strict=True)]
    schedule = getattr(pipelining, SCHEDULES[kind])
    steps = schedule(stages[0] if kind in ONE_STAGE else stages, n_microbatches=MICROBATCHES,
                     loss_fn=nn.functional.mse_loss)
    parameters = [p for m in models for p in m.parameters()]
    found: list[torch.Tensor] = []
    for p in parameters:
        p.grad = torch.zeros_like(p)
    optimizer, target = torch.optim.SGD(parameters, 0.01), x.flip(0)
    peak = 0
    for k in range(STEPS):
        losses: list[torch.Tensor] = []

        def step(losses: list[torch.Tensor] = losses) -> None:
            steps.step(*((x,) if 0 in mine else ()),
                       **({"target": target, "losses": losses} if count - 1 in mine else {}))

        if k == STEPS - 1:
            peak = devices.of(x).measure_peak(step).peak
        else:
            step()
        grads = [p.grad for p in parameters if p.grad is not None]
        found += [*(loss.detach() for loss in losses),
                  *((g.to_local() if isinstance(g, DTensor) else g).clone() for g in grads)]
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return found, peak, 0 if budget is None else int(budget) if kind not in SPLIT else \
        sum(run.plan.budget_bytes for run in runs)


def _compared(rank: int, kind: str) -> dict[str, Any]:
    plain, before, _ = _trained(rank, kind, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", rkmate.RkmateWarning)
        mine, after, budget = _trained(rank, kind, int(0.65 * before) if kind not in SPLIT else 0.6)
    return {"equal": len(mine) == len(plain) and all(map(torch.equal, mine, plain)), "before": before,
            "after": after, "budget": budget}


TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    kind: functools.partial(_compared, kind=kind) for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_stages_keep_bits_and_budget(found: Found, kind: str) -> None:
    for mine in found[kind]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]
        assert mine["after"] <= mine["budget"], mine
        assert mine["after"] < mine["before"], mine
        assert kind not in ONE_BUDGET or mine["after"] > 0.75 * mine["budget"], mine
