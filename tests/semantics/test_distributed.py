"""Two gloo processes: gradients are those of a single-process run."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.semantics.steps import Tower, planned, tightest

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Tower(depth=6)


def _data() -> torch.Tensor:
    return torch.randn(32, 16, generator=torch.Generator().manual_seed(1))


def _replicated(rank: int, options: dict[str, bool], out: Path) -> None:
    model, x = _model(), _data()[rank * 16:(rank + 1) * 16]
    if options["unused"]:
        model.unused = nn.Linear(4, 4)
    order: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_hook(lambda g, n=name: order.append(n))
    run = DistributedDataParallel(tightest(model, x), find_unused_parameters=options["unused"],
                                  bucket_cap_mb=0.001)
    with run.no_sync():
        run(x).pow(2).mean().backward()
    run(x).pow(2).mean().backward()
    assert order.index("layers.5.weight") < order.index("layers.0.weight")
    torch.save({n: p.grad for n, p in model.named_parameters()}, out / f"{rank}.pt")


def _sharded(rank: int, options: dict[str, bool], out: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, x = _model(), _data()[rank * 16:(rank + 1) * 16]
    module = fully_shard(planned(model, x), mesh=init_device_mesh("cpu", (2,)))
    for _ in range(2):
        module(x).pow(2).mean().backward()
    torch.save({n: p.grad.full_tensor() for n, p in module.named_parameters()}, out / f"{rank}.pt")


def _start(rank: int, work: Callable[..., None], options: dict[str, bool], out: str) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}/meeting", rank=rank, world_size=2)
    try:
        work(rank, options, Path(out))
    finally:
        dist.destroy_process_group()


def _in_two_processes(work: Callable[..., None], **options: bool) -> None:
    single, x = _model(), _data()
    for _ in range(2):
        single(x).pow(2).mean().backward()
    with tempfile.TemporaryDirectory() as out:
        mp.spawn(_start, (work, options, out), nprocs=2)
        for rank in range(2):
            found = torch.load(Path(out) / f"{rank}.pt")
            for name, parameter in single.named_parameters():
                torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5)
            assert all(g is None for n, g in found.items() if n.startswith("unused"))


@pytest.mark.parametrize("unused", [False, True])
def test_replicas(unused: bool) -> None:
    """Accumulation without synchronisation, then a synchronised step; buckets fire in between."""
    _in_two_processes(_replicated, unused=unused)


def test_shards_around_a_planned_module() -> None:
    _in_two_processes(_sharded)
