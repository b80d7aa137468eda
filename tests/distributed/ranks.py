"""Tasks on two gloo ranks, or more, that start once, and are killed if they stop computing or compute for too
long: no test that uses them can hang, and none fails because a machine is busy."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import multiprocessing.connection
import multiprocessing.context
import os
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.options import few_seconds

LIMIT = 240.0
"""Seconds of processor time after which a rank is killed, and the timeout of a group."""
LOADED_ONCE = ("torch.export", "torch._functorch.aot_autograd", "torch._inductor.compile_fx",
               "torch.distributed.fsdp", "torch.distributed.pipelining", "torch.distributed.tensor.parallel",
               "torch.distributed._functional_collectives", "rkmate.api", "rkmate.parts.apply")
"""Modules that the process loads from which ranks are forked: all of them begin with these."""
STILL = 90.0
"""Seconds in which ranks that compute nothing are not killed yet."""
Found = dict[str, list[dict[str, Any]]]
"""For each task, what each rank has found; ``failed`` if it raised, or did not come to an end."""


def forked() -> multiprocessing.context.ForkServerContext:
    """Return the way to start processes that are forked from one that has loaded torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(LOADED_ONCE))
    return context


def found_by_ranks(module: str, folder: Path, patience: float = LIMIT, count: int = 2) -> Found:
    """Let processes go through the ``TASKS`` of a test module: a dictionary of functions from a rank to what
    it finds. `patience`: the group's timeout, in seconds. `count`: of the processes."""
    context = forked()
    ranks = [context.Process(target=_rank, args=(rank, module, str(folder), patience, count), daemon=True)
             for rank in range(count)]
    for process in ranks:
        process.start()
    spent = dict.fromkeys(ranks, 0.0)
    begin = since = time.monotonic()
    still = STILL + (patience if patience < LIMIT else 0.0)
    while (alive := [p for p in ranks if p.is_alive()]) and max(spent.values()) < LIMIT \
            and time.monotonic() - since < still:
        multiprocessing.connection.wait([p.sentinel for p in alive], timeout=1.0)
        for process in alive:
            seconds = _processor_seconds(process.pid, begin)
            if seconds > spent[process] + 0.1:
                spent[process], since = seconds, time.monotonic()
    for process in ranks:
        process.kill()
        process.join()
    files = {name: [folder / f"{name}-{rank}.pt" for rank in range(count)] for name in _tasks(module)}
    return {name: [torch.load(p, weights_only=False) if p.exists() else
                   {"failed": "this rank did not come to an end"} for p in paths]
            for name, paths in files.items()}


def _processor_seconds(pid: int | None, begin: float) -> float:
    """Return the processor time that a process has used; where there is no /proc, the time since `begin`."""
    try:
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0 if Path("/proc/self/stat").exists() else time.monotonic() - begin
    return (int(after_name[11]) + int(after_name[12])) / os.sysconf("SC_CLK_TCK")


def _tasks(module: str) -> dict[str, Any]:
    tasks: dict[str, Any] = importlib.import_module(module).TASKS
    return tasks


def _rank(rank: int, module: str, folder: str, patience: float, count: int) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count,
                            timeout=timedelta(seconds=patience))
    tasks = _tasks(module)
    gc.freeze()                 # as in the tests' own process (`tests.conftest`)
    for name, task in tasks.items():
        try:
            with few_seconds():
                found = task(rank)
        except Exception:
            found = {"failed": traceback.format_exc()}
        torch.save(found, f"{folder}/{name}-{rank}.pt")
        if "failed" in found:
            break               # the other rank may be anywhere now
    os._exit(0)                 # no destructor of the group waits for the other rank


def steps(call: Callable[..., torch.Tensor], owner: nn.Module, inputs: Iterable[Any]) -> list[torch.Tensor]:
    """Return the losses and the gradients of steps, one for each input. `owner`: of the parameters."""
    found = []
    for x in inputs:
        owner.zero_grad()
        loss = call(x)
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in owner.parameters() if p.grad is not None)]
    owner.zero_grad()
    return found


def counted(work: Callable[[], Any], prefix: str) -> dict[str, int]:
    """Count the events of some work whose names begin so, as the profiler sees them. No event is made an
    object of Python, which takes longer than most work here."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        work()
    results = seen.profiler.kineto_results  # type: ignore[union-attr]
    return dict(Counter(name for e in results.events() if (name := e.name()).startswith(prefix)))


def are_equal(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    """Return whether a loss and gradients, or more of them, have the same bits."""
    return len(some) == len(others) > 2 and all(map(torch.equal, some, others))


def caught(call: Callable[[], Any]) -> tuple[str, str]:
    """Return the name of the class of the error that a call raises, and its message; ``nothing`` for none."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def whole(t: Any) -> torch.Tensor:
    """Return a copy of a tensor, of a DTensor with the parts of all ranks."""
    every: torch.Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return every.detach().clone()


class Block(nn.Module):
    """A residual block with a norm and two products."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Net(nn.Module):
    """Three blocks and a head, the same on all ranks."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.head = nn.Linear(width, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def parallel_in_sequence() -> dict[str, Any]:
    """Return the ways of `Block`'s modules in which ranks share a sequence between its products."""
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

    return {"norm": SequenceParallel(), "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1))}
