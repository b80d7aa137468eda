"""Four gloo processes: replicas, tensor-parallel models with sequence parallelism, and models that are tensor
parallel and sharded, with the bits of the original within the budget; and ranks of which one measures other
times."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rkmate
from rkmate import device as devices
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.runs import Timings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from tests.distributed.ranks import Found, Net, parallel_in_sequence, whole

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes"), pytest.mark.slow]

QUICK = Settings(costs="analytic", options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
STEPS, WIDTH = 8, 64
KINDS: tuple[str, ...] = (
    "replicas", "tensor and sequence parallel", "tensor parallel and sharded",
    "tensor parallel and replicated", "hybrid", "hybrid, flat")
if importlib.util.find_spec("torch.distributed._composable.replicate_with_fsdp") is not None:
    KINDS = (*KINDS, "tensor parallel and replicate")
RANKS = {"count": 4}
PLANS = 20


def _made(kind: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    net = Net(WIDTH)
    if kind == "replicas":
        return net
    if kind.startswith("hybrid"):
        return FullyShardedDataParallel(
            net, sharding_strategy=ShardingStrategy.HYBRID_SHARD, device_id=torch.device("cpu"),
            device_mesh=init_device_mesh("cpu", (2, 2)), use_orig_params=not kind.endswith("flat"))
    if kind == "tensor and sequence parallel":
        mesh = init_device_mesh("cpu", (4,))
        for block in net.blocks:
            parallelize_module(block, mesh, parallel_in_sequence())
        return net
    sharded = kind == "tensor parallel and sharded"
    every = init_device_mesh("cpu", (1, 2, 2) if sharded else (2, 1, 2),
                             mesh_dim_names=("replicas", "shards", "tensors"))
    mesh = every["shards"] if sharded else every["replicas", "shards"]
    shard: Any = fully_shard
    if kind == "tensor parallel and replicate":
        from torch.distributed._composable.replicate_with_fsdp import replicate
        shard, mesh = replicate, every["replicas"]
    for block in net.blocks:
        parallelize_module(block, every["tensors"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        shard(block, mesh=mesh)
    return shard(net, mesh=mesh)


def _trained(net: nn.Module, run: Callable[..., torch.Tensor], kind: str, rank: int
             ) -> tuple[list[torch.Tensor], int]:
    """Return losses and gradients of steps, and the least peak of the last ones: the meter does not see what
    another thread frees. Ranks that share a batch have the same; with sequence parallelism, each has a part
    of its own."""
    found: list[torch.Tensor] = []
    peaks: list[int] = []
    seed = rank // 2 if kind.startswith("tensor parallel") else rank
    for k in range(STEPS):
        x = torch.randn(8, 64, WIDTH, generator=torch.Generator().manual_seed(10 * k + seed))
        net.zero_grad()

        def step(x: torch.Tensor = x) -> None:
            loss = run(x).square().mean()
            loss.backward()
            found.append(whole(loss))

        if k > 2:
            peaks.append(devices.of(x).measure_peak(step).peak)
        else:
            step()
        found += [whole(p.grad) for p in net.parameters() if p.grad is not None]
    return found, min(peaks)


def _compared(rank: int, kind: str) -> dict[str, Any]:
    def wrapped(net: nn.Module) -> Callable[..., torch.Tensor]:
        return nn.parallel.DistributedDataParallel(net) if kind == "replicas" else net

    plain = _made(kind)
    theirs, before = _trained(plain, wrapped(plain), kind, rank)
    peak = torch.tensor(before)
    dist.all_reduce(peak, dist.ReduceOp.MAX)        # what one step takes differs: buffers go late by chance
    net = _made(kind)
    rkmate.apply(net, budget=int(0.8 * int(peak)), progress=False, settings=QUICK)
    mine, after = _trained(net, wrapped(net), kind, rank)
    return {"equal": len(mine) == len(theirs) and all(map(torch.equal, mine, theirs)),
            "before": int(peak), "after": after,
            "far": max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(mine, theirs, strict=True))}


def _slowed(rank: int) -> dict[str, Any]:
    """One rank that measures ten times the times of the others: plans for many shapes, each with a step."""
    seconds, schedules = Timings.seconds, []
    try:
        if rank == 2:
            Timings.seconds = lambda self, key: 10 * seconds(self, key)  # type: ignore[method-assign]
        for k in range(PLANS):
            net = _made("tensor and sequence parallel")
            assert isinstance(net, Net)
            net.blocks = net.blocks[:1]
            x = torch.randn(1, 4 * (k + 4), WIDTH)
            planned = rkmate.wrap(net, (x,), budget=0.8, progress=False,
                                  settings=replace(QUICK, costs="measured"))
            assert planned.plan is not None
            schedules.append(planned.plan.schedule)
            planned(x).square().mean().backward()
    finally:
        Timings.seconds = seconds  # type: ignore[method-assign]
    every: list[Any] = [None] * 4
    dist.all_gather_object(every, schedules)
    return {"plans": len(schedules), "equal": all(theirs == schedules for theirs in every)}


TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{kind: functools.partial(_compared, kind=kind) for kind in KINDS}, "slowed": _slowed}


@pytest.mark.parametrize("kind", KINDS)
def test_bits_and_budget(found: Found, kind: str) -> None:
    assert len(found[kind]) == 4
    for mine in found[kind]:
        assert "failed" not in mine, mine["failed"]
        # DistributedDataParallel sums four ranks' gradients in the order of its buckets.
        assert mine["equal"] or (kind == "replicas" and mine["far"] < 1e-6), mine
        assert mine["after"] <= 0.8 * mine["before"], mine


def test_a_slow_rank_follows_the_same_plans(found: Found) -> None:
    for mine in found["slowed"]:
        assert "failed" not in mine, mine["failed"]
        assert mine == {"plans": PLANS, "equal": True}
