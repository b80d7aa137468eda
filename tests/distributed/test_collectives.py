"""Two gloo processes whose forwards communicate: they follow one plan, in which collectives run as often as
in the original; what no plan can hold is refused by name on each rank, with a remedy that works.

Both ranks start once, go through all kinds, and are killed at a time limit: nothing here can hang.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.nn.parallel import DistributedDataParallel

import rkmate
from benchmarks.ranks import Reduced
from rkmate import device as devices
from rkmate.errors import RkmateError, sendable
from rkmate.graph.capture.collectives import CollectiveError, communicates, groups_of, refuse_in_joint
from rkmate.ilp.settings import OptionSettings
from rkmate.measure.runs import Timings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from tests.distributed.ranks import Found, are_equal, counted, steps
from tests.semantics.batch_norm_kernels import SynchronizedNorm

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

QUICK = {"options": OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
         "planner": PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0)}
Way = Callable[[torch.Tensor], torch.Tensor]
all_reduce: Any = getattr(dist, "all_reduce", None)
"""As a model's file imports it."""
T = TypeVar("T")


def _functional() -> Any:
    from torch.distributed import _functional_collectives

    return _functional_collectives


class _ReducedBackward(torch.autograd.Function):
    """The way into a tensor-parallel region."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        dist.all_reduce(g)
        return g


class _ReducedByName(_ReducedBackward):
    """A trace does not replace what a custom function calls by an imported name."""

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        all_reduce(g)
        return g


class _ReducedBackwardLater(_ReducedBackward):
    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        g = g.clone()
        dist.all_reduce(g, async_op=True).wait()
        return g


class _Exchanged(torch.autograd.Function):
    """Ulysses: the sequence for the heads."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous())
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return _Exchanged.forward(ctx, g)


class _Shifted(torch.autograd.Function):
    """Ring attention: each rank's part for that of the rank before it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, backwards: bool = False) -> torch.Tensor:
        y, rank, step = torch.empty_like(x), dist.get_rank(), -1 if backwards else 1
        for work in dist.batch_isend_irecv([
                dist.P2POp(dist.isend, x.contiguous(), (rank + step) % 2),
                dist.P2POp(dist.irecv, y, (rank - step) % 2)]):
            work.wait()
        return y

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        return _Shifted.forward(ctx, g, True)


def _all_reduce(x: torch.Tensor) -> torch.Tensor:
    return _functional().all_reduce(x, "sum", dist.group.WORLD)


def _all_gather(x: torch.Tensor) -> torch.Tensor:
    return _functional().all_gather_tensor_autograd(x, 0, dist.group.WORLD).view(2, *x.shape).mean(0)


def _detached(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    dist.all_reduce(y)
    return x + y


def _later(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    work = dist.all_reduce(y, async_op=True)
    z = x.sin()
    work.wait()
    return z + y


def _of_nn(x: torch.Tensor) -> torch.Tensor:
    import torch.distributed.nn.functional as of_nn

    return of_nn.all_reduce(x)


def _lists_of_nn(x: torch.Tensor) -> torch.Tensor:
    """With gloo, torch exchanges lists by scattering, also the gradients of what was gathered."""
    import torch.distributed.nn.functional as of_nn

    own, other = of_nn.all_to_all([torch.empty_like(x) for _ in range(2)], [x, x * 2])
    return sum(of_nn.all_gather(own)) + other


def _of_group(x: torch.Tensor) -> torch.Tensor:
    every = [torch.empty_like(x) for _ in range(2)]
    dist.group.WORLD.allgather([every], [x.detach()]).wait()
    return x + sum(every)


def _objects(x: torch.Tensor) -> torch.Tensor:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, dist.get_rank())
    return x * sum(found)


def _attached(x: torch.Tensor) -> torch.Tensor:
    """Autograd does not see the sum, in eager mode: the gradient is that of a copy."""
    y = x * 2
    dist.all_reduce(y)
    return y


def _summed_number(x: torch.Tensor) -> torch.Tensor:
    return x * dist_sum(x.detach().abs().max().reshape(1))


def dist_sum(y: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(y, op=dist.ReduceOp.MAX)
    return y


def _gathered_into(x: torch.Tensor) -> torch.Tensor:
    every = x.new_empty(2 * x.shape[0], x.shape[1])
    dist.all_gather_into_tensor(every, x.detach())
    return x * every.mean()


def _gathered_list(x: torch.Tensor) -> torch.Tensor:
    every = [torch.empty_like(x) for _ in range(2)]
    dist.all_gather(every, x.detach())
    return x * sum(every).mean()


def _scattered(x: torch.Tensor) -> torch.Tensor:
    mine = x.new_empty(x.shape[0] // 2, x.shape[1])
    dist.reduce_scatter_tensor(mine, x.detach())
    return x * mine.mean()


def _from_first(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    dist.broadcast(y, src=0)
    return x * y


def _value(x: torch.Tensor) -> torch.Tensor:
    count = torch.tensor(x.shape[0])
    dist.all_reduce(count)
    return x / count.item()


def _split_by_values(x: torch.Tensor) -> torch.Tensor:
    """Experts: each rank sends what its router has decided."""
    import torch.distributed.nn.functional as of_nn

    splits = (torch.full((2,), x.shape[0] // 2) + (x.detach()[:2, 0] > 1e9)).tolist()
    return of_nn.all_to_all_single(torch.empty_like(x), x, splits, splits)


def _swallowed(x: torch.Tensor) -> torch.Tensor:
    y = x.detach().clone()
    try:
        dist.all_reduce(y)
    except RkmateError:
        y = y + 1
    return x + y


def _swallowed_objects(x: torch.Tensor) -> torch.Tensor:
    try:
        return _objects(x)
    except RkmateError:
        return x + 1


def _by_itself(x: torch.Tensor) -> torch.Tensor:
    return _functional().all_reduce(x.detach(), "sum", _ALONE[0]) + x


_ALONE: list[Any] = []
"""The group that this rank is alone in."""
WAYS: dict[str, Way] = {
    "functional all_reduce": _all_reduce, "functional all_gather": _all_gather, "in place": _detached,
    "a function's forward": Reduced.apply, "a function's backward": _ReducedBackward.apply,
    "a function's backward, async": _ReducedBackwardLater.apply, "all to all": _Exchanged.apply,
    "async": _later, "torch.distributed.nn": _of_nn, "swallowed": _swallowed, "a maximum": _summed_number,
    "gathered": _gathered_into, "a list": _gathered_list, "scattered": _scattered, "broadcast": _from_first}
"""Planned: each communicates in another way."""


class _Block(nn.Module):
    def __init__(self, way: Way, opaque: bool) -> None:
        super().__init__()
        self.mlp = nn.Sequential(*(layer for _ in range(2) for layer in (nn.Linear(32, 32), nn.GELU())))
        self.mixed = _Mixed(way, opaque)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mixed(self.mlp(x))


class _Mixed(nn.Module):
    def __init__(self, way: Way, opaque: bool) -> None:
        super().__init__()
        self.way, self.opaque = way, opaque

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.opaque and x.detach().abs().max() > 1e9:      # no trace gets beyond this
            return x
        return self.way(x)


class _Net(nn.Module):
    def __init__(self, way: Way, opaque: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(_Block(way, opaque) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _data(rank: int, step: int = 0) -> torch.Tensor:
    return torch.randn(64, 32, generator=torch.Generator().manual_seed(10 * step + rank))


def _steps(model: nn.Module, rank: int) -> list[torch.Tensor]:
    return steps(model, model, (_data(rank, step) for step in range(3)))


def _caught(call: Callable[[], Any]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        kind = "CaptureError" if isinstance(error, rkmate.CaptureError) else type(error).__name__
        return kind, str(error)
    return "nothing", ""


def _alone(rank: int, turn: int, work: Callable[[], T]) -> T | None:
    """One rank works while the other waits: whoever communicates hangs until the time limit."""
    found = work() if rank == turn else None
    dist.barrier()
    return found


def _refused(rank: int, turn: int, way: Way, opaque: bool) -> dict[str, Any]:
    model, x = _Net(way, opaque), _data(rank)
    settings = Settings(opaque="auto" if opaque else (), **QUICK)     # type: ignore[arg-type]
    before = copy.deepcopy(model.state_dict()), [dict(m.__dict__) for m in model.modules()], \
        torch.get_rng_state()
    error = _alone(rank, turn, lambda: _caught(
        lambda: rkmate.wrap(model, (x,), budget=0.8, progress=False, settings=settings)))
    left = all(map(torch.equal, before[0].values(), model.state_dict().values())) and \
        [dict(m.__dict__) for m in model.modules()] == before[1] and \
        torch.equal(torch.get_rng_state(), before[2]) and all(p.grad is None for p in model.parameters())
    return {"error": error, "left as it was": left,
            "trains as before": are_equal(_steps(model, rank), _steps(_Net(way, opaque), rank))}


def _planned(rank: int, way: Way) -> dict[str, Any]:
    """One plan on both ranks, with the collectives of the original."""
    model = _Net(way)
    planned = rkmate.wrap(model, (_data(rank),), budget=0.7, progress=False,
                          settings=Settings(**QUICK))  # type: ignore[arg-type]
    assert planned.plan is not None
    first, second = [], []
    counts = _exchanges(lambda: first.extend(_steps(planned, rank))), \
        _exchanges(lambda: second.extend(_steps(_Net(way), rank)))
    return {"equal": are_equal(first, second), "exchanges": counts, "schedules": _all(planned.plan.schedule)}


def _exchanges(work: Callable[[], Any]) -> dict[str, int]:
    """Count what a rank exchanges, by kind."""
    return counted(work, "gloo:")


def _all(value: T) -> list[T]:
    found: list[Any] = [None, None]
    dist.all_gather_object(found, value)
    return found


class _Wide(_Net):
    """A model whose activations are more than what a process allocates anyway."""

    def __init__(self, way: Way) -> None:
        super().__init__(way)
        for block in self.blocks:
            block.mlp = nn.Sequential(*(layer for _ in range(3)
                                        for layer in (nn.Linear(128, 128), nn.GELU())))


def _peaks(rank: int) -> dict[str, Any]:
    found = {}
    place = devices.of(torch.zeros(1))
    for name in ("functional all_reduce", "functional all_gather", "all to all", "in place"):
        model, x = _Wide(WAYS[name]), torch.randn(2048, 128)
        planned = rkmate.wrap(model, (x,), budget=0.7, progress=False,
                              settings=Settings(**QUICK))  # type: ignore[arg-type]
        planned(x).backward()
        model.zero_grad()
        assert planned.plan is not None
        # One of gloo's threads may let go of a buffer late, if that thread is the last holder.
        measured = [place.measure_peak(lambda p=planned, x=x: p(x).backward(), timeline=False).peak
                    for _ in range(5)]
        found[name] = min(measured), planned.plan.peak_bytes, planned.plan.budget_bytes
        dist.barrier()
    return found


class _Rows(_Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _unusual(rank: int) -> dict[str, Any]:
    """A loss outside of the module that takes much on one rank: both plan anew, or neither."""
    model, x = _Rows(_detached), torch.randn(1024, 128)
    rkmate.apply(model, budget=0.9, progress=False, settings=Settings(**QUICK))  # type: ignore[arg-type]
    budgets = []
    for _ in range(5):
        y = model(x)
        (torch.cat([y] * 8).cumsum(0).sin().exp() if rank == 0 else y * y).mean().backward()
        planned = rkmate.applied(model)
        assert planned is not None and planned.plan is not None
        budgets.append((planned.plan.schedule, planned.plan.budget_bytes))
    first, second = _all(budgets)
    return {"equal": first == second, "anew": first[0] != first[-1]}


def _slowed(rank: int) -> dict[str, Any]:
    """One rank that measures ten times the time of the other, and an operation as slow as can be: one plan,
    time after time, with the costs of the slow rank."""
    schedules, slowest = [], set[float]()
    seconds = Timings.seconds
    try:
        if rank == 1:
            Timings.seconds = lambda self, key: (  # type: ignore[method-assign]
                1.0 if "gelu" in str(key) else 10 * seconds(self, key))
        for rows in range(40, 60):
            net = _Net(_detached)
            net.blocks = net.blocks[:1]
            planned = rkmate.wrap(net, (torch.randn(rows, 32),), budget=0.7, progress=False,
                                  settings=Settings(**QUICK))  # type: ignore[arg-type]
            assert planned.plan is not None
            schedules.append(planned.plan.schedule)
            slowest.add(max(c.time for c in planned.plan.graph.cd.c))
            planned(torch.randn(rows, 32)).backward()
    finally:
        Timings.seconds = seconds  # type: ignore[method-assign]
    first, second = _all(schedules)
    return {"times": len(first), "equal": first == second, "slowest": slowest}


def _not_measured(rank: int) -> dict[str, Any]:
    """Measuring fails on one rank, then on the other. Neither finds on disk what the other has measured."""
    errors, seconds = [], Timings.seconds

    def fails(self: Timings, key: Any) -> float:
        raise RuntimeError("no clock")

    os.environ["RKMATE_CACHE_DIR"] += f"/{rank}"
    for failing in range(2):
        try:
            if rank == failing:
                Timings.seconds = fails  # type: ignore[method-assign]
            errors.append(_caught(lambda: rkmate.wrap(
                _Net(_detached), (torch.randn(50 + failing, 32),), budget=0.7, progress=False,
                settings=Settings(**QUICK))))  # type: ignore[arg-type]
        finally:
            Timings.seconds = seconds  # type: ignore[method-assign]
    return {"errors": errors}


class _Images(nn.Module):
    """Convolutions with norms over the batches of all ranks, with kernels for the CPU."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(layer for _ in range(3) for layer in (
            nn.Conv2d(16, 16, 3, padding=1), SynchronizedNorm(16), nn.GELU())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def _synchronized(rank: int) -> dict[str, Any]:
    """The norm of torch, planned; and next to a norm over the whole batch in one process."""
    found: dict[str, Any] = {}
    every = torch.randn(2, 32, 16, 16, 16, generator=torch.Generator().manual_seed(0))
    plain, model = _Images(), _Images()
    planned = rkmate.wrap(model, (every[rank],), budget=0.7, progress=False,
                          settings=Settings(tiles="never", **QUICK))  # type: ignore[arg-type]
    assert planned.plan is not None and planned.plan.variant == "plain"
    unchanged = all(map(torch.equal, model.buffers(), plain.buffers()))
    first, second = list[torch.Tensor](), list[torch.Tensor]()
    found["exchanges"] = (_exchanges(lambda: first.extend(steps(planned, model, [every[rank]] * 2))),
                          _exchanges(lambda: second.extend(steps(plain, plain, [every[rank]] * 2))))
    found["equal"] = are_equal(first, second)
    found["buffers"] = unchanged, all(map(torch.equal, model.buffers(), plain.buffers()))
    place = devices.of(every)
    found["peak"] = min(place.measure_peak(lambda: planned(every[rank]).backward(), timeline=False).peak
                        for _ in range(4)), planned.plan.peak_bytes, planned.plan.budget_bytes
    found["right"] = torch.allclose(SynchronizedNorm(16)(every[rank]), nn.functional.batch_norm(
        every.flatten(0, 1), None, None, training=True)[32 * rank:32 * (rank + 1)], atol=1e-5)
    return found


def _another_shape(rank: int) -> dict[str, Any]:
    """A later length on both ranks, planned together; and another model on one rank."""
    model = _Net(_detached)
    planned = rkmate.wrap(model, (_data(rank),), budget=0.7, progress=False,
                          settings=Settings(**QUICK))  # type: ignore[arg-type]
    equal = []
    for rows in (64, 48, 80):
        x = torch.randn(rows, 32, generator=torch.Generator().manual_seed(rank))
        plain = _Net(_detached)
        equal.append(are_equal(steps(planned, model, [x]), steps(plain, plain, [x])))
    other = _Net(_detached) if rank == 0 else _Net(_from_first)
    error = _caught(lambda: rkmate.wrap(other, (_data(rank),), budget=0.7, progress=False,
                                        settings=Settings(**QUICK)))  # type: ignore[arg-type]
    return {"equal": equal, "error": error}


def _too_small(rank: int) -> dict[str, Any]:
    return {"error": _caught(lambda: rkmate.wrap(_Net(_detached), (_data(rank),), budget=0.01, progress=False,
                                                 settings=Settings(**QUICK)))}  # type: ignore[arg-type]


def _applied(rank: int) -> dict[str, Any]:
    """The whole refused; the parts that the message names planned."""
    model = _Net(_objects)
    rkmate.apply(model, budget=0.8, progress=False, settings=Settings(parts="never"))
    error = _caught(lambda: model(_data(rank)))
    rkmate.remove(model)
    names = error[1].rpartition(" among ")[2].split(", ")
    for name in names:
        rkmate.apply(model.get_submodule(name), budget=1.0, progress=False,
                     settings=Settings(**QUICK))  # type: ignore[arg-type]
    found = _steps(model, rank)
    plans = [shown.plan for n in names if (shown := rkmate.applied(model.get_submodule(n))) is not None]
    return {"error": error, "names": names, "planned": len([p for p in plans if p is not None]),
            "equal": are_equal(found, _steps(_Net(_objects), rank))}


def _by_parts(rank: int, way: Way) -> dict[str, Any]:
    """What no plan can hold runs as it is, and the rest of the model is planned."""
    model = _Net(way)
    rkmate.apply(model, budget=1.0, progress=False, settings=Settings(**QUICK))  # type: ignore[arg-type]
    return {"equal": are_equal(_steps(model, rank), _steps(_Net(way), rank))}


def _shared(rank: int) -> dict[str, Any]:
    found = {}
    for name, way, opaque in (("traced", _objects, False), ("opaque", _ReducedBackward.apply, True)):
        settings = Settings(opaque="auto" if opaque else (), **QUICK)     # type: ignore[arg-type]
        found[name] = _caught(lambda way=way, opaque=opaque, settings=settings: rkmate.shared_plan(
            _Net(way, opaque), (_data(rank),), budget=0.8, progress=False, settings=settings))
    return found


def _replicated(rank: int) -> dict[str, Any]:
    """What exchanges gradients around a planned forward is no part of it."""
    planned = rkmate.wrap(_Net(torch.tanh), (_data(rank),), budget=1.0, progress=False,
                          settings=Settings(**QUICK))  # type: ignore[arg-type]
    return {"equal": are_equal(_steps(DistributedDataParallel(planned), rank),
                            _steps(DistributedDataParallel(_Net(torch.tanh)), rank))}


def _in_groups_of_one(rank: int) -> dict[str, Any]:
    groups = [dist.new_group([r]) for r in range(2)]
    _ALONE[:] = [groups[rank]]
    model = _Net(_by_itself)
    planned = rkmate.wrap(model, (_data(rank),), budget=1.0, progress=False,
                          settings=Settings(**QUICK))  # type: ignore[arg-type]
    return {"equal": are_equal(_steps(planned, rank), _steps(_Net(_by_itself), rank))}


REFUSED: dict[str, tuple[Way, bool]] = {
    "objects": (_objects, False), "a value": (_value, False), "sizes": (_split_by_values, False),
    "with a gradient": (_attached, False), "swallowed objects": (_swallowed_objects, False),
    "opaque": (_detached, True), "opaque, swallowed": (_swallowed, True),
    "opaque, a function's backward": (_ReducedBackward.apply, True),
    "by an imported name": (_ReducedByName.apply, False), "of a process group": (_of_group, False)}
"""Ways to communicate, and whether the submodule runs as it is. The ranks plan in turns."""
TASKS: dict[str, Callable[[int], dict[str, Any]]] = {
    "lists": lambda rank: _planned(rank, _lists_of_nn),
    "sent": lambda rank: _planned(rank, _Shifted.apply),
    **{name: lambda rank, turn=k % 2, way=way, opaque=opaque: _refused(rank, turn, way, opaque)
       for k, (name, (way, opaque)) in enumerate(REFUSED.items())},
    **{name: lambda rank, way=way: _planned(rank, way) for name, way in WAYS.items()},
    "synchronized": _synchronized, "peaks": _peaks, "unusual": _unusual, "slowed": _slowed,
    "another shape": _another_shape, "too small": _too_small, "not measured": _not_measured,
    "applied": _applied, "by parts": lambda rank: _by_parts(rank, _objects),
    "applied as a whole": lambda rank: _by_parts(rank, _detached), "shared": _shared,
    "replicated": _replicated, "groups of one": _in_groups_of_one}


def _assert_refused(error: tuple[str, str], *, swallowed: bool = False) -> None:
    kind, text = error
    assert kind == "CaptureError", text
    assert f"{Path(__file__).name}:" in text, text
    assert "communicates with other ranks (" in text
    operation = text.partition("communicates with other ranks (")[2]
    assert operation.startswith(("c10d.", "_c10d_functional.", "_c10d_functional_autograd.",
                                 "torch.distributed.")), text
    assert all(other not in text for other in ("linalg", "remap", "rkmate.dtr")), text
    assert text.count("rkmate.apply(part, budget=...)") == 1
    # The traceback of an error that the forward has swallowed does not reach its module.
    assert "among blocks.0" + ".mlp, blocks.1.mlp" * (not swallowed) in text, text


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_by_name(found: Found, name: str) -> None:
    for number, rank in enumerate(found[name]):
        assert "failed" not in rank, rank["failed"]
        if number == list(REFUSED).index(name) % 2:
            _assert_refused(rank["error"], swallowed="swallowed" in name)
        assert rank["left as it was"]
        assert rank["trains as before"]


@pytest.mark.parametrize(("name", "function"), [
    ("by an imported name", "all_reduce"), ("of a process group", "all_gather")])
def test_a_refusal_names_the_form_that_a_plan_can_hold(found: Found, name: str, function: str) -> None:
    texts = [rank["error"][1] for rank in found[name] if rank["error"] is not None]
    assert len(texts) == 1 and f"called as torch.distributed.{function}(...), not by a name" in texts[0]
    assert "is none of those" not in texts[0]


def test_a_refusal_names_sizes_that_are_read_from_a_tensor(found: Found) -> None:
    assert any("takes sizes that the forward reads from a tensor" in rank["error"][1]
               for rank in found["sizes"] if rank["error"] is not None)


@pytest.mark.parametrize("name", WAYS)
def test_one_plan_with_the_collectives_of_the_original(found: Found, name: str) -> None:
    for rank in found[name]:
        assert "failed" not in rank, rank["failed"]
        assert rank["equal"]
        planned, original = rank["exchanges"]
        assert planned == original and sum(planned.values()) > 0
        assert rank["schedules"][0] == rank["schedules"][1]


def test_lists_are_exchanged_at_once(found: Found) -> None:
    for rank in found["lists"]:
        assert "failed" not in rank, rank["failed"]
        assert rank["equal"] and rank["schedules"][0] == rank["schedules"][1]
        planned, original = rank["exchanges"]
        gathers = planned.pop("gloo:all_gather")
        assert gathers == original.pop("gloo:all_gather") > 0
        # An exchange, its gradient's, and that of the gradients of what was gathered.
        assert list(planned.values()) == [3 * gathers] and original == {"gloo:scatter": 6 * gathers}


def test_what_is_sent_and_received_at_once_is_an_exchange(found: Found) -> None:
    for rank in found["sent"]:
        assert "failed" not in rank, rank["failed"]
        assert rank["equal"] and rank["schedules"][0] == rank["schedules"][1]
        planned, original = rank["exchanges"]
        assert [*planned.values()] == [original["gloo:send"]] == [original["gloo:recv"]], rank["exchanges"]


def test_peaks_are_as_planned(found: Found) -> None:
    for rank in found["peaks"]:
        assert "failed" not in rank, rank["failed"]
        assert len(rank) == 4
        for measured, planned, budget in rank.values():
            assert measured <= budget
            assert abs(measured - planned) <= 0.02 * planned


def test_synchronized_batch_norms(found: Found) -> None:
    for rank in found["synchronized"]:
        assert "failed" not in rank, rank["failed"]
        assert rank["equal"] and rank["right"] and rank["buffers"] == (True, True)
        planned, original = rank["exchanges"]
        assert planned == original and len(planned) == 2
        measured, peak, budget = rank["peak"]
        assert measured <= budget and abs(measured - peak) <= 0.02 * peak


def test_ranks_agree_on_what_an_unusual_loss_takes(found: Found) -> None:
    for rank in found["unusual"]:
        assert "failed" not in rank, rank["failed"]
        assert rank == {"equal": True, "anew": True}


def test_a_slow_rank_follows_the_same_plans(found: Found) -> None:
    for rank in found["slowed"]:
        assert "failed" not in rank, rank["failed"]
        assert rank["times"] == 20 and rank["equal"]
        assert 1.0 in rank["slowest"]           # a variant without that operation may be taken instead


def test_measuring_that_fails_on_one_rank_is_an_error_on_both(found: Found) -> None:
    for rank in found["not measured"]:
        assert "failed" not in rank, rank["failed"]
        (first, text), (second, other) = rank["errors"]
        assert first == "CaptureError" and "no clock" in text
        assert second == "RankError" and "rank 1: CaptureError" in other and "no clock" in other


def test_another_shape_and_another_model(found: Found) -> None:
    for rank in found["another shape"]:
        assert "failed" not in rank, rank["failed"]
        assert rank["equal"] == [True, True, True]
    (kind, text), (own, why) = (rank["error"] for rank in found["another shape"])
    assert kind == "RankError" and "planning has failed on rank 1: PlanError" in text
    assert own == "PlanError" and "belongs to another model" in why and "branch on its rank" in why


def test_a_budget_that_is_too_small_is_an_error_on_each_rank(found: Found) -> None:
    first, second = found["too small"]
    assert "failed" not in first, first["failed"]
    assert first == second
    assert first["error"][0] == "InfeasibleBudget"
    assert "collectives, which run once in a step" in first["error"][1]


@pytest.mark.parametrize(("name", "line"), [
    ("objects", "dist.all_gather_object"), ("with a gradient", "dist.all_reduce(y)")])
def test_the_submodule_and_the_line_are_named(found: Found, name: str, line: str) -> None:
    text, = (rank["error"][1] for rank in found[name] if rank["error"] is not None)
    assert "its submodule blocks.0.mixed communicates" in text or "blocks.1.mixed communicates" in text
    assert line in text


def test_the_parts_that_the_message_names_can_be_planned(found: Found) -> None:
    for rank in found["applied"]:
        assert "failed" not in rank, rank["failed"]
        _assert_refused(rank["error"])
        assert rank["names"] == ["blocks.0.mlp", "blocks.1.mlp"]
        assert rank["planned"] == 2
        assert rank["equal"]


def test_a_shared_plan_is_refused_on_every_rank(found: Found) -> None:
    first, second = found["shared"]
    assert "failed" not in first, first["failed"]
    assert first == second
    for error in first.values():
        _assert_refused(error)


@pytest.mark.parametrize("name", ["by parts", "applied as a whole", "replicated", "groups of one"])
def test_it_is_planned(found: Found, name: str) -> None:
    for rank in found[name]:
        assert "failed" not in rank, rank["failed"]
        assert rank["equal"]


@pytest.fixture
def one_of_two() -> Iterator[None]:
    """A group of two ranks of which one is there, and whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_of_two")
def test_a_loss_that_communicates() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with pytest.raises(rkmate.CaptureError, match=r"the model without its loss \(leave loss= out"):
        rkmate.wrap(model, (torch.randn(2, 4),), budget=1.0, progress=False,
                    loss=lambda y: _objects(y).sum())


@pytest.mark.usefixtures("one_of_two")
def test_no_part_is_left() -> None:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _objects(x * self.weight)

    with pytest.raises(rkmate.CaptureError, match="has to be moved first, as Whole has none"):
        rkmate.wrap(Whole(), (torch.randn(2, 4),), budget=1.0, progress=False)


@pytest.mark.usefixtures("one_of_two")
def test_another_shape_that_communicates() -> None:
    """A later size that could be planned without a capture of its own."""
    class Long(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _objects(self.lin(x)) if x.shape[0] > 8 else self.lin(x)

    run = rkmate.wrap(Long(), (torch.randn(2, 4),), budget=1.0, progress=False,
                      settings=rkmate.Settings(costs="analytic"))
    for size in (4, 6):
        run(torch.randn(size, 4)).sum().backward()
    with pytest.raises(rkmate.CaptureError, match="it communicates with other ranks"):
        run(torch.randn(16, 4))


@pytest.mark.usefixtures("one_of_two")
def test_a_plan_for_ranks_that_are_not_there() -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    settings = rkmate.Settings(costs="analytic")
    plan = rkmate.shared_plan(model, (x,), budget=2**20, progress=False, settings=settings)
    run = rkmate.wrap(model, (x,), plan=plan, progress=False, settings=settings)
    run(x).sum().backward()
    run(torch.randn(3, 4)).sum().backward()         # another shape, planned by all ranks that are there
    assert model[0].weight.grad is not None


@pytest.mark.usefixtures("one_of_two")
def test_operations_of_a_joint_graph() -> None:
    _functional()
    operation = torch.ops._c10d_functional.all_reduce.default
    name = dist.group.WORLD.group_name             # type: ignore[union-attr]
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(operation, (x, "sum", name)))
    refuse_in_joint(graph)
    assert groups_of(graph) == (name,)
    several = fx.Graph()
    x = several.placeholder("x")
    several.output(several.call_function(torch.ops._c10d_functional.all_reduce_coalesced.default,
                                         ([x], "sum", name)))
    with pytest.raises(CollectiveError, match=r"_c10d_functional\.all_reduce_coalesced"):
        refuse_in_joint(several)
    ordered = fx.Graph()
    x = ordered.placeholder("x")
    ordered.output(ordered.call_function(torch.add, (x, operation, x, "sum", name)))
    with pytest.raises(CollectiveError, match=r"_c10d_functional\.all_reduce"):
        refuse_in_joint(ordered)
    waiting = fx.Graph()
    x = waiting.placeholder("x")
    waiting.output(waiting.call_function(torch.ops._c10d_functional.wait_tensor.default, (x,)))
    refuse_in_joint(waiting)


def test_without_a_group_nothing_communicates() -> None:
    _functional()
    assert not communicates(torch.ops._c10d_functional.all_reduce.default, (torch.ones(1), "sum", "0"), {})


class _OfTwoWords(rkmate.CaptureError):
    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name}: {why}")


def test_errors_that_other_processes_cannot_read_are_sent_as_their_nearest_class() -> None:
    sent = sendable(_OfTwoWords("a", "b"))
    assert (type(sent), str(sent)) == (rkmate.CaptureError, "a: b")
    infeasible = rkmate.InfeasibleBudget("too little", 3)
    assert sendable(infeasible) is infeasible
