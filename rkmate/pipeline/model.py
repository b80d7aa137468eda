"""Facts about a model that its graph does not tell planning: its description in a report, whether gradients
may be added up in place, train mode, and the attributes that planning leaves as they were."""

from __future__ import annotations

import inspect
import logging
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from rkmate import device as devices
from rkmate.errors import ArgumentError
from rkmate.graph.capture.state import PythonState
from rkmate.graph.capture.structure import take_apart
from rkmate.ir.plan import Origin
from rkmate.support.version import own_version
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.dtensor import placements_of
from rkmate.torch_seam.modules import gathered_by_zero, running_data_parallel
from rkmate.torch_seam.tensors import has_accumulation_hooks, has_gradient_hooks

# -- What a report says ----------------------------------------------------------------------------


def origin_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Origin:
    """Return the origin of a plan for a model on sample inputs."""
    parameters = list(model.parameters())
    # A tensor that is given twice has two names.
    given = pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, _by_name(model, args, kwargs))
    tensors, structure = take_apart(given, result=False)
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


# -- Gradients in place ----------------------------------------------------------------------------
#
# Whether gradients of parameters can be added straight to what stands in ``.grad``, or somebody wants them
# as tensors.


IN_PLACE = 'gradients="in_place"'
RETURNED = 'gradients="returned" (the default) hands gradients to autograd'


def refuse_gradients_in_place(model: nn.Module) -> None:
    """Raise `ArgumentError` where something in a model needs the gradient of a parameter as a tensor."""
    refuse_data_parallelism(*model.modules())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (why := obstacle(parameter)):
            raise ArgumentError(f"{IN_PLACE}: the parameter {name!r} {why}. {RETURNED}")


def refuse_data_parallelism(*modules: nn.Module) -> None:
    """Raise `ArgumentError` where gradients are exchanged, by one of these modules or by the
    DistributedDataParallel that runs now."""
    distributed = torch.nn.parallel.DistributedDataParallel
    kinds: list[type] = [distributed, torch.nn.parallel.DataParallel]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None:
        kinds += [fsdp.FSDPModule, fsdp.FullyShardedDataParallel]
    around = running_data_parallel()
    found = next((m for m in modules if isinstance(m, tuple(kinds)) or gathered_by_zero(m)), around)
    if found is not None:
        raise ArgumentError(f"{IN_PLACE}: {type(found).__name__} exchanges gradients between processes or "
                            f"threads, and needs them as tensors. {RETURNED}")


def obstacle(parameter: torch.Tensor) -> str:
    """Return why only autograd may add to a parameter's gradient, as the end of a sentence about the
    parameter; empty if others may."""
    if has_gradient_hooks(parameter):
        return "has a gradient hook, which needs the gradient as a tensor"
    if has_accumulation_hooks(parameter):
        return "has a hook that runs after its gradient was accumulated"
    if not parameter.is_leaf:
        return "is computed from other tensors: its gradient goes on to those"
    if type(parameter) not in (torch.Tensor, nn.Parameter):
        return f"is a {type(parameter).__name__}, whose gradient may be something else than a plain tensor"
    grad = parameter.grad
    if grad is None:
        return ""
    if grad.layout is not torch.strided:
        return f"has a gradient of the layout {grad.layout}: set it to None, or make it dense"
    if type(grad) is not torch.Tensor:
        return f"has a gradient that is a {type(grad).__name__}: set it to None"
    if _form(grad) != _form(parameter):
        return (f"has a gradient of another form than itself ({_words(grad)}, not {_words(parameter)}): set "
                "it to None")
    return ""


def _form(tensor: torch.Tensor) -> tuple[object, ...]:
    """Return shape, dtype, device, and the strides of dimensions with more than one element."""
    strides = tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    return tensor.shape, tensor.dtype, tensor.device, strides if tensor.numel() else ()


def _words(tensor: torch.Tensor) -> str:
    return f"{shape_of(tensor)} with strides {list(tensor.stride())} on {tensor.device}"


# -- What planning leaves --------------------------------------------------------------------------


@contextmanager
def as_before(model: nn.Module, *, on_error: bool = False) -> Iterator[None]:
    """Put attributes, hooks and registries of a model back after the context: a captured forward leaves what
    a first call makes. `on_error`: only if the context fails."""
    before = PythonState(model) if isinstance(model, nn.Module) else None
    done = False
    try:
        yield
        done = on_error
    finally:
        if before is not None and not done:
            before.restore()


# -- Train mode ------------------------------------------------------------------------------------
#
# Models that libraries hand out in eval mode: their plans are for training.


@contextmanager
def flags_to_plan(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Give a model the train flags to plan for inside the context; afterwards restore its flags.

    ``from_pretrained`` returns models in eval mode, and a Trainer switches to train mode later.

    Args:
        training: None: of a model in eval mode as its own `train` sets them, which is said, and of others
            as they are. True: as its `train` sets them. False: as they are.

    Raises:
        ArgumentError: `training` is something else.
    """
    if training not in (None, True, False):
        raise ArgumentError(f"training is {training!r}; it should be True, False or None")
    if training is False or (training is None and model.training):
        yield
        return
    before = [(m, m.training) for m in model.modules()]
    if training is None:
        logging.getLogger("rkmate").warning(
            "%s is in eval mode: it is planned in train mode (training=False plans it as it is)",
            type(model).__name__)
    try:
        model.train()
        yield
    finally:
        for m, flag in before:
            m.training = flag
