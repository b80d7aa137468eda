"""Closed-over tensors: a forward computes with them, and they are none of its parameters, buffers or
arguments, but plain attributes, members of lists, globals.

The tracer takes them as they are, which the trace of the gradients does not: to it they are buffers.

Uses private names of torch (the modes of a trace, a tensor's version); tested with torch 2.13.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from rkmate.errors import CaptureError

_NORMS = (F.batch_norm, F.instance_norm)
_SINGLE = (torch.Tensor, int, float, str, torch.dtype, type(None))
_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class ClosedOverError(CaptureError):
    """Raised while a forward is traced, before it is known where."""


def lost_tensors_refused() -> AbstractContextManager[Any]:
    """While a model's forward is traced; raises `ClosedOverError`."""
    return _Guard()


class _Guard(TorchFunctionMode):
    """Raises `ClosedOverError` where an operation takes such a tensor that requires a gradient, which the
    trace would lose without a word, or writes to one, which tracing alone would do.

    What the tracer puts in the place of parameters, buffers and arguments is of other classes.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Iterable[type],
                           args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in _leaves((*args, *kwargs.values())) if type(t) in (torch.Tensor, nn.Parameter)]
        if not given or func.__name__ == "__get__":
            return func(*args, **kwargs)
        if func in _NORMS and _moves_statistics(func, *args, **kwargs):
            raise _written(given[0])        # which the trace loses
        with _disable_current_modes():
            before = [(t, t._version, t.detach().clone()) for t in given if not t.is_inference()]
        out = func(*args, **kwargs)
        for t, version, value in before:
            if t._version != version:
                with _disable_current_modes(), torch.no_grad():
                    t.copy_(value)
                raise _written(t)
        taught = [t for t in given if t.requires_grad]
        if taught and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tree_leaves(out)):
            raise ClosedOverError(
                f"the forward computes with a tensor of shape {tuple(taught[0].shape)} that requires a "
                "gradient and that it does not find as a parameter of the module: register it "
                "(nn.Parameter, nn.ParameterList), pass it as an argument, or detach it")
        return out


def _leaves(values: tuple[Any, ...]) -> Iterable[Any]:
    """What an operation takes; most take tensors and numbers alone."""
    return values if all(isinstance(v, _SINGLE) for v in values) else tree_leaves(values)


def _moves_statistics(norm: Any, *args: Any, **kwargs: Any) -> bool:
    given = inspect.signature(norm).bind(*args, **kwargs)
    given.apply_defaults()
    of = given.arguments
    return bool(of.get("training", of.get("use_input_stats"))) and any(
        type(of[name]) is torch.Tensor for name in ("running_mean", "running_var"))


def _written(t: torch.Tensor) -> ClosedOverError:
    return ClosedOverError(f"the forward writes to a tensor of shape {tuple(t.shape)} that is none of the "
                           "module's buffers or arguments: keep it in a buffer (register_buffer)")


def closed_over_as_buffers(program: fx.GraphModule) -> None:
    """Register closed-over tensors with the exported program, which shares them with the user."""
    for node in program.graph.nodes:
        # What the forward itself makes of Python values is fresh, and the trace takes it.
        if node.op != "get_attr" or any(n.target in _FRESH for n in node.users):
            continue
        path, _, name = str(node.target).rpartition(".")
        holder = program.get_submodule(path)
        value = holder.__dict__.get(name)
        if isinstance(value, torch.Tensor):
            del holder.__dict__[name]
            holder.register_buffer(name, value, persistent=False)
