"""Two gloo processes with models that communicate and are planned by parts: all ranks take one decision."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import rkmate
from rkmate.measure.step import measure_step
from rkmate.parts.followed_parts import FollowedParts
from rkmate.pipeline.settings import Settings
from tests.distributed.ranks import Block, Found, are_equal, caught, steps, whole

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"), pytest.mark.slow,
              pytest.mark.xdist_group("two processes")]

WIDTH, STEPS, MEASURED = 32, 8, 5
"""Width of the model; steps, and the first one that is measured from outside."""
Layer = Callable[[int], nn.Module]
SETTINGS = Settings(costs="analytic", tiles="never")


class _Experts(nn.Module):
    """An expert on each rank, which gets what the routers of all ranks send to it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.expert = nn.Linear(width, 2), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import torch.distributed.nn.functional as of_nn

        score, chosen = self.gate(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        sent = torch.bincount(chosen, minlength=2)
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent)
        there, here = sent.tolist(), got.tolist()
        mine = of_nn.all_to_all_single(x.new_empty(sum(here), WIDTH), x[order], here, there)
        back = of_nn.all_to_all_single(x.new_empty(x.shape), torch.tanh(self.expert(mine)), there, here)
        return x + torch.zeros_like(x).index_add(0, order, back * score[order, None])


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0]


class _ReducedBlock(Block):
    """A block that communicates, and can be planned: all ranks have to call it with equal shapes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = _Reduced.apply(super().forward(x).mean(0))
        return super().forward(x) + mean / 8


class _Counting(Block):
    """A block whose forward communicates, its backward does not; and which decides by values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount((x.detach().mean(-1) > 0).long(), minlength=2)
        dist.all_reduce(counts)
        return super().forward(x) * (1.0 if counts[0] < 1e6 else 2.0)


class _Choosing(Block):
    """A block that decides by values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if x.detach().sum().item() < 1e6 else 2.0)


class _Net(nn.Module):
    def __init__(self, kind: Layer = Block, other: Layer = _Experts) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(layer for _ in range(3) for layer in (
            kind(WIDTH), kind(WIDTH), other(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _data(rank: int, step: int, rows: int = 0) -> torch.Tensor:
    rows = rows or 512 - 128 * rank
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(2 * step + rank))


def _train(model: nn.Module, rank: int, steps: int = STEPS, data: Callable[..., torch.Tensor] = _data,
           skipped: int = -1) -> tuple[list[torch.Tensor], list[int]]:
    """Return losses and weights, and the peaks of the last steps: rkmate measures the first ones. `skipped`:
    the step without a backward on this rank."""
    losses, peaks = [], []
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for k in range(steps):
        x = data(rank, k)

        def step(x: torch.Tensor = x, k: int = k) -> None:
            loss = model(x)
            losses.append(loss.detach())
            if k != skipped:
                loss.backward()
        peaks.append(measure_step(model, step).peak) if k >= MEASURED else step()
        optimizer.step()
        optimizer.zero_grad()
    return [*losses, *(p.detach().clone() for p in model.parameters())], peaks


def _all(value: Any) -> list[Any]:
    found = [None, None]
    dist.all_gather_object(found, value)
    return found


def _applied(rank: int, budget: float | int, *layers: Layer, **options: Any) -> dict[str, Any]:
    plain, model = _Net(*layers), _Net(*layers)
    first, own = _train(plain, rank, **options)
    if budget <= 1:
        budget = int(budget * max(max(p) for p in _all(own)))
    rkmate.apply(model, budget=budget, progress=False, settings=SETTINGS)
    found: dict[str, Any] = {"budget": budget}

    def train() -> None:
        second, peaks = _train(model, rank, **options)
        found.update(equal=are_equal(first, second), peaks=peaks, planned=[
            rkmate.applied(m) is not None for m in model.layers])
    found["error"] = caught(train)
    return found


def _refused(rank: int) -> dict[str, Any]:
    """First all ranks refuse, then a rank with more rows."""
    every = _applied(rank, 1000)
    least = int(every["error"][1].split("that can be met is ")[1].split(" ")[0].replace(",", ""))
    return {"all": every, "one": _applied(rank, least - 2000), "met": _applied(rank, least * 51 // 50)}


def _alike(rank: int, step: int) -> torch.Tensor:
    return _data(rank, step, 512)


def _again(rank: int) -> dict[str, Any]:
    """A rank takes more than its budget: all share theirs out again, in the same step. Parts communicate."""
    shared: list[int] = []
    share_again = FollowedParts._share_again

    def noted(self: FollowedParts, *args: Any) -> None:
        shared.append(self._calls)
        share_again(self, *args)

    FollowedParts._share_again = noted      # type: ignore[method-assign]
    measure = FollowedParts._measure_followed

    def measured(self: FollowedParts) -> None:
        if self._followed is not None and rank == 1 and not shared:
            plain = self._followed.peak
            self._followed.peak = lambda: (plain() or 0) + 60_000       # type: ignore[method-assign]
        measure(self)

    FollowedParts._measure_followed = measured      # type: ignore[method-assign]
    try:
        return _applied(rank, 0.85, _ReducedBlock, data=_alike) | {"shared": _all(shared)}
    finally:
        FollowedParts._share_again, FollowedParts._measure_followed = share_again, measure  # type: ignore


class _Deciding(_ReducedBlock):
    """A block that one rank cannot capture."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x if dist.get_rank() == 0 or x.detach().mean().item() < 1e6 else 2 * x)


def _alone(rank: int) -> dict[str, Any]:
    """One rank cannot capture the model: the other one hears why, and both are planned by parts."""
    net, x = _Net(_ReducedBlock, _Deciding), _alike(rank, 0)
    wrapped = caught(lambda: rkmate.wrap(net, (x,), budget=0.8, progress=False, settings=SETTINGS))
    return _applied(rank, 0.8, _ReducedBlock, _Deciding, data=_alike) | {"wrapped": wrapped}


class _Swapped(torch.autograd.Function):
    """An exchange whose result has the strides of what it is given, in the forward or in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, contiguous: bool) -> torch.Tensor:
        ctx.contiguous = contiguous
        y = torch.empty_like(x.contiguous() if contiguous else x)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return _Swapped.forward(ctx, grads[0], ctx.contiguous), None


class _Transposed(nn.Module):
    def __init__(self, contiguous: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.contiguous = contiguous

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        z = _Swapped.apply(y.t(), self.contiguous).t()      # type: ignore[no-untyped-call]
        return (z * torch.arange(z.numel()).view_as(z)).mean()


def _strided(rank: int) -> dict[str, Any]:
    """What gloo fills in the order of memory: a plan fills it in the order of the elements."""
    plain, x = _Transposed(True), _data(rank, 0, 64)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())      # type: ignore[method-assign]
    logger = logging.getLogger("rkmate")
    logger.addHandler(handler)
    try:
        planned = rkmate.wrap(_Transposed(False), (x,), budget=1.0, progress=False, settings=SETTINGS)
    finally:
        logger.removeHandler(handler)
    return {"equal": are_equal(steps(plain, plain, [x]), steps(planned, planned, [x])), "said": said}


def _noted(rank: int) -> dict[str, Any]:
    """Layers that do not communicate, in a DistributedDataParallel: one rank has a larger batch than its
    budget leaves room for, in the first or in a later microbatch of a step. Then with a larger budget."""
    found = []
    for share, microbatches in ((0.1, 1), (0.1, 3), (4.0, 1)):
        net = _Net(Block, _Choosing)
        replicas = nn.parallel.DistributedDataParallel(net)
        rkmate.apply(net, budget=int(share * 20e6), progress=False, settings=SETTINGS)
        ran = [0]

        def train(microbatches: int = microbatches, replicas: Any = replicas, ran: list[int] = ran) -> None:
            for k in range(4):
                for j in range(microbatches):
                    with nullcontext() if j == microbatches - 1 else replicas.no_sync():
                        replicas(_data(rank, k, 8192 if rank else 64)).backward()
                    ran[0] += 1
        found.append((*caught(train), ran[0]))
    return {"found": found}


def _follows_alone(rank: int) -> dict[str, Any]:
    """Sharded layers that communicate: one rank shares its budget out again, alone."""
    from torch.distributed.fsdp import fully_shard

    found = []
    for planned in (False, True):
        net = _Net(_ReducedBlock, Block)
        for layer in net.layers:
            fully_shard(layer)
        fully_shard(net)
        if planned:
            rkmate.apply(net, budget=0.8, progress=False, settings=SETTINGS)
        losses = []
        for k in range(6):
            if planned and k == 4 and rank == 1:
                for layer in net.layers:
                    shown = rkmate.applied(layer)
                    assert shown is not None
                    shown._plans.follow(shown._plans._prototypes)
            loss = net(_alike(rank, k))
            loss.backward()
            losses.append(loss.detach())
        found.append([*losses, *(whole(p.grad) for p in net.parameters())])
    return {"equal": are_equal(*found)}


TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "follows alone": _follows_alone,
    "refused": _refused, "noted": _noted, "communicates": lambda rank: _applied(
        rank, 0.8, _ReducedBlock, data=_alike), "again": _again,
    "skipped": lambda rank: _applied(rank, 0.7, Block, _Counting, skipped=-rank),
    "alone": _alone, "strided": _strided}


def test_a_refusal_of_one_rank_is_raised_by_all_replicas_after_their_gradients_were_reduced(found: Found
                                                                                           ) -> None:
    first, second = found["noted"]
    assert "failed" not in first and "failed" not in second, (first, second)
    for one, other, microbatches in zip(first["found"][:2], second["found"][:2], (1, 3), strict=True):
        assert one == other and one[0] == "InfeasibleBudget", (one, other)
        assert one[1].startswith("rank 1: _Net is planned by parts"), one
        assert one[2] % microbatches == 0
    assert first["found"][2] == second["found"][2] == ("nothing", "", 4)


def test_a_rank_that_shares_its_budget_out_again_keeps_no_other_waiting(found: Found) -> None:
    for mine in found["follows alone"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"]


def test_a_refusal_of_one_rank_is_that_of_all(found: Found) -> None:
    first, second = found["refused"]
    for name in ("all", "one"):
        kind, words = first[name]["error"]
        assert kind == "InfeasibleBudget" and words.startswith("rank 0: _Net is planned by parts"), first
        assert second[name]["error"] == (kind, words)
    for mine in (first["met"], second["met"]):
        assert mine["error"] == ("nothing", "") and mine["equal"] and any(mine["planned"])
        assert max(mine["peaks"]) <= mine["budget"]


def test_parts_that_communicate_share_a_budget(found: Found) -> None:
    for mine in found["communicates"]:
        assert mine["error"] == ("nothing", "") and mine["equal"] and any(mine["planned"])
        assert max(mine["peaks"]) <= mine["budget"]


def test_ranks_share_a_budget_out_again_in_the_same_step(found: Found) -> None:
    for mine in found["again"]:
        assert mine["error"] == ("nothing", "") and mine["equal"] and any(mine["planned"])
        assert mine["shared"][0] == mine["shared"][1] != []


def test_a_backward_that_a_rank_leaves_out_delays_all(found: Found) -> None:
    for mine in found["skipped"]:
        assert mine["error"] == ("nothing", "") and mine["equal"] and any(mine["planned"])


def test_a_rank_that_cannot_capture_a_model_keeps_no_other_waiting(found: Found) -> None:
    first, second = found["alone"]
    for mine in (first, second):
        assert mine["error"] == ("nothing", "") and mine["equal"]
        assert mine["planned"] == 3 * [True, True, False]
        assert mine["wrapped"][0] == "CaptureError" and "_Net cannot be captured at" in mine["wrapped"][1]
    assert first["wrapped"][1] == f"rank 1: {second['wrapped'][1]}"


def test_a_result_that_is_not_contiguous_is_right_and_told_of(found: Found) -> None:
    for mine in found["strided"]:
        assert mine["equal"]
        assert any("not contiguous" in text for text in mine["said"])
