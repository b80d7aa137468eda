"""Custom autograd functions, kept whole while a module is exported.

`torch.export` records the operations of a function's forward, and their derivative would take the
place of the function's own backward: a straight-through estimator would lose its gradient, a reversed
gradient its sign. So each call is recorded as one operation, and runs as it is when the joint graph
is traced from the exported program; its backward is then traced as autograd calls it.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import CheckpointFunction

from rkmate.errors import CaptureError
from rkmate.torch_seam.containers import objects_in
from rkmate.torch_seam.patches.autograd import region
from rkmate.torch_seam.trace import several_ranks


@dataclass(frozen=True)
class _Call:
    """One call of a custom function."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]
    """Tensors left out (None stands there)."""
    places: tuple[int, ...]
    """Where the tensors stand."""
    kwargs: dict[str, Any]

    def again(self, *tensors: torch.Tensor) -> Any:
        """The call, with these tensors."""
        args = list(self.args)
        for place, tensor in zip(self.places, tensors, strict=True):
            args[place] = tensor
        result = self.function.apply(*args, **self.kwargs)
        return tuple(result) if isinstance(result, list) else result


class _Recorded(HigherOrderOperator):
    """Stands for one call in an exported program, and takes its tensors."""

    def __init__(self, call: _Call) -> None:
        super().__init__("rkmate_custom_function")
        self.call = call

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Never runs: `run_as_they_are` replaces it."""
        raise AssertionError("a custom function was left in an exported program")


_callers: weakref.WeakKeyDictionary[type, weakref.ref[nn.Module]] = weakref.WeakKeyDictionary()
"""Custom functions, and the module that has called each one last."""


def _note_caller(function: type[torch.autograd.Function]) -> None:
    frame = sys._getframe(1) if several_ranks() else None
    while frame is not None:
        module = frame.f_locals.get("self")
        if isinstance(module, nn.Module):
            _callers[function] = weakref.ref(module)
            return
        frame = frame.f_back


def caller_of(context: object) -> nn.Module | None:
    """Return the module that called the custom function whose context this is; None for anything else.

    A function's backward is traced apart from its forward. Callers are remembered where there are several
    ranks.
    """
    found = _callers.get(getattr(type(context), "_forward_cls", type(None)))
    return None if found is None else found()


@contextmanager
def kept_whole() -> Iterator[None]:
    """While a module is exported. Other threads' calls run as ever.

    Modules keep `F.apply` under names of their own, so it is the method's code that changes.
    """
    here = threading.get_ident()
    method: Any = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
    code = method.__code__
    plain = types.FunctionType(code, method.__globals__, method.__name__, method.__defaults__,
                               method.__closure__)

    def apply(cls: type[torch.autograd.Function], args: tuple[Any, ...],
              kwargs: dict[str, Any]) -> Any:
        mode = proxy_tensor.get_proxy_mode()
        # Torch keeps the mode of an export once for all threads.
        if mode is None or threading.get_ident() != here:
            return plain(cls, *args, **kwargs)
        if issubclass(cls, CheckpointFunction):
            # What is checkpointed is the plan's business; without such inputs it takes no gradient.
            run, _, *rest = args
            learns = any(isinstance(a, torch.Tensor) and a.requires_grad for a in rest)
            if not learns:
                return plain(cls, *args, **kwargs)
            with region():
                return run(*rest)
        return _recorded(mode, plain, cls, args, kwargs)

    globals_ = method.__globals__
    globals_[_HOOK] = apply
    method.__code__ = _calling_the_hook(code)
    try:
        with mock.patch.object(torch.Tensor, "register_hook", _refusing(torch.Tensor.register_hook)):
            yield
    finally:
        method.__code__ = code
        # It stays: another thread's call may have begun with the other code.
        globals_[_HOOK] = lambda cls, args, kwargs: plain(cls, *args, **kwargs)


_HOOK = "_rkmate_apply"


def _calling_the_hook(code: types.CodeType) -> types.CodeType:
    """The code of ``apply(cls, *args, **kwargs)`` that calls the hook; with the cells of `code`."""
    cells = "".join(f"    {name} = None\n" for name in code.co_freevars)
    read = "".join(f"        {name}\n" for name in code.co_freevars)
    space: dict[str, Any] = {}
    exec(f"def outer():\n{cells}    def apply(cls, *args, **kwargs):\n"
         f"        return {_HOOK}(cls, args, kwargs)\n{read}    return apply\n", space)
    made: types.CodeType = space["outer"]().__code__
    return made


def _refusing(register: Callable[..., Any]) -> Callable[..., Any]:
    here = threading.get_ident()

    def register_hook(tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        if proxy_tensor.get_proxy_mode() is None or threading.get_ident() != here:
            return register(tensor, hook)
        raise CaptureError(
            "the forward registers a gradient hook on a tensor that it has made, which a captured step "
            "would not call: write what it does to the gradient as a torch.autograd.Function, or "
            "return the tensor and hook it outside")
    return register_hook


def _recorded(mode: Any, plain: Callable[..., Any], cls: type[torch.autograd.Function],
              args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    places = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
    others = tuple(None if i in places else a for i, a in enumerate(args))
    for value in (*objects_in((others, kwargs)), *others):
        if isinstance(value, (torch.Tensor, nn.Module)) or callable(value):
            raise CaptureError(
                f"the custom autograd function {cls.__name__} takes a {type(value).__name__} that may "
                "hold tensors beside those that it is called with, and a captured step would not see "
                "their gradients: pass the tensors themselves, or use rkmate.dtr")
    _note_caller(cls)
    proxies = [mode.tracer.unwrap_proxy(args[i]) for i in places]
    with proxy_tensor.disable_proxy_modes_tracing():
        result = plain(cls, *args, **kwargs)
    call = _Call(cls, others, places, kwargs)
    proxy = mode.tracer.create_proxy("call_function", _Recorded(call), tuple(proxies), {},
                                     name=cls.__name__)
    return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


def run_as_they_are(program: fx.GraphModule) -> None:
    """Let the recorded calls of an exported program be calls of their functions again."""
    for node in program.graph.nodes:
        if isinstance(node.target, _Recorded):
            node.target = _custom_function(node.target.call)
    program.recompile()


def _custom_function(call: _Call) -> Callable[..., Any]:
    # A node's target has to have a name that Python code can have.
    def custom_function(*tensors: torch.Tensor) -> Any:
        return call.again(*tensors)
    return custom_function

