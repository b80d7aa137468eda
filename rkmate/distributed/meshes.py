"""Plans for one rank of a mesh that is not here: the memory that the rank needs, and the time of its step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import nn

from rkmate.devices import GPU, checked
from rkmate.distributed.sharding import shard
from rkmate.errors import ArgumentError
from rkmate.pipeline.device_budget import ADAM_STATES
from rkmate.show.amounts import duration, size
from rkmate.show.plan import Plan
from rkmate.show.replay import replay
from rkmate.torch_seam.dtensor import bytes_held, is_dtensor
from rkmate.torch_seam.trace import fake_ranks

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

REPLICAS, SHARDS = "dp", "shard"
"""Names of the dimensions of a mesh that replicate a model, and over which `shard` shards it."""


@contextmanager
def fake_mesh(**sizes: int) -> Iterator[DeviceMesh]:
    """Provide a mesh of ranks that do not exist, to shard a model over it and to plan one rank's step.

    Inside of the context, this process is the first rank of a process group whose collectives do nothing. It
    must not train there. ``with rkmate.distributed.fake_mesh(dp=8, tp=2) as mesh:`` has 16 ranks; ranks
    that differ only in the last dimension are neighbours, in one machine as far as possible.

    Raises:
        ArgumentError: a size is no positive number, or this process has a process group already.
    """
    from torch.distributed.device_mesh import init_device_mesh

    for name, ranks in sizes.items():
        if isinstance(ranks, bool) or not isinstance(ranks, int) or ranks < 1:
            raise ArgumentError(f"{name} is {ranks!r}; it should be a positive number of ranks")
    if not sizes:
        raise ArgumentError("a mesh has at least one dimension: fake_mesh(shard=8)")
    if not dist.is_available() or dist.is_initialized():
        raise ArgumentError("a mesh of ranks that are not here needs torch.distributed, in a process without "
                            "a process group")
    with fake_ranks(math.prod(sizes.values())):
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def sharded_over(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard a model over the dimension ``shard`` of a mesh, replicated over ``dp``, unless its parameters are
    DTensors already. Raises `ArgumentError` for other dimensions that no parameter knows, and where ``shard``
    stands before ``dp``."""
    names = mesh.mesh_dim_names or ()
    if any(map(is_dtensor, model.parameters())):
        return
    for name in names:
        if name not in (REPLICAS, SHARDS):
            raise ArgumentError(f"the dimension {name} of the mesh is not used: let the target be a function "
                                "of the mesh that makes the model parallel over it")
    if {*names} == {REPLICAS, SHARDS} and names[0] != REPLICAS:
        shards, replicas = mesh.shape
        raise ArgumentError(
            f"the dimension {SHARDS} of the mesh stands before {REPLICAS}, and ranks that shard a model are "
            f"neighbours: it should be {REPLICAS}={replicas},{SHARDS}={shards}")
    if SHARDS in names:
        shard(model, mesh[(REPLICAS, SHARDS)] if REPLICAS in names else mesh[SHARDS])


@dataclass(frozen=True)
class RankEstimate:
    """The memory that one rank of a mesh needs for training, and the time of its step. Bytes and seconds."""

    mesh: Mapping[str, int]
    """Size of each dimension of the mesh, by its name."""
    device: str
    """Name of the GPU of each rank."""
    memory_bytes: int
    """Memory of that GPU."""
    parameter_bytes: int
    """Parameters and buffers that the rank holds."""
    gradient_bytes: int
    """Gradients of the parameters that the rank holds."""
    optimizer_bytes: int
    """States of AdamW, in the types of the parameters."""
    step_bytes: int
    """Peak of the planned step."""
    gathered_bytes: int
    """Gathered parameters in memory at the peak; they are part of the step's bytes."""
    step_seconds: float
    """Predicted time of the step, with the collectives of the plan."""
    exchange_seconds: float
    """Time of the plan's collectives."""
    hidden_seconds: float
    """Part of the collectives' time in which something else computes."""
    replicas_seconds: float
    """Time to average gradients over the replicas of a model that is not sharded, after the plan. Data
    parallel training hides most of it behind the backward."""

    @property
    def total_bytes(self) -> int:
        """Bytes that training takes in all."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes + self.step_bytes

    def __str__(self) -> str:
        ranks = math.prod(self.mesh.values())
        dims = ", ".join(f"{name}={n}" for name, n in self.mesh.items())
        after = f"; {duration(self.replicas_seconds)} more to average gradients over replicas, mostly " \
            "hidden behind the backward" if self.replicas_seconds else ""
        return "\n".join((
            f"one of {ranks} ranks ({dims}) on {self.device}",
            f"  parameters  {size(self.parameter_bytes)}",
            f"  gradients   {size(self.gradient_bytes)}",
            f"  optimizer   {size(self.optimizer_bytes)} (AdamW)",
            f"  step        {size(self.step_bytes)}, of which {size(self.gathered_bytes)} are gathered "
            "parameters",
            f"  in all      {size(self.total_bytes)} of {size(self.memory_bytes)}",
            f"  time        {duration(self.step_seconds)} a step; collectives take "
            f"{duration(self.exchange_seconds)}, of which {duration(self.hidden_seconds)} are hidden{after}"))


def estimate(plan: Plan, model: nn.Module, mesh: DeviceMesh, device: GPU | str) -> RankEstimate:
    """Return the memory and time of one rank that trains with a plan.

    Args:
        plan: the plan that `rkmate.plan` returned for this model and device.
        model: the model that was planned.
        mesh: the mesh that `fake_mesh` provides.
        device: the GPU of each rank.
    """
    gpu, names = checked(device), mesh.mesh_dim_names or ()
    trained = sum(bytes_held(p) for p in model.parameters() if p.requires_grad)
    cd, replayed = plan.graph.cd, replay(plan)
    seconds = sum(cd.c[i].time for i in plan.schedule.order if cd.c[i].exchanges)
    replicas = 0.0
    if REPLICAS in names and SHARDS not in names:
        group: Any = mesh.get_group(REPLICAS)
        ranks = dist.get_process_group_ranks(group)
        replicas = 2 * trained * (len(ranks) - 1) / len(ranks) / gpu.expected.between(ranks)
    made: set[int] = set()
    """Storages that were gathered, and what was made of these alone: parts of several, or another type."""
    for c, of in zip(cd.c, plan.graph.computations, strict=True):
        if "all_gather" in of.operation or (c.inputs and made.issuperset(c.inputs)):
            made.update(c.outputs)
    gathered = sum(cd.d[j].size for j, kind in replayed.alive_at_peak
                   if j in made and kind != "temporaries")
    return RankEstimate(
        dict(zip(names, mesh.shape, strict=True)), gpu.name, gpu.memory_bytes,
        sum(map(bytes_held, (*model.parameters(), *model.buffers()))), trained, ADAM_STATES * trained,
        plan.peak_bytes, gathered, plan.step_seconds, seconds,
        seconds - replayed.simulation.exposed, replicas)
