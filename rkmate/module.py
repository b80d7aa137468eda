"""The module that `wrap` returns."""

from __future__ import annotations

import copy
import logging
import warnings
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from rkmate.budget import Budget
from rkmate.codegen.compiled import Compiled
from rkmate.codegen.emit import Emitter
from rkmate.errors import ArgumentError, PlanError, RkmateWarning, ScheduleError
from rkmate.graph.structure import take_apart
from rkmate.pipeline import Settings, prepare
from rkmate.plan import Plan
from rkmate.progress import Progress
from rkmate.schedule.simulate import simulate
from rkmate.search import Searcher

NewShape = Literal["plan", "original", "error"]
logger = logging.getLogger("rkmate")

_REMEMBERED = 16
"""Signatures whose plans are kept; the least recently used goes first."""


@dataclass(frozen=True)
class Planning:
    """How the plans of one wrapped module are made."""

    budget: Budget
    planner: str
    settings: Settings
    progress: bool


@dataclass
class Ready:
    """One signature's plan, and what runs it."""

    plan: Plan
    compiled: Compiled
    trained: bool = False


class PlannedModule(nn.Module):
    """An equivalent of a module that trains inside a budget. Made by `rkmate.wrap`.

    It shares the original's parameters, buffers and submodules: they are the same objects, and
    state dictionaries have the same keys. Other attributes are the original's.
    """

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                 planning: Planning, plan: Plan | None, verify: bool, on_new_shape: NewShape) -> None:
        _adopt(self, model)
        self.__dict__["_planning"] = planning
        self.__dict__["_verify"] = verify
        self.__dict__["_on_new_shape"] = on_new_shape
        self.__dict__["_ready"] = OrderedDict()
        self.__dict__["_told"] = set()
        self.__dict__["_latest"] = self._prepare(args, kwargs, plan)

    # -- planning -------------------------------------------------------------------------

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any],
                 plan: Plan | None = None) -> Ready:
        model, planning = self._original, self._planning
        prepared = prepare(model, args, kwargs, planning.settings, Progress(planning.progress),
                           costs=plan.costs if plan is not None else None)
        if plan is None:
            plan = Searcher(prepared).plan(planning.budget, planning.planner)
        else:
            _check_plan(plan, prepared)
        labels = [b.label for b in plan.blocks]
        generated = Emitter(prepared.partition, plan.schedule, labels, repr(plan)[1:-1],
                            prepared.graph).emit()
        plan = replace(plan, source=generated.text)
        compiled = Compiled(model, prepared.capture, prepared.partition, generated, prepared.device)
        ready = Ready(plan, compiled)
        self._ready[_signature(model, args, kwargs)] = ready
        while len(self._ready) > _REMEMBERED:
            self._ready.popitem(last=False)
        return ready

    @property
    def plan(self) -> Plan:
        """The plan of the latest signature."""
        return self._latest.plan

    @property
    def source(self) -> str:
        """The generated Python of the latest signature."""
        return self._latest.compiled.generated.text

    @property
    def original(self) -> nn.Module:
        """The module that was wrapped."""
        return self._original

    # -- running --------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward; under the plan when gradients are wanted."""
        model = self._original
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return model(*args, **kwargs)
        key = _signature(model, args, kwargs)
        ready = self._ready.get(key)
        if ready is None:
            ready = self._new_signature(key, args, kwargs)
            if ready is None:
                return model(*args, **kwargs)
        self._ready.move_to_end(key)
        self.__dict__["_latest"] = ready
        tensors, _ = take_apart((args, kwargs), result=False)
        return ready.compiled(tensors)

    def _new_signature(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Ready | None:
        flags = key[0]
        if all(k[0] != flags for k in self._ready):
            self._tell("flags", "a submodule's train flag or a parameter's requires_grad differs from "
                                "what was planned: the original module runs instead, without a budget")
            return None
        if self._on_new_shape == "error":
            raise ArgumentError("the call's shapes, dtypes, autocast state or constants differ from "
                                'the planned ones, and on_new_shape is "error"')
        if self._on_new_shape == "original":
            self._tell("shape", "a call with other shapes, dtypes or constants than planned: the "
                                "original module runs instead, without a budget")
            return None
        logger.info("a new signature: planning for it")
        return self._prepare(args, kwargs)

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warnings.warn(message, RkmateWarning, stacklevel=4)

    # -- being the original ---------------------------------------------------------------

    @property
    def training(self) -> bool:  # type: ignore[override]
        """The original's train flag."""
        return bool(self._original.training)

    @training.setter
    def training(self, value: bool) -> None:
        self._original.training = value

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self._original.training = value
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._original, name)

    def extra_repr(self) -> str:
        """The plan in one line."""
        return repr(self.plan)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        """A copy with parameters of its own; its plans are made again from the saved ones."""
        return _revive(copy.deepcopy(self._original, memo), *self._state())

    def __reduce__(self) -> Any:
        return _revive, (self._original, *self._state())

    def _state(self) -> tuple[Any, ...]:
        return self._planning, self._verify, self._on_new_shape


def _revive(model: nn.Module, planning: Planning, verify: bool, on_new_shape: NewShape) -> PlannedModule:
    """A wrapped module without plans yet: the first call makes one."""
    module = PlannedModule.__new__(PlannedModule)
    _adopt(module, model)
    module.__dict__.update(_planning=planning, _verify=verify, _on_new_shape=on_new_shape,
                           _ready=OrderedDict(), _told=set(), _latest=None)
    return module


def _adopt(module: PlannedModule, model: nn.Module) -> None:
    """Share the original's registries: parameters, buffers, submodules and state-dict hooks."""
    module.__dict__["_original"] = model
    training = model.training
    nn.Module.__init__(module)              # sets the train flag, which is the original's
    model.training = training
    for name in _SHARED:
        if name in model.__dict__:
            module.__dict__[name] = model.__dict__[name]


_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "_state_dict_hooks",
           "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")


def _check_plan(plan: Plan, prepared: Any) -> None:
    if plan.fingerprint != prepared.fingerprint:
        raise PlanError("the plan belongs to another model, or to other input shapes, dtypes or train "
                        "flags: make a plan for this one")
    try:
        result = simulate(prepared.graph, plan.schedule, held=prepared.held,
                          reserve_at_loss=prepared.reserve_at_loss)
    except (ScheduleError, IndexError, KeyError) as error:
        raise PlanError(f"the plan's schedule does not run on this model: {error}") from error
    if result.peak != plan.peak_bytes:
        raise PlanError(f"the plan says that its peak is {plan.peak_bytes:,} bytes, the simulator "
                        f"says {result.peak:,}: make the plan again")


def _signature(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a plan is specialised on."""
    tensors, structure = take_apart((tuple(args), dict(kwargs)), result=False)
    flags = (tuple(m.training for m in model.modules()),
             tuple(p.requires_grad for p in model.parameters()))
    shapes = tuple((tuple(t.shape), t.dtype, t.device, t.requires_grad, t.stride()) for t in tensors)
    constants = tuple(_hashable(c) for c in structure.constants())
    device = tensors[0].device.type if tensors else "cpu"
    autocast = (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
                if torch.is_autocast_enabled(device) else None)
    places = tuple(p.device for p in model.parameters()), tuple(p.dtype for p in model.parameters())
    return flags, shapes, structure.spec, constants, autocast, places


def _hashable(value: Any) -> Any:
    try:
        hash(value)
    except TypeError:
        return ("id", id(value))
    return (type(value), value)

