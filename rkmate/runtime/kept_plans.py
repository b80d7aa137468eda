"""Everything that determines the plans of a module, and what is kept of each: trace, schedule and code."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from operator import or_
from typing import Any

from torch import nn

from rkmate import device as devices
from rkmate.budget import Budget
from rkmate.errors import InfeasibleBudget
from rkmate.graph.blocks.lower import storage_bytes
from rkmate.graph.capture.captured import Capture
from rkmate.offload.target import Engines
from rkmate.pipeline.attempts import Planned
from rkmate.pipeline.prepare import Traced
from rkmate.pipeline.settings import Settings
from rkmate.pipeline.sizes import KnownPlan
from rkmate.runtime.adapters import Observations
from rkmate.runtime.executable import PlannedStep
from rkmate.runtime.guards import FlagGuards, Guards, changing, differing, warn_of_changes
from rkmate.runtime.new_sizes import Member, alike, outdated
from rkmate.runtime.outside import LOOKS, MANY, Outside, Shown, is_over, warn_of_other_layers, warn_of_others
from rkmate.runtime.recorded_step import RecordedStep
from rkmate.runtime.segments import OpenCalls
from rkmate.runtime.snapshot import HOOKS_OF_FORWARD
from rkmate.show.plan import Plan
from rkmate.support.warn import warn
from rkmate.torch_seam.modules import COMPILED_CALL
from rkmate.torch_seam.nodes import VALUE

REPLACED = ("forward", "__getstate__", "__deepcopy__", "__reduce_ex__", "_replicate_for_data_parallel",
            COMPILED_CALL)
"""The attributes of a module that `rkmate.apply` replaces."""
_NODE_BYTES = 3 << 10
"""Bytes of a node of a captured graph with its fake tensor, rounded up."""

TangentMask = tuple[bool, ...]
"""For each output, whether a gradient comes for it."""


@dataclass(frozen=True)
class Planning:
    """Everything that determines how the plans of one wrapped module are made."""

    budget: Budget
    planner: str
    settings: Settings
    progress: bool
    hooks_outside: bool = False
    """Whether the hooks of the module itself run around its plan, and are no part of it."""
    calls_at_once: int = 1
    """Calls before a backward whose plans, each made for one call, share a larger budget."""
    shared_inputs: frozenset[int] = frozenset()
    """Numbers of the tensors among the arguments that others use, too, and contribute gradients to."""
    taught: frozenset[int] | None = None
    """Numbers of the outputs that gradients came to, for a part of a model whose step has shown that, and the
    inputs that others use. Calls with other outputs have those of them that there are. None: not a part."""
    counts_calls: bool = False
    """Whether later steps are planned for as many calls before a backward as were seen in one."""
    engines: Engines | None = None
    """Engines that copy data away, if other modules share them; None: the module's own."""
    more_calls: Callable[[], None] | None = None
    """Function called when a step makes more calls before a backward than fit in the budget of its plans, for
    a part of a model whose steps are measured. None: a warning, or later steps are planned for it."""
    over: Callable[[InfeasibleBudget], None] | None = None
    """Function called for a call whose budget is too small: the call gets the smallest one that can be met.
    None: the call is refused."""

    @property
    def is_part(self) -> bool:
        """Whether the planning is for a part of a model whose step was observed."""
        return self.taught is not None

    def taught_mask(self, capture: Capture) -> TangentMask | None:
        """Return, for each output of a part, whether gradients came to it (`taught`); None where a call has
        none of these outputs, and for a module that is no part."""
        mask = tuple(ok and k in (self.taught or ()) for k, ok in enumerate(capture.differentiable))
        return mask if any(mask) else None

    @property
    def unverified(self) -> Planning:
        """A copy for a part of a step, whose first run is compared with no measurement of its own."""
        run = replace(self.settings.run, verify=False)
        return replace(self, settings=replace(self.settings, run=run))


@dataclass
class Executable:
    """A plan, and the code that runs it."""

    plan: Plan
    compiled: PlannedStep
    measured: bool = False
    """Whether a step has been measured against the prediction."""
    known: KnownPlan | None = None
    """Data that plans of other sizes may use."""
    graph_nodes: int = 0
    """Number of nodes of the graph that it runs over."""
    recorded: RecordedStep | None = None
    """The recorded step, if steps are recorded and one was."""
    is_given: bool = False
    """Whether the user gave the plan: no other one replaces it."""
    looks: int = 0
    """Calls that were looked at for what the caller holds during their backwards."""
    ran: bool = False
    """Whether a forward has run as it is, before steps are recorded: libraries set themselves up in it."""


CONFIRMED = 3
"""Sizes whose steps show what the caller takes. Of later ones, the 4th, 8th, 16th and so on are looked at."""


def handed_on(traced: Traced, inputs: tuple[Any, ...], others: Sequence[Specialization],
              latest: Specialization | None) -> tuple[Traced, Specialization | None]:
    """Return the latest of some signatures whose tensors have these forms: it differs in numbers alone. And a
    trace that leaves as much room for the caller as that one. Where there is none, it leaves room as the
    latest of `others` does, in proportion to the outputs, or as `latest`, the signature before a change of
    the module, if that has the same outputs."""
    before = next((s for s in reversed(others) if s.inputs == inputs), None)
    like = before or next(reversed(others), None)
    if like is None and latest is not None and latest.mask_for(traced.capture) == traced.wanted:
        like = latest
    if like is None or traced.settings.loss_bytes is not None:
        return traced, before
    outside, loss = like.traced.outside, like.traced.settings.loss_bytes
    if before is None:
        outside, loss = like.takes or (outside, loss)
        new = taught_bytes(traced.capture, traced.wanted)
        old = max(1, taught_bytes(like.traced.capture, traced.wanted))
        outside, loss = -(-outside * new // old), None if loss is None else -(-loss * new // old)
    if (outside, loss) == (traced.outside, None):
        return traced, before
    return replace(traced, outside=outside, settings=replace(traced.settings, loss_bytes=loss)), before


def taught_bytes(capture: Capture, wanted: TangentMask) -> int:
    """Return the bytes of the outputs that a loss is computed from. `wanted`: of each, whether it is one."""
    return sum(storage_bytes(node.meta[VALUE]) for node, is_wanted in zip(
        capture.outputs, wanted, strict=False) if is_wanted and node is not None)


@dataclass
class Specialization:
    """A signature: its trace, and an executable for each tangent mask."""

    traced: Traced
    executables: dict[TangentMask, Executable] = field(default_factory=dict)
    mask: TangentMask = ()
    """The tangent mask that the next forward is planned for."""
    took: TangentMask = ()
    """The tangent mask of the latest call's loss, as far as it has come; empty before that is looked at."""
    latest: tuple[TangentMask, ...] = ()
    """The tangent masks of the two losses before that."""
    following: dict[tuple[TangentMask, ...], TangentMask] = field(default_factory=dict)
    """The tangent mask that came after two others, the time before."""
    sums: frozenset[int] = frozenset()
    """Numbers of the inputs whose gradients are handed out as sums: until one call has shown whether others
    contribute to them, too."""
    outside: Outside = Outside()
    """Memory that the caller was seen to use for the outputs, if a plan has no room for it."""
    shown: Shown[Executable] | None = None
    """Findings of a step on which all ranks agree at the next forward; None if there are none."""
    takes: tuple[int, int] | None = None
    """Bytes that the caller was measured to hold during the backward, and that its loss takes; None if
    nothing was measured."""
    has_others: bool = False
    """Whether the next step measures what an unusual loss, or another model, takes between forward and
    backward."""
    member: Member | None = None
    """The full capture from which other sizes are derived; None if this one was derived."""
    inputs: tuple[Any, ...] = ()
    """The forms of the arguments' tensors, as in its key."""
    may_leave_room: bool = False
    """Whether plans may be made anew for what several calls of a step leave with their caller."""

    def go_on_from(self, before: Specialization | None) -> None:
        """Take over what steps have shown of a signature that differs in numbers alone."""
        if before is not None:
            self.sums, self.outside, self.has_others = before.sums, before.outside, before.has_others
            looks = max((e.looks for e in before.executables.values()), default=0)
            for executable in self.executables.values():
                executable.looks = looks

    def go_on_from_sizes(self, confirmed: int, number: int) -> None:
        """Look at the first step only if it may show something new. `confirmed`: looks in a row that have
        shown enough room; `number`: of sizes, this one included."""
        if confirmed >= CONFIRMED and number & (number - 1):
            for executable in self.executables.values():
                executable.looks = LOOKS
        elif self.traced.outside or self.traced.settings.loss_bytes is not None:
            self.has_others = True          # the first step shows whether it is in proportion

    def has_looked(self, ready: Executable) -> bool:
        """Return whether no step of a plan needs to be looked at any more."""
        settings = self.traced.settings
        return not self.has_others and (ready.looks >= LOOKS or settings.loss_bytes is not None)

    def note_outside(self, ready: Executable, seen: Outside, opened: int, calls: OpenCalls
                     ) -> bool | None:
        """Note what a step has shown outside of its plan. Return whether there was room for it; None if a
        measurement tells later. `opened`: of its calls, were open then."""
        plan, host, ready.looks = ready.plan, devices.of(ready.compiled.device).host, LOOKS
        if opened == 1 and not calls.told_beside:
            calls.told_beside = warn_of_other_layers(self.traced.name, seen, plan)
        if seen.again:
            if is_over(seen._replace(held=seen.held - self.traced.outside), plan):
                found = seen if self.outside == Outside() else self.outside
                self.outside = found._replace(held=max(seen.held, found.held), again=True)
        elif opened > plan.calls and (seen.between is not None or not seen.is_usual):
            # The next step is looked at with plans for them; a warning has told of them where none are made.
            self.has_others = calls.count(opened) and host
        elif seen.between is not None:
            self.outside = seen
            return None
        elif seen.operations > MANY and host:
            self.has_others = True
        elif seen.operations > MANY:
            warn_of_others(self.traced.name, plan.graph.cd.reserve_at_loss)
        else:
            self.has_others = not seen.is_usual and host
            over = is_over(seen._replace(held=seen.held - self.traced.outside), plan)
            if over:
                self.outside = seen
            return seen.is_usual and not over
        return False

    @property
    def bytes(self) -> int:
        """About what it takes of the host's memory."""
        plans = list(self.executables.values())
        nodes = len(self.capture.graph.nodes) + sum(e.graph_nodes for e in plans)
        return _NODE_BYTES * nodes + sum(4 * len(e.plan.source) for e in plans)

    def next_mask(self) -> TangentMask:
        """Return the tangent mask to plan a forward for, when the backward of the one before is over. Losses
        that take turns (a step for one output, the next for another) come as they did the time before."""
        if self.took:
            self.following[self.latest] = self.took
            self.latest = (*self.latest, self.took)[-2:]
            self.mask = self.following.get(self.latest, self.mask)
        self.took = self.mask
        return self.mask

    def mask_for(self, capture: Capture) -> TangentMask:
        """Return the tangent mask for a new signature, whose first loss is probably like the latest one here;
        empty where its outputs are others."""
        own = self.capture
        is_same = (own.result.spec, own.differentiable) == (capture.result.spec, capture.differentiable)
        return self.mask if is_same else ()

    def take_another_loss(self, mask: TangentMask, planned: TangentMask) -> None:
        """Note that a loss has another tangent mask than its forward was planned for."""
        both: TangentMask = tuple(map(or_, mask, planned))
        self.mask = mask if both == planned else both
        self.took = mask

    def warn_of_another_loss(self, mask: TangentMask, planned: TangentMask, most: int) -> None:
        """Warn that a forward runs a second time for it, and takes `most` bytes."""
        both = tuple(map(or_, mask, planned))
        alone, added = both == planned, both not in (mask, planned)
        warn(f"the loss depends on {self.outputs_in(mask)}{' alone' if alone else ''}, which is not what "
             f"this forward was planned for: it runs a second time, with up to {most:,} bytes on top of what "
             "it keeps" + (", and last bits may differ where gradients of the planned outputs are added to "
                           "these" if added else "") +
             ". The next forward is planned for this loss (Settings(trains=...) says from the start which "
             "outputs a loss takes)")

    @staticmethod
    def outputs_in(mask: TangentMask) -> str:
        """Return which outputs a loss depends on, for a message."""
        numbers = [str(i) for i, taken in enumerate(mask) if taken]
        return f"output{'s' if len(numbers) > 1 else ''} {' and '.join(numbers)} (counted from 0)"

    @property
    def capture(self) -> Capture:
        """The captured model."""
        return self.traced.capture


@dataclass(frozen=True, eq=False)
class Prototype:
    """A call that was captured and planned, of a module or of one that is like it: the plan of every equal
    call."""

    model: nn.Module
    key: Guards
    traced: Traced
    planned: Planned
    hooks_outside: bool = False
    """Whether only the module itself has hooks, and these run around its plan."""
    also: Sequence[Guards] = ()
    """Keys of modules with other attributes whose calls have the same graph."""

    def fits(self, model: nn.Module, key: Guards) -> bool:
        """Return whether a call of a module has the same graph: all that a plan is specialised on is equal,
        except which objects the submodules are, and what replaces their calls."""
        return (model is self.model or is_free(self.traced)) and self.traced.capture.recipe is None and any(
            is_alike(key, known, self.hooks_outside) for known in (self.key, *self.also))


def is_free(traced: Traced) -> bool:
    """Return whether other modules may follow a plan: what was captured refers to no object of its module."""
    capture = traced.capture
    return capture.recipe is None and not (capture.constants or capture.assigned or traced.settings.opaque)


def is_alike(key: Guards, other: Guards, hooks_outside: bool, *, attributes: bool = True) -> bool:
    """Return whether all that a plan is specialised on is equal in two calls, except which objects the
    submodules are, and what replaces their calls.

    `hooks_outside`: whether the module's own hooks run around its plan. `attributes`: whether these, and the
    classes of the submodules, are compared, too.
    """
    def parts(key: Guards) -> tuple[Any, ...]:
        own = (attributes_in(key, hooks_outside), [o for o in key.flags.parts.objects if isinstance(o, type)])
        return (*key._replace(flags=None, attributes=None, values=None),  # type: ignore[arg-type]
                key.flags.flags, own if attributes else None)

    return parts(key) == parts(other)


def attributes_in(key: Guards, hooks_outside: bool = False) -> list[tuple[str, Any]]:
    """Return the attributes that a plan is specialised on, except for what replaces calls."""
    return [(path, value) for path, value in key.attributes.content
            if path not in REPLACED and not path.endswith(f".{COMPILED_CALL}")
            and not (hooks_outside and path == HOOKS_OF_FORWARD)]


class KeptPlans:
    """The signatures of one module that have plans, the latest used last. A lock guards them."""

    def __init__(self, name: str, observations: Observations) -> None:
        """`name`: of the module, for a warning; `observations`: what signatures tell of values, which goes
        with the last signature that needs it."""
        self._name, self._observations = name, observations
        self._by_key: OrderedDict[Guards, Specialization] = OrderedDict()
        self._last: tuple[Guards, Specialization] | None = None
        """The last that is kept, where it was also found last: compared with a call before that is hashed."""
        self._lock = threading.RLock()
        self._warned = False

    def __len__(self) -> int:
        return len(self._by_key)

    def all(self) -> list[Specialization]:
        """Return the plans of each signature, the latest used last."""
        with self._lock:
            return [*self._by_key.values()]

    def signatures(self) -> list[Guards]:
        """Return the signatures, the latest used last."""
        with self._lock:
            return [*self._by_key]

    def latest(self) -> Specialization | None:
        """Return the plans of the signature that was used last."""
        with self._lock:
            return next(reversed(self._by_key.values()), None)

    def find(self, key: Guards) -> Specialization | None:
        """Return the plans of a signature; it becomes the latest used."""
        with self._lock:
            if self._last is not None and self._last[0] == key:
                return self._last[1]
            known = self._by_key.get(key)
            if known is not None:
                self._by_key.move_to_end(key)
                self._last = key, known
            return known

    def has_flags(self, flags: FlagGuards) -> bool:
        """Return whether some plan was made for these submodules with their train and gradient flags and
        hooks."""
        return any(k.flags == flags for k in self.signatures())

    def has_parts(self, flags: FlagGuards) -> bool:
        """Return whether some plan was made for these submodules."""
        return any(k.flags.parts == flags.parts for k in self.signatures())

    def differing(self, key: Guards) -> str:
        """Return how a call differs from the nearest planned call."""
        return differing(key, self.signatures())

    def of_other_sizes(self, key: Guards) -> list[Specialization]:
        """Return the signatures that differ only in sizes, the latest used last."""
        with self._lock:
            return [s for k, s in self._by_key.items() if alike(k, key)]

    def keep(self, key: Guards, new: Specialization, others: Sequence[Specialization], most: int) -> None:
        """Keep a new signature, and `others`, which it was derived from. Where all take more than `most`
        bytes of the host, the least recently used go."""
        with self._lock:
            self._last = key, new
            for k in [k for k, s in self._by_key.items() if s.member is not None
                      and any(s is other for other in others)]:
                self._by_key.move_to_end(k)
            self._by_key[key] = new
            for k in outdated(key, [k for k, s in self._by_key.items() if s.member is None]):
                del self._by_key[k]
                self._observations.keep(self._by_key)
            total = sum(s.bytes for s in self._by_key.values())
            while len(self._by_key) > 1 and total > most:
                total -= self._by_key.popitem(last=False)[1].bytes
                self._observations.keep(self._by_key)

    def clear(self) -> None:
        """Forget all."""
        with self._lock:
            self._by_key.clear()
            self._last = None

    def warn_of_changes(self, key: Guards) -> None:
        """Warn, once, where attributes of the module change so that each call takes a new plan."""
        names = [] if self._warned else changing(key, self.signatures())
        if names:
            self._warned = True
            warn_of_changes(self._name, names)
