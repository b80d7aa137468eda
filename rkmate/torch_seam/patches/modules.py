"""Patches on `nn.Module` while a model is captured: batch norms with cumulative averages, buffers that a
forward makes anew, frozen parameters with attributes, modules that are moved to where they are, hooks around
every module, and modules that were compiled in place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from rkmate.errors import CaptureError
from rkmate.torch_seam.modules import (
    buffers_of,
    compiled_call,
    is_compiled_in_place,
    original_of,
    parameters_of,
    replace_call,
    submodules_of,
)
from rkmate.torch_seam.patches.libraries import is_observer
from rkmate.torch_seam.tensors import is_unwrapped, without_torch_function

# -- Batch norms with a cumulative average ---------------------------------------------------------
#
# With ``momentum=None`` the module reads the number of batches back from its buffer, which no static
# graph can. Here the factor stays a tensor; values are those of the kernel, which computes the average in
# double precision.


@contextmanager
def cumulative_averages_as_tensors(model: nn.Module) -> Iterator[None]:
    """Let batch norms with cumulative averages run a traceable forward inside the context."""
    changed = [m for m in model.modules()
               if isinstance(m, _BatchNorm) and type(m).forward is _BatchNorm.forward
               and m.momentum is None and m.training and m.track_running_stats
               and "forward" not in m.__dict__]
    for m in changed:
        m.__dict__["forward"] = partial(_forward, m)
    try:
        yield
    finally:
        for m in changed:
            m.__dict__.pop("forward", None)


def _forward(m: _BatchNorm, x: torch.Tensor) -> torch.Tensor:
    m._check_input_dim(x)
    assert m.running_mean is not None
    assert m.running_var is not None
    assert m.num_batches_tracked is not None
    m.num_batches_tracked.add_(1)
    factor = 1.0 / m.num_batches_tracked.double()
    # At momentum one the running statistics become the batch's own.
    mean, var = torch.zeros_like(m.running_mean), torch.zeros_like(m.running_var)
    y = F.batch_norm(x, mean, var, m.weight, m.bias, True, 1.0, m.eps)
    for running, own in ((m.running_mean, mean), (m.running_var, var)):
        average = factor * own.double() + (1 - factor) * running.double()
        running.copy_(average.to(running.dtype))
    return y


# -- Buffers that a forward makes anew -------------------------------------------------------------
#
# A trace sees what is written to a tensor, not which tensor a module's buffer is afterwards
# (``self.mean = 0.9 * self.mean + ...``): the new buffer becomes a write in place.


@contextmanager
def new_buffers_as_writes(model: nn.Module) -> Iterator[None]:
    """Turn new buffers into writes while a model's forward is traced. Raises `CaptureError` as
    `_Registered.write_back` does."""
    registered = _Registered(model)
    yield
    registered.write_back()


class MadeByFirstCall(CaptureError):
    """A forward has registered what was not there (a buffer, a parameter under another name, a submodule),
    has frozen or thawed a parameter, or counts under a key that was not there."""

    learns = False
    """Whether what it has made leads to parameters."""


_CALL_FIRST = ("Where only the first call on inputs of a size does so (a table that it keeps), call the "
               "model on such inputs before it is wrapped")


class _Registered:
    """The tensors that a model's modules have registered when a forward begins."""

    def __init__(self, model: nn.Module) -> None:
        self._root, self._model = model, type(model).__name__
        self._buffers = [(path, m, name, t) for path, m in model.named_modules()
                         for name, t in buffers_of(m).items()]
        self._parameters = [(path, m, name, t) for path, m in model.named_modules()
                            for name, t in parameters_of(m).items()]
        self._known = self._names()

    def _names(self) -> dict[str, str]:
        """Return the kinds of what modules have registered, by each full name. (An export has copies of
        modules that are used in several places.)"""
        modules = self._root.named_modules(remove_duplicate=False)
        return {_full(path, name): kind for path, module in modules
                for kind, members in (("buffer", buffers_of(module)), ("parameter", parameters_of(module)),
                                      ("submodule", submodules_of(module)))
                for name, member in members.items() if member is not None or kind != "buffer"}

    def write_back(self) -> None:
        """Write each buffer that is another tensor by now into the one that it was.

        Raises `CaptureError` for a parameter that was replaced, and for a buffer of another shape or
        dtype than before; `MadeByFirstCall` for what was not there.
        """
        for path, module, name, before in self._parameters:
            if parameters_of(module).get(name) is not before:
                raise CaptureError(f"{self._model}: the forward replaces the parameter "
                                   f"{_full(path, name)!r}, which a captured step would not repeat: change "
                                   "its values outside of the forward, or keep it in a buffer")
        # A sharded layer seems to be empty until it is called: what it has then is not new.
        seen = {name.rpartition(".")[0] for name in self._known}
        for made, kind in self._names().items():
            if made not in self._known and (kind == "buffer" or made.rpartition(".")[0] in seen):
                raise MadeByFirstCall(f"{self._model}: the forward makes the {kind} {made!r}, which a "
                                      f"captured step would not repeat. {_CALL_FIRST}")
        for path, module, name, before in self._buffers:
            now = buffers_of(module).get(name)
            if now is before or before is None:
                continue
            if now is None or (now.shape, now.dtype, now.device) != (
                    before.shape, before.dtype, before.device):
                raise CaptureError(
                    f"{self._model}: the forward replaces the buffer {_full(path, name)!r} by "
                    "something of another shape, type or device (or drops it), which a captured step "
                    f"would not repeat: write into it in place, or return it. {_CALL_FIRST}")
            with torch.no_grad():
                before.copy_(now)
            buffers_of(module)[name] = before


def _full(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


# -- Frozen parameters with attributes -------------------------------------------------------------
#
# A quantised weight of bitsandbytes is a parameter of a class of its own, and has its scales as attributes. A
# trace replaces parameters by tensors that have neither. So a traced model holds plain parameters on the same
# memory, and the tensors that replace them get the attributes. The scales become constants of the plan.

_here = threading.local()


@contextmanager
def frozen_parameters_plain(model: nn.Module) -> Iterator[None]:
    """Let a model hold plain parameters in place of frozen ones of other classes, inside the context.
    Parameters that dispatch their own operations stay as they are."""
    found = [(m, name, p) for m in model.modules()
             for name, p in parameters_of(m).items() if _has_attributes(p)]
    plain: dict[int, nn.Parameter] = {}
    with ExitStack() as stack:
        for module, name, p in found:
            if id(p) not in plain:
                with without_torch_function():
                    plain[id(p)] = nn.Parameter(p.detach().as_subclass(torch.Tensor), requires_grad=False)
            stack.callback(parameters_of(module).__setitem__, name, p)
            parameters_of(module)[name] = plain[id(p)]
        _here.carried = found
        stack.callback(setattr, _here, "carried", [])
        yield


def _has_attributes(parameter: Any) -> bool:
    return type(parameter) not in (nn.Parameter, nn.UninitializedParameter) \
        and isinstance(parameter, nn.Parameter) and not parameter.requires_grad \
        and bool(parameter.__dict__) and not is_traceable_wrapper_subclass(parameter)


@contextmanager
def attributes_carried() -> Iterator[None]:
    """Give the tensors that replace frozen parameters in a trace the attributes of those parameters."""
    for module, name, p in getattr(_here, "carried", []):
        parameters_of(module)[name].__dict__.update(p.__dict__)
    yield


def has_this_memory(traced: Any, value: Any) -> bool:
    """Return whether a tensor of a trace replaces a frozen parameter with attributes that is made of the
    memory of `value` anyway."""
    return is_unwrapped(value) and any(
        parameters_of(m).get(name) is traced and value.data_ptr() == p.data_ptr()
        and (value.dtype, value.shape, value.stride()) == (p.dtype, p.shape, p.stride())
        for m, name, p in getattr(_here, "carried", []))


# -- Modules that a forward moves to where they are ------------------------------------------------
#
# Modules that a forward moves to where they are: a router's `classifier.to(dtype)`.


@contextmanager
def standing_modules_stay() -> Iterator[None]:
    """Let `Module.to` do nothing while a module is captured, if it would move nothing. Otherwise it makes new
    parameters, which a trace cannot follow. Calls of other threads run as usual."""
    here = threading.get_ident()
    plain = nn.Module.to

    def to(self: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        stays = threading.get_ident() == here and _moves_nothing(self, *args, **kwargs)
        return self if stays else plain(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "to", to):
        yield


def _moves_nothing(module: nn.Module, *args: Any, **kwargs: Any) -> bool:
    device, dtype, _, layout = torch._C._nn._parse_to(*args, **kwargs)
    tensors = (*module.parameters(), *module.buffers())
    return layout is None and all(
        (device is None or torch.empty(0, device=device).device == t.device)
        and (dtype is None or t.dtype is dtype or not (t.is_floating_point() or t.is_complex()))
        for t in tensors)


# -- Hooks around every module of the process ------------------------------------------------------
#
# Hooks that torch runs around the calls of every module of the process (`register_module_forward_hook`).


_COUNTING = ("torch.utils.module_tracker", "torch.distributed._tools.mod_tracker",
             "torch.distributed.tensor.debug._comm_mode")
"""Torch's own, which note what runs (to count operations): they compute nothing."""


def global_forward_hooks() -> list[Callable[..., Any]]:
    """Return the hooks around all forwards that may compute something."""
    return [h for place in _forward_places() if place for h in place.values() if not _only_looks(h)]


def global_backward_hooks() -> list[Callable[..., Any]]:
    """Return the hooks around all backwards that may compute something."""
    before, after = (torch.nn.modules.module._global_backward_pre_hooks,
                     torch.nn.modules.module._global_backward_hooks)
    return [h for h in (*before.values(), *after.values()) if not _only_looks(h)]


@contextmanager
def hooks_of_the_model_alone(model: nn.Module) -> Iterator[None]:
    """Run global forward hooks around the modules of a model, but not around modules that a trace adds, and
    none that only count. A hook that changes the inputs or outputs of the model itself raises `CaptureError`:
    it would also run around the module that replaces the model."""
    places = _forward_places()
    if not any(places):
        yield
        return
    mine, before = {id(m) for m in model.modules()}, [dict(place) for place in places]

    def guarded(hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(module: nn.Module, *args: Any) -> Any:
            found = hook(module, *args) if id(module) in mine and not _only_counts(hook) else None
            if found is not None and module is model:
                raise CaptureError(
                    f"a forward hook around every module changes what {type(model).__name__} itself takes or "
                    "returns, and would do so a second time around the planned module: register it at the "
                    "modules that it is for (Module.register_forward_hook)")
            return found
        return run

    try:
        for place in places:
            place.update({key: guarded(hook) for key, hook in place.items()})
        yield
    finally:
        for place, hooks in zip(places, before, strict=True):
            place.update(hooks)


def _forward_places() -> tuple[dict[int, Callable[..., Any]], ...]:
    return torch.nn.modules.module._global_forward_pre_hooks, torch.nn.modules.module._global_forward_hooks


def _only_looks(hook: Callable[..., Any]) -> bool:
    return is_observer(hook) or _only_counts(hook)


def _only_counts(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", None) in _COUNTING


# -- Modules that were compiled --------------------------------------------------------------------


@contextmanager
def calls_uncompiled(model: nn.Module) -> Iterator[None]:
    """Let modules that were compiled, in place or by `torch.compile`, run their own calls inside the
    context."""
    compiled = [(m, compiled_call(m)) for m in model.modules() if is_compiled_in_place(m)]
    for m, _ in compiled:
        replace_call(m, None)
    try:
        with returned_uncompiled(model):
            yield
    finally:
        for m, call in compiled:
            replace_call(m, call)


@contextmanager
def returned_uncompiled(model: nn.Module) -> Iterator[None]:
    """Let modules that `torch.compile` has returned call what it was given inside the context."""
    returned = [(m, vars(m)["forward"], original) for m in model.modules()
                if (original := original_of(m)) is not None]
    for m, _, original in returned:
        vars(m)["forward"] = original
    try:
        yield
    finally:
        for m, forward, _ in returned:
            vars(m)["forward"] = forward
