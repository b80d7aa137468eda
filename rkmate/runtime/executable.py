"""A plan's source, compiled, on a model's own parameters and buffers."""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import starmap
from operator import attrgetter, getitem
from typing import Any, NamedTuple

import torch
from torch import nn

from rkmate.codegen.emit import Generated
from rkmate.device.random_state import RandomState
from rkmate.errors import BackwardError, OffloadError
from rkmate.graph.blocks.expressions import source_key
from rkmate.graph.blocks.lower import Program
from rkmate.graph.blocks.partition import Partition
from rkmate.graph.capture.answers import OtherAnswer
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.structure import owner_name, piece_of
from rkmate.graph.passes.gradients import gradients_of_any_strides
from rkmate.graph.passes.joint import Joint
from rkmate.graph.passes.once import unrepeatable
from rkmate.offload.protocol import CopyEngine
from rkmate.runtime.adapters import around_step
from rkmate.runtime.deferred import DeferredOutputs
from rkmate.runtime.double_backward import Again, Original
from rkmate.runtime.environment import (
    Additions,
    Environment,
    Held,
    RerunState,
    generator_state,
    generators_at,
)
from rkmate.runtime.segments import (
    Call,
    WithGraph,
    connect,
    connect_unplanned,
    unrecorded,
    unseen,
    without_autocast,
)
from rkmate.support.generated import load, show
from rkmate.torch_seam.modules import buffers_of, parameters_of
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.own import quickest
from rkmate.torch_seam.tensors import all_ordinary, has_strides, version_of

# -- Executables -----------------------------------------------------------------------------------
#
# A plan's source, compiled, on a model's own parameters and buffers.


logger = logging.getLogger("rkmate")
_numbers = iter(range(1 << 62))
_several: weakref.WeakSet[type[nn.Module]] = weakref.WeakSet()
"""Classes of models with several backwards through one forward, which was said."""
_FEW = 16
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


@dataclass(frozen=True)
class CallerTensors:
    """The tensors that the caller of a step holds, by source key."""

    slots: Mapping[str, TensorSlot]
    """Parameters and buffers."""
    constants: Mapping[str, torch.Tensor]
    inputs: Mapping[str, int]
    """Numbers among the tensors in the arguments."""
    overwritten: frozenset[str]
    """The tensors that the forward writes to."""

    @cached_property
    def _whole(self) -> dict[str, tuple[Mapping[str, torch.Tensor | None], str]]:
        return {k: (s.registry, s.owner) for k, s in self.slots.items() if not s.piece}

    @cached_property
    def _pieces(self) -> list[tuple[str, TensorSlot]]:
        return [(k, s) for k, s in self.slots.items() if s.piece]

    @cached_property
    def _versioned(self) -> list[str]:
        return [k for k in (*self.slots, *self.constants, *self.inputs) if k not in self.overwritten]

    def now(self, tensors: Sequence[torch.Tensor]) -> Held:
        """Return what the caller holds now. `tensors`: those in the arguments."""
        found = Held(zip(self._whole, starmap(getitem, self._whole.values()), strict=True))
        for key, slot in self._pieces:
            found[key] = slot.get()
        found.update(self.constants)
        for key, i in self.inputs.items():
            found[key] = tensors[i].detach()                   # detach: the boundary of autograd
        return found

    def trained(self, keys: Iterable[str], sources: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return parameters that gradients go to. A piece is made anew: autograd hands gradients on in the
        reverse order of what was made."""
        return [self.slots[k].get() if k in self.slots and self.slots[k].piece else sources[k] for k in keys]

    def versions(self, sources: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Return the versions of what the backward may read, and nobody may change before it."""
        try:
            return dict(zip(self._versioned, map(_version, map(sources.__getitem__, self._versioned)),
                            strict=True))
        except RuntimeError:                # inference tensors have none
            return {k: version_of(sources[k]) for k in self._versioned if not sources[k].is_inference()}

    def target(self, key: str, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the parameter or input that a gradient is of."""
        return tensors[self.inputs[key]] if key in self.inputs else self.slots[key].get()

    @property
    def written_inputs(self) -> list[int]:
        """Tensors in the arguments that the forward writes to."""
        return [i for k, i in self.inputs.items() if k in self.overwritten]


def _caller_tensors(model: nn.Module, capture: Capture, joint: Joint, generated: Generated) -> CallerTensors:
    slots: dict[str, TensorSlot] = {}
    constants: dict[str, torch.Tensor] = {}
    inputs: dict[str, int] = {}
    for source in capture.sources.values():
        key = source_key(source)
        if source.kind == "input":
            inputs[key] = int(source.key)
        elif source.kind == "constant":
            constants[key] = capture.constants[str(source.key)]
        elif source.kind != "tangent":
            slots[key] = slot(model, str(source.key), source.kind)
    count = capture.inputs.count
    inputs |= {f"input:{i}": i for i in range(count, count + len(capture.repeats))}
    for name in (p for s in generated.segments for p in (*s.params, *s.added)):
        slots.setdefault(f"param:{name}", slot(model, name, "param"))
    return CallerTensors(slots, constants, inputs, frozenset(map(source_key, joint.written())))


class Targets(NamedTuple):
    """The tensors that a step takes gradients of, by source key."""

    params: tuple[tuple[str, ...], ...]
    """Per segment of the backward: parameters whose gradients it returns."""
    returned: tuple[tuple[str, ...], ...]
    """Per segment: all that it returns gradients of. The last one's inputs are among them."""
    added: tuple[tuple[str, ...], ...]
    """Per segment: parameters whose gradients it adds to."""
    all: tuple[str, ...]
    """Whatever the captured backward has gradients of."""

    @property
    def last(self) -> int:
        """The last segment that autograd asks for."""
        return max(k for k, keys in enumerate(self.returned) if keys or self.added[k])


def _targets(capture: Capture, generated: Generated) -> Targets:
    params = tuple([tuple([f"param:{p}" for p in s.params]) for s in generated.segments])
    inputs = tuple([f"input:{i}" for i in generated.input_grads])
    return Targets(params, (*params[:-1], (*params[-1], *inputs)),
                   tuple([tuple([f"param:{p}" for p in s.added]) for s in generated.segments]),
                   tuple(dict.fromkeys(source_key(s) for s, _ in capture.grads)))


class Outputs(NamedTuple):
    """The outputs of a step, by number."""

    forms: tuple[tuple[tuple[int, ...], torch.dtype, tuple[int, ...]] | None, ...]
    """Shape and dtype of each in the trace, and the strides of its gradient."""
    tangents: tuple[tuple[int, str], ...]
    """The tensors that the backward takes a gradient of, with the key of the gradient."""
    fixed: tuple[int, ...]
    """The others."""
    unplanned: tuple[int, ...]
    """The others that autograd could differentiate."""
    keys: tuple[str, ...]
    """The values of the environment that the caller gets."""

    @property
    def are_large(self) -> bool:
        """Whether a gradient comes to more than a few numbers: a loss is computed outside."""
        forms = [self.forms[i] for i, _ in self.tangents]
        return any(form is not None and math.prod(form[0]) > _FEW for form in forms)


def _outputs(capture: Capture, program: Program) -> Outputs:
    meta = [n.meta[VALUE] if n is not None else None for n in program.joint.outputs]
    gradients = {int(s.key): n.meta[VALUE] for n, s in capture.sources.items() if s.kind == "tangent"}
    wanted = program.joint.wanted
    return Outputs(
        tuple([None if m is None else (tuple(m.shape), m.dtype, tuple(gradients.get(i, m).stride()))
               for i, m in enumerate(meta)]),
        tuple([(i, f"grad_output_{i}") for i, w in enumerate(wanted) if w]),
        tuple([i for i, w in enumerate(wanted) if not w]),
        tuple([i for i, d in enumerate(capture.differentiable) if d and not wanted[i]]),
        tuple([program.cd.d[j].name for j in program.pinned]))


Gradients = dict[str, torch.Tensor]
"""Gradients by source key."""
Redo = Callable[[RerunState, Mapping[int, torch.Tensor]], Gradients]
"""Gradients for output gradients (by output number) that this plan does not take."""


def loaded(generated: Generated, filename: str) -> dict[str, Any]:
    """Return the names of generated source: each operator stands for what it calls, which takes less time."""
    names = load(generated.text, filename)
    names.update([(name, quickest(value)) for name, value in names.items()])
    if generated.below_autograd:
        names.update([(name, unseen(names[name])) for name in generated.slices])
    return names


class PlannedStep:
    """Runs the generated source; one instance per signature and set of output gradients."""

    def __init__(self, model: nn.Module, capture: Capture, partition: Partition,
                 generated: Generated, device: torch.device, engine: CopyEngine | None = None) -> None:
        """`engine`: what copies values away, where the source says so."""
        assert engine is not None or not generated.copies, "nothing copies values away"
        program = partition.program
        filename = f"<rkmate plan {next(_numbers)}>"
        names = loaded(generated, filename)
        show(generated.text, filename, self)
        self.capture = capture
        self.generated = generated
        self.device = device
        self._model = model
        self.around = around_step(capture)
        """Adapters around each step."""
        self._any_strides = gradients_of_any_strides(program.joint)
        self.wanted = program.joint.wanted
        self.caller = _caller_tensors(model, capture, program.joint, generated)
        self.targets = _targets(capture, generated)
        self.outputs = _outputs(capture, program)
        self._engine = engine
        self._forward = names["forward"]
        self._backward = [names[s.function] for s in generated.segments]
        self._deferred = DeferredOutputs(program.joint, capture.result,
                                         [names[name] for name in generated.deferred], device)
        self._additions = list(dict.fromkeys(p for s in generated.segments for p in s.added))
        self._last = self.targets.last
        self._unrepeatable = [source_key(program.joint.sources[n]) for n in unrepeatable(program.joint)]
        self.loss_varies = False
        """Whether a loss of such a call has depended on other outputs than its plan was made for, or several
        backwards have come through one call."""
        self.keeps_overwritten = len(self.outputs.unplanned) + len(self.outputs.tangents) > 1
        """Whether a step keeps what it overwrites until its backward, which may have to run the forward a
        second time: from one backward on that is as planned, it does not."""
        self._draws = any(c.random for c in program.cd.c)

    def _why_not_twice(self) -> str:
        """Return why the original's forward cannot run again after this one; empty if it can."""
        if self._additions:
            return 'with gradients="in_place" the backward adds to .grad itself'
        written = [k for k in self.caller.inputs if k in self.caller.overwritten]
        if written or self._unrepeatable:
            return f"the forward has overwritten {(*written, *self._unrepeatable)[0].partition(':')[2]!r}"
        return ""

    def __call__(self, tensors: Sequence[torch.Tensor], redo: Redo,
                 finished: Callable[[], None] | None = None,
                 opened: Callable[[Call], None] | None = None,
                 read: Callable[[str], None] | None = None, original: Original | None = None,
                 verify: bool = False) -> list[Any]:
        """Run the forward of one step, and return its outputs. The backward follows through autograd, and
        calls `finished`. `tensors`: the inputs of the step; `opened`: called with the call when its forward
        has run; `read`: called with the name of an output that is read and that the step leaves out;
        `original`: for a double backward; `verify`: compare checksums of data that is sent away."""
        caller, targets, known = self.caller, self.targets, self.outputs
        sources = caller.now(tensors)
        additions = Additions(sources, self._additions) if self._additions else None
        versions = caller.versions(sources)
        state = generator_state(self.device) if self._draws else None
        env = self._environment(sources, {}, verify=verify)
        env.unrecorded = self.generated.below_autograd and all_ordinary(sources.values())
        answers = self.capture.effects.answers
        before = [(t := sources[k], t.detach().clone()) for k in caller.overwritten] if answers else []
        old = {k: sources[k].detach().clone() for k in self._unrepeatable} \
            if self.keeps_overwritten else {}
        with torch.no_grad(), without_autocast(self.device), unrecorded(env.unrecorded), \
                _undone(env, state, before):
            results = self._forward(env)
            for answer in answers:
                answer.check(results)
        before.clear()
        env.watch(known.keys)
        env.watch_sources(versions)
        call = Call(env, self._backward, self._last, targets.returned)
        call.rerun = RerunState(sources.with_others(old) if old else sources, versions, state, frozenset(old))
        call.finished = finished
        call.additions = additions
        if original is not None:
            call.again_with_graph = self._again(original, tensors, sources, state)
        if opened is not None:
            opened(call)
        params = [functools.partial(caller.trained, keys, sources) for keys in targets.params]
        added = [[sources[k] for k in keys] for keys in targets.added]
        inputs = [tensors[i] for i in self.generated.input_grads]
        # Fresh aliases: what the user gets refers to the environment, and must not stand in it.
        count = len(known.forms)
        outputs: list[Any] = [o if o is None else o.detach() for o in results[:count]]
        self._deferred.fill(outputs, results[count:], sources, read)
        del results

        def receive(call: Call, grads: list[torch.Tensor | None]) -> None:
            self._receive(call, grads, redo)

        flat = connect(call, receive, outputs, known.fixed, params, inputs, added)
        if known.unplanned:
            def unplanned(given: Mapping[int, torch.Tensor]) -> list[torch.Tensor | None]:
                if additions is not None:
                    additions.check()
                try:
                    found = redo(call.again(), given)
                except BaseException:
                    if additions is not None:
                        additions.were_interrupted()
                    raise
                return [found.get(k) for k in targets.all]

            places = caller.inputs
            connect_unplanned(call, unplanned, flat, known.unplanned, [
                tensors[places[k]] if k in places else sources[k] for k in targets.all],
                joins=additions is None and {*targets.all} <= {k for keys in targets.returned for k in keys})
        return flat

    def _again(self, original: Original, tensors: Sequence[torch.Tensor], sources: Held,
               draws: RandomState | None) -> WithGraph:
        """Return the gradients for a double backward. It is rare, so nothing is looked up in advance."""
        ran: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []

        def gradients(call: Call, given: Mapping[int, torch.Tensor]) -> dict[str, torch.Tensor | None]:
            return Again(original, self.capture, tensors[:self.capture.inputs.count], draws,
                         {k: self.caller.inputs.get(k, sources[k]) for k in self.targets.all},
                         {k.partition(":")[2]: t for k, t in sources.items()},
                         [sources[k] for k in self.caller.overwritten if k in self.caller.slots],
                         self._why_not_twice(), ran).gradients(call, given)
        return gradients

    # -- parts of a step --------------------------------------------------------------------

    def empty_gradient(self, i: int) -> torch.Tensor:
        """Room for the gradient of output `i`, as the traced backward expects it."""
        shape, dtype, stride = self.outputs.forms[i]  # type: ignore[misc]
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
        for function, targets in zip(self._backward, self.targets.returned, strict=True):
            for key, grad in zip(targets, function(env), strict=True):
                if grad is not None:
                    found[key] = found[key] + grad if key in found else grad
        return found

    def _receive(self, call: Call, grads: list[torch.Tensor | None], redo: Redo) -> None:
        """Move the gradients of the outputs into the environment; empties the list."""
        given: dict[int, torch.Tensor] = {}
        for i, _ in self.outputs.tangents:
            grad, grads[i] = grads[i], None
            if grad is not None:
                given[i] = grad
                del grad
        call.goes_through(given)
        joined, call.joined = call.joined, {}
        if len(given) == len(self.outputs.tangents) and not joined:
            if call.spent:
                call.env, call.spent = self._run_again(call), False
            else:
                self.keeps_overwritten = self.loss_varies
            if call.retained and (call.kept is None or call.kept.copies is not None):
                call.kept = call.env.kept(self.outputs.keys, whole=bool(self._changed(call.rerun)))
            self._give(call.env, given)
            return
        # The gradients of what only the others lead to have to be None, not zeros.
        call.env.clear()
        call.spent = True
        given |= joined
        joined.clear()
        call.ready = redo(call.rerun, given) if given and call.rerun is not None else {}

    def _changed(self, state: RerunState | None) -> list[str]:
        """Return what a second run of the forward would find changed."""
        return [k for k in self._unrepeatable if state is None or k not in state.copied]

    def _run_again(self, call: Call) -> Environment:
        """Return the values for a further backward of one call: its forward runs once more. Nothing is
        written, nothing is drawn anew."""
        state, kept = call.rerun, call.kept
        assert state is not None, "begin has refused it"
        if not self.loss_varies:
            self.loss_varies = self.keeps_overwritten = True
            if type(self._model) not in _several:
                _several.add(type(self._model))
                logger.warning("several backwards go through one forward of %s (retain_graph=True): it runs "
                               "again before each one after the first, within the memory of its plan",
                               type(self._model).__name__)
        if kept is not None and kept.copies is not None:
            return kept.copies
        env = self._environment(state.sources, state.versions, dry=True)
        self._forward_again(env, state)
        if kept is not None:
            env.take_over(kept)
        return env

    def _forward_again(self, env: Environment, state: RerunState) -> None:
        changed = self._changed(state)
        if changed:
            name = changed[0].partition(":")[2]
            raise BackwardError(
                "several backwards go through this forward, or a loss that it was not planned for, and it "
                f"cannot be run again, because it has overwritten {name!r}: run this step again; from now on "
                "the plan expects this loss")
        with torch.no_grad(), without_autocast(self.device), _undone(env, None, ()), \
                nullcontext() if state.draws is None else generators_at(self.device, state.draws):
            self._forward(env)

    def _give(self, env: Environment, given: dict[int, torch.Tensor]) -> None:
        for i, name in self.outputs.tangents:
            env.give((name,), self._as_traced(i, given.pop(i)))

    def again(self, state: RerunState, given: dict[int, torch.Tensor]) -> Gradients:
        """Return gradients by a second run of a forward; nothing is written, nothing is drawn anew.

        `given`: by output number, the gradients of exactly the outputs that this plan takes. The
        dictionary is emptied.
        """
        env = self._environment(state.sources, state.versions, dry=True)
        with torch.no_grad(), without_autocast(self.device), _cleared(env):
            self._forward_again(env, state)
            return self.run_backward(env, given)

    def _environment(self, sources: Mapping[str, torch.Tensor], versions: Mapping[str, int], *,
                     dry: bool = False, verify: bool = False) -> Environment:
        """Return the environment of one call, with the copies away of a step that sends data."""
        engine = self._engine
        if engine is None:
            return Environment(sources, versions, self.device, dry=dry)
        return Environment(sources, versions, self.device, dry=dry, away=engine.open(verify=verify),
                           buffer_bytes=engine.buffer_bytes)

    def _as_traced(self, i: int, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of output `i` in the layout that the traced backward expects; as it is, if the
        backward takes any layout."""
        _, dtype, stride = self.outputs.forms[i]  # type: ignore[misc]
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        if grad.dtype is dtype and not grad.is_conj() and not grad.is_neg() \
                and (i in self._any_strides or has_strides(grad, stride)):
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
def _undone(env: Environment, draws: RandomState | None,
            before: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> Iterator[None]:
    """Clear the environment if the forward fails. If its data could not be sent away, also restore the random
    state, so that the forward can run again; if it has found another answer than its trace took for granted,
    also what it overwrites. `before`: that, with the values before."""
    try:
        yield
    except BaseException as error:
        env.clear()
        if isinstance(error, OffloadError | OtherAnswer) and draws is not None:
            draws.restore()
        if isinstance(error, OtherAnswer):
            for t, value in before:
                t.data.copy_(value)
        raise


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

