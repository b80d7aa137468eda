"""Submodules that run unchanged inside of a plan: each call is one operation.

A submodule whose inner shapes depend on values (experts that pick their rows) has no static graph. If its
inputs and outputs have static shapes, the whole call is one operation of the graph. The operation keeps only
its inputs. Its backward runs the forward again and differentiates it, as `torch.utils.checkpoint` does, with
eager mode's kernels on the rows that were picked.
"""

from __future__ import annotations

import hashlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.func import functional_call

from rkmate import device as devices
from rkmate.device.random_state import RandomState, set_state, unchanged_random_state
from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.capture.collectives import CollectiveError, without_collectives
from rkmate.graph.capture.forward_code import MISSING
from rkmate.graph.capture.refusals import at_fault
from rkmate.graph.capture.state import PythonState
from rkmate.graph.capture.structure import Structure, TensorForm, form_of, take_apart
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.modules import buffers_by_path, parameters_by_path
from rkmate.torch_seam.own import OwnOperator, own_operator, register
from rkmate.torch_seam.tensors import version_of, without_modes, without_torch_function
from rkmate.torch_seam.trace import several_ranks, values_refused

# -- Calls as operations ---------------------------------------------------------------------------
#
# Submodules that run as they are inside of a plan: each call is one operation.
#
# A submodule whose inner shapes depend on values (experts that pick their rows) has no static graph. What
# goes into it and what comes out often has static shapes all the same. Then the whole call stands in the
# graph as one operation. It keeps nothing but what goes in; its backward runs the forward again and
# differentiates that, as `torch.utils.checkpoint` does: the kernels are eager mode's, on the rows that were
# picked.


_DEPEND = "depend on values; the submodule around it can be named instead"


class OpaqueError(CaptureError):
    """A submodule cannot run as it is inside of a plan; the module around it may be able to."""

    def __init__(self, name: str, why: str) -> None:
        super().__init__(f"{name} cannot run as it is inside of a plan: {why}")
        self.name = name


Forms = tuple[TensorForm, ...]
_calls: dict[str, OpaqueCall] = {}
"""Calls by the key in graphs and in generated source."""


class OpaqueCall:
    """Everything except tensors that one submodule is called with."""

    def __init__(self, module: nn.Module, name: str, inputs: Structure, names: tuple[tuple[str, int], ...],
                 autocast: tuple[tuple[str, torch.dtype], ...]) -> None:
        """`names`: names of parameters and buffers, each with its position among the tensors."""
        self.module = weakref.ref(module)
        self.name = name
        self.inputs = inputs
        self.names = names
        self.autocast = autocast
        self.result: Structure | None = None
        self.state_bytes = 0
        """Bytes of the generators' state."""
        self.forms: dict[Any, Forms] = {}
        """Forms of the results, by shapes and types of the inputs."""

    def is_of(self, module: nn.Module, *others: Any) -> bool:
        """Return whether a module is called, with equal inputs, names and autocast."""
        inputs, names, autocast = others
        return self.module() is module and (
            self.inputs.spec, self.inputs.constants(), self.names, self.autocast) == (
            inputs.spec, inputs.constants(), names, autocast)

    @property
    def living(self) -> nn.Module:
        """The module."""
        module = self.module()
        if module is None:
            raise RuntimeError(f"{self.name}, which a plan runs as it is, is no longer there: wrap the "
                               "model again")
        return module

    def run(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the forward on these tensors, its results in order."""
        args, kwargs = self.inputs.fill(list(tensors[:self.inputs.count]))
        state = {f"module.{name}": tensors[k] for name, k in self.names}
        versions = [version_of(t) for t in tensors]
        with ExitStack() as stack:
            for kind in sorted(devices.autocast_kinds((torch.device("cpu"), *(t.device for t in tensors)))):
                dtype = dict(self.autocast).get(kind)
                stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=dtype is not None,
                                                   cache_enabled=False))
            out = functional_call(_Body(self.living), state, args, kwargs)
        if versions != [version_of(t) for t in tensors]:
            raise OpaqueError(self.name, "it writes to its arguments or buffers, and runs twice")
        results, self.result = take_apart(out, result=True)
        return results

    def probe(self, tensors: Sequence[torch.Tensor]) -> None:
        """Learn the forms of the results from a call with zeros and one with ones. `tensors`: parameters
        and buffers are real ones; of what comes before them, the form counts. Raises `OpaqueError`."""
        at = _shapes(tensors)
        if at in self.forms:
            return
        module = self.living
        found = []
        with unchanged_random_state(*devices.in_use()), torch.no_grad():
            for make in (torch.zeros, torch.ones):
                given = [*(_made(t, make) for t in tensors[:self.inputs.count]),
                         *(t.detach().clone() for t in tensors[self.inputs.count:])]
                before = PythonState(module)
                with without_collectives():
                    found.append(tuple(form_of(t.detach()) for t in self.run(given)))
                    if several_ranks():
                        self._try_backward(given)
                left = [a.path for a in before.assigned() if tensors_in(a.new)]
                before.restore()
                if left:
                    raise OpaqueError(self.name, f"it leaves tensors in {left[0]}")
        if found[0] != found[1]:
            raise OpaqueError(self.name, f"the shapes of its results {_DEPEND}")
        self.forms[at] = found[0]
        self.state_bytes = random_state(found[0][0].device).numel()

    def _try_backward(self, tensors: Sequence[torch.Tensor]) -> None:
        """Run a backward, as a custom function may communicate in that alone."""
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_(t.is_floating_point() or t.is_complex()) for t in tensors]
            results = [t for t in self.run(leaves) if t.requires_grad]
            learning = [t for t in leaves if t.requires_grad]
            if results and learning:
                torch.autograd.grad(results, learning, [torch.ones_like(t) for t in results],
                                    allow_unused=True)

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the operation. Returns the results, and the state of the generators before."""
        forms = self.forms[_shapes(tensors)]
        states = RandomState.of(devices.common(tensors)).states
        with torch.no_grad():
            results = self.run(tensors)
        if [(tuple(t.shape), t.dtype) for t in results] != [(f.shape, f.dtype) for f in forms]:
            raise OpaqueError(self.name, f"the shapes of its results {_DEPEND}")
        storages = {t.untyped_storage().data_ptr() for t in tensors}
        for k, (t, f) in enumerate(zip(results, forms, strict=True)):
            where = t.untyped_storage().data_ptr()
            if where in storages or t.stride() != f.stride or t.storage_offset():
                results[k] = t.new_empty_strided(f.shape, f.stride).copy_(t)
            storages.add(where)
        return [*results, _as_tensor(states, results[0].device)]

    def backward(self, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], given: Sequence[int],
                 wanted: Sequence[int], state: torch.Tensor) -> list[torch.Tensor]:
        """Return gradients of the tensors `wanted`, by a second forward; of one that was not used, zeros."""
        with ExitStack() as stack, torch.enable_grad():
            device = devices.common(tensors)
            stack.enter_context(unchanged_random_state(device))
            _restore(state, RandomState.of(device))
            leaves = [t.detach().requires_grad_(k in wanted) for k, t in enumerate(tensors)]
            results = self.run(leaves)
            pairs = [(results[i], g) for i, g in zip(given, grads, strict=True) if results[i].requires_grad]
            learning = [leaves[k] for k in wanted]
            found = torch.autograd.grad([r for r, _ in pairs], learning, [g for _, g in pairs],
                                        allow_unused=True) if pairs else [None] * len(learning)
        return [torch.zeros_like(t) if g is None else _like(t, g)
                for t, g in zip((tensors[k] for k in wanted), found, strict=True)]


class _Body(nn.Module):
    """A module's forward without its hooks, which are part of the graph around it."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(t.shape), t.dtype, t.device) for t in tensors)


def _made(like: torch.Tensor, make: Callable[..., torch.Tensor]) -> torch.Tensor:
    """Make a tensor like another one. Indices are zeros, which are always valid."""
    make = make if like.is_floating_point() or like.is_complex() or like.dtype is torch.bool else torch.zeros
    return make(tuple(like.shape), dtype=like.dtype, device=like.device)


def _like(t: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """Return a gradient of its own memory, with the strides of its tensor."""
    own = grad.stride() == t.stride() and grad.untyped_storage().nbytes() == grad.nbytes
    return grad if own else torch.empty_like(t).copy_(grad)


def _as_tensor(states: Sequence[bytes], device: torch.device) -> torch.Tensor:
    return torch.frombuffer(bytearray(b"".join(states)), dtype=torch.uint8).to(device, copy=True)


def _restore(kept: torch.Tensor, now: RandomState) -> None:
    content, start = kept.cpu().numpy().tobytes(), 0
    for generator, state in zip(now.generators, now.states, strict=True):
        set_state(generator, content[start:start + len(state)])
        start += len(state)


def random_state(device: torch.device) -> torch.Tensor:
    """Return the state of the generators, as the operation would keep it now."""
    return _as_tensor(RandomState.of(devices.of(device)).states, device)


def _forward(key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return _calls[key].forward(tensors)


def _backward(key: str, *args: Any) -> list[torch.Tensor]:
    return _calls[key].backward(*args)


def _fake_forward(key: str, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    call = _calls[key]
    results = [torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device=f.device)
               for f in call.forms[_shapes(tensors)]]
    return [*results, torch.empty(call.state_bytes, dtype=torch.uint8, device=results[0].device)]


def _fake_backward(key: str, tensors: Sequence[torch.Tensor], grads: Sequence[torch.Tensor],
                   given: Sequence[int], wanted: Sequence[int],
                   state: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(tensors[k]) for k in wanted]


register((
    # Whether it draws random numbers depends on values, too: so it always counts as drawing.
    OwnOperator("opaque(str key, Tensor[] tensors) -> Tensor[]", _forward, shape=_fake_forward,
                tags=(torch.Tag.nondeterministic_seeded,), reads_host=True, uses_autograd=True),
    OwnOperator("opaque_backward(str key, Tensor[] tensors, Tensor[] grads, int[] given, int[] wanted, "
                "Tensor state) -> Tensor[]", _backward, shape=_fake_backward, reads_host=True,
                uses_autograd=True),
))
FORWARD, BACKWARD = own_operator("opaque"), own_operator("opaque_backward")


class _OpaqueFunction(torch.autograd.Function):
    """A call, as autograd sees it while the joint graph is traced."""

    @staticmethod
    def forward(ctx: Any, key: str, *tensors: torch.Tensor) -> Any:
        """Run the operation, and save its tensors together with the state of the generators."""
        *results, state = FORWARD(key, list(tensors))
        ctx.key = key
        ctx.save_for_backward(*tensors, state)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Run the operation of the backward."""
        *tensors, state = ctx.saved_tensors
        given = [i for i, g in enumerate(grads) if g is not None]
        wanted = [k for k, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        found = BACKWARD(ctx.key, tensors, [grads[i] for i in given], given, wanted, state)
        result: list[torch.Tensor | None] = [None] * len(tensors)
        for k, g in zip(wanted, found, strict=True):
            result[k] = g
        return None, *result


def traced_as_one(module: nn.Module, name: str) -> Callable[..., Any]:
    """Return the function that replaces a module's forward while a model is captured."""
    real = {id(t): t.detach() for t in (*module.parameters(), *module.buffers())}
    registered = [n for n, _ in _state_of(module)]
    own = module.__dict__.get("forward", MISSING)
    held = {n: real[id(t)] for n, t in _state_of(module)}

    def forward(*args: Any, **kwargs: Any) -> Any:
        given, inputs = take_apart((args, kwargs), result=False)
        objects = [type(held).__name__ for held, _ in inputs.held_by_objects(args, kwargs).values()]
        if objects:
            raise OpaqueError(name, f"it takes an object that holds tensors ({', '.join(objects)})")
        if any(not isinstance(n, int) for t in given for n in t.shape):
            raise OpaqueError(name, f"the shapes of its arguments {_DEPEND}")
        now = dict(_state_of(module))
        places: dict[int, int] = {}
        state: list[torch.Tensor] = []
        actual: list[torch.Tensor] = []
        for n in registered:
            if id(now[n]) not in places:
                places[id(now[n])] = len(given) + len(state)
                state.append(now[n])
                actual.append(held[n])
        names = tuple((n, places[id(now[n])]) for n in registered)
        kinds = sorted(devices.autocast_kinds((torch.device("cpu"), *(t.device for t in (*given, *actual)))))
        autocast = tuple((k, torch.get_autocast_dtype(k)) for k in kinds if torch.is_autocast_enabled(k))
        key = _key_of(module, name, inputs, names, autocast)
        call = _calls[key]
        with without_modes(), without_torch_function(), _own_forward(module, own):
            call.probe([*given, *actual])
        results = _OpaqueFunction.apply(key, *given, *state)
        assert call.result is not None
        return call.result.fill(list(results))

    return forward


def _state_of(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*parameters_by_path(module), *buffers_by_path(module)]


@contextmanager
def _own_forward(module: nn.Module, own: Any) -> Iterator[None]:
    """Give a module its own forward inside the context: the one in its dictionary, or its class's."""
    instead = module.__dict__.pop("forward")
    if own is not MISSING:
        module.__dict__["forward"] = own
    try:
        yield
    finally:
        module.__dict__["forward"] = instead


def _key_of(module: nn.Module, name: str, *others: Any) -> str:
    """Return the key of a call: its module's name, with a number where another call has it."""
    for key in (name if not k else f"{name}#{k}" for k in itertools.count()):
        known = _calls.get(key)
        if known is not None and known.is_of(module, *others):
            return key
        if known is None or known.module() is None:
            _calls[key] = OpaqueCall(module, name, *others)
            return key
    raise AssertionError


def kind_of(key: str) -> str:
    """Return a key that calls with equal costs share: the code of the module and of its submodules."""
    module = _calls[key].living
    digest = hashlib.sha256(repr((module, _calls[key].inputs, _calls[key].autocast)).encode())
    for m in module.modules():
        code = getattr(getattr(type(m).forward, "__wrapped__", type(m).forward), "__code__", None)
        what = code and (code.co_code, code.co_names)
        digest.update(repr((type(m).__qualname__, m.training, what)).encode())
    return f"{type(module).__name__}:{digest.hexdigest()[:12]}"


# -- Which submodules ------------------------------------------------------------------------------
#
# Which submodules run as they are: those that a user names, or those that a trace stumbles over.


Opaque = Literal["auto"] | tuple[str, ...]
"""Names of submodules, or patterns of names; or those that a trace stumbles over."""
T = TypeVar("T")
_here = threading.local()


@contextmanager
def opaque_parts(model: nn.Module) -> Iterator[None]:
    """Capture a call of each chosen submodule as one operation, inside the context."""
    with ExitStack() as stack:
        for name in getattr(_here, "names", ()):
            module = model.get_submodule(name)
            stack.enter_context(_forward_is(module, traced_as_one(module, name)))
        yield


@contextmanager
def _forward_is(module: nn.Module, forward: Any) -> Iterator[None]:
    before = module.__dict__.get("forward", MISSING)
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is MISSING:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


def with_opaque(model: nn.Module, opaque: Opaque, capture: Callable[[], T]) -> T:
    """Return the result of `capture` with these submodules chosen. Raises `CaptureError`, `ArgumentError`."""
    if opaque != "auto":
        with _chosen(_matching(model, opaque)):
            return capture()
    names: tuple[str, ...] = ()
    while True:
        try:
            with _chosen(names), values_refused():
                found = capture()
            break
        except CollectiveError:         # a submodule that runs as it is communicates as well
            raise
        except OpaqueError as error:
            kind = type(model.get_submodule(error.name))
            around = {n: _around(model, n) for n in names if type(model.get_submodule(n)) is kind}
            if not all(around.values()):
                raise
            names = tuple(dict.fromkeys(around.get(n, n) for n in names))
        except CaptureError as error:
            culprit = at_fault(model, error)
            if not culprit or culprit in names:
                raise
            kind = type(model.get_submodule(culprit))
            alike = [n for n, m in model.named_modules() if type(m) is kind and n]
            torchs = kind.__module__.startswith("torch.")
            names = tuple(dict.fromkeys((*names, *([culprit] if torchs else alike))))
        names = tuple(n for n in names if not any(n.startswith(f"{m}.") for m in names))
    if names:
        warn(f"{', '.join(names[:4])}{' and others' if len(names) > 4 else ''} of {type(model).__name__} "
             "cannot be traced: each call runs as it is, as one operation of the plan, and once more in the "
             "backward. The memory that it takes inside is planned as for the sample's values")
    return found


@contextmanager
def _chosen(names: Sequence[str]) -> Iterator[None]:
    _here.names = names
    try:
        yield
    finally:
        _here.names = ()


def _matching(model: nn.Module, patterns: Sequence[str]) -> tuple[str, ...]:
    names = [n for n, _ in model.named_modules() if n]
    found: dict[str, None] = {}
    for pattern in patterns:
        # A model with its loss has the model as a submodule of this name.
        matching = [n for n in names if fnmatchcase(n, pattern) or fnmatchcase(n, f"model.{pattern}")]
        if not matching:
            raise ArgumentError(f"opaque names {pattern!r}, and {type(model).__name__} has no such submodule")
        found.update(dict.fromkeys(matching))
    return tuple(n for n in found if not any(n.startswith(f"{m}.") for m in found))


def _around(model: nn.Module, name: str) -> str:
    """Return the nearest submodule around one that has a forward; empty where only the model has."""
    while name := name.rpartition(".")[0]:
        if type(model.get_submodule(name)).forward is not nn.Module.forward:
            break
    return name

