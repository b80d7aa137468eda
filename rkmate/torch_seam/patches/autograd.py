"""Patches on autograd while a model is captured: autocast and the backward, checkpointed regions, gradients
that a forward takes by itself, nested graphs, tags of the backward, and closed-over tensors.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import fx, nn
from torch._functorch import config
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from rkmate.errors import CaptureError
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.nodes import annotation, is_backward, phase_tag
from rkmate.torch_seam.tensors import version_of, without_modes
from rkmate.torch_seam.trace import is_tangent

# -- Autocast and the backward ---------------------------------------------------------------------
#
# The backward is traced as it runs: after the autocast region that the forward stands in.


@contextmanager
def backward_without_autocast() -> Iterator[None]:
    """Trace the backward outside of autocast: values that the forward has in float32 keep that type in their
    gradients."""
    with config.patch(backward_pass_autocast="off"):
        yield


# -- Nodes of the backward -------------------------------------------------------------------------
#
# Which nodes of a joint graph belong to the backward.


def tag_what_needs_the_loss(graph: fx.Graph) -> None:
    """Tag everything that depends on a gradient as part of the backward, even if a nested graph has lost the
    tag."""
    for node in graph.nodes:
        if node.op == "call_function" and any(
                is_backward(n) or is_tangent(n)
                for n in node.all_input_nodes):
            node.meta.update(phase_tag(backward=True))


# -- Regions under torch.utils.checkpoint ----------------------------------------------------------
#
# The plan decides what is kept and what is computed again, so checkpointing does nothing in a trace. Each
# operation that the forward calls inside of a region carries the region's number, by which the step as the
# program runs it can be simulated.


_KEY = "rkmate_region"
_numbers = itertools.count()


@contextmanager
def region() -> Iterator[None]:
    """Let operations that are traced inside the context belong to one region: a new one, unless a region is
    open."""
    if annotation(torch.fx.traceback.current_meta, _KEY) is not None:
        yield
        return
    with torch.fx.traceback.preserve_node_meta(), torch.fx.traceback.annotate({_KEY: next(_numbers)}):
        yield


@contextmanager
def regions_marked() -> Iterator[None]:
    """Mark regions without reentrance, while a module is exported; `custom_functions` sees the others.

    What autograd saves inside passes through no hooks, as these would be recorded. Calls in other threads run
    as usual.
    """
    here = threading.get_ident()
    plain = torch.utils.checkpoint._checkpoint_hook

    def marked(frame: Any) -> AbstractContextManager[None]:
        elsewhere = proxy_tensor.get_proxy_mode() is None or threading.get_ident() != here
        return plain(frame) if elsewhere else region()

    with mock.patch.object(torch.utils.checkpoint, "_checkpoint_hook", marked):
        yield


def region_of(node: fx.Node) -> int | None:
    """Return the region that an operation of the forward was called in."""
    number: int | None = annotation(node.meta, _KEY)
    return number


# -- Forwards that differentiate by themselves -----------------------------------------------------
#
# Forces of an energy, gradient penalties: `torch.export` cannot record them. The trace of the joint graph
# can, because an inner gradient is made of operations like any other. So such a forward is traced without an
# export before it.


class OwnBackwardError(CaptureError):
    """A forward that calls ``backward()``."""


@contextmanager
def noting_inner_gradients(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` when a gradient is requested inside the context. A gradient that would be added to
    ``.grad`` raises `OwnBackwardError`."""
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]

    def noted(*args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if accumulate_grad:
            raise OwnBackwardError("the forward calls backward(), which adds to the .grad of parameters, and "
                                   "a plan cannot repeat that: use torch.autograd.grad instead")
        note()
        return run(*args, accumulate_grad=accumulate_grad, **kwargs)

    with mock.patch.object(torch.autograd, "_engine_run_backward", noted):
        yield


# -- Nested graphs of an exported forward ----------------------------------------------------------
#
# The operations inside of an autocast or no-grad region know which module they come from, and which
# checkpointed region. A joint trace calls the graph of such a region as one function, and its operations
# would carry what is known of the whole region.


def traced_node_by_node(program: fx.GraphModule) -> None:
    """Let the graphs inside of an exported program run as the program itself is run."""
    for module in program.modules():
        if isinstance(module, fx.GraphModule) and module is not program:
            module.forward = MethodType(_run, module)


def _run(graph: fx.GraphModule, *args: Any) -> Any:
    return fx.Interpreter(graph, garbage_collect_values=False).run(*args)


# -- Closed-over tensors ---------------------------------------------------------------------------
#
# A forward may compute with tensors that are not parameters, buffers or arguments, but plain attributes,
# members of lists, or globals. The tracer takes them as they are. The trace of the gradients does not: there
# they become buffers.


_NORMS = (F.batch_norm, F.instance_norm)
_SINGLE = (torch.Tensor, int, float, str, torch.dtype, type(None))
_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class ClosedOverError(CaptureError):
    """Raised while a forward is traced, before it is known where."""


def lost_tensors_refused() -> AbstractContextManager[Any]:
    """Raise `ClosedOverError` for lost tensors while a model's forward is traced."""
    return _Guard()


class _Guard(TorchFunctionMode):
    """Raises `ClosedOverError` if an operation takes a closed-over tensor that requires a gradient, which the
    trace would lose silently, or writes to a closed-over tensor, which only the trace would do.

    The tracer replaces parameters, buffers and arguments by objects of other classes.
    """

    def __torch_function__(self, func: Callable[..., Any], types: Iterable[type],
                           args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [t for t in _leaves((*args, *kwargs.values())) if type(t) in (torch.Tensor, nn.Parameter)]
        if not given or func.__name__ == "__get__":
            return func(*args, **kwargs)
        if func in _NORMS and _moves_statistics(func, *args, **kwargs):
            raise _written(given[0])        # which the trace loses
        with without_modes():
            before = [(t, version_of(t), t.detach().clone()) for t in given if not t.is_inference()]
        out = func(*args, **kwargs)
        for t, version, value in before:
            if version_of(t) != version:
                with without_modes(), torch.no_grad():
                    t.copy_(value)
                raise _written(t)
        taught = [t for t in given if t.requires_grad]
        if taught and any(isinstance(t, torch.Tensor) and t.requires_grad for t in pytree.tree_leaves(out)):
            raise ClosedOverError(
                f"the forward computes with a tensor of shape {tuple(taught[0].shape)} that requires a "
                "gradient and that it does not find as a parameter of the module: register it "
                "(nn.Parameter, nn.ParameterList), pass it as an argument, or detach it")
        return out


def _leaves(values: tuple[Any, ...]) -> Iterable[Any]:
    """Return the inputs of an operation; most operations take only tensors and numbers."""
    return values if all(isinstance(v, _SINGLE) for v in values) else pytree.tree_leaves(values)


def _moves_statistics(norm: Any, *args: Any, **kwargs: Any) -> bool:
    given = inspect.signature(norm).bind(*args, **kwargs)
    given.apply_defaults()
    of = given.arguments
    return bool(of.get("training", of.get("use_input_stats"))) and any(
        type(of[name]) is torch.Tensor for name in ("running_mean", "running_var"))


def _written(t: torch.Tensor) -> ClosedOverError:
    return ClosedOverError(f"the forward writes to a tensor of shape {tuple(t.shape)} that is not a "
                           "buffer or argument of the module: keep it in a buffer (register_buffer)")


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

