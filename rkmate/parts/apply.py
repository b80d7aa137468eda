"""Plans inside of a module whose object stays the same, or inside of its sharded layers."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from multiprocessing.context import get_spawning_popen
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch
from torch import nn

from rkmate.errors import ArgumentError, CaptureError, InfeasibleBudget, RkmateError
from rkmate.graph.capture.refusals import refuse_without_shape, tell_of_compiled
from rkmate.offload.target import Engines
from rkmate.parts.by_parts import Parts
from rkmate.parts.one_budget import sharded_layers, take_watch_from
from rkmate.parts.sharded import Sharded
from rkmate.parts.sharded_step import Follower
from rkmate.parts.stages import Stages
from rkmate.pipeline.model import flags_to_plan, refuse_data_parallelism
from rkmate.runtime.kept_plans import (
    REPLACED,
    Executable,
    Planning,
    Prototype,
    Specialization,
)
from rkmate.runtime.module import FirstStep, PlannedModule, outside_of_dynamo
from rkmate.show.plan import Plan
from rkmate.support.warn import warn
from rkmate.torch_seam.modules import (
    COMPILED_CALL,
    compiled_call,
    has_call_of_class,
    inside_of_flat,
    is_compiled_in_place,
    is_sharded,
    original_of,
    own_call,
    replace_call,
    running_flat,
)

# -- Planned calls ---------------------------------------------------------------------------------
#
# A planned forward inside of the user's own module, which stays what it is.
#
# Libraries look at a model's class, save it, index it, and put forwards of their own into it. `apply` leaves
# all of that alone: it puts a planned call into the attribute in which ``Module.compile`` keeps its own, and
# replaces ``forward`` by a planned method for libraries that call ``forward`` directly (peft does).
#
# The call as a whole is planned, with its hooks, and with any forward that a library has set instead of
# ``forward``. Sharded modules are the exception: their hooks gather parameters, and run outside.


_M = TypeVar("_M", bound=nn.Module)
Refused = Callable[[RkmateError], bool]
"""Function called with the reason why a call cannot be planned. Returns whether the call runs as it is."""
_PUT = REPLACED[:-1]
"""The methods that a planned module has of its own."""
logger = logging.getLogger("rkmate")
_thread = threading.local()
"""For each thread, the planned parts that it is inside of, where what runs was planned; and the planned calls
whose module's own forward it is inside of."""


class _Planned(Follower):
    """The planned part of a module that `apply` has changed: its call, or its forward alone."""

    _FIELDS = Follower._FIELDS | {"_run", "_refused", "first_step"}
    _has_class_of_original = False
    _run: Callable[..., Any]
    _refused: Refused | None
    """Decides what happens to a call that cannot be planned; None: its error is raised."""
    first_step: FirstStep | None
    """Measurement of the first planned step."""

    def __init__(self, model: nn.Module, run: Callable[..., Any], planning: Planning,
                 refused: Refused | None = None, plans: tuple[Plan | Prototype, ...] = (),
                 within: Sharded | None = None) -> None:
        super().__init__(model, planning, plans)
        self.__dict__.update(_run=run, _refused=refused, _within=within, first_step=None)

    def _new_signature(self, key: Any, args: tuple[Any, ...],
                       kwargs: dict[str, Any]) -> Specialization | None:
        layers = sharded_layers(self._original) if self._within is None else []
        around = running_flat() if self._within is None else None
        if layers or (around is not None and inside_of_flat(around) is self._original):
            move_plan_into_layers(self._original, layers, around)
            self.__dict__["_run"] = planned_call_of(self._original)
            return None
        if self._refused is None:
            return super()._new_signature(key, args, kwargs)
        try:
            return super()._new_signature(key, args, kwargs)
        except (CaptureError, InfeasibleBudget) as error:
            if not self._refused(error):
                raise
            self._note_unplanned(key)
            return None

    def _first_step(self, ready: Executable) -> FirstStep | None:
        if self._within is not None:        # of a layer's call to its backward, other layers run
            return None
        watched = super()._first_step(ready)
        if self.first_step is None:
            self.__dict__["first_step"] = watched
        return watched

    def _run_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(*args, **kwargs)


class PlannedCall:
    """A planned call in a module's slot for a compiled call. Copies of the module get one of their own."""

    __slots__ = ("_compiled", "_forward", "_is_of_user", "_is_told", "_made_with", "_model", "_others",
                 "_own", "as_tensors", "method", "parts", "sharded", "whole", "within")
    is_planned = True
    """Distinguishes this call from a compiled call."""

    def __init__(self, model: nn.Module, planning: Planning, refused: Refused | None = None,
                 plans: tuple[Plan | Prototype, ...] = (), parts: Parts | None = None,
                 sharded: Sharded | None = None, within: Sharded | None = None) -> None:
        self._model = model
        self._compiled = compiled_call(model) if is_compiled_in_place(model) else None
        self._own = model.__dict__.get("forward")
        self._others = {name: model.__dict__[name] for name in _PUT[1:] if name in model.__dict__}
        self.parts = parts
        """The planner of the module's parts; None where parts are not allowed."""
        self.sharded = sharded
        """The planner of the module's sharded layers, if it has some."""
        self.within = within
        """The planner that this sharded layer belongs to."""
        self._is_of_user = within is sharded is None and refused is None
        """Whether a user applied it: copies have a plan then. Else it is of a part of a model, or sharded."""
        self._is_told = False
        if parts is not None:
            refused = parts.instead
        self._made_with = planning, refused, plans
        self.whole = _Planned(model, self._call, *self._made_with, within)
        self._forward: _Planned | None = None
        if sharded is not None:
            self._forward = _Planned(model, sharded.rest.run, replace(
                sharded.planning.unverified, hooks_outside=True), within=sharded)
            sharded.set_up(self._own_forward, self._forward)
        self.method = MethodType(_planned_forward(self), model)
        """The module's planned forward."""
        self.as_tensors: tuple[str, ...] = ()
        """Keyword arguments that come as another number in each call: a plan gets them as tensors."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        if self.sharded is not None:
            return self.sharded.called(own_call(self._model), args, kwargs)
        part = self._inside()
        if part is self._forward is not None:
            return self._own_forward(*args, **kwargs)
        if part is not None or self._is_gathered or self._keeper is not None:
            result = own_call(self._model)(*args, **kwargs)
            return result if self.within is None else self.within.returned(self._model, result)
        if self.parts is not None and self.parts.active and not self.whole.has_plan:
            return self._call(*args, **kwargs)
        return self.whole.forward(*args, **self._with_tensors(kwargs))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's forward alone, or with hooks around it that are not part of a plan."""
        if self.sharded is not None:
            return self.sharded.forward(args, kwargs)
        if self._inside() is not None:
            return self._own_forward(*args, **kwargs)
        if self.parts is not None and self.parts.active and not self.whole.has_plan:
            return self._own_forward(*args, **kwargs)
        with self._entered(self.alone), self._without_keeper():
            return self.alone.forward(*args, **self._with_tensors(kwargs))

    @property
    def _is_gathered(self) -> bool:
        """Whether hooks around the module's forward, or what is around it, gather its parameters."""
        return is_sharded(self._model) or (self.within is not None and self._model in self.within.inside)

    @property
    def alone(self) -> _Planned:
        """Plans of the forward without what is around it; made when it is called so."""
        if self._forward is None:
            planning, refused, plans = self._made_with
            self._forward = _Planned(self._model, self._unplanned_forward,
                                     replace(planning, hooks_outside=True), refused, plans, self.within)
        return self._forward

    @property
    def planning(self) -> Planning:
        """Everything that plans of the module are made with."""
        return self._made_with[0]

    @property
    def latest(self) -> _Planned:
        """The holder of the latest plan."""
        return self.whole if self._forward is None or self.whole.has_plan else self._forward

    @property
    def for_a_copy(self) -> tuple[Any, ...] | None:
        """The arguments with which a copy of the module gets plans of its own, which follow these; None for a
        part of a model, and for sharded modules."""
        if not self._is_of_user:
            return None
        return replace(self.planning, engines=None), tuple(self.whole._plans.all()), self.as_tensors

    def tell_of_pickle(self) -> None:
        """Say once that a pickle has no plan."""
        if self._is_of_user and not self._is_told:
            self._is_told = True
            logger.warning("%s is pickled without its plan and budget, so that it can be loaded where rkmate "
                           "is not installed: call rkmate.apply on the loaded module to train it within a "
                           "budget", type(self._model).__name__)

    def plans(self) -> list[Plan]:
        """Return every plan that is kept: of both, and of parts."""
        parts = [] if self.parts is None else self.parts.planned
        return [*(p for part in (self.whole, self._forward) if part is not None for p in part._plans.all()),
                *(p for m in parts if (call := planned_call_of(m)) is not None for p in call.plans())]

    @property
    def first_step(self) -> FirstStep | None:
        """Measurement of the first planned step; None before that step, and on devices that are not
        measured."""
        return self.whole.first_step or (self._forward.first_step if self._forward is not None else None)

    def plan_now(self, training: bool | None, args: tuple[Any, ...], kwargs: dict[str, Any],
                 plan: Plan | None) -> None:
        """Plan a sample call as a whole, unless that is left to the first step: by parts, and where a
        ``__call__`` of the module's class decides what the planned call gets. The module is left as it was
        where an error is raised."""
        if (self.parts is not None and self.parts.named) or has_call_of_class(self._model):
            return
        try:
            with flags_to_plan(self._model, training):
                self.whole.plan_for(args, kwargs, plan)
        except BaseException as error:
            if plan is None and isinstance(error, CaptureError) and self.parts is not None and \
                    self.parts.instead(error):
                return
            take_plan_from(self._model)
            raise

    def put_back_into(self, module: nn.Module) -> PlannedCall | None:
        """Put the call into its module again where `Module.compile` has replaced it; None for a copy of the
        module, which has another call."""
        if module is not self._model or not is_compiled_in_place(module):
            return None
        self._compiled = compiled_call(module)
        replace_call(module, self)
        tell_of_compiled([type(module).__name__])
        return self

    def take_away(self) -> None:
        """Leave the module as it was."""
        if self.parts is not None:
            self.parts.take_away()
        if self.sharded is not None:
            self.sharded.take_away()
        left = self.left_without(self._model.__dict__)
        for name in _PUT:
            self._model.__dict__.pop(name, None)
        self._model.__dict__.update(left)
        replace_call(self._model, self._compiled)

    def left_without(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return a module's dictionary without the plan."""
        left = {k: v for k, v in content.items() if k not in _PUT and v is not self} | self._others
        forward = content.get("forward", self._own)
        if isinstance(forward, MethodType) and getattr(forward.__func__, "is_planned", False):
            forward = self._own             # else a library's, around the planned one
        return left if forward is None else {**left, "forward": forward}

    @property
    def _keeper(self) -> Any:
        """The object that a library has put in the place of the planned forward, and that calls it where it
        has kept no result (as `MatryoshkaLoss` of sentence-transformers does); None where there is none."""
        forward = self._model.__dict__.get("forward")
        return forward if hasattr(forward, "__dict__") and not isinstance(
            forward, FunctionType | MethodType | functools.partial) else None

    @contextmanager
    def _without_keeper(self) -> Iterator[None]:
        """Put the planned forward in its place again inside the context: what is kept is no part of it."""
        keeper = self._keeper
        if keeper is not None:
            self._model.__dict__["forward"] = self.method
        try:
            yield
        finally:
            if keeper is not None:
                self._model.__dict__["forward"] = keeper

    def _with_tensors(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        if not torch.is_grad_enabled():
            return kwargs
        return {k: torch.tensor(v) if k in self.as_tensors and type(v) is int else v
                for k, v in kwargs.items()} if self.as_tensors else kwargs

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        with self._entered(self.whole):
            return self._by_parts(own_call(self._model), args, kwargs)

    def _by_parts(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call as it is, with plans for parts where that was decided."""
        if self.parts is None:
            return call(*args, **kwargs)
        if not self.parts.active:
            with self.parts.ignored():
                return call(*args, **kwargs)
        return self.parts.run(call, args, kwargs)

    def _unplanned_forward(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self.parts is None or self.parts.active else self.parts.ignored():
            return self._own_forward(*args, **kwargs)

    def _own_forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._own is not None:
            with self._entered(self):
                return self._own(*args, **kwargs)
        return type(self._model).forward(self._model, *args, **kwargs)

    def _inside(self) -> _Planned | None:
        """Return the part of this module that this thread is inside of, where it is."""
        return next((p for p in reversed(_entered()) if isinstance(p, _Planned)
                     and p in (self.whole, self._forward)), None)

    @contextmanager
    def _entered(self, part: _Planned | PlannedCall) -> Iterator[None]:
        """Let calls of this module in this thread run without a plan, inside the context."""
        _entered().append(part)
        try:
            yield
        finally:
            _entered().pop()


def _entered() -> list[_Planned | PlannedCall]:
    parts: list[_Planned | PlannedCall] = _thread.__dict__.setdefault("parts", [])
    return parts


def put_plan_into(model: nn.Module, planning: Planning, refused: Refused | None = None,
                  plans: tuple[Plan | Prototype, ...] = (), sharded: Sharded | None = None,
                  within: Sharded | None = None) -> PlannedCall:
    """Replace the call and the forward of a module by planned ones. A plan is made at the first call that
    records gradients; where the settings say so, plans for parts of the module.

    `refused`: decides what happens to a call that cannot be planned. `plans`: to follow where they fit.
    `sharded`: plans its sharded layers; `within`: the planner that it is a sharded layer of.
    """
    refuse_without_shape(model)
    planning = _sharing(planning)
    parts = None
    if planning.settings.parts not in (None, "never"):
        def put(module: nn.Module, planning: Planning, plans: tuple[Prototype, ...],
                refused: Callable[[nn.Module, RkmateError], None]) -> None:
            def told(error: RkmateError) -> bool:
                refused(module, error)
                return True

            put_plan_into(module, planning.unverified, told, plans)

        parts = Parts(model, planning, put, take_plan_from)
    take_plan_from(model)
    call = PlannedCall(model, planning, refused, plans, parts, sharded, within)
    if within is sharded is None and is_compiled_in_place(model):
        tell_of_compiled([type(model).__name__])
    model.__dict__.update(zip(_PUT, (call.method, *(MethodType(f, model) for f in _METHODS)), strict=True))
    replace_call(model, call)
    if parts is not None:
        parts.watch_methods()
    return call


def put_plans_into_layers(model: nn.Module, layers: list[nn.Module], planning: Planning,
                          around: nn.Module | None = None) -> None:
    """Put a plan into each sharded layer of a model, and into the rest of its forward: they share the
    budget of a step. `around`: the FSDP1 around the model, if there is one; it may have no layers then."""
    refuse_without_shape(model)
    compiled = [name or type(model).__name__ for name, m in model.named_modules()
                if (m in (model, *layers) and is_compiled_in_place(m))
                or (is_sharded(m) and original_of(m) in layers)]
    if compiled:
        tell_of_compiled(compiled)
    sharded = Sharded(model, layers, _sharing(planning), around)
    take_plan_from(model)
    for layer in layers:
        put_plan_into(layer, sharded.planning_of(layer), within=sharded)
    sharded.watch(sharded.units)
    put_plan_into(model, sharded.planning, sharded=sharded)


def put_plans_into_members(model: nn.Module, planning: Planning) -> None:
    """Put a plan into each member of a container, or into its sharded layers: all calls up to an optimizer's
    step share the budget."""
    refuse_without_shape(model)
    stages = Stages(model, _sharing(planning))
    take_plan_from(model)
    for module in stages.planned:
        put_plan_into(module, stages.planning_of(module), within=stages)
    stages.watch(m for m in model.children() if m not in stages.planned)
    put_plan_into(model, stages.planning, sharded=stages)


def move_plan_into_layers(model: nn.Module, layers: list[nn.Module], around: nn.Module | None) -> None:
    """Share the budget of a module among its layers, which were sharded after `put_plan_into`. `around`: the
    FSDP1 around the module, if there is one."""
    call = planned_call_of(model)
    assert call is not None
    if call.planning.settings.gradients == "in_place":
        refuse_data_parallelism(*model.modules())
    if call.latest.has_plan:
        warn(f"{type(model).__name__} was sharded after it was planned: the plan is dropped, "
             "and each sharded layer is planned at its first call")
    put_plans_into_layers(model, layers, call.planning, around)


class PlannedInside(PlannedModule):
    """A wrapped module whose original follows plans, by parts where it cannot be planned as a whole. Made by
    `rkmate.wrap` with ``Settings(parts=...)``."""

    def _set_up(self, planning: Planning, *made_with: Any) -> None:
        super()._set_up(planning, *made_with)
        put_plan_into(self._original, planning, plans=made_with[0])

    def _made_with(self) -> tuple[Any, ...]:
        planning, _, *others = super()._made_with()
        inside = self._inside
        return planning, tuple(() if inside is None else inside.whole._plans.all()), *others

    @property
    def _inside(self) -> PlannedCall | None:
        return planned_call_of(self._original)

    @property
    def has_plan(self) -> bool:
        """Whether the module as a whole has a plan."""
        return self._inside is not None and self._inside.latest.has_plan

    @property
    def plan(self) -> Plan:
        """The latest plan of the module as a whole."""
        inside = self._inside
        if inside is None or (inside.parts is not None and inside.parts.active and not self.has_plan):
            raise ArgumentError("there is no plan of the whole: the module is planned by parts, and "
                                "rkmate.applied(part).plan is the plan of a part")
        return inside.latest.plan

    def extra_repr(self) -> str:
        """Return the plan in one line."""
        return repr(self.plan) if self.has_plan else "no plan of the whole"

    def _run_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run_original(args, kwargs)


def wrapped_by_parts(model: nn.Module, planning: Planning, training: bool | None, args: tuple[Any, ...],
                     kwargs: dict[str, Any], plan: Plan | None) -> PlannedModule:
    """Return a wrapped module that is planned as a whole where that is possible, and by parts otherwise."""
    module = PlannedInside(model, planning)
    planned = planned_call_of(model)
    assert planned is not None
    planned.plan_now(training, args, kwargs, plan)
    return module


def _sharing(planning: Planning) -> Planning:
    """Return the planning with one set of engines for all parts that share a budget: together they keep to
    its limit."""
    return planning if planning.engines is not None else \
        replace(planning, engines=Engines(planning.settings.offload))


def planned_call_of(model: nn.Module) -> PlannedCall | None:
    """Return the planned call of a module, or of the one inside of an FSDP1; None if it has no plan."""
    call = (inside_of_flat(model) or model).__dict__.get(COMPILED_CALL)
    return call if isinstance(call, PlannedCall) else None


def take_plan_from(model: nn.Module) -> None:
    """Undo `put_plan_into`, where that was done."""
    call = planned_call_of(model)
    if call is not None:
        call.take_away()
    if not is_sharded(model):               # else a whole model's plans depend on the watch
        take_watch_from(model)


def _state_without_plan(self: nn.Module) -> Any:
    """Return the state for copies and pickles: the module without its plan."""
    state, call = type(self).__getstate__(self), planned_call_of(self)
    return call.left_without(state) if isinstance(state, dict) and call is not None else state


def _refuse_replicas(self: nn.Module) -> Any:
    raise ArgumentError(f"DataParallel makes replicas of {type(self).__name__}, and a plan is for one: "
                        "take the plan away (rkmate.remove), or use DistributedDataParallel")


def _copy_with_plan(self: nn.Module, memo: dict[int, Any]) -> Any:
    """Return a deep copy, which keeps to the same budget under a plan of its own."""
    call = planned_call_of(self)
    with _as_its_class_copies(self):
        copied = copy.deepcopy(self, memo)
    if call is not None and isinstance(copied, nn.Module):
        _put_again(copied, call.for_a_copy)
    return copied


@contextmanager
def _as_its_class_copies(model: nn.Module) -> Iterator[None]:
    """Let a module be copied as its class says, inside the context: without what `put_plan_into` has put."""
    before = {name: model.__dict__.pop(name) for name in ("__deepcopy__", "__reduce_ex__")}
    try:
        yield
    finally:
        model.__dict__.update(before)


def _reduce(self: nn.Module, protocol: Any) -> Any:
    """Return what a pickle has of the module: no plan in a file, as it may be loaded where rkmate is not; a
    process that is spawned gets the plan."""
    made, call = type(self).__reduce_ex__(self, protocol), planned_call_of(self)
    if call is None or isinstance(made, str):
        return made
    if get_spawning_popen() is None or len(made) < 3 or call.for_a_copy is None:
        call.tell_of_pickle()
        return made
    again, args, state, *others = made
    return (again, args, (state, call.for_a_copy), *(*others, None, None)[:2], _set_state_and_plan)


def _set_state_and_plan(model: nn.Module, state: tuple[Any, tuple[Any, ...]]) -> None:
    model.__setstate__(state[0])
    _put_again(model, state[1])


def _put_again(model: nn.Module, made_with: tuple[Any, ...] | None) -> None:
    """Put a plan into a copy of a module. `made_with`: `PlannedCall.for_a_copy`."""
    if made_with is not None and planned_call_of(model) is None:
        planning, plans, as_tensors = made_with
        put_plan_into(model, planning, plans=plans).as_tensors = as_tensors


_METHODS: tuple[Any, ...] = _state_without_plan, _copy_with_plan, _reduce, _refuse_replicas
"""Methods that a planned module has instead of its own, in the order of `_PUT`."""
for _put in _METHODS:
    _put.is_planned = True


def _planned_forward(call: PlannedCall) -> Callable[..., Any]:
    """Return a method with the name and signature of the module's own; in a copy of the module, its own."""
    model, before = type(call._model), call._own
    own = before if before is not None else model.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return outside_of_dynamo(forward, self, *args, **kwargs)
        mine = planned_call_of(self) or call.put_back_into(self)
        # A library's forward that is the module's own to `mine` may be around this one, of a plan before.
        if mine is not None and (mine is call or mine not in _entered()):
            return mine.forward(*args, **kwargs)
        if isinstance(before, MethodType):
            return before.__func__(self, *args, **kwargs)
        return model.forward(self, *args, **kwargs) if before is None else before(*args, **kwargs)

    functools.update_wrapper(forward, own)
    forward.is_planned, forward.replaces = True, before  # type: ignore[attr-defined]
    if before is not None:
        # A bound method has no self, which this function has.
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        signature = inspect.signature(before)
        forward.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[first, *signature.parameters.values()])
    return forward

