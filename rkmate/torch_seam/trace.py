"""Traces: the joint graph of AOTAutograd and the roles of its inputs and outputs, modes that are active, and
what a trace prints."""

from __future__ import annotations

import builtins
import importlib
import itertools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any, Literal
from unittest import mock

import torch
from torch import distributed as dist
from torch import fx, nn
from torch._functorch._aot_autograd import descriptors as D
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.fx import _lazy_graph_module
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from rkmate.torch_seam import nodes
from rkmate.torch_seam.schema import OpOverload

RoleKind = Literal["parameter", "buffer", "piece", "input", "tangent", "output", "mutation", "gradient",
                   "token", "other"]


@dataclass(frozen=True)
class Role:
    """The meaning of an input or an output of a joint graph."""

    kind: RoleKind
    """Inputs: a parameter, a buffer, a piece of one (of a tensor subclass), an argument, the gradient of an
    output (tangent), the order of effects (token). Outputs: a result, the new value of something that is
    written to, a gradient."""
    name: str = ""
    """Path of the parameter or buffer; attribute of a piece."""
    index: int = -1
    """Number of the argument, of the result, or of the result whose gradient a tangent is."""
    of: Role | None = None
    """The role that a piece is a part of, that a mutation writes to, or that a gradient belongs to; for
    "other", the role whose mutation has this tangent."""


def role_of(descriptor: Any) -> Role:
    """Return what a descriptor says (`nodes.descriptor`)."""
    if isinstance(descriptor, D.ParamAOTInput):
        return Role("parameter", descriptor.target)
    if isinstance(descriptor, D.BufferAOTInput):
        return Role("buffer", descriptor.target)
    if isinstance(descriptor, D.SubclassGetAttrAOTInput):
        return Role("piece", str(descriptor.attr), of=role_of(descriptor.base))
    if isinstance(descriptor, D.PlainAOTInput):
        return Role("input", index=descriptor.idx)
    if isinstance(descriptor, D.TangentAOTInput) and isinstance(descriptor.output, D.PlainAOTOutput):
        return Role("tangent", index=descriptor.output.idx)
    if isinstance(descriptor, D.PlainAOTOutput):
        return Role("output", index=descriptor.idx)
    if isinstance(descriptor, D.InputMutationAOTOutput):
        return Role("mutation", of=role_of(descriptor.mutated_input))
    if isinstance(descriptor, D.GradAOTOutput):
        return Role("gradient", of=role_of(descriptor.grad_of))
    if "Token" in type(descriptor).__name__:
        return Role("token")
    written = getattr(getattr(descriptor, "output", None), "mutated_input", None)
    return Role("other", of=None if written is None else role_of(written))


def is_tangent(node: fx.Node) -> bool:
    """Return whether an input of a joint graph is the gradient of one of its outputs."""
    return isinstance(nodes.descriptor(node), D.TangentAOTInput)


def export_joint(program: nn.Module, tensors: Sequence[torch.Tensor],
                 instead: Mapping[OpOverload, Callable[..., Any]] | None = None) -> fx.GraphModule:
    """Return the joint graph of forward and backward, its inputs and outputs with descriptors.

    instead: operator -> the function to trace in its place. Call `load` before contexts replace what the
    import binds.
    """
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, program, tuple(tensors),
                                                 decompositions=dict(instead or {})).graph_module


@contextmanager
def gradients_laid_out(strides: Sequence[tuple[int, ...] | None]) -> Iterator[None]:
    """Let the joint graphs that this thread traces take the gradients of their outputs with these strides, in
    the order of the outputs that have gradients; None: with the output's."""
    analysis = importlib.import_module("torch._functorch._aot_autograd.collect_metadata_analysis")
    plain, here = analysis.coerce_tangent_and_suggest_memory_format, threading.get_ident()
    following = itertools.cycle(strides)

    def coerced(tangent: Any, *others: Any) -> Any:
        found = plain(tangent, *others)
        stride = next(following) if threading.get_ident() == here else None
        if stride is None or len(stride) != tangent.dim():
            return found
        return (tangent.new_empty_strided(tangent.shape, stride), *found[1:])

    with mock.patch.object(analysis, plain.__name__, coerced):
        yield


def load() -> None:
    """Import what `export_joint` needs: seconds, with torch._dynamo."""
    importlib.import_module("torch._functorch.aot_autograd")


def graphs_without_code() -> AbstractContextManager[None]:
    """Let torch write the Python of a traced graph when the graph is called, and not each time that a step of
    the trace has changed it: most are never called."""
    return _lazy_graph_module._use_lazy_graph_module(True)


# -- modes that are active ---------------------------------------------------------------------

def inside_transform() -> bool:
    """Return whether a torch.func transform (vmap, grad, jvp) is running."""
    return torch._C._functorch.peek_interpreter_stack() is not None


@contextmanager
def forward_mode_ended() -> Iterator[None]:
    """Leave, at the end, each level of forward-mode derivatives (`torch.func.jvp`) that a trace has entered
    inside, and has not left because it ended in an error."""
    before = getattr(forward_ad, _LEVEL, None)
    try:
        yield
    finally:
        while before is not None and getattr(forward_ad, _LEVEL) > before:
            forward_ad.exit_dual_level()


_LEVEL = "_current_level"
"""The name under which torch counts such levels."""


def inside_fake_mode() -> bool:
    """Return whether a trace on fake tensors is running, which have no values."""
    return detect_fake_mode() is not None


@contextmanager
def values_refused() -> Iterator[None]:
    """Let a trace fail where an operation's result depends on values, in number or in shape."""
    with mock.patch.multiple(ShapeEnv, allow_dynamic_output_shape_ops=False, allow_scalar_outputs=False):
        yield


@contextmanager
def fake_operations_seen(look: Callable[[Any, Any, Any], None]) -> Iterator[None]:
    """Call `look` with each operation on fake tensors of this thread, its arguments and its keywords."""
    here, plain = threading.get_ident(), FakeTensorMode.dispatch

    def dispatch(mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() == here:
            look(func, args, kwargs)
        return plain(mode, func, types, args, kwargs or {})

    with mock.patch.object(FakeTensorMode, "dispatch", dispatch):
        yield


@contextmanager
def setting_refused(refuse: Callable[[], None]) -> Iterator[None]:
    """Call `refuse`, which raises, where a function of torch is to set the state of a default generator
    inside the context. Torch itself may (its tracer, ``torch.utils.checkpoint``)."""
    with ExitStack() as stack:
        for module in (torch, torch.random, torch.cuda):
            stack.enter_context(mock.patch.object(module, "set_rng_state", _Refusing(
                module.set_rng_state, refuse)))
        yield


class _Refusing:
    def __init__(self, plain: Callable[..., Any], refuse: Callable[[], None]) -> None:
        self._plain, self._refuse = plain, refuse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSED_THROUGH:
            frame = frame.f_back
        if not frame.f_globals.get("__name__", "").startswith("torch."):
            self._refuse()
        return self._plain(*args, **kwargs)


_PASSED_THROUGH = {"torch.random", "torch.cuda.random", "contextlib"}
"""Modules between a function that sets a state, and who wants it set."""


def several_ranks() -> bool:
    """Return whether this process is one of several ranks of an initialised process group."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def process_group(name: str) -> Any:
    """Return the process group that functional collectives know under a name."""
    from torch._C._distributed_c10d import _resolve_process_group
    return _resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def meeting_place(group: Any) -> tuple[Any, float]:
    """Return the store through which the ranks of a process group found each other (None where MPI started
    them), and the group's timeout in seconds. `group`: None for the default group."""
    group, timeout = group or dist.group.WORLD, dist.default_pg_timeout
    with suppress(AttributeError, RuntimeError):            # a backend without options
        if group._device_types:
            timeout = group._get_backend(group._device_types[0]).options._timeout
    return dist.distributed_c10d._get_default_store(), timeout.total_seconds()


def collectives_run() -> dict[str, int]:
    """Return how many collectives this rank has run in each of its process groups, by the group's name;
    without groups of one rank, and those of backends that do not count."""
    found: dict[str, int] = {}
    group: Any
    for group in list(dist.distributed_c10d._world.pg_map) if several_ranks() else ():
        with suppress(AttributeError, RuntimeError):
            if group.size() > 1:
                found[group.group_name] = group._get_sequence_number_for_group()
    return found


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Let this process be the first one of a process group whose other ranks are not there, and whose
    collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=count)
    try:
        yield
    finally:
        dist.destroy_process_group()


# -- what a trace prints -----------------------------------------------------------------------

def _printing() -> tuple[ModuleType, ...]:
    """Return the modules that print the graph so far, and the line that failed, to the standard error. The
    first takes seconds to load, with torch._dynamo."""
    import torch.export._trace
    import torch.fx.graph_module

    return torch.export._trace, torch.fx.graph_module


_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


def said_to_export() -> AbstractContextManager[Any]:
    """Let `torch.compiler.is_exporting` and `is_compiling` return True, as they do in a capture: libraries
    then leave out what depends on values (whether a mask has only ones)."""
    return mock.patch.multiple(torch.compiler, _is_exporting_flag=True, _is_compiling_flag=True)


@contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch prints about a failing trace from the user, who gets it as the exception.

    What other threads print and log, and what the model itself prints, is seen.
    """
    here = threading.get_ident()

    def printed(*values: Any, **how: Any) -> None:
        if threading.get_ident() != here:
            builtins.print(*values, **how)

    def is_seen(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno >= logging.CRITICAL

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    with ExitStack() as stack:
        for module in _printing():
            stack.enter_context(mock.patch.object(module, "print", printed, create=True))
        for logger in loggers:
            logger.addFilter(is_seen)
            stack.callback(logger.removeFilter, is_seen)
        yield


# -- functions ---------------------------------------------------------------------------------

def seen_inside(function: Any) -> Callable[..., Any]:
    """Return a function of torch that is written in Python as one whose calls a mode sees, in place of its
    own call."""
    hidden = {"has_torch_function_variadic": lambda *_: False}
    seen = FunctionType(function.__code__, {**function.__globals__, **hidden}, None, function.__defaults__)
    seen.__kwdefaults__ = function.__kwdefaults__
    return seen


def operations_of(function: Callable[..., Any], inputs: Sequence[torch.Tensor]) -> fx.Graph:
    """Return the operations that a function of fake tensors calls, those of derivatives that it asks for
    included. Aliases are left out."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.utils._python_dispatch import _disable_current_modes

    mode: Any = inputs[0].fake_mode  # type: ignore[attr-defined]
    with _disable_current_modes(), mode, torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        graph: fx.Graph = make_fx(function)(*inputs).graph
    for node in list(graph.nodes):
        if node.target in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
    graph.eliminate_dead_code()
    return graph
