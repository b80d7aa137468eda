"""Libraries that take another path when they notice that they are traced, put back on eager's path.

Hugging Face's transformers build explicit attention masks while they are exported, where eager mode
leaves the masks out and tells the attention kernel that it is causal. A plan is for one shape, so
what depends on shapes and constants alone may take eager's path: the arithmetic is then eager's, bit
for bit, and the masks take no memory. What depends on the values of an input takes it where the capture
knows them (`graph.capture.answers`), and keeps the traced path elsewhere.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from functools import lru_cache, partial
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import fx, nn
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from rkmate.torch_seam.modules import forward_hooks_of
from rkmate.torch_seam.schema import OpOverload, schema_of
from rkmate.torch_seam.tensors import is_unwrapped, outside_trace

_MASKS = "transformers.masking_utils"
_EXPORTING = "is_torchdynamo_exporting"
_TRACED = ("is_torchdynamo_compiling", _EXPORTING)
"""Functions by which transformers' source asks whether it is traced."""
_QUESTIONS = {name: getattr(torch.compiler, name) for name in (
    "is_compiling", "is_exporting", "is_dynamo_compiling") if hasattr(torch.compiler, name)}
"""Functions by which any source asks torch whether it is traced."""
_TRACING = "is_tracing"
_LOOKING = ("_ignore_causal_mask_sdpa", "_ignore_bidirectional_mask_sdpa", "find_packed_sequence_indices")
"""Functions of the masks that look at the values of their first argument, in eager mode alone."""
_OBSERVERS = "transformers.utils.output_capturing"
_ASKING_FOR_GRADIENTS = ("make_inputs_require_grads", "make_inputs_require_grad")
"""Hooks of transformers, peft and trl on an embedding, for checkpointing above frozen weights."""
_COMPLETED = {"problem_type": "transformers"}
"""Attributes that a first forward sets where they are None, and each forward reads afterwards: as a library's
source does in every model; with that library."""


def is_completed(holder: Any, name: str, old: Any) -> bool:
    """Return whether a forward that has set an attribute of an object does the same when it finds it set.
    `old`: the value before."""
    library = _COMPLETED.get(name)
    return library is not None and old is None and any(
        base.__module__.partition(".")[0] == library for base in type(holder).__mro__)


def is_observer(hook: Any) -> bool:
    """Return whether a forward hook is a library's own, which computes nothing: it records outputs that the
    forward asks for, or makes embeddings require a gradient, without which reentrant checkpointing has none.

    A model installs the first in its first forward, so they come and go without a change of meaning.
    """
    return getattr(hook, "__module__", None) == _OBSERVERS or \
        getattr(hook, "__name__", None) in _ASKING_FOR_GRADIENTS


class _Records(threading.local):
    """Records of hooks of transformers in a part of a forward, in each thread."""

    state: tuple[Any, ...] = ()
    kept: ClassVar[dict[tuple[Any, ...], tuple[dict[str, Any], threading.RLock]]] = {}
    """For each state, lists that stay the same objects: each planned forward fills them."""
    lists: Mapping[str, Any] = {}
    """The lists that hooks fill now."""


_records = _Records()


def _collector() -> ContextVar[Any] | None:
    """Return the variable in which hooks of transformers find where to record."""
    found = getattr(sys.modules.get(_OBSERVERS), "_active_collector", None)
    variable = getattr(found, "context_var", None)
    return variable if isinstance(variable, ContextVar) else None


def leave_tensors(modules: Iterable[nn.Module]) -> bool:
    """Return whether forward hooks of modules may leave tensors somewhere now: the user's own, and those that
    record outputs in this call."""
    variable = _collector()
    is_recording = variable is not None and bool(variable.get())
    return any(is_recording if is_observer(h) else not str(getattr(h, "__module__", "")).startswith(
        "torch.distributed.") for m in modules for h in forward_hooks_of(m).values())


def recorded_here() -> tuple[Any, ...]:
    """Return what hooks record inside of `records_apart`: names, and how long the lists are, as far as hooks
    ask for that."""
    return _records.state


def begins_anew(held: Any) -> bool:
    """Return whether each forward finds a list as this one has found it: a list of `records_apart`."""
    return any(held is known for known in _records.lists.values())


@contextmanager
def records_apart() -> Iterator[None]:
    """Let hooks of transformers record outputs (hidden states, attentions, routers' logits) of a part of a
    forward in lists of its own, which a plan of the part can fill; the forward's lists get them at the end.

    The forward makes its lists anew in each call, and hooks find them in a context variable."""
    variable = _collector()
    active = None if variable is None else variable.get()
    if variable is None or not isinstance(active, dict):
        yield
        return
    lists = {k: v for k, v in active.items() if isinstance(v, list)}
    others = {k: v for k, v in active.items() if k not in lists}
    # Hooks ask whether a list is empty, and with a selection for its length.
    lengths = {k: len(v) if others else min(1, len(v)) for k, v in lists.items()}
    before, outer = _records.state, _records.lists
    state = (before[0] + 1 if before else 1, tuple(lengths.items()), repr(others))
    own, lock = _records.kept.setdefault(state, ({**{k: [] for k in lists}, **others}, threading.RLock()))
    with lock:
        for k, n in lengths.items():
            own[k][:] = [None] * n
        token, _records.state, _records.lists = variable.set(own), state, own
        try:
            yield
            for k, n in lengths.items():
                lists[k].extend(own[k][n:])
        finally:
            _records.state, _records.lists = before, outer
            variable.reset(token)
            for k in lengths:
                own[k].clear()


def weight_made_by(hook: Any) -> str | None:
    """Return the attribute that torch's own (old) normalisations and pruning compute before each forward."""
    if isinstance(hook, (WeightNorm, SpectralNorm)):
        return str(hook.name)
    return str(hook._tensor_name) if isinstance(hook, BasePruningMethod) else None


def routed_by_loops(model: nn.Module) -> str:
    """Return where a model of transformers loops over experts, each with the tokens that chose it: ``model``,
    or a submodule's name; empty if it does not, or if the library has no other way."""
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        asks = getattr(module, "_can_set_experts_implementation", None)
        if asks is not None and getattr(config, "_experts_implementation", None) == "eager" and asks():
            return f"model.{name}" if name else "model"
    return ""


@contextmanager
def without_value_checks() -> Iterator[None]:
    """Let distributions skip the checks of their arguments' values while a module is captured, because a
    trace has no values."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


def masks_as_in_eager_mode(model: nn.Module) -> AbstractContextManager[None] | None:
    """Let transformers make masks as in eager mode while a module is exported. A mask that depends on values
    that are not known cannot be traced this way. None if the library is not loaded."""
    return as_in_eager_mode() if _MASKS in sys.modules else None


def sources_as_in_eager_mode(model: nn.Module) -> AbstractContextManager[None] | None:
    """Return a context for an export, in which the sources of the model's classes that ask whether they are
    compiled or exported get the answer no. Return None if no part of the model asks."""
    kinds = {kind for m in model.modules() for kind in type(m).__mro__ if not kind.__module__.startswith(
        ("torch.", "builtins"))}
    sources = {name: source for name in {kind.__module__ for kind in kinds}
               if (source := sys.modules.get(name)) is not None}
    asking = [(source, name) for source in sources.values() if source.__name__.startswith("transformers.")
              for name in _TRACED if hasattr(source, name)] if _MASKS in sys.modules else []
    own = frozenset(name for name in {kind.__module__ for kind in kinds if _asks(kind)} if name in sources)
    asking += [(sources[name], question) for name in own for question, function in _QUESTIONS.items()
               if sources[name].__dict__.get(question) is function]
    return _as_not_traced(asking, own) if asking or own else None


@lru_cache(maxsize=1024)
def names_in(code: CodeType) -> frozenset[str]:
    """Return the names of globals and attributes in a function's code, and in that of functions inside."""
    return frozenset(code.co_names).union(*(names_in(k) for k in code.co_consts if isinstance(k, CodeType)))


def _asks(kind: type) -> bool:
    """Return whether methods of a class ask torch whether they are compiled or exported."""
    functions = map(inspect.unwrap, filter(callable, vars(kind).values()))
    return any(not _QUESTIONS.keys().isdisjoint(names_in(f.__code__))
               for f in functions if isinstance(f, FunctionType))


@contextmanager
def _as_not_traced(asking: Sequence[tuple[ModuleType, str]], own: frozenset[str]) -> Iterator[None]:
    """`asking`: functions that answer no. `own`: modules to which torch's functions answer no."""
    def answered(function: Callable[[], bool]) -> Callable[[], bool]:
        def answer() -> bool:
            return sys._getframe(1).f_globals.get("__name__") not in own and function()
        return answer

    with ExitStack() as stack:
        for module, name in asking:
            stack.enter_context(mock.patch.object(module, name, _no))
        for name, function in _QUESTIONS.items() if own else ():
            stack.enter_context(mock.patch.object(torch.compiler, name, answered(function)))
        yield


_LAYERS, _LAYER = "transformers.modeling_layers", "GradientCheckpointingLayer"
_ADAPTERS = "alora_invocation_tokens"


def adapters_hooked_once(model: nn.Module) -> AbstractContextManager[Any] | None:
    """Return a context in which peft's activated LoRA hooks its layers for the forward alone, and not again
    for the second run of checkpointed ones, which a plan has none of. Return None for other models."""
    layers = sys.modules.get(_LAYERS)
    configs = [c for m in model.modules() if isinstance(c := getattr(m, "peft_config", None), dict)]
    if not hasattr(layers, _LAYER) or not any(
            getattr(c, _ADAPTERS, None) for found in configs for c in found.values()):
        return None
    # peft looks for layers of this class, and transformers has made its own long ago.
    return mock.patch.object(layers, _LAYER, type(_LAYER, (nn.Module,), {}))


@contextmanager
def as_in_eager_mode() -> Iterator[None]:
    """Let loaded libraries decide as in eager mode, while a module is exported."""
    masks = sys.modules.get(_MASKS)
    with ExitStack() as stack:
        if masks is None:
            yield
            return
        if hasattr(masks, _EXPORTING):
            stack.enter_context(mock.patch.object(masks, _EXPORTING, _no))
        for name in filter(partial(hasattr, masks), _LOOKING):
            stack.enter_context(mock.patch.object(masks, name, _answered(masks, getattr(masks, name))))
        yield


def _no() -> bool:
    return False


def _not_known(tensor: Any = None) -> bool:
    return tensor is not None and not is_unwrapped(tensor)


def _answered(masks: ModuleType, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of the masks that answers as in eager mode where the values of its first argument are
    known in a trace."""
    def answered(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        value = None if tensor is None else _here.value_of(tensor)
        if tensor is None or value is not None:
            with outside_trace(), mock.patch.object(masks, _TRACING, _not_known):
                answer = function(value, *args, **kwargs)
            if not isinstance(answer, torch.Tensor):
                return answer
        return function(tensor, *args, **kwargs)
    return answered


@contextmanager
def values_told(value_of: Callable[[torch.Tensor], torch.Tensor | None]) -> Iterator[None]:
    """Let libraries know values of traced tensors, in place of those that depend on no input.

    value_of: returns the value of a traced tensor; None if it is not known.
    """
    before, _here.value_of = _here.value_of, value_of
    try:
        yield
    finally:
        _here.value_of = before


def node_of(tensor: torch.Tensor) -> fx.Node | None:
    """Return the node of a traced tensor; None outside of a trace."""
    mode = proxy_tensor.get_proxy_mode()
    if mode is not None and isinstance(tensor, FunctionalTensor):   # in a trace of a model with DTensors
        torch._sync(tensor)                     # type: ignore[attr-defined]
        tensor = torch._from_functional_tensor(tensor.elem)
    found = None if mode is None else proxy_tensor.get_proxy_slot(tensor, mode.tracer, None)
    proxy = getattr(found, "proxy", None)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


def known_value(tensor: torch.Tensor, argument: Callable[[fx.Node], torch.Tensor | None] = lambda node: None
                ) -> torch.Tensor | None:
    """Return the value of a traced tensor; None when it depends on an input whose value is not known.

    argument: returns the value of an input; None if it is not known.
    """
    last = node_of(tensor)
    needed: dict[fx.Node, None] = {}
    values: dict[fx.Node, Any] = {}
    todo = [] if last is None else [last]
    while todo:
        node = todo.pop()
        if node.op == "placeholder":
            values[node] = argument(node)
            if values[node] is None:
                return None
        elif node.op != "call_function" or not isinstance(node.target, OpOverload) \
                or torch.Tag.nondeterministic_seeded in node.target.tags:
            return None
        needed[node] = None
        todo += [n for n in node.all_input_nodes if n not in needed]
    if last is None or _written_through_views(last.graph, needed):
        return None
    with outside_trace():
        for node in last.graph.nodes:        # in the order of the trace
            if node in needed and node not in values:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    return values[last] if isinstance(values[last], torch.Tensor) else None


def _written_through_views(graph: fx.Graph, values: Iterable[fx.Node]) -> bool:
    """Return whether a graph writes to one of some values through a view, which the value's own node does not
    show."""
    values = set(values)
    shared = set(values)
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and not shared.isdisjoint(node.all_input_nodes):
            schema = schema_of(node.target)
            if schema.is_mutable and node.args[0] in shared and node not in values:
                return True
            if any(r.alias_info is not None for r in schema.returns):
                shared.add(node)
    return False


class _Here(threading.local):
    """Values that are known in the trace of a thread."""

    value_of: Callable[[torch.Tensor], torch.Tensor | None] = staticmethod(known_value)


_here = _Here()
