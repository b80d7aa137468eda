"""A plan's source, compiled, on a model's own parameters and buffers; and backwards of backwards, by the
original's forward.
"""

from __future__ import annotations

import linecache
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import starmap
from operator import attrgetter, getitem
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from rkmate import device as devices
from rkmate.codegen.emit import Generated
from rkmate.device.copy_engine import CopyEngine
from rkmate.device.quick_code import load
from rkmate.device.random_state import RandomState
from rkmate.errors import BackwardError, OffloadError
from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.capture.capture import Capture
from rkmate.graph.capture.structure import owner_name, piece_of, take_apart
from rkmate.runtime.added_gradients import Additions, Held
from rkmate.runtime.deferred import DeferredOutputs
from rkmate.runtime.environment import Away, Environment, RerunState, generator_state, generators_at
from rkmate.runtime.guards import Guards, ModuleReader, guards_of
from rkmate.runtime.segments import (
    Call,
    WithGraph,
    connect,
    connect_unplanned,
    unrecorded,
    unseen,
    without_autocast,
)
from rkmate.torch_seam.modules import buffers_of, parameters_of
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.tensors import all_ordinary, version_of

# -- Backwards of backwards ------------------------------------------------------------------------
#
# A double backward (``create_graph=True``) around a planned step: gradient penalties, Hessians.
#
# A planned backward leaves no graph to differentiate. So where one is wanted, the original's forward runs
# once more, with the draws of the call, and autograd differentiates that. The plan's own step stays as it
# is: an ordinary backward through the same forward may follow.


_INSTEAD = ("compute the inner gradient in the forward of the module that is wrapped (torch.autograd.grad: "
            "see 'Gradient penalties' in docs/recipes.md), on the original module, or with rkmate.dtr")


class Original(NamedTuple):
    """A call without a plan."""

    run: Callable[[tuple[Any, ...], dict[str, Any]], Any]
    reader: ModuleReader
    key: Guards
    """The signature of the call."""

    def outputs(self, capture: Capture, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the output tensors of the original, on the call's arguments. Raises `BackwardError` where
        the module is no longer what it was."""
        with ExitStack() as stack:
            stack.enter_context(torch.enable_grad())
            given = dict(self.key.autocast)
            for kind in {"cpu", *given, *devices.autocast_kinds(t.device for t in tensors)}:
                stack.enter_context(torch.autocast(kind, dtype=given.get(kind), enabled=kind in given))
            args, kwargs = capture.inputs.fill(list(tensors))
            now, _ = guards_of(self.reader, args, kwargs)
            if now._replace(values=self.key.values) != self.key:
                raise BackwardError("the module was changed between the forward and a backward with "
                                    f"create_graph=True, which runs the forward once more: {_INSTEAD}")
            return take_apart(self.run(args, kwargs), result=True)[0]


class Again(NamedTuple):
    """Data that a second run of one call's original needs."""

    original: Original
    capture: Capture
    tensors: Sequence[torch.Tensor]
    """Among the arguments."""
    draws: RandomState | None
    """State of the generators before the forward; None if nothing is drawn."""
    targets: Mapping[str, torch.Tensor | int]
    """Targets of the gradients, by source key: a parameter, or the number of an input."""
    buffers: Sequence[torch.Tensor]
    """Buffers that the forward overwrites."""
    obstacle: str
    """Why the call cannot run a second time; empty if it can."""

    def gradients(self, call: Call, given: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor | None]:
        """Return gradients by source key, with a graph. `given`: gradients of the outputs, by number."""
        if self.obstacle:
            raise BackwardError("there is no double backward (create_graph=True) of this step: "
                                f"{self.obstacle}; {_INSTEAD}")
        call.check_untouched()
        tensors = [t.view_as(t) if t.requires_grad else t for t in self.tensors]
        with ExitStack() as stack:
            before = [b.detach().clone() for b in self.buffers]
            if self.draws is not None:
                stack.enter_context(generators_at(call.env.device, self.draws))
            try:
                outputs = self.original.outputs(self.capture, tensors)
            finally:
                for buffer, value in zip(self.buffers, before, strict=True):
                    buffer.data.copy_(value)        # no new version: what was saved for a backward stands
        targets = {k: tensors[t] if isinstance(t, int) else t for k, t in self.targets.items()}
        numbers = list(given)
        found = torch.autograd.grad([outputs[n] for n in numbers], list(targets.values()),
                                    [given[n] for n in numbers], create_graph=True, allow_unused=True)
        return dict(zip(targets, found, strict=True))


# -- Executables -----------------------------------------------------------------------------------
#
# A plan's source, compiled, on a model's own parameters and buffers.


_numbers = iter(range(1 << 62))
_version = attrgetter("_version")


@dataclass(frozen=True)
class TensorSlot:
    """The attribute in which a module keeps a tensor, or a piece of one. It is read at each call, so that
    ``model.to()`` is followed."""

    registry: Mapping[str, torch.Tensor | None]
    owner: str
    piece: str = ""
    """The name of a piece; empty for a whole tensor."""

    def get(self) -> torch.Tensor:
        """Return the tensor that stands there now."""
        value = self.registry[self.owner]
        assert value is not None
        return piece_of(value, self.piece) if self.piece else value


Gradients = dict[str, torch.Tensor]
"""Gradients by source key."""
Redo = Callable[[RerunState, Mapping[int, torch.Tensor]], Gradients]
"""Gradients for output gradients (by output number) that this plan does not take."""


def _is_of_a_slice(value: Any) -> bool:
    """Return whether `value` is a function that computes: it takes names of values, in addition to the
    environment."""
    return (isinstance(value, FunctionType) and value.__code__.co_argcount > 1
            and value.__code__.co_varnames[0] == "env")


class PlannedStep:
    """Runs the generated source; one instance per signature and set of output gradients."""

    def __init__(self, model: nn.Module, capture: Capture, partition: Partition,
                 generated: Generated, device: torch.device, engine: CopyEngine | None = None) -> None:
        """`engine`: copies values away, if the source says so."""
        self.capture = capture
        self.generated = generated
        self.device = device
        assert engine is not None or not generated.copies, "nothing copies values away"
        self._engine = engine
        self.result = capture.result
        joint = partition.program.joint
        self.wanted = joint.wanted
        filename = f"<rkmate plan {next(_numbers)}>"
        namespace = load(generated.text, filename)
        if generated.below_autograd:
            namespace.update((name, unseen(f)) for name, f in list(namespace.items()) if _is_of_a_slice(f))
        # Tracebacks and debuggers show the generated lines, as long as they can run.
        linecache.cache[filename] = (len(generated.text), None, generated.text.splitlines(True), filename)
        weakref.finalize(self, linecache.cache.pop, filename, None).atexit = False
        self._forward = namespace["forward"]
        self._backward = [namespace[s.function] for s in generated.segments]
        self._deferred = DeferredOutputs(joint, capture.result,
                                         [namespace[name] for name in generated.deferred], device)
        self._slots: dict[str, TensorSlot] = {}
        self.inputs: dict[str, int] = {}
        self._fixed: dict[str, torch.Tensor] = {}
        for source in capture.sources.values():
            key = source_key(source)
            if source.kind == "input":
                self.inputs[key] = int(source.key)
            elif source.kind == "constant":
                self._fixed[key] = capture.constants[str(source.key)]
            elif source.kind != "tangent":
                self._slots[key] = slot(model, str(source.key), source.kind)
        self._params = [[f"param:{p}" for p in s.params] for s in generated.segments]
        targets = [[f"param:{p}" for p in s.params] for s in generated.segments]
        targets[-1] += [f"input:{i}" for i in generated.input_grads]
        self._targets = targets
        self._added = [[f"param:{p}" for p in s.added] for s in generated.segments]
        for key in (k for keys in (*self._params, *self._added) for k in keys):
            self._slots.setdefault(key, slot(model, key.partition(":")[2], "param"))
        self._additions = list(dict.fromkeys(p for s in generated.segments for p in s.added))
        self._last = max(k for k, t in enumerate(targets) if t or self._added[k])
        self._fixed_outputs = [i for i, w in enumerate(self.wanted) if not w]
        self._tangents = [(i, f"grad_output_{i}") for i, w in enumerate(self.wanted) if w]
        self.unplanned = [i for i, d in enumerate(capture.differentiable)
                           if d and not self.wanted[i]]
        self._all_targets = list(dict.fromkeys(source_key(s) for s, _ in capture.grads))
        meta = [n.meta[VALUE] if n is not None else None for n in joint.outputs]
        self._meta = [(tuple(m.shape), m.dtype, tuple(m.stride())) if m is not None else None
                      for m in meta]
        written = joint.written()
        self._free = {source_key(s) for s in written}
        slots = self._slots.items()
        self._whole = {k: (s.registry, s.owner) for k, s in slots if not s.piece}
        self._pieces = [(k, s) for k, s in slots if s.piece]
        self._versioned = [k for k in (*self._slots, *self._fixed, *self.inputs) if k not in self._free]
        self.written = [i for k, i in self.inputs.items() if k in self._free]
        """Tensors among the arguments that the forward writes to."""
        # What the forward overwrites, and reads other than as batch-norm statistics, was copied. A second
        # run may find another value where it leads to new values of such things only (a counter).
        results = {n for n in joint.outputs if n is not None} | {n for _, n in joint.grads} \
            | joint.additions()
        self._unrepeatable = [source_key(s) for n, s in joint.sources.items() if s in written and any(
            u.target is torch.ops.aten.clone.default and _leads_to(u, results) for u in n.users)]
        self._not_twice = self._why_not_twice()
        cd = partition.program.cd
        self._output_names = [cd.d[j].name for j in partition.program.pinned]
        self._draws = any(c.random for c in cd.c)

    def _why_not_twice(self) -> str:
        """Return why the original's forward cannot run again after this one; empty if it can."""
        if self._additions:
            return 'with gradients="in_place" the backward adds to .grad itself'
        written = [k for k in self._free if k in self.inputs]
        if written or self._unrepeatable:
            return f"the forward has overwritten {(*written, *self._unrepeatable)[0].partition(':')[2]!r}"
        return ""

    def __call__(self, tensors: Sequence[torch.Tensor], redo: Redo,
                 finished: Callable[[], None] | None = None,
                 opened: Callable[[Call], None] | None = None,
                 read: Callable[[str], None] | None = None, original: Original | None = None,
                 verify: bool = False, leaves: Callable[[], Sequence[Any]] = tuple) -> Any:
        """Run the forward of one step. The backward follows through autograd, and calls `finished`. `opened`:
        called with the call when its forward has run; `read`: called with the name of an output that is read
        and that the step leaves out; `original`: for a double backward; `verify`: compare checksums of data
        that is sent away; `leaves`: returns the leaves of the arguments, if the forward changes objects among
        them."""
        sources = self.sources(tensors)
        additions = Additions(sources, self._additions) if self._additions else None
        versions = self.versions(sources)
        several = len(self.unplanned) + len(self._tangents) > 1
        state = generator_state(self.device) if self._draws else None
        env = Environment(sources, {}, self.device, away=self._opened(verify))
        env.unrecorded = self.generated.below_autograd and all_ordinary(sources.values())
        with torch.no_grad(), without_autocast(self.device), unrecorded(env.unrecorded), _undone(env, state):
            results = self._forward(env)
        env.watch(self._output_names)
        env.watch_sources(versions)
        call = Call(env, self._backward, self._last, self._targets)
        call.rerun = RerunState(sources, versions, state) if several else None
        call.finished = finished
        call.additions = additions
        if original is not None:
            call.again_with_graph = self._again(original, tensors, sources, state)
        if opened is not None:
            opened(call)
        params = [[sources[k] for k in keys] for keys in self._params]
        added = [[sources[k] for k in keys] for keys in self._added]
        inputs = [tensors[i] for i in self.generated.input_grads]
        # Fresh aliases: what the user gets refers to the environment, and must not stand in it.
        count = len(self._meta)
        outputs: list[Any] = [o if o is None else o.detach() for o in results[:count]]
        self._deferred.fill(outputs, results[count:], sources, read)
        del results

        def receive(call: Call, grads: list[torch.Tensor | None]) -> None:
            self._receive(call, grads, redo)

        flat = connect(call, receive, outputs, self._fixed_outputs, params, inputs, added)
        if self.unplanned:
            def unplanned(given: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
                if additions is not None:
                    additions.check()
                try:
                    found = redo(call.again(), given)
                except BaseException:
                    if additions is not None:
                        additions.were_interrupted()
                    raise
                return [found.get(k) for k in self._all_targets]

            places = self.inputs
            targets = [tensors[places[k]] if k in places else sources[k] for k in self._all_targets]
            connect_unplanned(call, unplanned, flat, self.unplanned, targets)
        if self.capture.effects:
            self.capture.effects.repeat(leaves, [*tensors[:self.capture.inputs.count], *flat])
        return self.result.fill(flat)

    def _again(self, original: Original, tensors: Sequence[torch.Tensor], sources: Held,
               draws: RandomState | None) -> WithGraph:
        """Return the gradients for a double backward. It is rare, so nothing is looked up in advance."""
        def gradients(call: Call, given: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor | None]:
            return Again(original, self.capture, tensors[:self.capture.inputs.count], draws,
                         {k: self.inputs[k] if k in self.inputs else sources[k]
                          for k in self._all_targets},
                         [sources[k] for k in self._free if k in self._slots], self._not_twice
                         ).gradients(call, given)
        return gradients

    # -- parts of a step --------------------------------------------------------------------

    def sources(self, tensors: Sequence[torch.Tensor]) -> Held:
        """Return the caller's current tensors. `tensors`: those among the arguments."""
        found = Held(zip(self._whole, starmap(getitem, self._whole.values()), strict=True))
        for key, slot in self._pieces:
            found[key] = slot.get()
        found.update(self._fixed)
        for key, i in self.inputs.items():
            found[key] = tensors[i].detach()                   # detach: the boundary of autograd
        return found

    def versions(self, sources: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the versions of tensors that the backward may read and that nobody may change before it."""
        try:
            return dict(zip(self._versioned, map(_version, map(sources.__getitem__, self._versioned)),
                            strict=True))
        except RuntimeError:                # inference tensors have none
            return {k: version_of(sources[k]) for k in self._versioned if not sources[k].is_inference()}

    def target(self, key: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter or input that a gradient is of."""
        return tensors[self.inputs[key]] if key in self.inputs else self._slots[key].get()

    def empty_gradient(self, i: int) -> torch.Tensor:
        """Allocate the gradient of output `i`, as the traced backward expects it."""
        shape, dtype, stride = self._meta[i]  # type: ignore[misc]
        return torch.empty_strided(shape, stride, dtype=dtype, device=self.device)

    def run_forward(self, env: Environment) -> list[Any]:
        """Run the generated forward. Returns the outputs, and the values that outputs computed later depend
        on."""
        found: list[Any] = self._forward(env)
        return found

    def run_backward(self, env: Environment, given: dict[int, torch.Tensor]) -> Gradients:
        """Run all segments of the backward, one after another. `given`: gradients by output number; the
        dictionary is emptied."""
        self._give(env, given)
        found: Gradients = {}
        for function, targets in zip(self._backward, self._targets, strict=True):
            for key, grad in zip(targets, function(env), strict=True):
                if grad is not None:
                    found[key] = found[key] + grad if key in found else grad
        return found

    def _receive(self, call: Call, grads: list[torch.Tensor | None], redo: Redo) -> None:
        """Move the gradients of the outputs into the environment; empties the list."""
        given: dict[int, torch.Tensor] = {}
        for i, _ in self._tangents:
            grad, grads[i] = grads[i], None
            if grad is not None:
                given[i] = grad
                del grad
        call.goes_through(given)
        if len(given) == len(self._tangents) and call.ready is None:
            self._give(call.env, given)
            return
        # The gradients of what only the others lead to have to be None, not zeros.
        call.env.clear()
        call.ready = redo(call.rerun, given) if given and call.rerun is not None else {}

    def _give(self, env: Environment, given: dict[int, torch.Tensor]) -> None:
        for i, name in self._tangents:
            env.give((name,), self._as_traced(i, given.pop(i)))

    def again(self, state: RerunState, given: dict[int, torch.Tensor]) -> Gradients:
        """Return gradients by a second run of a forward; nothing is written, nothing is drawn anew.

        `given`: by output number, the gradients of exactly the outputs that this plan takes. The
        dictionary is emptied.
        """
        if self._unrepeatable:
            name = self._unrepeatable[0].partition(":")[2]
            raise BackwardError(
                f"the loss depends on other outputs than this forward was planned for, and the forward "
                f"cannot be run again, because it has overwritten {name!r}: run this step again; "
                "from now on the plan expects this loss")
        env = Environment(state.sources, state.versions, self.device, dry=True, away=self._opened())
        with torch.no_grad(), without_autocast(self.device), _cleared(env):
            if state.draws is None:
                self._forward(env)
            else:
                with generators_at(self.device, state.draws):
                    self._forward(env)
            return self.run_backward(env, given)

    def _opened(self, verify: bool = False) -> Away | None:
        """Return the copies away of one call; None if the step sends nothing."""
        return Away(self._engine, verify=verify) if self._engine is not None else None

    def _as_traced(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of output `i` in the layout that the traced backward expects."""
        _, dtype, stride = self._meta[i]  # type: ignore[misc]
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        same = grad.dtype is dtype and not grad.is_conj() and not grad.is_neg() and all(
            n == 1 or a == b for n, a, b in zip(grad.shape, grad.stride(), stride, strict=True))
        if same:
            return grad
        return self.empty_gradient(i).copy_(grad)


@contextmanager
def _cleared(env: Environment) -> Iterator[None]:
    """Clear the environment after a whole step, or if the step fails."""
    try:
        yield
    finally:
        env.clear()


@contextmanager
def _undone(env: Environment, draws: RandomState | None) -> Iterator[None]:
    """Clear the environment if the forward fails. If its data could not be sent away, also restore the random
    state, so that the forward can run again."""
    try:
        yield
    except BaseException as error:
        env.clear()
        if isinstance(error, OffloadError) and draws is not None:
            draws.restore()
        raise


def _leads_to(node: fx.Node, results: Collection[fx.Node]) -> bool:
    """Return whether one of the results depends on a value."""
    seen, todo = {node}, [node]
    while todo:
        n = todo.pop()
        if n in results:
            return True
        new = [u for u in n.users if u not in seen]
        seen.update(new)
        todo += new
    return False


def slot(model: nn.Module, name: str, kind: str) -> TensorSlot:
    """Return the registry entry behind a dotted name."""
    owner = owner_name(name)
    path, _, leaf = owner.rpartition(".")
    module = model.get_submodule(path)
    # An attribute that a forward reads and assigns is a buffer in a plan.
    registry = parameters_of(module) if kind == "param" else \
        buffers_of(module) if leaf in buffers_of(module) else module.__dict__
    return TensorSlot(registry, leaf,
                      leaf + name.removeprefix(owner) if name != owner else "")

