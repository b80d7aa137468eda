"""What a plan is made for, as a report names it: model, sample inputs, device and versions."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from rkmate import device as devices
from rkmate.graph.capture.structure import take_apart
from rkmate.ir.plan import Origin
from rkmate.support.version import own_version
from rkmate.torch_seam.dtensor import placements_of


def origin_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Origin:
    """Return the origin of a plan for a model on sample inputs."""
    parameters = list(model.parameters())
    tensors, structure = take_apart(_by_name(model, args, kwargs), result=False)
    device = devices.common((*parameters, *tensors))
    where = device.torch_device if device.elsewhere is None else device.elsewhere.name
    # A tensor stands under several names: by field, by index, by index from the end.
    singles = [(name, min(under)) for name, under in structure.names().items() if len(under) == 1]
    names = {i: name for name, i in reversed(singles)}
    return Origin(type(model).__name__, sum(p.numel() for p in parameters),
                  sum(p.numel() for p in parameters if p.requires_grad),
                  tuple((names.get(i, f"tensor {i}"), shape_of(t)) for i, t in enumerate(tensors)),
                  str(where), (("rkmate", own_version()), ("torch", str(torch.__version__)),
                   ("python", platform.python_version())), tuple(placements_of(model).items()))


def shape_of(tensor: torch.Tensor) -> str:
    """Return a tensor's type and shape as text: ``float32[8, 128]``."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _by_name(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments by the names in the forward's signature; by number if some decorator has hidden the
    signature."""
    try:
        signature = inspect.signature(model.forward)
        bound = signature.bind(*args, **kwargs).arguments
    except (TypeError, ValueError):
        return {**{str(k): a for k, a in enumerate(args)}, **kwargs}
    named: dict[str, Any] = {}
    for name, value in bound.items():
        keywords = signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
        named |= value if keywords else {name: value}
    return named
