"""Sharded parameters that are gathered inside of the forward, so that a plan decides how long they stay.

`shard` leaves each rank a part of each parameter, as a DTensor. A forward gathers a parameter where it reads
it, and the backward reduces and scatters its gradient. Both are operations of a captured graph: a plan keeps
a gathered parameter until the backward, or frees it and gathers it again. (Stage 3 of Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)

Small parameters (norms, biases) stay whole on each rank. One collective averages the gradients of all small
parameters of a layer.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
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
    layers = {model, *_in_lists(model)}
    for module in list(model.modules()):
        registry = parameters_of(module)
        names = tuple(name for name, p in registry.items() if p is not None)
        for name in names:
            whole = registry[name]
            if whole not in parts:
                parts[whole] = _part(whole, mesh, small)
            registry[name] = parts[whole]
        if names or module in layers:
            kind: Any = type(module)
            module.__class__ = _gathering(kind, names, precision, module in layers)
    return model


def _in_lists(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the outermost modules in lists: the layers of a model."""
    for child in module.children():
        if isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)):
            yield child
        else:
            yield from _in_lists(child)


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
def _gathering(kind: Any, names: tuple[str, ...], precision: Precision, is_layer: bool) -> type[nn.Module]:
    """Return a subclass whose parameters are whole while a forward runs; equal layers share it. The innermost
    sharded module that runs gathers a parameter once. `is_layer`: whether the small parameters of its
    submodules are averaged together."""
    plain: Callable[..., Any] = kind.forward

    @functools.wraps(plain)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        outside, layer = getattr(_here, "whole", None), getattr(_here, "layer", None)
        _here.whole, _here.layer = {}, (module, {}) if is_layer or layer is None else layer
        try:
            return plain(module, *args, **kwargs)
        finally:
            _here.whole, _here.layer = outside, layer

    def whole(name: str) -> property:
        def read(module: nn.Module) -> Any:
            part, known = parameters_of(module)[name], getattr(_here, "whole", None)
            if known is None or not is_dtensor(part):
                return part
            key = part, torch.is_grad_enabled()
            if key not in known:
                known[key] = _small(part, precision) if placed(part).placements[-1].is_replicate() else \
                    _Gathered.apply(local_part(part), placed(part), precision)
            return known[key]
        return property(read)

    described = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {"forward": forward, "is_rkmate_layer": is_layer, **described,
                                         **{n: whole(n) for n in names}})


def _small(part: Any, precision: Precision) -> torch.Tensor:
    """Return a small parameter for a forward to read. The first one that the layer reads takes the others
    with it."""
    layer, known = _here.layer
    trains = part.requires_grad and torch.is_grad_enabled()
    if not trains or part not in known:
        own = {p: None for m in _of_layer(layer) for p in parameters_of(m).values() if is_dtensor(p)
               and p.requires_grad and placed(p).placements[-1].is_replicate()} if trains else {}
        group = [*own] if part in own else [part]
        made: dict[Any, torch.Tensor] = dict(zip(group, _Averaged.apply(
            placed(part).mesh, precision, *map(local_part, group)), strict=True))
        if not trains:
            return made[part]
        known.update(made)
    found: torch.Tensor = known[part]
    return found


def _of_layer(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer and its submodules, without those of other layers."""
    yield module
    for child in module.children():
        if not getattr(type(child), "is_rkmate_layer", False):
            yield from _of_layer(child)


def _cast(local: torch.Tensor, precision: Precision) -> torch.Tensor:
    dtype = precision.parameters
    return local if dtype is None or not local.is_floating_point() else local.to(dtype)


class _Averaged(torch.autograd.Function):
    """Parameters that are whole on each rank. Their gradients are averaged together."""

    @staticmethod
    def forward(ctx: Any, mesh: DeviceMesh, precision: Precision, *whole: torch.Tensor
                ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.mesh, ctx.precision, ctx.dtypes = mesh, precision, [w.dtype for w in whole]
        return tuple(_cast(w, precision).view_as(w) for w in whole)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        mesh, dtype = ctx.mesh, ctx.precision.gradients
        found = list(grads)
        by_type: dict[torch.dtype, list[int]] = {}
        for k, grad in enumerate(grads):
            if grad is not None:
                by_type.setdefault(dtype or grad.dtype, []).append(k)
        for kind, numbers in by_type.items():
            some = [g.to(kind) for k in numbers if (g := grads[k]) is not None]
            flat = some[0].contiguous() if len(some) == 1 else torch.cat([g.reshape(-1) for g in some])
            for dim in range(mesh.ndim - 1, -1, -1):
                flat = flat if mesh.size(dim) == 1 else _exchanged("all_reduce", flat, mesh, dim, "sum")
            parts = flat.reshape(-1).split([g.numel() for g in some])
            for k, grad, part in zip(numbers, some, parts, strict=True):
                found[k] = (part.view(grad.shape) / mesh.size()).to(ctx.dtypes[k])
        return None, None, *found


class _Gathered(torch.autograd.Function):
    """The whole of a sharded parameter. Its gradient is reduced, scattered and averaged."""

    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, place: Placed, precision: Precision) -> torch.Tensor:
        ctx.place, ctx.precision, ctx.dtype = place, precision, local.dtype
        local = _cast(local, precision)
        ranks, placement = place.mesh.size(place.mesh.ndim - 1), place.placements[-1]
        if ranks == 1:
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
        if ranks > 1:
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
