"""Whether gradients of parameters can be added straight to what stands in ``.grad``, or somebody wants them
as tensors.
"""

from __future__ import annotations

import sys

import torch
from torch import nn

from rkmate.errors import ArgumentError
from rkmate.torch_seam.modules import running_data_parallel
from rkmate.torch_seam.tensors import has_accumulation_hooks, has_gradient_hooks

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
    found = next((m for m in modules if isinstance(m, tuple(kinds))), around)
    if found is not None:
        raise ArgumentError(f"{IN_PLACE}: {type(found).__name__} exchanges gradients between processes or "
                            f"threads, and needs them as tensors. {RETURNED}")


def obstacle(parameter: torch.Tensor) -> str:
    """Why nobody but autograd may add to a parameter's gradient, after its name; empty where one may."""
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
    """Shape, dtype, device, and strides where there is more than one element."""
    strides = tuple(s for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1)
    return tensor.shape, tensor.dtype, tensor.device, strides if tensor.numel() else ()


def _words(tensor: torch.Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} with strides {list(tensor.stride())} on {tensor.device}"
