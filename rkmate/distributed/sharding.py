"""Sharded parameters that are gathered inside of the forward, so that a plan decides how long they stay.

`shard` leaves each rank a part of each parameter, as a DTensor. A forward gathers a parameter where it reads
it, and the backward reduces and scatters its gradient. Both are operations of a captured graph: a plan keeps
a gathered parameter until the backward, or frees it and gathers it again. (Stage 3 of Rajbhandari et al.,
"ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020.)

Small parameters (norms, biases) stay whole on each rank. One collective averages the gradients of all small
parameters of a layer; one gathers those that are somewhat larger, and one reduces their gradients.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
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
TOGETHER = 262_144
"""Elements of the largest parameter that is gathered together with others of its layer, unless told
otherwise."""
M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Precision:
    """The types in which a sharded model computes, and in which its gradients are added up."""

    parameters: torch.dtype | None = None
    """Type in which floating-point parameters are gathered; None: their own."""
    gradients: torch.dtype | None = None
    """Type in which gradients are reduced; None: the type in which they are computed."""


def shard(model: M, mesh: DeviceMesh, *, precision: Precision = Precision(), small: int = SMALL,
          together: int = TOGETHER) -> M:
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
        together: the number of elements up to which sharded parameters of a layer (an element of an
            `nn.ModuleList` or `nn.Sequential`) are gathered, and their gradients reduced, by one collective.

    Raises:
        ArgumentError: the mesh has more than two dimensions, a parameter is a DTensor already, or a module
            also holds its parameters in a list (torch's recurrent layers do).
    """
    if mesh.ndim > 2:
        raise ArgumentError(f"mesh has {mesh.ndim} dimensions; it should have one that shards, or one that "
                            "replicates and one that shards")
    _check(model)
    parts: dict[nn.Parameter, nn.Parameter] = {}
    layers = dict.fromkeys(_in_lists(model), together) | {model: 0}
    """The layers, and how large parameters may be that are gathered together there."""
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
            module.__class__ = _gathering(kind, names, precision, layers.get(module))
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
def _gathering(kind: Any, names: tuple[str, ...], precision: Precision,
               together: int | None) -> type[nn.Module]:
    """Return a subclass whose parameters are whole while a forward runs; equal layers share it. The innermost
    sharded module that runs gathers a parameter once. `together`: of a layer, the elements up to which its
    parameters are gathered together."""
    plain: Callable[..., Any] = kind.forward

    @functools.wraps(plain)
    def forward(module: Any, *args: Any, **kwargs: Any) -> Any:
        outside, layer = getattr(_here, "whole", None), getattr(_here, "layer", None)
        _here.whole, _here.layer = {}, (module, {}) if together is not None or layer is None else layer
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
                known[key] = _whole(part, precision)
            return known[key]
        return property(read)

    described = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(kind.__name__, (kind,), {"forward": forward, "rkmate_together": together, **described,
                                         **{n: whole(n) for n in names}})


def _whole(part: Any, precision: Precision) -> torch.Tensor:
    """Return a parameter for a forward to read. Of parameters that are gathered or averaged together, the
    first one that the layer reads takes the others with it."""
    layer, known = _here.layer
    key = part, torch.is_grad_enabled()
    if key in known:
        found: torch.Tensor = known[key]
        return found
    together = getattr(type(layer), "rkmate_together", None) or 0
    kind = _kind(part, together)
    group = [part] if kind is None else [*dict.fromkeys(
        p for m in _of_layer(layer) for p in parameters_of(m).values()
        if is_dtensor(p) and _kind(p, together) == kind)]
    if all(p is not part for p in group):   # of another layer
        group = [part]
    made: dict[Any, torch.Tensor] = dict(zip(group, _Whole.apply(
        tuple(map(placed, group)), precision, *map(local_part, group)), strict=True))
    if kind is not None:
        known.update({(p, key[1]): t for p, t in made.items()})
    return made[part]


def _kind(part: Any, together: int) -> Any:
    """Return what a parameter has in common with those that are made whole together with it; None if it is
    made whole by itself."""
    if placed(part).placements[-1].is_replicate():
        return "whole", part.requires_grad
    return ("parts", part.requires_grad, part.dtype) if part.numel() <= together else None


def _of_layer(module: nn.Module) -> Iterator[nn.Module]:
    """Yield a layer and its submodules, without those of other layers."""
    yield module
    for child in module.children():
        if getattr(type(child), "rkmate_together", None) is None:
            yield from _of_layer(child)


class _Whole(torch.autograd.Function):
    """Parameters as a forward reads them: gathered together where each rank has a part of them. Their
    gradients are averaged together: reduced, and scattered where each rank has a part."""

    @staticmethod
    def forward(ctx: Any, places: tuple[Placed, ...], precision: Precision, *local: torch.Tensor
                ) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.places, ctx.precision, ctx.dtypes = places, precision, [t.dtype for t in local]
        mesh, dtype = places[0].mesh, precision.parameters
        ctx.ranks = ranks = mesh.size(mesh.ndim - 1) if places[0].placements[-1].is_shard() else 1
        local = tuple(t.to(dtype) if dtype is not None and t.is_floating_point() else t for t in local)
        if ranks == 1:
            return tuple(t.view_as(t) for t in local)
        gathered = _exchanged("all_gather_into_tensor", _flat(local), mesh, -1, ranks)
        parts = gathered.view(ranks, -1).split([t.numel() for t in local], 1)
        return tuple(part.unflatten(1, t.shape).movedim(0, place.placements[-1].dim).reshape(place.shape)
                     for part, t, place in zip(parts, local, places, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        mesh, dtype, ranks = ctx.places[0].mesh, ctx.precision.gradients, ctx.ranks
        found = list(grads)
        by_type: dict[torch.dtype, list[int]] = {}
        for k, grad in enumerate(grads):
            if grad is not None:
                by_type.setdefault(dtype or grad.dtype, []).append(k)
        for kind, numbers in by_type.items():
            some = [g.to(kind) for k in numbers if (g := grads[k]) is not None]
            shapes = [g.shape for g in some]
            if ranks > 1:
                dims = [ctx.places[k].placements[-1].dim for k in numbers]
                some = [g.unflatten(d, (ranks, -1)).movedim(d, 0) for g, d in zip(some, dims, strict=True)]
                shapes = [g.shape[1:] for g in some]
                flat = _flat([g.reshape(ranks, -1) for g in some], 1).reshape(-1)
                flat = _exchanged("reduce_scatter_tensor", flat, mesh, -1, "sum", ranks)
            else:
                flat = _flat(some)
            for dim in range(mesh.ndim - 1 - (ranks > 1), -1, -1):
                flat = flat if mesh.size(dim) == 1 else _exchanged("all_reduce", flat, mesh, dim, "sum")
            parts = flat.split([shape.numel() for shape in shapes])
            for k, shape, part in zip(numbers, shapes, parts, strict=True):
                found[k] = (part.view(shape) / mesh.size()).to(ctx.dtypes[k])
        return None, None, *found


def _flat(tensors: Sequence[torch.Tensor], dims: int = 0) -> torch.Tensor:
    """Return all elements of tensors in one, with the first `dims` dimensions as they are."""
    flat = [t.flatten(dims) for t in tensors]
    return flat[0].contiguous() if len(flat) == 1 else torch.cat(flat, dims)


def _exchanged(name: str, tensor: torch.Tensor, mesh: DeviceMesh, dim: int, *others: Any) -> torch.Tensor:
    """Return the result of a functional collective over a dimension of a mesh."""
    started = functional(name)(tensor, *others, group_name(mesh.get_group(dim)))
    found: torch.Tensor = functional("wait_tensor")(started)
    return found
