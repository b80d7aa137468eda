"""Sharded parameters that are gathered inside of the forward, so that a plan decides how long they stay.

`shard` leaves each rank a part of each parameter, as a DTensor. A forward gathers a parameter where it reads
it, and the backward reduces and scatters its gradient. Both are operations of a captured graph: a plan keeps
a gathered parameter until the backward, or frees it and gathers it again. (Stage 3 of Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.torch_seam.collectives import functional, group_name
from rkmate.torch_seam.dtensor import Placed, is_dtensor, local_part, placed
from rkmate.torch_seam.modules import parameters_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALL = 16_384
"""Elements of the largest parameter that `shard` leaves whole on each rank, unless told otherwise."""
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Precision:
    """The types in which a sharded model computes, and in which its gradients are added up."""

    parameters: torch.dtype | None = None
    """Type in which floating-point parameters are gathered; None: their own."""
    gradients: torch.dtype | None = None
    """Type in which gradients are reduced; None: the type in which they are computed."""


def shard(model: M, mesh: DeviceMesh, *, precision: Precision = Precision(), small: int = SMALL) -> M:
    """Shard the parameters of a model over ranks, in place, and return the model.

    Each rank keeps a part of each parameter.

    Outside of a forward, parameters are DTensors: build the optimizer afterwards. In a forward, each
    parameter is whole where it is read, and its gradient is averaged over the ranks. Without a plan, gathered
    parameters stay until the backward; a plan decides which ones to free and to gather again.

    Args:
        model: the module, with the same parameters on each rank. It may be on the meta device.
        mesh: the ranks. A mesh of two dimensions replicates over the first one and shards over the second.
        precision: the types in which to gather parameters and to reduce gradients.
        small: the number of elements up to which a parameter stays whole on each rank. A parameter that has
            no dimension divisible by the number of ranks stays whole, too.

    Raises:
        ArgumentError: the mesh has more than two dimensions, a parameter is a DTensor already, or a module
            also holds its parameters in a list (torch's recurrent layers do).
    """
    if mesh.ndim > 2:
        raise ArgumentError(f"mesh has {mesh.ndim} dimensions; it should have one that shards, or one that "
                            "replicates and one that shards")
    _check(model)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    for module in list(model.modules()):
        registry = parameters_of(module)
        names = tuple(name for name, p in registry.items() if p is not None)
        for name in names:
            whole = registry[name]
            if whole not in parts:
                parts[whole] = _part(whole, mesh, small)
            registry[name] = parts[whole]
        if names or module is model:
            kind: Any = type(module)
            module.__class__ = _gathering(kind, names, precision)
    return model


def _check(model: nn.Module) -> None:
    for path, module in model.named_modules():
        own = parameters_of(module)
        for name, parameter in own.items():
            if is_dtensor(parameter):
                raise ArgumentError(f"{path}.{name} is a DTensor already; shard takes a model whose "
                                    "parameters are plain tensors")
        for name, value in vars(module).items():
            if isinstance(value, list) and any(v is p for v in value for p in own.values() if p is not None):
                raise ArgumentError(f"{path or 'model'} ({type(module).__name__}) also holds its parameters "
                                    f"in the list {name}, where they stay whole: shard other submodules")


def _part(whole: nn.Parameter, mesh: DeviceMesh, small: int) -> nn.Parameter:
    """Return the DTensor that this rank holds of a parameter."""
    from torch.distributed.tensor import Placement, Replicate, Shard

    ranks = mesh.size(mesh.ndim - 1)
    local = whole.detach()
    placements: list[Placement] = [Replicate()] * mesh.ndim
    dim = next((d for d, n in enumerate(whole.shape) if n % ranks == 0), None)
    if dim is not None and whole.numel() > small:
        placements[-1] = Shard(dim)
        mine = local.chunk(ranks, dim)[mesh.get_local_rank(mesh.ndim - 1)]
        local = mine.clone(memory_format=torch.contiguous_format)
    place = Placed(mesh, tuple(placements), whole.shape, tuple(whole.stride()))
    return nn.Parameter(place.of(local), whole.requires_grad)


# -- While a forward runs --------------------------------------------------------------------------

_here = threading.local()


@functools.cache
def _gathering(kind: Any, names: tuple[str, ...], precision: Precision) -> type[nn.Module]:
    """Return a subclass whose parameters are whole while a forward runs; equal layers share it. The innermost
    sharded module that runs gathers a parameter once."""
    plain: Callable[..., Any] = kind.forward

    @functools.wraps(plain)
    def forward(*args: Any, **kwargs: Any) -> Any:
        outside, _here.whole = getattr(_here, "whole", None), {}
        try:
            return plain(*args, **kwargs)
        finally:
            _here.whole = outside

    def whole(name: str) -> property:
        def read(module: nn.Module) -> Any:
            part, known = parameters_of(module)[name], getattr(_here, "whole", None)
            if known is None or not is_dtensor(part):
                return part
            if part not in known:
                known[part] = _Gathered.apply(local_part(part), placed(part), precision)
            return known[part]
        return property(read)

    described = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {"forward": forward, **described, **{n: whole(n) for n in names}})


class _Gathered(torch.autograd.Function):
    """The whole of a parameter. Its gradient is reduced, scattered and averaged."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, place: Placed, precision: Precision) -> torch.Tensor:
        ctx.place, ctx.precision, ctx.dtype = place, precision, local.dtype
        if precision.parameters is not None and local.is_floating_point():
            local = local.to(precision.parameters)
        ranks, placement = place.mesh.size(place.mesh.ndim - 1), place.placements[-1]
        if ranks == 1 or placement.is_replicate():
            return local.view_as(local)
        whole = _exchanged("all_gather_into_tensor", local, place.mesh, -1, ranks)
        if placement.dim:
            whole = whole.unflatten(0, (ranks, -1)).movedim(0, placement.dim).reshape(place.shape)
        return whole

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        mesh, placement = ctx.place.mesh, ctx.place.placements[-1]
        ranks = mesh.size(mesh.ndim - 1)
        if ctx.precision.gradients is not None:
            grad = grad.to(ctx.precision.gradients)
        if ranks > 1 and placement.is_replicate():
            grad = _exchanged("all_reduce", grad.contiguous(), mesh, -1, "sum")
        elif ranks > 1:
            if placement.dim:
                grad = grad.unflatten(placement.dim, (ranks, -1)).movedim(placement.dim, 0).flatten(0, 1)
            grad = _exchanged("reduce_scatter_tensor", grad.contiguous(), mesh, -1, "sum", ranks)
        if mesh.ndim == 2 and mesh.size(0) > 1:
            grad = _exchanged("all_reduce", grad, mesh, 0, "sum")
        return (grad / mesh.size()).to(ctx.dtype), None, None


def _exchanged(name: str, tensor: torch.Tensor, mesh: DeviceMesh, dim: int, *others: Any) -> torch.Tensor:
    """Return the result of a functional collective over a dimension of a mesh."""
    started = functional(name)(tensor, *others, group_name(mesh.get_group(dim)))
    found: torch.Tensor = functional("wait_tensor")(started)
    return found
