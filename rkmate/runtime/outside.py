"""Uses of a planned module's outputs by its caller before the backward begins: a loss, or more.

A plan leaves room for a usual loss: three times the outputs that it is computed from. Some losses take more
(a formula of several operations), and some hold memory to the end of the backward: `F.mse_loss` returns a
number in a storage as large as its input. No plan can know before the first step, so that step looks.

Other models may stand between the outputs and the loss (a frozen U-Net behind a ControlNet), and no rule
knows what unusual operations take (a short-time Fourier transform). Their memory is free again when the
module's backward begins, so the second step measures all that is allocated in between.

A step may call a module several times, one call after the other: microbatches of a pipeline, or a
discriminator and a generator in turn. The caller may keep something of each call to the end of the step (its
loss). A later step looks for that.
"""

from __future__ import annotations

import json
import re
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device import MeterError, MeterInUse
from rkmate.device.events import OpenRun
from rkmate.ir.simulate import LOSS_SCALARS, lasting_of_loss
from rkmate.runtime.segments import Call, saved_by
from rkmate.show.plan import Plan
from rkmate.support.warn import warn
from rkmate.torch_seam.dtensor import dtensor_types, held_part, is_dtensor
from rkmate.torch_seam.memory import living
from rkmate.torch_seam.tensors import (
    function_of,
    inside_backward,
    key_of,
    saved_by_node,
    storage_lives,
    version_of,
)

USUAL = re.compile(
    r"^(Nll|LogSoftmax|Mse|SmoothL1|Huber|BinaryCrossEntropy|View|UnsafeView|ReshapeAlias|Transpose|T|Permute|"
    r"Slice|Select|Squeeze|Unsqueeze|Alias|Clone|Add|Mul|Div|Sum|Mean|ToCopy|_DDPSink)(Loss|Loss2D|LossND|WithLogits)?"
    r"Backward\d*$")
"""Names of autograd's nodes of which losses consist that take no more than is left for one."""
ALONE = re.compile(
    r"^(Tanh|Sigmoid|Exp|Log|Abs|Neg|Rsub|Relu|LeakyRelu|Elu|Silu|Gelu|Softplus|LogSigmoid|Softmax|Hardtanh|"
    r"Clamp)Backward\d*$")
"""Names of nodes that take no more either, if they compute with an output, and numbers are made of their
result at once (`output.tanh().mean()`)."""
_NUMBERS = re.compile(r"^(Mean|Sum|Add|ViewAsReal)Backward\d*$")
"""Names of the nodes that make these numbers, and add them; also of complex outputs."""
_PACKAGE = __name__.partition(".")[0]
MORE = 5, 3
"""The memory of another loss, as a ratio to that of a usual one."""
MANY = 100
"""Operations between forward and backward that are more than a loss: other models."""
FAR = 2000
"""Operations in front of a module, or next to it, that are looked at, at most."""
LOOKS = 8
"""Calls under a plan that are looked at, at most, until one is found whose backward begins first."""
STEPS_IN_A_ROW = 3
"""Steps that are looked at, at most, for what finished calls leave with the caller."""


class Outside(NamedTuple):
    """Memory and operations outside of the plan, as a step has shown them."""

    held: int = 0
    """Bytes that the caller has made, and holds while the backward runs."""
    is_usual: bool = True
    """Whether the loss takes no more than is left for one. Operations on DTensors may communicate, and take
    other memory than those of the same name (`loss_parallel`)."""
    operations: int = 0
    """Differentiable operations from the outputs to the loss."""
    between: BetweenMeter | Measured | None = None
    """Measures the bytes that the caller takes between forward and backward."""
    calls: int = 1
    """Calls of the step, one after the other, of which the caller has kept something."""
    again: bool = False
    """Whether a backward has gone through the call before."""
    beside: int = 0
    """Bytes that autograd keeps of operations from before the call which lead to the loss on another way."""
    before: int = 0
    """Bytes that autograd keeps of operations which lead to the call's inputs."""
    because: tuple[str, str] | None = None
    """For a step that was measured as a whole: why it takes more than its plans, and advice."""

    def is_known(self) -> bool:
        """Return whether a measurement can be read now: not before the backward that runs is over."""
        return not isinstance(self.between, BetweenMeter) or self.between.has_stopped()


class Measured(NamedTuple):
    """A measurement of several ranks."""

    most: int | None

    def bytes(self) -> int | None:
        """Return the largest number of bytes; None where nothing was measured."""
        return self.most


T = TypeVar("T")


class Shown(Generic[T]):
    """Findings of a step on each rank, where the forward communicates: all ranks plan anew, or none."""

    def __init__(self, ready: T, tell: Callable[[str], list[str]]) -> None:
        """`ready`: the plan of the step; `tell`: gives a text to all ranks, and returns the texts of all."""
        self.ready, self._tell = ready, tell
        self.seen: tuple[Outside, int] | None = None
        """Memory outside of this rank's plan, and the number of open calls; None before a backward."""

    def together(self) -> tuple[Outside, int] | None:
        """Return the most that any rank was shown, and the most open calls; None if no rank was shown
        anything. All ranks call this at the same place."""
        mine = None
        if self.seen is not None:
            seen, opened = self.seen
            mine = [seen.held, not seen.is_usual, seen.operations, opened, seen.between is not None,
                    seen.between and seen.between.bytes()]
        texts = self._tell(json.dumps(mine))
        rows = [row for text in texts for row in [json.loads(text)] if row is not None]
        if not rows:
            return None
        held, unusual, operations, opened, measures = (max(r[k] for r in rows) for k in range(5))
        most = max((r[5] for r in rows if r[5] is not None), default=None)
        return Outside(held, not unusual, operations, Measured(most) if measures else None), opened


class OutsideWatch:
    """Looks for what was made since a forward has returned, and is still there when its backward begins:
    the tensors that Python refers to, and the operations that led to them."""

    def __init__(self, device: torch.device, model: nn.Module) -> None:
        """`model`: the gradients of its parameters are no part of a budget."""
        self._device, self._model = device, model
        self._since: list[Any] = []
        there = _found(device)
        self._before = {key: storage_lives(held_part(found[0])) for key, found in there.items()}
        """Storages that were there. None of them gives its number to another one."""
        self._made = {key for key, found in there.items() if any(
            t.requires_grad and ((node := _node_of(t)) is None or _is_planned(node)) for t in found)}
        """Storages of what planned modules have returned, or hold, and of parameters."""

    def end(self, gradients: Sequence[torch.Tensor | None], copies: Sequence[torch.Tensor],
            own: Iterable[torch.Tensor]) -> Outside:
        """Return what is there now. `gradients`: of the module's outputs, which a plan counts; `copies`: of
        what its forward has left; `own`: what the call holds, its inputs included."""
        self._made.update(key for t in own if (key := key_of(held_part(t))) is not None)
        known = {None} | self._before.keys() | gradients_of(self._model) | {
            key_of(held_part(t)) for t in (*gradients, *copies) if t is not None}
        new = {key: found for key, found in _found(self._device, self._since).items() if key not in known}
        numbers = [t for found in new.values() for t in found if t.numel() == 1 and _node_of(t) is not None]
        nodes, first = _operations([_node_of(t) for t in numbers])
        is_usual = _are_usual(nodes) and not any(map(is_dtensor, numbers))
        held = [held_part(found[0]) for found in new.values()]
        # What the backward of the loss has still to come to, or keeps for another one.
        saved = [held_part(t) for node in nodes for t in saved_by_node(node) if t.device == self._device]
        sizes = {k: t.untyped_storage().nbytes() for t in (*held, *saved) if (k := key_of(t)) not in known}
        return Outside(sum(sizes.values()) + self._waiting([_node_of(t) for t in numbers]), is_usual,
                       len(nodes), beside=self._kept_by(nodes), before=self._kept_by(_before(first)))

    def _waiting(self, begin: Sequence[Any]) -> int:
        """Return the bytes of gradients that parameters get from the loss on another way (a penalty on
        weights): autograd holds them until those of the module arrive, and adds up both. Where a parameter
        has no gradient before the step, they are the beginning of that."""
        own = {id(p): p for p in self._model.parameters() if p.grad is not None}
        found = {id(p): own[id(p)] for p in _leaves(begin) if id(p) in own}
        return sum(held_part(p).nbytes for p in found.values() if p.device == self._device)

    def _kept_by(self, nodes: Sequence[Any]) -> int:
        """Return the bytes from before the call that some operations keep for their backward, without
        parameters and data."""
        saved = [held_part(t) for node in nodes for t in saved_by_node(node)
                 if t.device == self._device and _node_of(t) is not None]
        return sum({key: t.untyped_storage().nbytes() for t in saved
                    if (key := key_of(t)) in self._before and key not in self._made}.values())


class BetweenMeter:
    """Measures the memory that is taken from now on until the backward of a call begins.

    A profiler that is stopped inside of a backward runs again afterwards: autograd restores the state of its
    thread. So it stops when the call is gone, at an optimizer's step, when the result is asked for, in the
    next forward, or when another measurement begins: a caller may keep outputs for as long as it likes.
    """

    def __init__(self, device: torch.device, call: Call) -> None:
        self._run: OpenRun | None = None
        self._thread = threading.get_ident()
        self._measured = self._is_cut = self._has_stopped = False
        try:
            self._run = OpenRun(devices.of(device).parts_meter(), self._give_way, lambda: self._measured)
        except MeterInUse:
            raise
        except MeterError:                      # the user profiles
            self._has_stopped = True
            return
        self._run.begin_part(0)
        weakref.finalize(call, self._stop)

    @classmethod
    def begun(cls, device: torch.device, call: Call) -> BetweenMeter | None:
        """Begin to measure. None while rkmate measures something else (`measure_step`)."""
        try:
            return cls(device, call)
        except MeterInUse:
            return None

    def end(self) -> None:
        """The backward begins."""
        if self._run is not None:
            self._measured = not self._is_cut and threading.get_ident() == self._thread
            self._run.end_part()

    def bytes(self) -> int | None:
        """Return the largest number of bytes; None where nothing was measured, or the measurement runs."""
        if not self.has_stopped() or not self._measured or self._run is None:
            return None
        return self._run.meter.peaks().get(0)

    def has_stopped(self) -> bool:
        """Stop, and return whether that was possible: not in a backward (of another loss, whose hook calls
        the module again), nor in another thread."""
        self._stop()
        return self._has_stopped

    def _give_way(self) -> None:
        """Another measurement begins, or an optimizer steps."""
        self._is_cut = not self._measured
        self._stop()

    def _stop(self) -> None:
        if self._run is not None and threading.get_ident() == self._thread and not inside_backward():
            self._run.close()
            self._has_stopped = True


class InARow:
    """Looks, in a step that calls a module more often than its plan is for, for the memory that finished
    calls have left with the caller when the backward of a later call begins: also their inputs, where each
    call gets new ones. Gradients of parameters do not count.

    Calls that take turns (a discriminator's and a generator's) follow a plan for each signature. The last
    call of each signature is looked at. A step is over when the module's parameters have changed.
    """

    def __init__(self, model: nn.Module, *, looks: bool) -> None:
        """`looks`: whether it looks at all."""
        self._model = model
        self._clock = next((p for p in model.parameters() if p.requires_grad), None)
        self._version = -1
        self._calls: list[Hashable] = []
        """The signatures of the calls of this step so far."""
        self._calls_before = 0
        """The number of calls of the step before."""
        self._places: set[int] = set()
        """The places in the step of the calls to look at."""
        self._steps = STEPS_IN_A_ROW if looks else 0
        self._told = False
        self._at_start: dict[int, int] | None = None
        """Storages that were there when the step began, and their bytes; None for a step that is not looked
        at."""
        self._before: dict[int, int] | None = None
        """Storages that were there before a call to look at; None before other calls."""
        self._planned = 1
        """Calls before a backward that the plan of that call is for."""
        self._first: list[tuple[int | None, Callable[[], bool]]] = []
        """Storages of the first call's inputs, and whether each still lives."""
        self._new: dict[int, Callable[[], bool]] = {}
        """Inputs of the first call for which the latest call has tensors of this step."""

    def begin_call(self, signature: Hashable, planned: int, inputs: Sequence[torch.Tensor],
                   device: torch.device) -> None:
        """Count a call, before its forward. `planned`: calls before a backward that its plan is for."""
        self._before = None
        if self._clock is None or not self._steps:
            return
        version = version_of(self._clock)
        if version != self._version:
            ended, self._calls = self._calls, []
            self._version, self._calls_before, self._at_start = version, len(ended), None
            last = {key: place for place, key in enumerate(ended)}
            self._places = {place for place in last.values() if place >= planned}
            if self._places:
                self._steps -= 1
                self._at_start = self._storages(device)
                self._first = [(key_of(t), storage_lives(t)) for t in inputs]
        self._calls.append(signature)
        if self._at_start is not None and len(self._calls) - 1 in self._places:
            self._before, self._planned = self._storages(device), planned
            old = [key_of(t) in self._at_start for t in inputs]         # of one batch, or the same
            self._new = {} if all(old) else {
                key: lives for k, (key, lives) in enumerate(self._first)
                if key is not None and not (k < len(old) and old[k])}

    def tell_once(self, name: str, seen: Outside, plan: Plan) -> None:
        """Warn, once, if a step takes more than its budget because of what its caller keeps."""
        if not self._told and is_over(seen, plan):
            self._told = True
            warn_of_row(name, seen, plan)

    def watch(self, call: Call, are_open: Callable[[], Sequence[Call]], device: torch.device,
              tell: Callable[[Outside], None]) -> None:
        """Look at a call whose forward is over, if there is reason to, when its backward begins, unless more
        calls are open then than its plan is for. `tell`: gets what was found."""
        start, before, then = self._at_start, self._before, call.begins
        if start is None or before is None:
            return
        new, planned, after = self._new, self._planned, self._storages(device)
        place, calls, first = len(self._calls) - 1, self._calls_before, True

        def begins(grads: Sequence[torch.Tensor | None]) -> None:
            nonlocal first
            if first and len(opened := are_open()) <= planned:
                counted = {key_of(t) for other in opened for t in other.env.values()}
                made = {key for key, lives in new.items() if lives()}
                there = {k: b for k, b in start.items() if k not in made}
                now, kept = self._storages(device), counted | there.keys()
                left = sum(b for k, b in now.items() if k in before and k not in kept) - \
                    sum(b for k, b in there.items() if k not in now)
                known = after.keys() | {key_of(g) for g in grads if g is not None}
                held = sum(b for k, b in now.items() if k not in known)
                self._places.discard(place)
                if not self._places:
                    self._steps = 0
                if left > LOSS_SCALARS * (place + 1):
                    # The plan counts what calls leave that are open at once.
                    tell(Outside(left * (place + 1 - planned) // place + held, calls=calls))
            first = False
            if then is not None:
                then(grads)
        call.begins = begins

    def _storages(self, device: torch.device) -> dict[int, int]:
        grads = gradients_of(self._model)
        return {key: held_part(found[0]).untyped_storage().nbytes() for key, found in _found(device).items()
                if key not in grads}


def _found(device: torch.device, since: list[Any] | None = None) -> dict[int, list[torch.Tensor]]:
    """Return the tensors of a device by the number of their storage; without those that have none. `since`: a
    list, if only tensors that were made after it are needed."""
    found: dict[int, list[torch.Tensor]] = defaultdict(list)
    kinds = {torch.Tensor, nn.Parameter, *dtensor_types()}
    for t in living(kinds, since):
        if t.device == device and (key := key_of(held_part(t))) is not None:
            found[key].append(t)
    return found


def gradients_of(model: nn.Module) -> set[int | None]:
    """Return the storages of the gradients of a module's parameters."""
    return {key_of(held_part(p.grad)) for p in model.parameters() if p.grad is not None}


def _node_of(tensor: torch.Tensor) -> Any:
    """Return the node of autograd's graph that a tensor comes from; None where it has none, or does not tell:
    views of what was written to since (parameters that FSDP1 has gathered)."""
    try:
        return tensor.grad_fn
    except RuntimeError:
        return None


def _is_planned(node: Any) -> bool:
    """Return whether a node of autograd's graph belongs to a planned module: a custom function of rkmate."""
    return getattr(function_of(node), "__module__", "").partition(".")[0] == _PACKAGE


def _operations(begin: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Return autograd's nodes from some on, up to those of planned modules, without those that lead to these
    modules' inputs; and the nodes that lead to the modules."""
    seen: set[Any] = set()
    found: list[Any] = []
    before: list[Any] = []
    todo = list(begin)
    while todo and len(found) <= MANY:
        node = todo.pop()
        if node in seen or type(node).__name__ == "AccumulateGrad":
            continue
        seen.add(node)
        then = [n for n, _ in node.next_functions if n is not None]
        if _is_planned(node):
            before += then
        else:
            found.append(node)
            todo += then
    of_inputs: set[Any] = set()
    first = list(before)
    while before:
        node = before.pop()
        if node not in of_inputs and (node in seen or _is_planned(node)):
            of_inputs.add(node)
            before += [n for n, _ in node.next_functions if n is not None]
    return [node for node in found if node not in of_inputs], first


def _reached(begin: Sequence[Any], stops: Callable[[Any], bool] = lambda node: False) -> set[Any]:
    """Return autograd's nodes from some on, about `FAR` at most. `stops`: tells whether a way ends before a
    node."""
    seen: set[Any] = set()
    todo = list(begin)
    while todo and len(seen) <= FAR:
        node = todo.pop()
        if node not in seen and not stops(node):
            seen.add(node)
            todo += [n for n, _ in node.next_functions if n is not None]
    return seen


def _leaves(begin: Sequence[Any]) -> list[torch.Tensor]:
    """Return the tensors that autograd's nodes from some on end at, on ways that lead through no planned
    module."""
    return [n.variable for n in _reached(begin, _is_planned) if type(n).__name__ == "AccumulateGrad"]


def _are_usual(nodes: Sequence[Any]) -> bool:
    """Return whether a loss of these operations takes no more than is left for one."""
    alone = {n for n in nodes if ALONE.match(type(n).__name__) and all(
        _is_planned(before) or type(before).__name__ == "ViewAsRealBackward0"
        for before, _ in n.next_functions if before is not None)}
    others = _NUMBERS if alone else USUAL
    return all(node in alone or others.match(type(node).__name__) for node in nodes)


def _before(begin: Sequence[Any]) -> list[Any]:
    """Return autograd's nodes that lead to some nodes of planned modules, without those of such modules."""
    return [n for n in _reached(begin) if not _is_planned(n) and type(n).__name__ != "AccumulateGrad"]


def is_over(seen: Outside, plan: Plan) -> bool:
    """Return whether a plan has no room for the memory that a step has shown."""
    return seen.held - LOSS_SCALARS > plan.budget_bytes - plan.peak_bytes or not (
        seen.is_usual or plan.calls * saved_by(plan) + of_more(room_for_loss(plan)) <= plan.budget_bytes)


def room_for_loss(plan: Plan) -> int:
    """Return the bytes that a plan leaves for the loss of all its calls."""
    graph = plan.graph.cd
    return graph.reserve_at_loss + (plan.calls - 1) * lasting_of_loss(graph)


def loss_of_call(loss: int, plan: Plan) -> int:
    """Return the bytes to leave for the loss of one call, so that all calls of a plan leave some for the
    loss."""
    grads = plan.graph.cd.bytes(plan.graph.cd.output_grads)
    return -(-(loss + (plan.calls - 1) * grads) // plan.calls)


class Needs(NamedTuple):
    """Memory that plans have to leave for the caller."""

    held: int
    """Bytes that the caller holds while the backward runs."""
    loss: int
    """Bytes of the loss, or of what other models take before the backward begins."""
    words: str
    """The reason, for a message."""
    remedy: str
    """Advice if no plan keeps to the budget."""

    def tell(self, what: str) -> None:
        """Warn that steps exceed the budget. `what`: the figures."""
        warn(f"{self.words}. {what}. {self.remedy}")


_INSIDE = "A loss inside of the plan (rkmate.with_loss) takes less"


def needs_of(seen: Outside, usual: int, name: str) -> Needs | None:
    """Return the memory that a step has shown a caller to need; None if the memory of other models could not
    be measured. `usual`: bytes that are left for a loss; `name`: of the module."""
    held = max(0, seen.held - LOSS_SCALARS)
    if seen.because is not None:
        return Needs(held, usual, *seen.because)
    if seen.calls > 1:
        return Needs(held, usual, _in_a_row(seen, name), "Let go of losses and of inputs' gradients earlier")
    if seen.again and seen.between is None:
        return Needs(held, usual if seen.is_usual else of_more(usual), _in_a_row(seen, name),
                     "Add the losses up, and call one backward")
    if seen.between is None:
        loss = usual if seen.is_usual else of_more(usual)
        return Needs(held, loss, f"the loss that is computed from the outputs of {name} takes more than a "
                     f"usual one (about {loss:,} bytes; {seen.held:,} are held while the backward runs)",
                     _INSIDE)
    between = seen.between.bytes()
    if between is None:
        return None
    loss = max(usual, between - held)
    if seen.operations <= MANY:
        return Needs(held, loss, f"the loss that is computed from the outputs of {name} takes {between:,} "
                     "bytes", _INSIDE)
    return Needs(held, loss, f"more than {MANY} operations, as of another model, follow on the outputs of "
                 f"{name}, and take {between:,} bytes before its backward begins",
                 "Give a larger budget, or checkpoint the other model (torch.utils.checkpoint)")


def warn_of_others(name: str, usual: int) -> None:
    """Warn that other models follow on a module's outputs. `usual`: bytes that are left for a loss."""
    warn(f"more than {MANY} operations follow on the outputs of {name}: what they take comes on top of the "
         f"budget, in which {usual:,} bytes are left for a loss. Leave room for other models in a step "
         "(rkmate.Settings(loss_bytes=...))")


def _in_a_row(seen: Outside, name: str) -> str:
    if seen.again:
        return (f"several backwards go through one call of {name} (retain_graph=True), and its caller keeps "
                f"{seen.held:,} bytes (the losses with what they keep, gradients) while a later one runs")
    return (f"a step calls {name} {seen.calls} times, and its caller keeps {seen.held:,} bytes of finished "
            "calls and of the latest one's loss (losses, inputs, their gradients, outputs) while a later "
            "backward runs")


def warn_of_row(name: str, seen: Outside, plan: Plan) -> None:
    """Warn that a step takes more than its budget, because the caller keeps something of finished calls."""
    together = plan.peak_bytes + seen.held
    warn(f"{_in_a_row(seen, name)}: the step takes about {together:,} bytes, and the budget is "
         f"{plan.budget_bytes:,}. A budget that is {together - plan.budget_bytes:,} bytes smaller leaves "
         "room for them")


def warn_of_other_layers(name: str, seen: Outside, plan: Plan) -> bool:
    """Warn if a step takes more than its budget because of layers in front of the module or next to it.
    Returns whether it does."""
    kept = seen.beside + seen.before
    together = plan.peak_bytes + kept
    if kept <= plan.budget_bytes // 100 or together <= plan.budget_bytes:
        return False
    leads = "meet it at the loss" if not seen.before else "lead to it" if not seen.beside else \
        "lead to it or meet it at the loss"
    warn(f"autograd keeps {kept:,} bytes or more of layers that run before {name}, and {leads}: the step "
         f"takes about {together:,} bytes, and the budget of {name} alone is {plan.budget_bytes:,}. Apply "
         "rkmate to a module that contains all of them, or give a budget that is smaller by as much")
    return True


def of_more(usual: int) -> int:
    """Return the bytes of a loss that takes more than a usual one."""
    return usual * MORE[0] // MORE[1]
