"""Patches on autograd while a model is captured: autocast and the backward, checkpointed regions, gradients
that a forward takes by itself, nested graphs, tags of the backward, and closed-over tensors.
"""

from __future__ import annotations

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.fx.traceback
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import fx, nn
from torch._export.passes import replace_autocast_with_hop_pass, replace_set_grad_with_hop_pass
from torch._functorch import config, eager_transforms
from torch._functorch._aot_autograd import collect_metadata_analysis
from torch.fx.experimental import proxy_tensor
from torch.overrides import TorchFunctionMode

from rkmate import device as devices
from rkmate.errors import CaptureError
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.nodes import annotation, is_backward, phase_tag
from rkmate.torch_seam.patches.modules import MadeByFirstCall, has_this_memory
from rkmate.torch_seam.schema import python_kernels_replaced, without_python_kernels
from rkmate.torch_seam.tensors import is_unwrapped, storage_id, version_of, without_modes
from rkmate.torch_seam.trace import is_tangent

# -- Autocast ---------------------------------------------------------------------------------------
#
# The backward is traced as it runs: after the autocast region that the forward stands in.
#
# Eager mode casts a weight once in an autocast region, keeps the cast to the region's end, and adds up what
# comes back for it in the region's type. Torch's own cache knows leaves alone, and a trace of gradients has
# none; and it is switched off in traces, as its values could be found again in another one.


@contextmanager
def backward_without_autocast() -> Iterator[None]:
    """Trace the backward outside of autocast: values that the forward has in float32 keep that type in their
    gradients."""
    with config.patch(backward_pass_autocast="off"):
        yield


class _Casts:
    """The casts of a trace, for as long as their region lasts."""

    def __init__(self) -> None:
        self.leaves: dict[int, torch.Tensor] = {}
        """By identity: what eager mode would keep a cast of."""
        self.found: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self.regions: list[torch.autocast] = []
        """The contexts that the exported forward is inside of."""
        self._clear = torch.clear_autocast_cache

    def clear(self) -> None:
        """Forget them, and torch's own."""
        self.found.clear()
        self._clear()

    @contextmanager
    def of_a_trace(self) -> Iterator[None]:
        """Inside, no cast from outside is found, and outside none from inside."""
        self.clear()
        try:
            yield
        finally:
            while self.regions:
                self.regions.pop().__exit__(None, None, None)
            self.leaves.clear()
            self.clear()

    def to_copy(self, x: torch.Tensor, *, dtype: torch.dtype | None = None, **others: Any) -> torch.Tensor:
        """`aten._to_copy`, which autocast calls."""
        kept = self.leaves.get(id(x)) is x and not any(others.values()) and _casts_to(x) is dtype
        found = self.found.get((id(x), dtype)) if kept and dtype is not None else None
        if found is None:
            with without_python_kernels():
                found = _TO_COPY(x, dtype=dtype, **others)
            if kept and dtype is not None:
                self.found[id(x), dtype] = found
        return found


_TO_COPY = torch.ops.aten._to_copy.default
_casts: _Casts | None = None
"""Casts of the capture that is under way: there is one at a time."""


def _casts_to(x: torch.Tensor) -> torch.dtype | None:
    """The type that autocast casts a tensor to at this moment; None where it does not, or keeps no casts."""
    kind = devices.of(x).autocast_kind
    # Around a cast of its own, and around the operation that it is for, autocast switches itself off.
    if x.dtype is not torch.float32 or torch.is_autocast_enabled(kind):
        return None
    torch.autocast_increment_nesting()
    inside = torch.autocast_decrement_nesting() > 0
    return torch.get_autocast_dtype(kind) if inside and torch.is_autocast_cache_enabled() else None


@contextmanager
def casts_kept_in_regions() -> Iterator[None]:
    """While a module is captured: an autocast region casts each weight once, as in eager mode."""
    global _casts
    before, _casts = _casts, _Casts()
    try:
        with mock.patch.object(proxy_tensor, "disable_autocast_cache", _casts.of_a_trace), \
                mock.patch.object(collect_metadata_analysis, "disable_autocast_cache", _casts.of_a_trace), \
                mock.patch.object(torch, "clear_autocast_cache", _casts.clear), \
                python_kernels_replaced({_TO_COPY: _casts.to_copy}):
            yield
    finally:
        _casts = before


def note_leaves(*tensors: torch.Tensor) -> None:
    """Tell which tensors eager mode would keep casts of: leaves that require a gradient."""
    if _casts is not None:
        _casts.leaves.update((id(t), t) for t in tensors if t.requires_grad)


def leaves_noted(program: fx.GraphModule) -> None:
    """Let an exported program tell of its parameters and arguments when it begins."""
    first = next((n for n in program.graph.nodes if n.op not in ("placeholder", "get_attr")), None)
    if first is None:
        return
    parameters = {name for name, _ in program.named_parameters(remove_duplicate=False)}
    leaves = [n for n in program.graph.nodes
              if n.op == "placeholder" or (n.op == "get_attr" and n.target in parameters)]
    for node in leaves:
        first.prepend(node)
    with program.graph.inserting_before(first):
        program.graph.call_function(note_leaves, tuple(leaves))
    program.recompile()


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


REGION = "rkmate_region"
"""Key of a region's number among a node's annotations."""
_numbers = itertools.count()


@contextmanager
def region() -> Iterator[None]:
    """Let operations that are traced inside the context belong to one region: a new one, unless a region is
    open."""
    if annotation(torch.fx.traceback.current_meta, REGION) is not None:
        yield
        return
    with torch.fx.traceback.preserve_node_meta(), torch.fx.traceback.annotate({REGION: next(_numbers)}):
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


def renewed_region(number: int) -> int:
    """Return the number of a new region, which is like another one in another layer."""
    return next(_numbers)


def region_of(node: fx.Node) -> int | None:
    """Return the region that an operation of the forward was called in."""
    number: int | None = annotation(node.meta, REGION)
    return number


# -- Forwards that differentiate by themselves -----------------------------------------------------
#
# Forces of an energy, gradient penalties: `torch.export` cannot record them. The trace of the joint graph
# can, because an inner gradient is made of operations like any other. So such a forward is traced without an
# export before it.


class OwnBackwardError(CaptureError):
    """A forward that calls ``backward()``, or ``torch.func.linearize``."""


@contextmanager
def noting_inner_gradients(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` when this thread requests a gradient inside the context. A gradient that would be added to
    ``.grad``, and a function that is linearized, raise `OwnBackwardError`."""
    begin_trace = eager_transforms.lazy_dynamo_disallow
    run, mine = torch.autograd._engine_run_backward, threading.get_ident()  # type: ignore[attr-defined]

    def noted(*args: Any, accumulate_grad: bool, **kwargs: Any) -> Any:
        if threading.get_ident() != mine:       # another model trains meanwhile
            return run(*args, accumulate_grad=accumulate_grad, **kwargs)
        if accumulate_grad:
            raise OwnBackwardError("the forward calls backward(), which adds to the .grad of parameters, and "
                                   "a plan cannot repeat that: use torch.autograd.grad instead")
        note()
        return run(*args, accumulate_grad=accumulate_grad, **kwargs)

    def linearized(trace: Any) -> Any:
        if threading.get_ident() != mine:
            return begin_trace(trace)
        raise OwnBackwardError(
            "the forward calls torch.func.linearize, which makes a trace of its own, without gradients of "
            "parameters: use torch.func.jvp(f, (x,), (t,)), whose results have them (call .detach() on the "
            "second one for the gradients that linearize leaves)")

    def noting(enter: Callable[..., Any]) -> Callable[..., Any]:
        def noted_entry(*args: Any) -> Any:
            if threading.get_ident() == mine:
                note()
            return enter(*args)
        return noted_entry

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.autograd, "_engine_run_backward", noted))
        stack.enter_context(mock.patch.object(eager_transforms, "lazy_dynamo_disallow", linearized))
        for name in _TRANSFORMS:
            entry = noting(getattr(eager_transforms, name))
            stack.enter_context(mock.patch.object(eager_transforms, name, entry))
        yield


_TRANSFORMS = ("_grad_increment_nesting", "_jvp_increment_nesting")
"""The functions that the differentiating transforms of torch.func call."""


def check_transforms(program: fx.GraphModule) -> None:
    """Raise `LostTransform` where an exported program leaves a differentiating transform of torch.func: the
    export has lost its operations, and holds values of its trace as constants."""
    if any(n.op == "call_function" and getattr(n.target, "__name__", "") in _LEAVES
           for module in program.modules() if isinstance(module, fx.GraphModule) for n in module.graph.nodes):
        raise LostTransform("an export has lost the operations of a transform of torch.func")


_LEAVES = ("_unwrap_for_grad", "_grad_decrement_nesting", "_jvp_decrement_nesting")
"""Names of the functions that transforms of torch.func end with."""


class LostTransform(RuntimeError):
    """An exported program has lost a part of its forward."""


# -- Regions of an exported forward ----------------------------------------------------------------
#
# Torch makes a graph of its own of what stands in an autocast or no-grad region. Of a region in another one
# it loses the no-grad, and makes three regions of the outer one, each with casts of its own; and the joint
# trace calls such a graph as one function, whose operations know neither their modules nor checkpointed
# regions. Here the exported forward enters and leaves its regions as the model's own forward does.


@contextmanager
def regions_entered_in_place() -> Iterator[None]:
    """While a module is exported."""
    with mock.patch.object(replace_autocast_with_hop_pass, "replace_autocast_with_hop_pass", _as_it_is), \
            mock.patch.object(replace_set_grad_with_hop_pass, "replace_set_grad_with_hop_pass", _as_it_is):
        yield


@contextmanager
def inference_without_gradients() -> Iterator[None]:
    """Let ``torch.inference_mode`` only switch gradients off (or on), in this thread."""
    kind, here = torch.inference_mode, threading.get_ident()
    enter, leave = kind.__enter__, kind.__exit__
    open_regions: list[torch.set_grad_enabled] = []

    def entered(self: torch.inference_mode) -> None:
        if threading.get_ident() == here:
            open_regions.append(torch.set_grad_enabled(not self.mode))
        else:
            enter(self)

    def left(self: torch.inference_mode, *error: Any) -> None:
        if threading.get_ident() == here:
            open_regions.pop().__exit__(*error)
        else:
            leave(self, *error)

    with mock.patch.multiple(kind, __enter__=entered, __exit__=left):
        yield


def _as_it_is(program: Any, signature: Any) -> Any:
    return program, signature


def regions_left_after_errors(program: fx.GraphModule) -> None:
    """Let an exported program enter its autocast regions by functions of this package, as an error in the
    middle of a region would leave it open."""
    found = [n for n in program.graph.nodes if n.op == "call_function" and n.target in _REGIONS]
    for node in found:
        node.target = _REGIONS[node.target]
    if found:
        program.recompile()


def _enter(*of: Any) -> torch.autocast:
    region = torch.autocast(*of)
    region.__enter__()
    if _casts is not None:
        _casts.regions.append(region)
    return region


def _leave(region: torch.autocast) -> None:
    if _casts is not None:
        _casts.regions.remove(region)
    region.__exit__(None, None, None)


_REGIONS = {torch.amp.autocast_mode._enter_autocast: _enter, torch.amp.autocast_mode._exit_autocast: _leave}


# -- Closed-over tensors ---------------------------------------------------------------------------
#
# A forward may compute with tensors that are not parameters, buffers or arguments, but plain attributes,
# members of lists, or globals. The tracer takes them as they are. The trace of the gradients does not: there
# they become buffers.


_NORMS = (F.batch_norm, F.instance_norm)
_READ_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_WRITE_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_TRAINS = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""Methods that set whether a tensor requires a gradient."""
_OF_SPARSE = tuple(getattr(torch.Tensor, name) for name in (
    "_nnz", "_indices", "_values", "indices", "values", "crow_indices", "col_indices", "ccol_indices",
    "row_indices"))
"""Methods that ask for the values of a sparse tensor. A sparse stand-in has none."""
_SINGLE = (torch.Tensor, int, float, str, torch.dtype, type(None))
_FRESH = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift_fresh_copy.default)


class ClosedOverError(CaptureError):
    """Raised while a forward is traced, before it is known where."""


def lost_tensors_refused(model: nn.Module) -> AbstractContextManager[Any]:
    """Raise `ClosedOverError` for lost tensors while a model's forward is traced."""
    return _Guard(model)


class _Guard(TorchFunctionMode):
    """Raises `ClosedOverError` if an operation takes a closed-over tensor that requires a gradient, which the
    trace would lose silently, or writes to a closed-over tensor, which only the trace would do; and if the
    forward asks for the values of a sparse tensor. Raises `MadeByFirstCall` if it freezes or thaws a
    parameter, which changes nothing in the trace.

    The tracer replaces parameters, buffers and arguments by objects of other classes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._read: list[weakref.ref[torch.Tensor]] = []
        """What `.data` and `detach` have returned."""

    def _write_data(self, place: torch.Tensor, value: torch.Tensor) -> None:
        """Write the `.data` that a forward assigns to a frozen tensor into the tensor (a moving average of
        another network's parameters). The same numbers, where nothing shares the old memory or the new."""
        held = {storage_id(t) for t in (*self._model.parameters(), *self._model.buffers())}
        old = storage_id(place)
        if place.requires_grad or is_unwrapped(place) or storage_id(value) in held \
                or any(t is not None and storage_id(t) == old for t in (r() for r in self._read)) \
                or (place.shape, place.dtype, place.device, place.stride()) != (
                    value.shape, value.dtype, value.device, value.stride()):
            raise ClosedOverError("the forward assigns to the .data of a tensor, which a plan cannot repeat: "
                                  "keep what changes in a buffer, and write to it (copy_)")
        with torch.no_grad():
            place.copy_(value.detach())

    def _refuse_other_flag(self, place: torch.Tensor, requires_grad: bool = True) -> None:
        """Refuse a flag of a parameter that is another than it was before. The tracer replaces those of the
        model, and not those that a list or an optimizer holds."""
        if requires_grad == place.requires_grad:
            return
        name = next((f"the parameter {n!r}" for n, p in self._model.named_parameters() if p is place), None)
        if name is None and isinstance(place, nn.Parameter) and is_unwrapped(place):
            name = f"a parameter of shape {tuple(place.shape)}"
        if name is not None:
            raise MadeByFirstCall(
                f"{type(self._model).__name__}: the forward sets requires_grad of {name}, which a captured "
                "step would not repeat: set it outside of the forward. Where only the first call does so, "
                "call the model once before it is wrapped")

    def __torch_function__(self, func: Callable[..., Any], types: Iterable[type],
                           args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _TRAINS:
            self._refuse_other_flag(*args, **kwargs)
        if func in (_READ_DATA, torch.Tensor.detach):           # a trace does not see the first
            found = args[0].detach()
            self._read.append(weakref.ref(found))
            return found
        if func == _WRITE_DATA:
            return None if has_this_memory(*args) else self._write_data(*args)
        if func in _OF_SPARSE and args[0].layout is not torch.strided:
            raise ClosedOverError(f"the forward asks for the values of a tensor with the layout "
                                  f"{args[0].layout} ({func.__name__}), which a trace does not know: compute "
                                  "with dense tensors, or with indices (index_add, scatter)")
        given = [t for t in _leaves((*args, *kwargs.values())) if is_unwrapped(t)]
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

