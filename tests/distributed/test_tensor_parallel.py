"""Two gloo processes with tensor-parallel models: one plan on the local parts of parameters, with the outputs
and the gradients of the original, within the budget. The same for models that make DTensors in their forward,
also if ranks compute other things between the collectives."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import rkmate
from rkmate import device as devices
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from tests.distributed.ranks import Found, Net, are_equal, caught, parallel_in_sequence, whole

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

QUICK = Settings(options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
CHOSEN: dict[str, Any] = {"budget": 0.7, "progress": False, "settings": QUICK}


def _parallel(net: Net, kind: str) -> Net:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,))
    ways: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if kind == "sequence":
        ways = parallel_in_sequence()
    if kind == "dropout":
        for block in net.blocks:
            block.norm = nn.Sequential(block.norm, nn.Dropout(0.3))     # type: ignore[assignment, list-item]
        ways = parallel_in_sequence()
        ways["norm.0"] = ways.pop("norm")
    if kind == "distributed input":
        ways = {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False)}
    for block in net.blocks:
        parallelize_module(block, mesh, ways)
    if kind == "distributed output":
        parallelize_module(net, mesh, {"head": ColwiseParallel(use_local_output=False)})
    if kind == "distributed input":
        parallelize_module(net, mesh, {"head": ColwiseParallel(input_layouts=Shard(1))})
    return net


def _data(kind: str, rank: int, width: int = 64) -> torch.Tensor:
    """Ranks have the same rows; with sequence parallelism, each has a part of its own."""
    seed = rank if kind in ("sequence", "dropout") else 0
    found = torch.randn(4, 32, width, generator=torch.Generator().manual_seed(seed))
    if kind != "distributed input":
        return found
    made: torch.Tensor = distribute_tensor(found, init_device_mesh("cpu", (2,)), [Shard(1)])
    return made.requires_grad_()


def _steps(run: Callable[..., torch.Tensor], owner: nn.Module, kind: str, rank: int) -> list[torch.Tensor]:
    found = []
    for _ in range(2):
        owner.zero_grad()
        x = _data(kind, rank)
        torch.manual_seed(rank)
        out = run(x)
        loss = out.square().mean()
        loss.backward()
        found += [whole(out), whole(loss), *(whole(p.grad) for p in owner.parameters())]
        found += [whole(x.grad)] if x.grad is not None else []
    return found


def _schedules(plan: rkmate.Plan | None) -> bool:
    assert plan is not None
    found: list[Any] = [None, None]
    dist.all_gather_object(found, plan.schedule)
    return bool(found[0] == found[1])


def _wrapped(rank: int, kind: str) -> dict[str, Any]:
    net = _parallel(Net(), kind)
    run = rkmate.wrap(net, (_data(kind, rank),), **CHOSEN)
    same = _schedules(run.plan)
    plain = _parallel(Net(), kind)
    mine, theirs = _steps(run, net, kind, rank), _steps(plain, plain, kind, rank)
    kinds = [type(run(_data(kind, rank))).__name__, type(plain(_data(kind, rank))).__name__]
    return {"equal": are_equal(mine, theirs), "one plan": same, "kinds": kinds, "table": str(run.plan)}


def _applied(rank: int) -> dict[str, Any]:
    net, plain = _parallel(Net(), "tensor"), _parallel(Net(), "tensor")
    rkmate.apply(net, **CHOSEN)
    equal = are_equal(_steps(net, net, "tensor", rank), _steps(plain, plain, "tensor", rank))
    shown = rkmate.applied(net)
    assert shown is not None
    return {"equal": equal, "one plan": _schedules(shown.plan)}


def _later(rank: int) -> dict[str, Any]:
    """A planned module that is made parallel: it is planned again."""
    net, plain = Net(), _parallel(Net(), "tensor")
    run = rkmate.wrap(net, (_data("tensor", rank),), **CHOSEN)
    _parallel(net, "tensor")
    return {"equal": are_equal(_steps(run, net, "tensor", rank), _steps(plain, plain, "tensor", rank))}


def _peak(rank: int) -> dict[str, Any]:
    net, x = _parallel(Net(128), "tensor"), torch.randn(16, 128, 128)
    run = rkmate.wrap(net, (x,), **CHOSEN)
    run(x).square().mean().backward()
    net.zero_grad()
    peak = devices.of(x).measure_peak(lambda: run(x).square().mean().backward(), timeline=False).peak
    assert run.plan is not None
    return {"measured": peak, "planned": run.plan.peak_bytes, "budget": run.plan.budget_bytes}


def _loss_parallel(rank: int) -> dict[str, Any]:
    """A loss of a parallel output: its operations are on DTensors, and communicate."""
    from torch.distributed.tensor.parallel import loss_parallel

    def stepping(net: nn.Module) -> Callable[[], torch.Tensor]:
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))

        def step() -> torch.Tensor:
            with loss_parallel():
                logits = net(x)
                loss = nn.functional.cross_entropy(logits, torch.arange(64) % 16)
                loss.backward()
            return whole(loss)
        return step

    def steps(net: nn.Module) -> list[torch.Tensor]:
        found = []
        for _ in range(3):
            net.zero_grad()
            found += [stepping(net)(), *(whole(p.grad) for p in net.parameters())]
        return found

    def wide() -> Net:
        net = Net()
        net.head = nn.Linear(64, 256)
        return _parallel(net, "distributed output")

    plain = wide()
    theirs = steps(plain)
    peaks: list[Any] = [None, None]
    dist.all_gather_object(peaks, devices.of(plain.head.bias).measure_peak(stepping(plain)).peak)
    found: dict[str, Any] = {"equal": True, "peaks": [], "warnings": []}
    for share in (0.6, 0.44):
        net, budget = wide(), int(share * max(peaks))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            rkmate.apply(net, budget=budget, progress=False, settings=QUICK)
            found["equal"] &= are_equal(steps(net), theirs)
        found["peaks"] += [(devices.of(plain.head.bias).measure_peak(stepping(net)).peak, budget)]
        found["warnings"] += [[str(w.message) for w in said if "outputs of Net" in str(w.message)]]
    return found


def _input_refused(rank: int) -> dict[str, Any]:
    """A DTensor for a model of plain tensors; and one of which ranks have parts of different sizes."""
    found, mesh = [], init_device_mesh("cpu", (2,))
    for net, rows in ((Net(), 4), (_parallel(Net(), "distributed input"), 5)):
        x = distribute_tensor(torch.randn(rows, 32, 64), mesh, [Shard(0)])
        try:
            rkmate.wrap(net, (x,), **CHOSEN)
        except rkmate.ArgumentError as error:
            found.append(str(error))
    return {"errors": found}


def _replicas_refused(rank: int) -> dict[str, Any]:
    """Replicas whose hooks make DTensors in each forward: with a plan of the model before or after, or of a
    layer."""
    x = _data("tensor", rank)

    def failing(plan: Callable[[Net], nn.Module], after: bool = False) -> tuple[str, str]:
        net = Net()
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicas", "tensors"))
        for block in net.blocks:
            parallelize_module(block, mesh["tensors"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

        def call() -> None:
            made = net if after else plan(net)
            replicas = nn.parallel.DistributedDataParallel(made, device_mesh=mesh["replicas"])
            if after:
                plan(net)
            replicas(x)
        return caught(call)

    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def applied(net: Net) -> Net:
        return rkmate.apply(net, **CHOSEN)

    def layer(net: Net) -> Net:
        rkmate.apply(net.blocks[0], **CHOSEN)
        return net
    return {"errors": [failing(applied), failing(applied, after=True), failing(layer),
                       failing(lambda net: rkmate.wrap(net, (x,), **CHOSEN))]}


class _InParts(Net):
    """Each rank has a part of a sequence. It attends to the parts of all ranks, or to those up to its own; it
    may gather the others' parts and leave them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.mesh = kind, init_device_mesh("cpu", (2,))

    def _seen(self, x: torch.Tensor) -> torch.Tensor:
        rank = dist.get_rank()
        every = DTensor.from_local(x, self.mesh, [Shard(1)], run_check=False).redistribute(
            placements=[Replicate()]).to_local(grad_placements=[Partial()])
        if self.kind == "up to its own":
            every = every[:, :(rank + 1) * x.shape[1]]
        return x if self.kind == "left by one" and rank == 0 else every

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            every = self._seen(x)
            x = block(x + (x @ every.transpose(1, 2)).softmax(-1) @ every)
        return self.head(x)


def _in_parts(rank: int, kind: str) -> dict[str, Any]:
    net, plain, x = _InParts(kind), _InParts(kind), _data("sequence", rank)
    if kind == "left by one":
        return {"error": caught(lambda: rkmate.wrap(net, (x,), **CHOSEN))}
    too_small = caught(lambda: rkmate.wrap(net, (x,), **{**CHOSEN, "budget": 0.01}))
    run = rkmate.wrap(net, (x,), **CHOSEN)
    mine, theirs = (_steps(m, m, "sequence", rank) for m in (run, plain))

    def step() -> None:
        run(x).square().mean().backward()
    peak = devices.of(x).measure_peak(step).peak
    return {"equal": are_equal(mine, theirs), "one plan": _schedules(run.plan), "error": too_small,
            "peak": peak, "budget": run.plan.budget_bytes}


IN_PARTS = ("all", "up to its own", "left by one")
KINDS = ("tensor", "sequence", "dropout", "distributed output", "distributed input")
TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    **{kind: lambda rank, kind=kind: _wrapped(rank, kind) for kind in KINDS},
    **{kind: lambda rank, kind=kind: _in_parts(rank, kind) for kind in IN_PARTS},
    "applied": _applied, "later": _later, "peak": _peak, "loss parallel": _loss_parallel,
    "input refused": _input_refused, "replicas refused": _replicas_refused}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_planned_as_one(found: Found, kind: str) -> None:
    for mine in found[kind]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"] and mine["one plan"]
        assert " over 2 ranks" in mine["table"]
        assert mine["kinds"][0] == mine["kinds"][1] == (
            "DTensor" if kind == "distributed output" else "Tensor")


@pytest.mark.parametrize("kind", IN_PARTS[:2])
def test_dtensors_that_a_forward_makes_are_planned(found: Found, kind: str) -> None:
    """Between the collectives, ranks may compute other things: each has a plan of its own then."""
    for mine in found[kind]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"] and mine["peak"] <= mine["budget"], mine
        assert mine["one plan"] == (kind == "all")
    first, second = (mine["error"] for mine in found[kind])
    assert first == second and first[0] == "InfeasibleBudget", (first, second)


def test_ranks_that_leave_out_a_collective_are_refused(found: Found) -> None:
    """One rank does not read its result, and its plan would not run it."""
    (_, first), (_, second) = (mine["error"] for mine in found["left by one"])
    assert "planning has failed on rank 1: PlanError" in first
    assert "belongs to another model" in second and "branch on its rank" in second


def test_inputs_that_no_plan_can_hold(found: Found) -> None:
    for mine in found["input refused"]:
        plain, uneven = mine["errors"]
        assert "Net has no parameters that are: give it the local part" in plain
        assert "parts of different sizes (S(0))" in uneven


def test_replicas_of_tensor_parallel_models_are_refused(found: Found) -> None:
    for mine in found["replicas refused"]:
        assert "failed" not in mine, mine["failed"]
        for kind, text in mine["errors"]:
            assert kind == "ArgumentError", text
            assert "DistributedDataParallel(device_mesh=...)" in text and "fully_shard(layer, mesh=" in text


@pytest.mark.parametrize("name", ["applied", "later"])
def test_in_place_and_made_parallel_afterwards(found: Found, name: str) -> None:
    for mine in found[name]:
        assert "failed" not in mine, mine["failed"]
        assert mine["equal"] and mine.get("one plan", True)


def test_a_parallel_loss_has_room_or_a_warning(found: Found) -> None:
    """0.6 of the step's peak is enough; no plan keeps to the smaller share."""
    for mine in found["loss parallel"]:
        assert "failed" not in mine, mine["failed"]
        (peak, budget), (over, small) = mine["peaks"]
        assert mine["equal"] and peak <= budget and over > small
        nothing, said = mine["warnings"]
        assert not nothing and len(said) == 1 and f"plans for {small:,}" in said[0], said


def test_the_budget_is_held(found: Found) -> None:
    for mine in found["peak"]:
        assert "failed" not in mine, mine["failed"]
        assert mine["measured"] <= mine["budget"]
        assert abs(mine["measured"] - mine["planned"]) <= 0.02 * mine["planned"]
