"""The module that `wrap` returns."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Mapping
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn
from torch._guards import detect_fake_mode

from rkmate.errors import ArgumentError
from rkmate.graph.capture.capture import inside_transform
from rkmate.runtime.environment import RerunState
from rkmate.runtime.executable import Gradients
from rkmate.runtime.first_step import FirstStep, statistics_of
from rkmate.runtime.guards import Watch, signature
from rkmate.runtime.plan_cache import Known, Planning, Plans, Ready
from rkmate.show.plan import Plan
from rkmate.support.planning_lock import planning_lock
from rkmate.support.warn import warn

NewShape = Literal["plan", "original", "error"]
logger = logging.getLogger("rkmate")


class PlannedModule(nn.Module):
    """An equivalent of a module that trains inside a budget. Made by `rkmate.wrap`.

    It shares the original's parameters, buffers and submodules: they are the same objects, and
    state dictionaries have the same keys. Other attributes are the original's.
    """

    _original: nn.Module
    _plans: Plans
    _latest: Ready | None
    _watch: Watch
    _told: set[str]
    _verify: bool
    _on_new_shape: NewShape

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
                 planning: Planning, plan: Plan | None, verify: bool, on_new_shape: NewShape) -> None:
        _adopt(self, model)
        self._set_up(Plans(model, planning), verify, on_new_shape)
        key, tensors = signature(self._watch, args, kwargs)
        known = self._plans.make(key, args, kwargs, plan)
        self._watch.follow(known.capture.assigned)
        self.__dict__["_latest"] = self._plans.current(known, tensors)

    def _set_up(self, plans: Plans, verify: bool, on_new_shape: NewShape) -> None:
        self.__dict__.update(_plans=plans, _verify=verify, _on_new_shape=on_new_shape, _told=set(),
                             _latest=None, _watch=Watch(self._original))
        self.__dict__["forward"] = MethodType(_with_signature_of(self._original), self)

    # -- planning -------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """The plan of the latest signature."""
        if self._latest is None:
            plans = self._plans.all()
            if plans:
                return plans[-1]
            raise ArgumentError("this copy has no plan yet: its first call makes one")
        return self._latest.plan

    @property
    def source(self) -> str:
        """The generated Python of the latest signature."""
        return self.plan.source

    @property
    def original(self) -> nn.Module:
        """The module that was wrapped."""
        return self._original

    # -- running --------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward; under the plan when gradients are wanted."""
        if torch.compiler.is_dynamo_compiling():
            return _uncompiled(self, args, kwargs)
        model = self._original
        if torch.compiler.is_compiling():
            if _traced_here():
                return model(*args, **kwargs)      # a part of what is being captured or exported
            with planning_lock:                    # another thread traces: the flag is not ours
                pass
        if not torch.is_grad_enabled():
            return model(*args, **kwargs)
        if inside_transform():
            raise ArgumentError("a planned module cannot run inside torch.func transforms (vmap, grad, "
                                "jvp): use the original module (.original) there")
        key, tensors = signature(self._watch, args, kwargs)
        known = self._plans.find(key)
        if known is None:
            known = self._new_signature(key, args, kwargs)
            if known is None:
                return model(*args, **kwargs)
        latest = self._plans.current(known, tensors)
        self.__dict__["_latest"] = latest
        found, pattern = known, latest.compiled.wanted

        def redo(kept: RerunState, given: Mapping[int, torch.Tensor]) -> Gradients:
            return self._plans.again(found, pattern, kept, given)

        first = self._first_step(latest)
        return latest.compiled(tensors, redo, first.finish if first is not None else None)

    def _first_step(self, ready: Ready) -> FirstStep | None:
        """Watches a plan's first step, where that is wanted and the device can tell."""
        statistics = statistics_of(ready.compiled.device) if self._verify else None
        if statistics is None or ready.measured:
            return None
        ready.measured = True
        return FirstStep(statistics, ready.plan.peak_bytes, ready.plan.budget_bytes,
                         self._original.parameters())

    def _new_signature(self, key: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Known | None:
        if len(self._plans) and not self._plans.has_flags(key[0]):
            self._tell("flags", "a submodule's train flag or hooks, or a parameter's requires_grad, "
                                "differ from what was planned: the original module runs instead, "
                                "without a budget. Wrap the module again to plan for them")
            return None
        if len(self._plans):
            if self._on_new_shape == "error":
                raise ArgumentError(f"a call differs from the planned ones in {self._plans.differing(key)}; "
                                    'and on_new_shape is "error"')
            if self._on_new_shape == "original":
                if "shape" not in self._told:       # such a call may come in every step
                    self._tell("shape", "a call differs from the planned ones in "
                                        f"{self._plans.differing(key)}: the original module runs "
                                        "instead, without a budget")
                return None
            if "plan" not in self._told:
                self._told.add("plan")
                logger.warning("a call differs from the planned ones in %s: a plan is made for it, and "
                               "kept (this is said once)", self._plans.differing(key))
        known = self._plans.make(key, args, kwargs)
        self._watch.follow(known.capture.assigned)
        return known

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn(message)

    # -- being the original ---------------------------------------------------------------

    @property
    def training(self) -> bool:
        """The original's train flag."""
        return bool(self._original.training)

    @training.setter
    def training(self, value: bool) -> None:
        self._original.training = value

    def train(self, mode: bool = True) -> PlannedModule:
        """The original's `train`, which may leave some submodules in eval mode."""
        self._original.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> PlannedModule:
        self._original._apply(fn, recurse)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_original"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "training":
            self._original.training = value
        elif name in self.__dict__ or hasattr(PlannedModule, name):
            # What concerns the wrapper itself: `forward` when a library puts another in its place,
            # `__class__`, hooks.
            object.__setattr__(self, name, value)
        else:
            setattr(self._original, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            object.__delattr__(self, name)
        else:
            delattr(self._original, name)

    def extra_repr(self) -> str:
        """The plan in one line."""
        return repr(self.plan) if self._latest is not None else "no plan yet"

    def __deepcopy__(self, memo: dict[int, Any]) -> PlannedModule:
        """A copy with parameters of its own, which follows the same plans."""
        if id(self) in memo:
            return memo[id(self)]  # type: ignore[no-any-return]
        module = _revive(copy.deepcopy(self._original, memo), *self._state())
        memo[id(self)] = module
        return module

    def __reduce__(self) -> Any:
        return _revive, (self._original, *self._state())

    def _state(self) -> tuple[Any, ...]:
        return self._plans.planning, tuple(self._plans.all()), self._verify, self._on_new_shape


def _with_signature_of(model: nn.Module) -> Any:
    """The planned forward with the original's signature: libraries look at its argument names."""
    def forward(self: PlannedModule, *args: Any, **kwargs: Any) -> Any:
        return PlannedModule.forward(self, *args, **kwargs)

    forward.__doc__ = PlannedModule.forward.__doc__
    try:
        own = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return forward
    first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    others = [p for p in own.parameters.values() if p.name != "self"]
    if not any(p.kind is inspect.Parameter.POSITIONAL_ONLY for p in others):
        first = first.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD)
    forward.__signature__ = own.replace(parameters=[first, *others])  # type: ignore[attr-defined]
    return forward


@torch.compiler.disable
def _uncompiled(module: PlannedModule, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A compiled function breaks its graph around a planned module, which runs as planned."""
    return PlannedModule.forward(module, *args, **kwargs)


def _traced_here() -> bool:
    """Whether this thread makes a plan, or exports, now: of a module that this one is a part of.

    Torch's flag does not say: it is one for all threads.
    """
    return planning_lock.is_mine() or detect_fake_mode() is not None


def _revive(model: nn.Module, planning: Planning, saved: tuple[Plan, ...], verify: bool,
            on_new_shape: NewShape) -> PlannedModule:
    """A wrapped module that follows saved plans: the first call of each signature finds its own."""
    module = PlannedModule.__new__(PlannedModule)
    _adopt(module, model)
    module._set_up(Plans(model, planning, saved), verify, on_new_shape)
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
