"""Two gloo processes: gradients are those of a single-process run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

import rkmate
from rkmate.ilp.settings import OptionSettings
from rkmate.pipeline.settings import Settings
from rkmate.planners.settings import PlannerSettings
from tests.distributed.ranks import forked
from tests.semantics.steps import Tower, noting_segments, planned

pytestmark = [pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed"),
              pytest.mark.xdist_group("two processes")]

# The tests' own defaults do not reach other processes.
QUICK = Settings(options=OptionSettings(grid=(6, 6), time_limit=0.5, block_limit=1.0),
                 planner=PlannerSettings(save_set_seconds=0.2, first_seconds=0.2, smallest_seconds=0.0))
PATIENCE = timedelta(minutes=2)
"""For the other process, which may have failed."""
Processes = list[ProcessPoolExecutor]


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Tower(width=512, depth=6)         # the first bucket of DistributedDataParallel holds 1 MiB


def _data() -> torch.Tensor:
    return torch.randn(32, 512, generator=torch.Generator().manual_seed(1))


def _replicated(rank: int, options: dict[str, bool], out: Path) -> None:
    model, x = _model(), _data()[rank * 16:(rank + 1) * 16]
    in_place = DistributedDataParallel(planned(_model(), x, settings=QUICK, gradients="in_place"))
    with pytest.raises(rkmate.ArgumentError, match="DistributedDataParallel exchanges gradients"):
        in_place(x)
    if options["unused"]:
        model.unused = nn.Linear(4, 4)
    events: list[str] = []
    def sent(state, bucket):  # type: ignore[no-untyped-def]    # annotations must be classes here
        events.append("bucket")
        return allreduce_hook(None, bucket)

    run = DistributedDataParallel(planned(model, x, budget=0.9, settings=QUICK), bucket_cap_mb=0.001,
                                  find_unused_parameters=options["unused"])
    run.register_comm_hook(None, sent)
    with noting_segments(events):
        with run.no_sync():
            run(x).pow(2).mean().backward()
        assert "bucket" not in events
        local = _model()
        local(x).pow(2).mean().backward()
        for (name, mine), theirs in zip(local.named_parameters(), run.module.parameters(),
                                        strict=False):
            torch.testing.assert_close(theirs.grad, mine.grad, msg=name)
        run(x).pow(2).mean().backward()
        found = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
        events.clear()
        run(x).pow(2).mean().backward()        # DistributedDataParallel has made its buckets by now
    last = len(events) - 1 - events[::-1].index("segment")
    assert "bucket" in events[:last], events   # before the last segment of the backward has run
    torch.save(found, out / f"{rank}.pt")


def _sharded(rank: int, options: dict[str, bool], out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = _model(), _data()[rank * 16:(rank + 1) * 16]
    mesh = init_device_mesh("cpu", (2,))
    in_place = fully_shard(planned(_model(), x, settings=QUICK, gradients="in_place"), mesh=mesh)
    with pytest.raises(rkmate.ArgumentError, match="exchanges gradients"):
        in_place(x)
    module = fully_shard(planned(model, x, settings=QUICK), mesh=mesh)
    with pytest.warns(rkmate.RkmateWarning, match="is sharded as one unit: its gathered parameters"):
        module(x).pow(2).mean().backward()
    module(x).pow(2).mean().backward()
    torch.save({n: p.grad.full_tensor() for n, p in module.named_parameters()}, out / f"{rank}.pt")


def _sharing_a_plan(rank: int, options: dict[str, bool], out: Path) -> None:
    model, x = _model(), _data()[rank * 16:(rank + 1) * 16]
    with pytest.raises(rkmate.InfeasibleBudget) as caught:
        rkmate.shared_plan(model, (x,), budget=1, progress=False, settings=QUICK)
    # Measured times: each rank would find its own.
    plan = rkmate.shared_plan(model, (x,), budget=caught.value.minimum_bytes, progress=False,
                              settings=QUICK)
    plan.save(out / f"plan-{rank}.json")
    run = DistributedDataParallel(rkmate.wrap(model, (x,), plan=plan, progress=False))
    for _ in range(2):
        run(x).pow(2).mean().backward()
    torch.save({n: p.grad for n, p in model.named_parameters()}, out / f"{rank}.pt")
    dist.barrier()
    assert (out / "plan-0.json").read_text() == (out / "plan-1.json").read_text()


def _sharded_inside(rank: int, options: dict[str, bool], out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = _model(), _data()[rank * 16:(rank + 1) * 16]
    mesh = init_device_mesh("cpu", (2,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    with pytest.raises(rkmate.ArgumentError, match=r"DTensor that fully_shard.*fully_shard\(rkmate\.wrap"):
        planned(model, x, settings=QUICK)
    module = fully_shard(model, mesh=mesh)         # as it was: it trains
    for _ in range(2):
        module(x).pow(2).mean().backward()
    torch.save({n: p.grad.full_tensor() for n, p in module.named_parameters()}, out / f"{rank}.pt")


class _Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(
            4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm(x)))))


class _Nested(nn.Module):
    """A layer with a part that is sharded by itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(width), _Layer(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


def _sharded_by_layers(rank: int, options: dict[str, bool], out: Path) -> None:
    """Plain shards and planned ones, step by step: equal bits, and a smaller peak."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    mesh = init_device_mesh("cpu", (2,))

    def trained(plan: bool) -> tuple[nn.Module, list[torch.Tensor], int]:
        torch.manual_seed(0)
        kind = _Nested if options["nested"] else _Layer
        model = nn.Sequential(nn.Embedding(100, 64), *(kind(64) for _ in range(4)), nn.Linear(64, 100))
        if plan and options["before"]:
            assert rkmate.apply(model, budget=0.5, progress=False, settings=QUICK) is model
        for layer in model[1:5]:
            if options["nested"]:
                fully_shard(layer.inner, mesh=mesh)
            fully_shard(layer, mesh=mesh)
        if options["root"]:
            fully_shard(model, mesh=mesh)
        if plan and not options["before"]:
            assert rkmate.apply(model, budget=0.5, progress=False, settings=QUICK) is model
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, peak = [], 0
        for k in range(4):
            torch.manual_seed(10 * k + rank)
            ids = torch.randint(0, 100, (16, 64))

            def step(ids: torch.Tensor = ids) -> None:
                loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
                loss.backward()
                losses.append(loss.detach())

            peak = rkmate.measure_step(model, step).peak if k == 3 else step() or 0
            optimizer.step()
            optimizer.zero_grad()
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
        return model, [*losses, *(p.detach() for p in whole)], peak

    _, plain, before = trained(False)
    model, planned_, after = trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain, planned_, strict=True))
    layers = [layer.inner if options["nested"] else layer for layer in model[1:5]]
    shown = [rkmate.applied(layer) for layer in layers]
    assert all(found is not None and found.has_plan for found in shown)
    assert after <= 0.9 * before, (before, after)
    rkmate.remove(model)
    assert all(rkmate.applied(layer) is None for layer in layers)
    with pytest.raises(rkmate.ArgumentError, match="exchanges gradients"):
        rkmate.apply(model, budget=0.5, settings=Settings(gradients="in_place"))
    with pytest.raises(rkmate.ArgumentError, match="leave out the sample inputs"):
        rkmate.apply(model, (torch.zeros(1, 2, dtype=torch.long),), budget=0.5)
    with pytest.raises(rkmate.ArgumentError, match="layers times calls"):
        rkmate.apply(model, budget=0.5, calls=2)
    single = _model()
    for _ in range(2):
        single(_data()).pow(2).mean().backward()
    torch.save({n: p.grad for n, p in single.named_parameters()}, out / f"{rank}.pt")


def _start(rank: int, work: Callable[..., None], options: dict[str, bool], out: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=2,
                            timeout=PATIENCE)
    try:
        work(rank, options, Path(out))
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """Two, one for each rank, that all tests share: they take longer to start than to work."""
    pools = [ProcessPoolExecutor(1, forked()) for _ in range(2)]
    yield pools
    for pool in pools:
        pool.shutdown()


def _in_two(processes: Processes, work: Callable[..., None], **options: bool) -> None:
    """Do the work as two ranks, and hold their gradients against a single process's."""
    single, x = _model(), _data()
    for _ in range(2):
        single(x).pow(2).mean().backward()
    with tempfile.TemporaryDirectory() as out:
        ranks = [pool.submit(_start, rank, work, options, out) for rank, pool in enumerate(processes)]
        for done in (*wait(ranks, return_when=FIRST_EXCEPTION).done, *ranks):
            done.result()                    # what failed first first
        for rank in range(2):
            found = torch.load(Path(out) / f"{rank}.pt")
            for name, parameter in single.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
            assert all(g is None for n, g in found.items() if n.startswith("unused"))


@pytest.mark.parametrize("unused", [pytest.param(False, marks=pytest.mark.slow), True])
def test_replicas(processes: Processes, unused: bool) -> None:
    """Accumulation without synchronisation, then a synchronised step; buckets fire in between."""
    _in_two(processes, _replicated, unused=unused)


@pytest.mark.slow
def test_shards_around_a_planned_module(processes: Processes) -> None:
    _in_two(processes, _sharded)


@pytest.mark.slow
def test_shards_under_a_planned_module_are_refused(processes: Processes) -> None:
    _in_two(processes, _sharded_inside)


def test_layers_that_are_sharded_share_a_budget(processes: Processes) -> None:
    _in_two(processes, _sharded_by_layers, before=False, nested=False, root=True)


@pytest.mark.parametrize("root", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_budget_from_before_the_model_was_sharded(processes: Processes, root: bool) -> None:
    _in_two(processes, _sharded_by_layers, before=True, nested=False, root=root)


@pytest.mark.parametrize("before", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_parts_of_layers_that_are_sharded_are_planned(processes: Processes, before: bool) -> None:
    _in_two(processes, _sharded_by_layers, before=before, nested=True, root=True)


@pytest.mark.slow
def test_all_processes_follow_one_plan(processes: Processes) -> None:
    _in_two(processes, _sharing_a_plan)


def test_a_shared_plan_says_where_data_is_sent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 0), ("get_world_size", 1),
                        ("broadcast_object_list", None)):
        monkeypatch.setattr(dist, name, lambda *_, value=value, **__: value)
    link = rkmate.shared_plan(_model(), (_data(),), budget=1.0, settings=Settings(costs="analytic"),
                              progress=False, offload=rkmate.Offload(tmp_path, "1GiB")).graph.cd.link
    assert link is not None and (link.place, link.most_bytes) == (str(tmp_path), 2**30)
    with pytest.raises(rkmate.ArgumentError, match="no such folder"):
        rkmate.shared_plan(_model(), (_data(),), budget=1.0, progress=False, offload=tmp_path / "none")


def test_a_shared_plan_needs_a_group() -> None:
    with pytest.raises(rkmate.ArgumentError, match="needs a process group"):
        rkmate.shared_plan(_model(), (_data(),), budget=1.0)
