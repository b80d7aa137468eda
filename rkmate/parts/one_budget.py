"""One budget for a step of several planned parts: the parts of a model that cannot be planned as a whole
(`rkmate.parts.by_parts`), or the layers of a sharded model (`rkmate.parts.sharded`).

Each part has schedules that hold more or less between forward and backward (`rkmate.pipeline.part_plans`). A
step that was observed shows what the rest of it takes, and all parts share what that leaves of the budget.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from rkmate.errors import CaptureError, InfeasibleBudget
from rkmate.graph.blocks.partition import LEAST
from rkmate.graph.capture.captured import Capture
from rkmate.graph.ops.properties import ALIASES, COPIES, is_random
from rkmate.pipeline.part_plans import PartWays, lean_variants, more_ways, ways_of
from rkmate.pipeline.prepare import Traced
from rkmate.pipeline.variants import Variant
from rkmate.planners.several_calls import Choice, Item, Moment, Way, share_out, smallest_limit
from rkmate.runtime.guards import Guards
from rkmate.runtime.kept_plans import Planning, Prototype, TangentMask, is_alike, is_free
from rkmate.support.planning_lock import capture_lock, gc_pause, planning_lock
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.modules import (
    compiled_call,
    gathers_all_inside,
    inside_of_sharded,
    is_sharded,
    own_call,
    replace_call,
)
from rkmate.torch_seam.nodes import VALUE
from rkmate.torch_seam.tensors import inside_backward, without_saved_tensor_hooks
from rkmate.torch_seam.trace import inside_transform

LARGE = (nn.RNNBase, nn.MultiheadAttention)
"""Modules of torch that are more than an operation, though they may call no submodule."""


def is_one_operation(module: nn.Module) -> bool:
    """Return whether a module computes one operation of torch."""
    forward = getattr(type(module), "forward", None)        # TorchScript's classes have none
    return not isinstance(module, LARGE) and not any(True for _ in module.children()) and \
        getattr(forward, "__module__", "").startswith("torch.nn.modules.")


def sharded_layers(model: nn.Module) -> list[nn.Module]:
    """Return the innermost sharded modules inside of a model, the model itself left out; without those of one
    operation (an embedding, a head), if there are others. For FSDP1, and for what torch.compile has
    returned, return the modules inside."""
    sharded = [m for m in model.modules() if m is not model and is_sharded(m)]
    layers = [m for m in sharded if gathers_all_inside(m)
              and not any(is_sharded(inside) for inside in m.modules() if inside is not m)]
    layers = [inside_of_sharded(m) or m for m in layers]
    return [m for m in layers if not is_one_operation(m)] or layers


def own_bytes(model: nn.Module, units: Sequence[nn.Module]) -> int:
    """Return the bytes of a sharded model's own parameters, which are gathered for the whole step.

    `units`: its outermost sharded modules.
    """
    inside = {m for unit in units for m in unit.modules()}
    return sum(p.nbytes for m in model.modules() if m not in inside for p in m.parameters(recurse=False))


def advice_to_shard(model: nn.Module, units: Sequence[nn.Module]) -> str:
    """Return advice on modules of a sharded model that should be sharded by themselves, with a place for the
    model's name; empty if there are none. `units`: its outermost sharded modules."""
    advice = ""
    own, inside = own_bytes(model, units), {m for unit in units for m in unit.modules()}
    if own > sum(p.nbytes for p in model.parameters()) // 20:
        large = [name for name, m in model.named_modules() if name and m not in inside
                 and sum(p.nbytes for p in m.parameters(recurse=False)) > own // 20]
        advice += (
            f". {own:,} bytes are parameters of {{name}} itself ({', '.join(large) or 'its own'}), which are "
            "gathered for the whole step: give these modules a fully_shard (or FSDP1) of their own, before "
            "that of {name} (an embedding alone; a head together with its loss, as one module)")
    if units and is_one_operation(units[-1]):
        advice += (". The last sharded module is one operation, so that the loss after it has no plan: shard "
                   "a head together with its loss, as one module")
    return advice


# -- Calls that are observed -----------------------------------------------------------------------


class Watch:
    """Replaces a submodule's call while that is observed. Copies and pickles of the module leave it out."""

    __slots__ = ("_module", "observer")
    is_planned = True
    """A mark that tells the call from a compiled one."""

    def __init__(self, module: nn.Module, observer: OneBudget) -> None:
        self._module, self.observer = module, observer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        self.observer.ran.add(id(self._module))
        if is_unobserved():
            return own_call(self._module)(*args, **kwargs)
        return self.observer.called_inside(self._module, args, kwargs)


def take_watch_from(module: nn.Module) -> None:
    """Leave a submodule's call as it was."""
    if isinstance(compiled_call(module), Watch):
        replace_call(module, None)


def is_unobserved() -> bool:
    """Return whether a call now is not part of a training step's forward: in a trace, without gradients, or
    in a backward."""
    return (torch.compiler.is_dynamo_compiling() or not torch.is_grad_enabled() or planning_lock.is_mine()
            or capture_lock.is_mine() or inside_transform() or inside_backward())


@contextmanager
def undisturbed() -> Iterator[None]:
    """Capture and measure a part inside the context, in the middle of a step."""
    with planning_lock, gc_pause(), without_saved_tensor_hooks():
        yield


# -- What is planned -------------------------------------------------------------------------------


@dataclass(eq=False)
class Part:
    """Calls that are alike: the schedules that they may follow."""

    model: nn.Module
    """The submodule whose call was captured."""
    key: Guards
    traced: Traced
    forms: list[PartWays] = field(default_factory=list)
    """The schedules of each variant of the graph, the original's first; empty until they are known."""
    hooks_outside: bool = False
    """Whether only the submodule itself has hooks, and these run around its plan."""
    also: list[Guards] = field(default_factory=list)
    """Keys of calls of submodules with other attributes that have the same graph."""
    is_changed_at_once: bool = False
    """Whether the first step, too, may follow a variant that changes last bits."""
    loss: TangentMask | None = None
    """For each output, whether the loss depends on it; None: on all, until a step shows otherwise."""
    dropped: frozenset[int] = frozenset()
    """Numbers of the outputs that the model lets go of in its forward."""

    @functools.cached_property
    def first(self) -> Way:
        """The schedule that is followed at first: one that holds least, and that takes least of these."""
        ways = self.ways if self.is_changed_at_once else self.forms[0].ways
        return min(ways, key=lambda way: (way.saved, way.extra))

    @functools.cached_property
    def example(self) -> Prototype:
        """The plan that is followed at first."""
        return self.prototype(self.ways.index(self.first), self.first.extra)

    @property
    def ways(self) -> list[Way]:
        """The figures of all schedules. A variant that changes last bits has to be faster by a percent."""
        return [replace(w, seconds=w.seconds * (1.01 if k else 1))
                for k, form in enumerate(self.forms) for w in form.ways]

    @property
    def whole(self) -> Way:
        """The figures of a call without recomputation."""
        return self.forms[0].whole

    @property
    def least_saved(self) -> int:
        """The fewest bytes that a call can hold between its forward and its backward."""
        return min(w.saved for w in self.ways)

    def look(self, share: float) -> None:
        """Look for further schedules. `share`: about how much of what the calls hold without recomputation
        they can hold within the budget."""
        self.forms = [more_ways(form, share) for form in self.forms]

    def look_anew(self, planner: str, budget: int) -> None:
        """Look for the schedules of the graph as it is now. `budget`: bytes that measuring may take."""
        self.forms = [self._form(planner, budget, 1.0)]

    def _form(self, planner: str, budget: int, share: float, variant: Variant | None = None) -> PartWays:
        return ways_of(self.traced, planner, lambda blocked: budget, share, variant, dropped=self.dropped)

    def add_form(self, planner: str, budget: int, share: float) -> bool:
        """Add the schedules of the next variant of the graph that trades something for memory; return whether
        there was one. `budget`: bytes that measuring may take; `share`: as for `look`."""
        left = lean_variants(self.forms[0])[len(self.forms) - 1:]
        if left:
            self.forms.append(self._form(planner, budget, share, left[0]))
        return bool(left)

    def form_of(self, number: int) -> tuple[PartWays, int]:
        """Return the variant of a schedule, and the schedule's number in it."""
        for form in self.forms:
            if number < len(form.ways):
                return form, number
            number -= len(form.ways)
        raise IndexError(number)

    def prototype(self, number: int, extra: int) -> Prototype:
        """Return a plan with one of the schedules. `extra`: bytes on top of what it saves that it may take
        while it runs."""
        form, own = self.form_of(number)
        planned = form.planned(own, extra)
        traced = planned.prepared.blocked.traced
        return Prototype(self.model, self.key, replace(traced, tensors={}), planned, self.hooks_outside,
                         self.also)

    def fits(self, key: Guards) -> bool:
        """Return whether a call has this graph, as far as is known."""
        return any(is_alike(key, known, self.hooks_outside) for known in (self.key, *self.also))

    def note(self, key: Guards, traced: Traced) -> bool:
        """Note, and return, whether a call of another submodule that was captured has the same graph: all
        that differs is attributes that its forward does not read (its number)."""
        same = is_free(self.traced) and is_free(traced) and is_alike(
            key, self.key, self.hooks_outside, attributes=False) and is_same_step(self.traced, traced)
        if same:
            self.also.append(key)
        return same


def is_same_step(one: Traced, other: Traced) -> bool:
    """Return whether two captures compute the same, of parameters of the same names, and leave nothing else
    changed."""
    captures = one.capture, other.capture
    if any(c.effects or any(n.op == "get_attr" for n in c.graph.nodes) for c in captures):
        return False
    first, second = ((c.result, c.differentiable, c.repeats, [(n.name, s) for n, s in c.sources.items()],
                      [(s, n.name) for s, n in (*c.mutations, *c.grads)], bytes_made(c.graph))
                     for c in captures)
    return first == second and str(one.capture.graph) == str(other.capture.graph)


def refuse_what_would_run_twice(capture: Capture) -> None:
    """Raise `CaptureError` where the beginning of a forward, which runs again in the trace of its rest, has
    effects."""
    if capture.mutations or capture.assigned or capture.effects or capture.recipe is not None:
        raise CaptureError("it changes buffers or attributes, or reads values of inputs")


def drop_beginning(capture: Capture, count: int) -> None:
    """Drop from a graph what computes nothing of the rest of a forward: what has run before the sharded
    modules. `count`: tensors that the last of them has returned.

    Raises `CaptureError` if the rest depends on random numbers that were drawn there.
    """
    given = sorted((int(s.key), n) for n, s in capture.sources.items() if s.kind == "input")[-count:]
    copies = {user for _, node in given for user in node.users}
    earlier: list[fx.Node] = []
    for node in capture.graph.nodes if copies else ():
        if node in copies:
            break
        earlier.append(node)
    handed = {n for n in capture.outputs if n is not None} | {n for _, n in capture.grads}
    for node in reversed(earlier):
        if node.op == "call_function" and not node.users and node not in handed:
            capture.graph.erase_node(node)
        elif node.op == "call_function" and is_random(node):
            raise CaptureError("its rest reads random numbers that were drawn at the beginning")
    if all(n.target in (*COPIES, *ALIASES) for n in capture.graph.nodes if n.op == "call_function"):
        raise CaptureError("nothing is computed after its last sharded module")


def bytes_made(graph: fx.Graph) -> int:
    """Return the bytes of the results of all operations of a graph, and of its inputs."""
    return sum(t.nbytes for n in graph.nodes for t in tensors_in(n.meta.get(VALUE)))


# -- Sharing ---------------------------------------------------------------------------------------


class Rest(NamedTuple):
    """Bytes of a step outside of all plans, at most."""

    beside: int
    """While a planned part runs, and all others hold what they save."""
    alone: int
    """While no planned part runs, and all hold what they save."""
    early: int
    """Before the first planned part has run, and after the last."""
    plain: int
    """Bytes of the whole step without recomputation."""
    moments: Mapping[tuple[int | None, tuple[int, ...]], int] = {}
    """(the number of the call that runs, or None; the numbers of the calls that hold something) -> bytes at
    that moment; empty where moments are not told apart."""

    def together(self, other: Rest) -> Rest:
        """Return the larger figures of two steps."""
        return self._merged(other, max)

    def least(self, earlier: Rest | None) -> Rest:
        """Return the smaller figures of two measurements of one step."""
        return self if earlier is None else self._merged(earlier, min)

    def _merged(self, other: Rest, choose: Callable[[int, int], int]) -> Rest:
        beside, alone, early, plain = map(choose, self.figures, other.figures)
        return Rest(beside, alone, early, plain, {
            key: choose(size, other.moments[key]) for key, size in self.moments.items()
        } if self.moments.keys() == other.moments.keys() else {})

    @property
    def figures(self) -> tuple[int, int, int, int]:
        """The figures of the whole step."""
        return self.beside, self.alone, self.early, self.plain

    def row(self) -> str:
        """Return all figures as text, for the other ranks."""
        return ",".join(map(str, (*self.figures, *self.moments.values())))

    def read(self, row: str) -> Rest:
        """Return the figures of another rank; its moments, if there are as many as here."""
        beside, alone, early, plain, *sizes = map(int, row.split(","))
        return Rest(beside, alone, early, plain, dict(zip(self.moments, sizes, strict=True))
                    if len(sizes) == len(self.moments) else {})


class Shared(NamedTuple):
    """A budget that was shared out."""

    budget: int
    choice: Choice
    plans: tuple[Prototype, ...]
    """The plan of each item."""
    extras: tuple[int, ...]
    """Bytes on top of what it saves that a call of each item may take while it runs, apart from those that no
    plan uses at any moment."""
    taken: int
    """Bytes of a step between the first planned part and the last, at most."""


class OneBudget:
    """A model whose steps consist of several planned parts, and one budget."""

    _too_large: str
    """The message that no schedules keep to the budget."""
    _plain_is_fallback = False
    """Whether a step runs as it is where the budget has room for that."""
    _has_further_calls = False
    """Whether a step may go on when the backward of all of its calls so far is over."""
    _keeps_gradients = True
    """Whether the gradients of parameters stay until the backward of a call is over."""
    _growth = 1.0
    """Factor by which the rest of a step may grow, as some layers were not called in the observed steps."""

    def __init__(self, model: nn.Module, planning: Planning) -> None:
        settings = planning.settings
        self._model, self._type = model, type(model).__name__
        self.planning = replace(planning, counts_calls=False, settings=replace(
            settings, calls=1, loss_bytes=0, parts="never", deferred_outputs="never",
            cut=settings.cut if settings.cut.waiting is not None else replace(settings.cut, waiting=LEAST),
            opaque="auto" if settings.opaque == "auto" else ()))
        """Everything that plans of parts are made with."""
        self._told: set[str] = set()
        self.ran: set[int] = set()
        """Ids of the submodules that were called while they were watched, also where nothing was observed."""
        self._watched: list[nn.Module] = []

    def _why(self) -> str:
        """Return what the rest of a step contains because it cannot be planned, for the end of a message."""
        return ""

    def called_inside(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a submodule that is watched, in the forward of a training step."""
        raise NotImplementedError

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Observe the calls of submodules that nothing else replaces."""
        for module in modules:
            if module is not self._model and compiled_call(module) is None:
                replace_call(module, Watch(module, self))
                self._watched.append(module)

    def _stop_watching(self) -> None:
        for module in self._watched:
            take_watch_from(module)
        self._watched.clear()

    def _warn_once(self, subject: str, message: str) -> None:
        if subject not in self._told:
            self._told.add(subject)
            warn(message)

    def _warn_of_variant(self, part: Part, number: int, reason: str, instead: str) -> None:
        """Say once which variant of a part's graph a schedule is of, unless it is the original's.

        `reason`: why it is followed; `instead`: what the settings that forbid it would do."""
        form, _ = part.form_of(number)
        blocked = form.solved.prepared.blocked
        if form is not part.forms[0] and blocked.variant.trades:
            self._warn_once(f"{blocked.variant.name}: {reason}",
                            blocked.variant.warning(reason, instead, blocked.concerned))

    def _shared_out(self, parts: Sequence[Part], items: Sequence[Item], rest: Rest, budget: int,
                    moments: Sequence[Moment]) -> Shared:
        """Share the budget out: the fastest schedules together. Raises `InfeasibleBudget`.

        `items`: calls that follow one schedule, each of the part at its place in `parts`. `moments`: of a
        step; without them, all items hold what they save while any of them runs.
        """
        beside = 0 if moments else max(rest.beside, 0)
        alone = max(rest.alone - beside, 0)
        early = 0 if moments else rest.early
        choice = share_out(items, budget - beside, alone, moments)
        if choice is None or early > budget:
            least = max(early, smallest_limit(items, alone, moments) + beside)
            outside = max((m.bytes for m in moments), default=max(rest.figures[:3]))
            plain, more = rest.plain, round((self._growth - 1) * outside)
            least = more + (min(least, plain) if self._plain_is_fallback else least)
            plain += more
            raise InfeasibleBudget(self._too_large.format(
                name=self._type, budget=budget, outside=min(outside, least), least=least,
                share=least / max(1, plain), plain=plain, why=(
                    ", with room for layers that were not called in this step" if more else "")
                + self._why()), least)
        chosen = [item.ways[way] for item, way in zip(items, choice.ways, strict=True)]
        spare: dict[int, int] = {}
        for moment in moments:
            if moment.running is not None:
                left = budget - moment.taken(chosen)
                spare[moment.running] = min(spare.get(moment.running, left), left)
        extras = tuple(max(part.ways[way].extra, item.ways[way].extra) + spare.get(k, choice.left)
                       - choice.left if moments else choice.extra
                       for k, (part, item, way) in enumerate(zip(parts, items, choice.ways, strict=True)))
        plan_of = functools.cache(Part.prototype)
        plans = tuple(map(plan_of, parts, choice.ways, extras))
        taken = budget - choice.left if moments else beside + choice.saved + max(choice.extra, alone)
        return Shared(budget, choice, plans, extras, taken)
