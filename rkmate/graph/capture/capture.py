"""Capture: the joint forward and backward graph of a module, as ATen operations.

`torch.export` runs first: it tells libraries that they are being compiled, so that mask checks that depend on
data take the path that can be traced. AOTAutograd then makes the joint graph with descriptors. The table of
`repairs` lists the corrections on the way.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device.random_state import unchanged_random_state
from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.capture.answers import Looked, kinds_of
from rkmate.graph.capture.captured import Capture, read
from rkmate.graph.capture.collectives import CollectiveError, values_are_read
from rkmate.graph.capture.effects import (
    Collected,
    Effects,
    collected_again,
    counted,
    found_effects,
    is_state,
    read_before,
    repeated,
    told_apart,
)
from rkmate.graph.capture.forward_code import MISSING
from rkmate.graph.capture.hidden import Hidden, hidden_in
from rkmate.graph.capture.opaque import Opaque, OpaqueError, with_opaque
from rkmate.graph.capture.refusals import (
    explained,
    is_data_dependent,
    name_line,
    refuse_mixed_types,
    refuse_sparse,
)
from rkmate.graph.capture.repairs import repair_joint, repair_program, repaired, ways_to_export
from rkmate.graph.capture.state import (
    COUNTS,
    Assigned,
    HostDraws,
    Number,
    PythonState,
    complete,
    filled,
    members_of,
)
from rkmate.graph.capture.structure import (
    Structure,
    held_by_modules,
    refuse_what_a_trace_leaves,
    take_apart,
)
from rkmate.graph.capture.values import (
    Values,
    begin,
    drop_unused,
    from_inputs,
    is_stopped_by_values,
    taken_for_granted,
)
from rkmate.torch_seam.collectives import Unseen
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.dtensor import (
    as_dtensors,
    local_names,
    local_parameters,
    local_results,
    noting_dtensors,
)
from rkmate.torch_seam.modules import (
    HOOKED,
    buffers_by_path,
    buffers_of,
    planned_part_of_call,
)
from rkmate.torch_seam.patches.autograd import (
    ClosedOverError,
    OwnBackwardError,
    check_transforms,
    note_leaves,
    noting_inner_gradients,
)
from rkmate.torch_seam.patches.features import INNER, check_once
from rkmate.torch_seam.patches.libraries import begins_anew, is_completed
from rkmate.torch_seam.patches.modules import MadeByFirstCall
from rkmate.torch_seam.patches.numerics import WRITTEN_ANEW, ChecksByValue
from rkmate.torch_seam.tensors import storage_id
from rkmate.torch_seam.trace import (
    export_joint,
    forward_mode_ended,
    graphs_without_code,
    load,
    quiet,
    said_to_export,
)
from rkmate.torch_seam.versions import is_off

T = TypeVar("T")

# -- The module as it is traced ---------------------------------------------------------------------


class _Found:
    """Result of the traced forward. Opaque to the tracer, which restores module attributes."""

    structure: Structure | None = None
    assigned: Sequence[Assigned] = ()
    """Attributes that the forward has assigned: the tracer takes some of them back."""
    effects = Effects()
    outputs = 0
    """Number of tensors that the forward has returned, or left changed."""
    differentiates: bool = False
    """Whether the forward asks for a gradient by itself."""
    has_dtensors: bool = False
    """Whether the forward computes with DTensors."""

    def note_gradient(self) -> None:
        self.differentiates = True

    def note_dtensor(self) -> None:
        self.has_dtensors = True


_Told = Callable[[Sequence[torch.Tensor]], AbstractContextManager[None]]


class FlatModule(nn.Module):
    """The module with a flat list of tensors in and out; non-tensors are baked in. After it has run,
    `found.structure` is the structure around its outputs."""

    def __init__(self, model: nn.Module, inputs: Structure, before: PythonState, told: _Told) -> None:
        """`told`: returns the context for a forward on some tensors, in which libraries know values of
        them."""
        super().__init__()
        self.training = model.training
        self.model = model
        self._told = told
        self.found = _Found()
        self._inputs = inputs
        self.before = before

    def forward(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        begin(tensors, self.model)
        self.before.restore_members()          # another way to export may have failed
        args, kwargs = self._inputs.fill(list(tensors))
        before = self._inputs.held_by_objects(args, kwargs)
        members, buffers = members_of(args, kwargs), list(self.model.buffers())
        with repaired("forward", self.model), nullcontext() if is_off(INNER) else \
                noting_inner_gradients(self.found.note_gradient), as_dtensors(), \
                noting_dtensors(self.found.note_dtensor), self._told(tensors):
            out, placed = local_results(planned_part_of_call(self.model)(*args, **kwargs))
            of_modules, now = held_by_modules(self.model), set(map(id, self.model.buffers()))
            replaced = {id(b): b.clone() for b in buffers if id(b) not in now}     # before they are written
        changed = [(k, held) for k, (held, ids) in self._inputs.held_by_objects(args, kwargs).items()
                   if ids != before[k][1]]
        flat, structure = take_apart(out, result=True)
        self.found.structure = structure.with_dtensors(
            {k: placed[id(t)] for k, t in enumerate(flat) if id(t) in placed}) if placed else structure
        self.found.assigned = self.before.assigned()
        refuse_what_a_trace_leaves([out, *(a.new for a in self.found.assigned),
                                    *(held for held, _ in members.values()), *self.before.containers()])
        own = ((keys, filled(f"argument {keys[0]!r}", (0, ""), held, old))
               for keys, (held, old) in members.items())
        effects, every = found_effects(
            self.found.assigned, [*(((), f) for f in self.before.filled()),
                                  *((keys, f) for keys, f in own if f is not None)], changed,
            [*tensors, *flat], of_modules)
        flat = every[len(tensors):]
        self._refuse_new_leaves(flat, tensors)
        asked, answers = taken_for_granted(len(flat))
        flat += asked
        self.found.effects = replace(effects, answers=answers)
        self.found.outputs = len(flat)
        # A copy of each output keeps the graph's outputs free of aliases (of inputs, of each
        # other); simplification drops the copies again.
        return [replaced.get(id(t), t).clone() for t in flat]

    def _refuse_new_leaves(self, left: Sequence[torch.Tensor], given: Sequence[torch.Tensor]) -> None:
        """Refuse to lose the gradients of tensors that a forward returns, or leaves in attributes, after it
        has called `requires_grad_()` on them. `given`: its arguments."""
        own = {id(t) for t in (*given, *self.model.parameters())}
        for t in left:
            if t.requires_grad and t.is_leaf and id(t) not in own:
                raise CaptureError(
                    f"{type(self.model).__name__}: the forward returns or keeps a tensor of shape "
                    f"{tuple(t.shape)} on which it has called requires_grad_(), so that its gradient can be "
                    "asked for outside; a planned step has no such gradient. Call requires_grad_() on the "
                    "argument before the call and use that, or compute the gradient in the forward "
                    "(torch.autograd.grad) and return it")


def capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
            opaque: Opaque = ()) -> Capture:
    """Return the joint graph of one training step. Raises `CaptureError`, `ArgumentError`.

    `opaque`: submodules that run as they are, each call as one operation. The model is left as it was:
    parameters, buffers, gradients, train flags, random state and Python attributes. Only what a first forward
    completes (a configuration, a table that later ones read) is as a first forward leaves it.
    """
    check_once()
    with local_parameters(model), forward_mode_ended():
        return with_opaque(model, opaque, lambda: _whole(model, args, kwargs))


class _NotRepeated(CaptureError):
    """A second forward does something else than the first, as that has left attributes changed."""

    learns = False
    """Whether what the first has left leads to parameters."""


_OF_FIRST_CALLS = (_NotRepeated, MadeByFirstCall)
"""Errors of forwards whose first call may do what later ones do not."""


def _whole(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    try:
        return _of_one_call(model, args, kwargs)
    except _OF_FIRST_CALLS as error:
        if error.learns or any(devices.of(t).elsewhere is not None for t in model.parameters()):
            raise CaptureError(str(error)) from None
        before = PythonState(model)
        try:
            complete(model, args, kwargs)
        except Exception:               # a model may refuse a second forward before a backward
            before.restore()
            raise CaptureError(str(error)) from None
        try:
            return replace(_of_one_call(model, args, kwargs), completed=True)
        except Exception as again:      # what it still does after its first call
            before.restore()
            said = again if isinstance(again, CaptureError) else error
            raise (CaptureError(str(said)) if isinstance(said, _OF_FIRST_CALLS) else said) from None


def _of_one_call(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Capture:
    before = start = PythonState(model)
    before.refuse_iterators(model)
    draws = HostDraws()
    kept: list[Assigned] = []
    try:
        result, assigned = _capture(model, args, kwargs)
        if draws.drawn_by_imports():
            before.restore()
            draws.restore()
            result, assigned = _capture(model, args, kwargs)
        draws.refuse_change(model)
        read = set(map(storage_id, result.constants.values()))
        for one in (c.filled for c in result.effects.collected):
            if any(storage_id(t) in read for t in tensors_in(one.old)):
                kind = type(one.held).__name__.replace("defaultdict", "dict")
                raise CaptureError(
                    f"{type(model).__name__}: the forward reads tensors from the {kind} {one.path}, and "
                    "replaces them; a captured step would not repeat that. Keep them in buffers "
                    "(register_buffer)")
        state = [a for a in read_before(result.effects, result.constants.values()) if is_state(a)]
        if state:                   # they are read and written, as buffers are
            before.restore()
            for a in state:
                buffers_of(a.holder)[a.name] = a.holder.__dict__.pop(a.name)
            start = PythonState(model)
            result, assigned = _capture(model, args, kwargs)
        # A second trace from where the first has left the attributes: an equal graph means that the
        # forward does not read what it keeps.
        collected, numbers = result.effects.collected, [(n, n.place.read()) for n in before.numbers_left()]
        hidden = before.hidden_changes()
        made = [(a, [*hidden_in(a.path, a.new, set(), inside=True)]) for a in assigned
                if isinstance(a.holder, nn.Module) and (a.old is MISSING or a.old is None)]
        if collected or numbers or hidden or not all(is_completed(a.holder, a.name, a.old) for a in assigned):
            effects = _repeated(result, model, args, kwargs, start, assigned, numbers, hidden)
        else:
            effects = repeated(result.effects, (), type(model).__name__, hooks=False)
        again = [h for h in hidden if h.has_changed()]
        if again or (hidden and effects is None and not (assigned or collected or numbers)):
            name = type(model).__name__
            raise CaptureError(f"{name}: the forward changes {(again or hidden)[0]}; {COUNTS}")
        counts = counted(type(model).__name__, numbers, bool(assigned or collected) or effects is not None)
        if effects is None:
            raise _not_repeated(model, assigned, collected)
        written = {w.assigned.place.key for w in effects.attributes}
        for a, states in made:
            if a.place.key not in written and any(h.has_changed() for h in states):
                raise _not_repeated(model, [a], ())         # made by the first forward, changed by each
        # What only the first forward assigns is assigned now; in a module it may say that hooks were added.
        kept = [a for a in assigned if not tensors_in(a.new) and a.place.key not in written]
        if any(isinstance(a.holder, nn.Module) for a in kept) and not PythonState(model).has_hooks_of(before):
            kept = [a for a in kept if not isinstance(a.holder, nn.Module)]
        found = replace(result, assigned=tuple(kept), effects=replace(effects, numbers=counts), program="")
    finally:
        draws.restore()
        before.restore()
        for a in kept:
            a.repeat()
    left_in = before.leaked() if all(devices.of(t).elsewhere is None for t in model.parameters()) else None
    if left_in is not None:
        raise CaptureError(f"{type(model).__name__}: the forward leaves a tensor in {left_in}, which a "
                           "planned step would not do again: put it into an attribute of a module, a list or "
                           "a dictionary, or return it")
    return found


def _not_repeated(model: nn.Module, assigned: Sequence[Assigned], collected: Sequence[Collected]
                  ) -> _NotRepeated:
    """Return the error of a forward that does something else a second time. `collected`: what it has put into
    lists and dictionaries."""
    names = ", ".join(dict.fromkeys([*(a.path for a in assigned[:5]),
                                     *(c.filled.path for c in collected[:5])]))
    line = assigned[0].line if assigned else ""
    what, instead = f"assigns {names}{line}", "Keep such state in a buffer (register_buffer), or return it."
    if any(a.name == HOOKED for a in assigned):
        what = f"registers backward hooks on its modules ({names})"
        instead = ("Hook parameters or outputs instead. Libraries do so for their own gradient "
                   "checkpointing, which a plan replaces: switch it off "
                   "(model.gradient_checkpointing_disable())")
    error = _NotRepeated(f"{type(model).__name__}: the forward {what}; a captured step would not "
                         f"repeat that. {instead}")
    left = [*(a.new for a in assigned), *(c.filled.new for c in collected)]
    error.learns = any(t.requires_grad for value in left for t in tensors_in(value))
    return error


def _repeated(first: Capture, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
              before: PythonState, assigned: Sequence[Assigned],
              numbers: Sequence[tuple[Number, Any]], hidden: Sequence[Hidden]) -> Effects | None:
    """Return the changes that each forward leaves behind; None where a second one does something else.
    `numbers`: those that the first has changed, each with what it has made of it. `hidden`: likewise."""
    left = PythonState(model)
    before.restore()
    left.restore_hooks()              # those that the first trace has installed belong to it
    for a in assigned:
        a.repeat()
        a.place.write(told_apart(a.place.read()))
    for c in first.effects.collected:
        if not c.at and not begins_anew(c.filled.held):
            c.filled.repeat()
    for number, new in numbers:
        number.place.write(told_apart(new))
    for h in hidden:
        h.restore()
    try:
        second, again = _capture(model, args, kwargs, first)
    except CaptureError:
        return None             # it stumbles over what the first has left
    if _text(first) != _text(second) or read_before(first.effects, first.constants.values()):
        return None
    effects = collected_again(first.effects, second.effects)
    return None if effects is None else repeated(effects, again, type(model).__name__,
                                                 hooks=not left.has_hooks_of(before))


def _text(found: Capture) -> str:
    return _text_of(found.graph, found.constants)


def _text_of(graph: torch.fx.Graph, constants: Mapping[str, torch.Tensor]) -> str:
    values = [(k, v.tolist()) for k, v in sorted(constants.items()) if v.numel() < 1000]
    lines = [f"{n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes]
    return "\n".join([*lines, repr(values)])


def _text_of_program(program: nn.Module, model: nn.Module) -> str:
    """Return the text of an exported forward; empty unless all of its operations are torch's own. The
    backward of others may run Python, and read what a forward has left."""
    if not isinstance(program, torch.fx.GraphModule) or not all(
            getattr(n.target, "namespace", "") == "aten" or n.target in (operator.getitem, note_leaves)
            for n in program.graph.nodes if n.op.startswith("call") and (n.op == "call_function" or n.users)):
        return ""
    own = {f"model.{name}" for name, _ in buffers_by_path(model)}
    return _text_of(program.graph, {name: t for name, t in program.named_buffers(remove_duplicate=False)
                                    if name not in own})


def _export(flat: FlatModule, tensors: tuple[torch.Tensor, ...], values: Values | None) -> Any:
    """Return the exported program, in the first way in which that succeeds; the module itself where none does
    and its forward differentiates, and where it computes with DTensors, whose backward an exported program
    does not have."""
    def computes_with_dtensors(how: str) -> FlatModule:
        if values is not None:
            raise CaptureError(f"{type(flat.model).__name__} {how} DTensors, and its forward reads values of "
                               "its inputs (.item(), masks), which cannot be planned together: read these "
                               "values outside of the forward, or apply rkmate to the parts that read none")
        return flat

    if local_names():
        return computes_with_dtensors("has parameters that are")

    def export() -> Any:
        program = torch.export.export(flat, tensors, strict=False).module()
        check_transforms(program)
        if values is not None:
            drop_unused(program)
        repair_program(program)
        return program

    try:
        return _in_first_way(flat, ways_to_export(flat.model), export)
    except CaptureError:
        raise
    except Exception:
        if flat.found.has_dtensors:
            return computes_with_dtensors("makes")
        if flat.found.differentiates:
            return flat
        raise


def _in_first_way(flat: FlatModule, ways: Sequence[Callable[[], AbstractContextManager[None]]],
                  trace: Callable[[], T]) -> T:
    """Return what a trace gives in the first way in which it succeeds. Raises the error of the last way,
    unless an earlier one has found that a value decides."""
    failed: list[Exception] = []
    for way in ways:
        try:
            with way(), forward_mode_ended():
                return trace()
        except MadeByFirstCall:
            raise
        except Exception as error:
            failed.append(error)
            flat.before.restore()           # what it has assigned and registered, before the next way
    # A library's last way may stumble over what its own code does not expect there.
    raise next((e for e in (failed[-1], *failed) if is_data_dependent(e)), failed[-1]) from None


def _joint_of_distributed(flat: FlatModule, tensors: Sequence[torch.Tensor]) -> torch.fx.GraphModule:
    """Return the joint graph of a model with DTensor parameters, which is traced without an export."""
    def joint() -> torch.fx.GraphModule:
        with said_to_export():
            return export_joint(flat, tensors, WRITTEN_ANEW)

    return _in_first_way(flat, ways_to_export(flat.model, direct=True), joint)


def _capture(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
             known: Capture | None = None) -> tuple[Capture, Sequence[Assigned]]:
    """Return the capture of a forward that asks for no values; else, where it asks for those of its inputs,
    buffers and constants alone, the capture for such that answer as these do. `known`: its graph is taken
    where the exported forward is the same."""
    before = PythonState(model)
    try:
        return _once(model, args, kwargs, None, known)
    except CaptureError as error:
        cause, given = error.__cause__, take_apart((args, kwargs), result=False)[0]
        if not isinstance(error, ChecksByValue) and (
                not isinstance(cause, Exception) or not is_stopped_by_values(cause)):
            raise
        before.restore()
        with from_inputs(model, given) as values, values_are_read():
            try:
                return _once(model, args, kwargs, values, known)
            except CaptureError as again:
                if values.answered or values.questions.answered:
                    raise                   # the first obstacle is none, and there is another
                reasons = cause, again.__cause__
                if all(isinstance(e, Exception) and is_data_dependent(e) for e in reasons):
                    raise                   # the same obstacle, with the line
                raise error from cause


def _once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], values: Values | None,
          known: Capture | None) -> tuple[Capture, Sequence[Assigned]]:
    load()          # before the contexts below replace what the import binds
    given, inputs = take_apart((args, kwargs), result=False)
    # One tensor passed twice is two inputs: another call may pass two.
    tensors = [t if all(t is not u for u in given[:k]) else
               t.detach().requires_grad_(t.requires_grad) for k, t in enumerate(given)]
    with unchanged_random_state(*devices.in_use()), warnings.catch_warnings(), torch.inference_mode(False), \
            torch.enable_grad(), quiet(), graphs_without_code(), repaired("trace", model):
        warnings.simplefilter("ignore")
        looked = Looked(kinds_of(tensors))
        flat = FlatModule(model, inputs, PythonState(model), looked.begun)
        program = None
        try:
            program = _export(flat, tuple(tensors), values)
            text = "" if values is not None else _text_of_program(program, model)
            if known is not None and text and text == known.program:
                return replace(known, effects=flat.found.effects), flat.found.assigned
            module = _joint_of_distributed(flat, tensors) if local_names() or flat.found.has_dtensors else \
                export_joint(program, tensors, WRITTEN_ANEW)
            structure = flat.found.structure
            assert structure is not None
        except (ClosedOverError, OwnBackwardError) as error:
            raise explained(model, args, kwargs, error) from error
        except (ArgumentError, CollectiveError, Unseen, OpaqueError, KeyboardInterrupt):
            raise                       # others complete the messages of three of them
        except CaptureError as error:
            name_line(model, error)
            raise
        except Exception as error:
            raise explained(model, args, kwargs, error, program) from error
    refuse_sparse(model, module.graph)
    refuse_mixed_types(model, module.graph)
    repair_joint(module.graph)
    found = read(module, model, program, inputs, structure, values, flat.found.outputs)
    return (replace(found, effects=flat.found.effects, looked=looked.found, program=text),
            flat.found.assigned)
