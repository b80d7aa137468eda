"""Custom autograd functions, kept whole while a module is exported.

`torch.export` records the operations of a function's forward, and their derivative would replace the
function's own backward: a straight-through estimator would lose its gradient, a reversed gradient its sign.
So an export records each call as one operation. The joint trace of the exported program calls the function
again, and records its backward as autograd calls it.

Modules keep `F.apply` under names of their own, and torch reads `F.forward` each time that one of these is
called, with gradients switched off. So an export replaces that attribute, in the metaclass of all functions.
"""

from __future__ import annotations

import copy
import functools
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from operator import is_
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import fx, nn
from torch._functorch.autograd_function import CustomFunctionHigherOrderOperator
from torch._functorch.pyfunctorch import dispatch_functorch
from torch.autograd.function import BackwardCFunction, FunctionMeta
from torch.fx.experimental import proxy_tensor
from torch.utils.checkpoint import CheckpointFunction

from rkmate.errors import CaptureError
from rkmate.torch_seam.collectives import is_of_collectives
from rkmate.torch_seam.containers import attributes_in, objects_in, pytree
from rkmate.torch_seam.patches.autograd import region
from rkmate.torch_seam.schema import HigherOrderOperator
from rkmate.torch_seam.tensors import version_of
from rkmate.torch_seam.trace import inside_transform, several_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class _Call:
    """A call of a custom function."""

    function: type[torch.autograd.Function]
    args: tuple[Any, ...]
    """Tensors left out (None stands there)."""
    places: tuple[int, ...]
    """Positions of the tensors."""
    kwargs: dict[str, Any]
    held: tuple[torch.Tensor, ...] = ()
    """Frozen tensors inside of other arguments, in the order in which they follow the others as inputs."""

    def again(self, *tensors: torch.Tensor) -> Any:
        """Make the call again with these tensors."""
        count = len(self.places)
        others, kwargs = _with_tensors((self.args, self.kwargs), self.held, tensors[count:])
        args = list(others)
        for place, tensor in zip(self.places, tensors[:count], strict=True):
            args[place] = tensor
        result = self.function.apply(*args, **kwargs)
        return tuple(result) if isinstance(result, list) else result


class _Recorded(HigherOrderOperator):
    """Stands for one call in an exported program, and takes its tensors."""

    def __init__(self, call: _Call) -> None:
        super().__init__("rkmate_custom_function")
        self.call = call

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Raise: `run_as_they_are` replaces every such call."""
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
    found = _callers.get(getattr(type(context), "_forward_cls", type(context)))
    return None if found is None else found()


@contextmanager
def kept_whole() -> Iterator[None]:
    """Record each call of a custom function as one operation, while a module is exported.

    Run calls of `CheckpointFunction` through, and mark their operations as a region. Calls in other threads
    run as usual. Indexing by tensors under vmap (`ModIndex`, in the masks of transformers) is a custom
    function that torch would record by itself, with tensors of the transform.
    """
    from torch._dynamo import _trace_wrapped_higher_order_op as indexing  # slow to load
    here = threading.get_ident()

    def attribute(cls: Any, name: str) -> Any:
        value = type.__getattribute__(cls, name)
        # Torch keeps the mode of an export once for all threads.
        if name not in ("forward", "apply") or threading.get_ident() != here \
                or proxy_tensor.get_proxy_mode() is None:
            return value
        if name == "apply":
            return _run_through if issubclass(cls, CheckpointFunction) else value
        # Checkpointing has functions of its own to save; those that functorch makes call the function inside.
        called = issubclass(cls, torch.autograd.Function) and cls.__module__ != CheckpointFunction.__module__
        return _recording(cls, value) if called else value

    with mock.patch.object(FunctionMeta, "__getattribute__", attribute), \
            mock.patch.object(CustomFunctionHigherOrderOperator, "__call__", _under_transforms), \
            mock.patch.object(indexing, "mod_index", super(indexing.ModIndex, indexing.ModIndex).apply), \
            _refused("register_hook", _HOOKED), _refused("retain_grad", _RETAINED):
        yield


def _under_transforms(operator: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
    """Call a custom function under a transform (vmap), whose rule comes before the modes of an export. Torch
    asks the modes first, which have no rule for such calls."""
    return dispatch_functorch(operator, (function, *args), kwargs) if inside_transform() else \
        function.apply(*args, **kwargs)


def _run_through(run: Callable[..., Any], preserve_random_state: bool, *args: Any) -> Any:
    """Replace `CheckpointFunction.apply`, as what is kept is the plan's business.

    Without an argument that requires a gradient, the results require none, parameters or not. What several
    users inside contribute to the gradient of an argument is added up before it leaves the region: each
    argument is a view of its own there. Gradients leave it in the order of the arguments: autograd begins
    with the view that was made last.
    """
    if not any(_learns(a) for a in args):
        with torch.no_grad():
            return run(*args)
    with region():
        views = [a.view_as(a) if _learns(a) else a for a in reversed(args)]
        return run(*reversed(views))


def _learns(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def _recording(cls: type[torch.autograd.Function], forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function's forward, which records the call if `apply` calls it, but not if the model calls
    it itself."""
    takes_context = cls.setup_context is torch.autograd.Function.setup_context

    def recording(*args: Any, **kwargs: Any) -> Any:
        context = args[:takes_context]
        # Under vmap, torch makes a function of all rows, which is recorded; this one runs inside of it.
        if torch.is_grad_enabled() or inside_transform() or not all(
                isinstance(c, BackwardCFunction) for c in context):
            return forward(*args, **kwargs)
        return _recorded(cls, forward, context, args[takes_context:], kwargs)
    return recording


_HOOKED = ("registers a gradient hook on a tensor that it has made, which a captured step would not call: "
           "write what it does to the gradient as a torch.autograd.Function")
_RETAINED = ("asks for the gradient of a tensor that it has made (retain_grad), which a captured step does "
             "not keep: take it with torch.autograd.grad, or from a torch.autograd.Function")


def _refused(name: str, what: str) -> AbstractContextManager[Any]:
    """Refuse calls of a method of tensors by a traced forward. `what`: what that does, and a remedy."""
    here, plain = threading.get_ident(), getattr(torch.Tensor, name)

    @functools.wraps(plain)
    def method(tensor: torch.Tensor, *args: Any) -> Any:
        if proxy_tensor.get_proxy_mode() is None or threading.get_ident() != here:
            return plain(tensor, *args)
        raise CaptureError(f"the forward {what}")

    return mock.patch.object(torch.Tensor, name, method)


def _recorded(cls: type[torch.autograd.Function], forward: Callable[..., Any], context: tuple[Any, ...],
              args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the results of a forward that is not traced, as those of one operation."""
    mode: Any = proxy_tensor.get_proxy_mode()
    places = tuple(i for i, a in enumerate(args) if isinstance(a, torch.Tensor))
    others = tuple(None if i in places else a for i, a in enumerate(args))
    held = _held(cls, (others, kwargs))
    _note_caller(cls)
    # An operation on a tensor from outside makes it a constant of the trace.
    inside = [t.view_as(t) for t in held]
    proxies = [mode.tracer.unwrap_proxy(t) for t in (*(args[i] for i in places), *inside)]
    versions = {id(args[i]): version_of(args[i]) for i in places}
    given = filled, named = _with_tensors((others, kwargs), held, inside)
    before = _contents(given) if held else []
    with proxy_tensor.disable_proxy_modes_tracing():
        result = forward(*context, *(args[i] if i in places else a for i, a in enumerate(filled)), **named)
        # Torch makes a view of an input that is returned unchanged, too late for this trace.
        result = pytree.tree_map_only(
            torch.Tensor, lambda t: t.view_as(t) if versions.get(id(t)) == version_of(t) else t, result)
    after = _contents(given) if held else []
    if len(before) != len(after) or not all(map(is_, before, after)):
        raise CaptureError(f"the custom autograd function {cls.__name__} changes an object that it takes, "
                           "which a captured step would not repeat: return the values that it keeps there")
    call = _Call(cls, others, places, kwargs, held)
    proxy = mode.tracer.create_proxy("call_function", _Recorded(call), tuple(proxies), {},
                                     name=cls.__name__)
    return proxy_tensor.track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


def _held(cls: type[torch.autograd.Function], others: tuple[tuple[Any, ...], dict[str, Any]]) -> \
        tuple[torch.Tensor, ...]:
    """Return the tensors inside of arguments that are no tensors, such as the scales of a quantised weight.
    Raises `CaptureError` for an argument that may lead to a tensor with a gradient, `ValueError` for a number
    that stands for the value of a traced tensor."""
    held = {}
    if any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in pytree.tree_leaves(others)):
        raise ValueError(f"data-dependent: the custom autograd function {cls.__name__} takes a number that "
                         "the forward reads from a tensor")
    for value in (*objects_in(others), *others[0]):
        if is_of_collectives(value):
            continue
        if isinstance(value, nn.Module) or callable(value) or _learns(value):
            raise CaptureError(
                f"the custom autograd function {cls.__name__} takes a {type(value).__name__} that may "
                "hold tensors besides its arguments, and a captured step would not see "
                "their gradients: pass the tensors themselves, or use rkmate.dtr")
        if isinstance(value, torch.Tensor):
            held[id(value)] = value
    return tuple(held.values())


def _with_tensors(value: T, tensors: Sequence[torch.Tensor], instead: Sequence[torch.Tensor]) -> T:
    """Return a copy of a value with other tensors inside; the value itself where there are none."""
    if not tensors:
        return value
    memo: dict[int, Any] = {id(v): v for v in objects_in(value) if is_of_collectives(v)}
    return copy.deepcopy(value, memo | {id(t): new for t, new in zip(tensors, instead, strict=True)})


def _contents(value: Any) -> list[Any]:
    """Return the objects that a value consists of, and what they hold."""
    return [v for found in objects_in(value)
            for v in (found, *({} if isinstance(found, torch.Tensor) else attributes_in(found)).values())]


def run_as_they_are(program: fx.GraphModule) -> None:
    """Let the recorded calls of an exported program be calls of their functions again."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule):
            found = [n for n in module.graph.nodes if isinstance(n.target, _Recorded)]
            for node in found:
                node.target = _custom_function(node.target.call)
            if found:
                module.recompile()


def _custom_function(call: _Call) -> Callable[..., Any]:
    # A node's target has to have a name that Python code can have.
    def custom_function(*tensors: torch.Tensor) -> Any:
        return call.again(*tensors)
    return custom_function
