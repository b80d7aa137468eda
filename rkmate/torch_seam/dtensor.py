"""DTensors: tensors of which each rank holds a part, or a copy."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn

from rkmate.torch_seam.containers import pytree, tensors_in
from rkmate.torch_seam.modules import forward_pre_hooks_of, parameters_of
from rkmate.torch_seam.tensors import parts_of_sparse


@dataclass(frozen=True)
class Placed:
    """The mesh, the placements and the form of a DTensor, without its local part."""

    mesh: Any
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Return the DTensor with a local part. Its gradient has the same placements."""
        from torch.distributed.tensor import DTensor

        made: torch.Tensor = DTensor.from_local(local, self.mesh, self.placements, run_check=False,
                                                shape=self.shape, stride=self.stride)
        return made

    def __str__(self) -> str:
        return ", ".join(map(str, self.placements))


def dtensor_types() -> tuple[type[torch.Tensor], ...]:
    """Return the class of DTensors, if it was loaded."""
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def is_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor."""
    return isinstance(value, dtensor_types())


def placed(tensor: Any) -> Placed:
    """Return what a DTensor is besides its local part."""
    return Placed(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tuple(tensor.stride()))


def local_part(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor. Its gradient becomes a DTensor with the same placements."""
    found: torch.Tensor = tensor.to_local()
    return found


class _Waited(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Any) -> torch.Tensor:
        found: torch.Tensor = t.trigger_wait()
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def waited(values: Any) -> Any:
    """Return values with plain tensors in place of results of collectives that nobody has waited for."""
    module = sys.modules.get("torch.distributed._functional_collectives")
    kind = getattr(module, "AsyncCollectiveTensor", None)
    if kind is None or not any(isinstance(t, kind) for t in tensors_in(values)):
        return values
    return pytree.tree_map_only(kind, _Waited.apply, values)


def placements_of(model: nn.Module) -> dict[str, int]:
    """Return how a model's DTensor parameters are placed, in words, and how many are placed so."""
    found: Counter[str] = Counter()
    for parameter in model.parameters():
        if is_dtensor(parameter):
            mesh: Any = parameter.device_mesh          # type: ignore[attr-defined]
            names = mesh.mesh_dim_names or ("ranks",) * mesh.ndim
            where = ", ".join(f"{placement!r} over {n} {name}" for placement, n, name
                              in zip(placed(parameter).placements, mesh.shape, names, strict=True))
            found[where] += 1
    return dict(found)


def is_rebuilt_by_hooks(model: nn.Module) -> bool:
    """Return whether hooks around a model's forward make DTensors of parameters that are local parts
    otherwise: those of a DistributedDataParallel with ``device_mesh=`` around tensor parallelism. Inside of
    them, the DTensors are attributes, not parameters."""
    ddp: Any = sys.modules.get("torch.distributed.tensor.parallel.ddp")
    hook = getattr(ddp, "_reconstruct_dtensor", None)
    return hook is not None and (hook in forward_pre_hooks_of(model).values() or any(
        is_dtensor(t) and t.requires_grad for m in model.modules() for t in vars(m).values()))


def held_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of a tensor: of a DTensor, its local part."""
    return local_part(tensor.detach()) if is_dtensor(tensor) else tensor


def bytes_held(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor that this rank holds: of a DTensor, those of its local part; of a sparse
    one, those of its values and indices."""
    return sum(part.nbytes for part in parts_of_sparse(held_part(tensor)))


# -- While a model is traced --------------------------------------------------------------------
#
# A trace takes the local parts of parameters as plain tensors, and the forward makes DTensors of them: what
# is recorded are operations on local parts, and collectives.

_here = threading.local()


@dataclass(frozen=True)
class _Place:
    """A parameter of a module that is a DTensor."""

    registry: MutableMapping[str, Any]
    name: str
    placed: Placed


@contextmanager
def local_parameters(model: nn.Module) -> Iterator[None]:
    """Let a model hold the local parts of its DTensor parameters inside of the context."""
    found: dict[tuple[int, str], tuple[_Place, Any]] = {}       # a module may have several names
    names: set[str] = set()
    parts: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        registry: Any = parameters_of(module)
        for name, parameter in list(registry.items()):
            if is_dtensor(parameter):
                parts.setdefault(id(parameter), nn.Parameter(
                    local_part(parameter).detach(), parameter.requires_grad))
                found[id(registry), name] = _Place(registry, name, placed(parameter)), parameter
                names.add(f"{path}.{name}" if path else name)
    places = list(found.values())
    _here.places, _here.names = [place for place, _ in places], frozenset(names)
    try:
        for place, parameter in places:
            place.registry[place.name] = parts[id(parameter)]
        yield
    finally:
        _here.places, _here.names = [], frozenset()
        for place, parameter in places:
            place.registry[place.name] = parameter


def local_names() -> frozenset[str]:
    """Return the names of the parameters whose local parts the traced model holds."""
    names: frozenset[str] = getattr(_here, "names", frozenset())
    return names


@contextmanager
def as_dtensors() -> Iterator[None]:
    """Let the traced model's forward see its parameters as DTensors inside of the context."""
    places: list[_Place] = getattr(_here, "places", [])
    before = [place.registry[place.name] for place in places]
    for place, local in zip(places, before, strict=True):
        place.registry[place.name] = place.placed.of(local)
    try:
        yield
    finally:
        for place, local in zip(places, before, strict=True):
            place.registry[place.name] = local


@contextmanager
def noting_dtensors(note: Callable[[], None]) -> Iterator[None]:
    """Call a function whenever a DTensor is made inside of the context, before it is."""
    types = dtensor_types()
    if not types:
        yield
        return
    plain: Any = types[0].__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        note()
        plain(self, *args, **kwargs)

    with mock.patch.object(types[0], "__init__", made):
        yield


def local_results(value: Any) -> tuple[Any, dict[int, Placed]]:
    """Return a result with the local parts of its DTensors, and for each, by its id, what it was."""
    found: dict[int, Placed] = {}

    def local(leaf: Any) -> Any:
        if not is_dtensor(leaf):
            return leaf
        part = local_part(leaf)
        found[id(part)] = placed(leaf)
        return part

    if not any(map(is_dtensor, tensors_in(value))):
        return value, found
    return pytree.tree_map(local, value), found
