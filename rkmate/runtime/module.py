"""A wrapped module: it finds or makes a plan for each call and runs it."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from types import MethodType
from typing import Any, ClassVar

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device import Statistics
from rkmate.device.protocol import PeakWatch
from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.capture.answers import OtherAnswer
from rkmate.graph.capture.refusals import refuse_flat_parameters
from rkmate.pipeline.loss import traceable
from rkmate.pipeline.model import refuse_data_parallelism
from rkmate.pipeline.settings import RunSettings
from rkmate.runtime.adapters import Adapter, Arguments, before_a_plan, run_around
from rkmate.runtime.double_backward import Original
from rkmate.runtime.environment import RerunState
from rkmate.runtime.executable import Gradients
from rkmate.runtime.followed_step import UnusualSteps
from rkmate.runtime.guards import Guards, ModuleReader, guards_of
from rkmate.runtime.kept_plans import Executable, Planning, Prototype, Specialization
from rkmate.runtime.padding import Lengths, padding_to
from rkmate.runtime.plan_cache import PlanCache
from rkmate.runtime.segments import Call, watch_sums
from rkmate.show.plan import Plan
from rkmate.stand_in import StandIn
from rkmate.support.planning_lock import capture_lock, planning_lock
from rkmate.support.warn import warn
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.dtensor import waited
from rkmate.torch_seam.modules import is_sharded
from rkmate.torch_seam.patches.libraries import records_apart
from rkmate.torch_seam.tensors import saved_tensor_hook
from rkmate.torch_seam.trace import inside_fake_mode, inside_transform

_KNOWN = __name__.partition(".")[0], "torch.utils.checkpoint"
"""Modules whose hooks on saved tensors are no surprise around a planned call."""

# -- Before and after the first step ---------------------------------------------------------------
#
# The first training step, measured against its prediction where the device keeps statistics.


class FirstStep:
    """Watches one training step, from its forward to the end of its backward.

    The device's statistics are read and not reset. A step is judged by its peak where that is a new
    one since the statistics were last reset (by the user), else by the levels before and after it.
    """

    def __init__(self, statistics: Statistics, predicted: int, budget: int,
                 params: Iterable[torch.Tensor]) -> None:
        """`predicted`, `budget`: bytes above the level at the start, without parameter gradients. `params`:
        parameters whose gradients the step makes."""
        self._predicted = predicted
        self._budget = budget
        self._new_gradients = sum(p.numel() * p.element_size() for p in params
                                  if p.requires_grad and p.grad is None)
        self._watch = PeakWatch(statistics)
        self.peak: int | None = None
        """Bytes that the step took above what stood before it, new gradients included; once it is done."""

    def finish(self) -> None:
        """End the measurement after the backward; warn if the step took more than its budget."""
        self.peak = peak = self._watch.peak() - self._watch.start
        allowed = self._budget + self._new_gradients
        if peak > allowed:
            warn(
                f"the first training step took {peak:,} bytes on top of the memory before it; "
                f"predicted were {self._predicted:,}, the budget is {self._budget:,}, and new parameter "
                f"gradients may add {self._new_gradients:,}. Something outside the planned module "
                "(the loss, hooks, other models) allocates during the step, or operations take "
                "other temporary memory here than when they were measured: reserve room for it "
                "(rkmate.Settings(loss_bytes=...)), or make the plan again on this machine")


# -- Planned modules -------------------------------------------------------------------------------
#
# The module that `wrap` returns.


logger = logging.getLogger("rkmate")
_MOST_UNPLANNED = 256
"""Signatures that are remembered as such that cannot be planned."""


class PlannedModule(StandIn):
    """An equivalent of a module that trains inside a budget. Made by `rkmate.wrap`.

    It shares the original's parameters, buffers and submodules: they are the same objects, and
    state dictionaries have the same keys. Other attributes are the original's.
    """

    _FIELDS = frozenset(("_plans", "_latest", "_reader", "_told", "_unplanned", "_planned_forward",
                         "_lengths", "_around", "_unusual"))
    _has_class_of_original: ClassVar[bool] = True
    """Whether the class has a forward with the signature of the original's class."""
    _plans: PlanCache
    _latest: Executable | None
    _reader: ModuleReader
    _told: set[str]
    _unplanned: set[Guards]
    """Signatures of other flags that cannot be planned, which is said."""
    _lengths: Lengths | None
    _around: tuple[Adapter, ...]
    _unusual: UnusualSteps
    _planned_forward: MethodType
    """The value of `forward`, as long as no library replaces it."""

    def __init__(self, model: nn.Module, planning: Planning,
                 plans: tuple[Plan | Prototype, ...] = ()) -> None:
        """Prepare the module. Its first call is planned when it comes, unless `plan_for` is called before.

        `plans`: to follow if they fit."""
        self._stand_in_for(model)
        self._set_up(planning, plans)

    def plan_for(self, args: tuple[Any, ...], kwargs: dict[str, Any], plan: Plan | None = None) -> None:
        """Plan for calls like this one. `plan`: a plan to follow. Raises `PlanError` if it does not fit."""
        key, tensors = guards_of(self._reader, args, kwargs)
        key = self._plans.observations.with_kinds(key, tensors)
        known = self._plans.make(key, args, kwargs, plan)
        self._reader.follow(known.capture)
        self.__dict__["_latest"] = self._plans.current(known, known.capture.given(tensors))

    def _set_up(self, planning: Planning, saved: tuple[Plan | Prototype, ...],
                lengths: Lengths | None = None) -> None:
        if self._has_class_of_original and "_made_for" not in vars(type(self)):
            kinds: Any = type(self._original), type(self)
            object.__setattr__(self, "__class__", _class_for(*kinds))
        forward = MethodType(_with_signature_of(self._original), self)
        # Parts have a share of a step that is measured anyway.
        measures = not planning.settings.run.cuda_graph and planning.more_calls is None and \
            planning.settings.loss_bytes is None
        reader = ModuleReader(traceable(self._original))
        plans = PlanCache(reader, planning, saved)
        unusual = UnusualSteps(self._original, plans.kept, measures=measures)
        self.__dict__.update(_plans=plans, _latest=None, _unusual=unusual, _told=set(), _unplanned=set(),
                             _planned_forward=forward, _reader=reader, forward=forward)
        self._adapt(lengths)

    @property
    def _run_settings(self) -> RunSettings:
        return self._plans.planning.settings.run

    def _adapt(self, lengths: Lengths | None) -> None:
        """Set the adapters around calls, which pad to these lengths."""
        self.__dict__.update(_lengths=lengths, _around=before_a_plan(padding_to(lengths), self._reader,
                                                                     self._plans.observations))

    # -- planning -------------------------------------------------------------------------

    def plan_ahead(self, lengths: Lengths, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Plan for the sample at several lengths. If padding values are given, pad later calls to these
        lengths."""
        for some, named in lengths.samples(args, kwargs):
            key = self._plans.observations.with_kinds(*guards_of(self._reader, some, named))
            self._reader.follow(self._plans.make(key, some, named).capture)
        self._adapt(lengths)

    @property
    def has_plan(self) -> bool:
        """Whether a plan was made."""
        return self._latest is not None

    @property
    def plan(self) -> Plan:
        """The plan of the latest signature."""
        if self._latest is None:
            plans = self._plans.all()
            if plans:
                return plans[-1]
            raise ArgumentError("there is no plan yet: the first call that records gradients makes one")
        return self._latest.plan

    @property
    def source(self) -> str:
        """The generated Python of the latest signature."""
        return self.plan.source

    # -- running --------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the original's forward; under its plan if gradients are recorded."""
        if torch.compiler.is_dynamo_compiling():
            return outside_of_dynamo(PlannedModule.forward, self, *args, **kwargs)
        if planning_lock.is_mine() or (torch.compiler.is_compiling() and _traced_here()):
            return self._run_original(args, kwargs)   # a part of what is being captured or exported
        if capture_lock.is_others():
            with capture_lock:
                pass
        if not torch.is_grad_enabled():
            return self._run_original(args, kwargs)
        if inside_transform():
            raise ArgumentError("a planned module cannot run inside torch.func transforms (vmap, grad, "
                                "jvp): use the original module (.original) there")
        with records_apart():
            return self._run_planned(args, kwargs)

    def _run_planned(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a call under its plan; as the original where it has none."""
        return run_around(self._around, Arguments(*waited((args, kwargs))), self._run_step)

    def _run_step(self, call: Arguments) -> Any:
        """Find the plan of a call and run its step. Returns the result of the forward."""
        key = call.key
        assert key is not None, "an adapter has read it"
        known = self._plans.kept.find(key)
        if known is None:
            known = self._new_signature(key, call.args, call.kwargs)
            if known is None:
                return self._run_original(call.args, call.kwargs)
            call = call._replace(inputs=known.capture.given(call.tensors))
        latest = self._plans.current(known, call.inputs)
        self.__dict__["_latest"] = latest
        found, pattern = known, latest.compiled.wanted

        def redo(kept: RerunState, given: Mapping[int, torch.Tensor]) -> Gradients:
            return self._plans.again(found, pattern, kept, given)

        if self.__dict__["forward"] is not self._planned_forward:
            self._tell("around", "a library has put its own forward around the planned one, as "
                                 "accelerate's mixed precision does: the memory of that forward (float32 "
                                 "copies of the outputs) comes on top of the budget. Use "
                                 "rkmate.apply(model, budget=...) instead of wrap to plan it, too")
        hook = saved_tensor_hook()
        if hook is not None and not str(getattr(hook, "__module__", "")).startswith(_KNOWN):
            self._tell("saved", (
                f"hooks on saved tensors are around a call of {type(self._original).__name__} "
                "(torch.autograd.graph.save_on_cpu, saved_tensors_hooks): they see nothing of a planned "
                "step, which keeps and recomputes data itself. Leave them out; offload= sends data of a plan "
                "to the host or a disk"))
        if latest.plan.gradients == "in_place":
            refuse_data_parallelism(self)
        opened = self._plans.open_calls
        opened.check(latest.plan, forward=True)
        self._plans.in_a_row.begin_call(key, latest.plan.calls, call.inputs, latest.compiled.device)
        if latest.plan.calls > 1:
            self._unusual.ask(f"a step calls {type(self._original).__name__} several times before a "
                              "backward, and what it makes in between (inputs of later calls) comes on top",
                              "Make all inputs before the first call, or give a smaller budget",
                              plans_anew=True)
        if not latest.ran and any(p.grad_fn is not None for p in self._original.parameters()):
            self._unusual.ask(f"the step makes the weights of {type(self._original).__name__} "
                              "(torch.func.functional_call), whose gradients come on top",
                              "Give a smaller budget, or apply rkmate to a module that makes the weights")
        self._unusual.begin(latest.plan, latest.compiled.device)
        verify = self._run_settings.verify and not latest.ran
        step = latest.compiled
        recorded = self._plans.recorded(latest, call.inputs)
        if recorded is not None:
            return run_around(step.around, call, lambda c: recorded(c.inputs))
        first = self._first_step(latest)
        original = Original(self._run_again, self._reader, key)
        calls: list[Call] = []

        def open_call(new: Call) -> None:
            opened.add(new, latest.plan)
            calls.append(new)

        try:
            result = run_around(step.around, call, lambda c: step(
                c.inputs, redo, first.finish if first is not None else None, open_call,
                self._plans.reads.call(), original, verify))
            latest.ran = True
            self._plans.look_outside(calls[0], found, latest)
            if found.sums:
                sums, found.sums = found.sums, frozenset()
                watch_sums(calls[0], sums, call.inputs, self._tell_of_sum)
            return self._unusual.follow(result)
        except OtherAnswer as error:
            asked, raises = str(error), error.raises
        # An error of the original's says enough by itself.
        result = self._run_original(call.args, call.kwargs) if raises else None
        self._tell(asked, f"the plan of {type(self._original).__name__} takes for granted that {asked}, and "
                          "a call has found otherwise: the original runs in such calls, without a budget "
                          "('Questions that have one answer' in docs/limits.md)")
        return result if raises else self._run_original(call.args, call.kwargs)

    def _tell_of_sum(self, number: int, advice: str = "") -> None:
        """Warn that others contribute to the gradient of an input. `advice`: instead of that to plan more at
        once."""
        name = type(self._original).__name__
        advice = advice or (f"rkmate.apply on the model that contains {name} and what else uses that tensor "
                            "keeps the order")
        self._tell("sum", (
            f"the gradient of input tensor number {number} of {name} is a sum, to which others contribute, "
            "too: it is added up in another order than without rkmate, and its last bits may differ. "
            f"{advice}"))

    def _run_again(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original's forward once more, because its backward has to leave a graph."""
        plan = self.plan
        self._tell("graph", "a backward with create_graph=True runs the original's forward once more, and "
                            "differentiates that: this takes the original's memory, outside of the budget of "
                            f"{plan.budget_bytes:,} bytes (a step of the original takes about "
                            f"{plan.baseline_peak_bytes:,} bytes), and last bits of gradients may differ. A "
                            "gradient that is computed inside of the module is planned ('Gradient penalties' "
                            "in docs/recipes.md)")
        self._unusual.ask("backwards with create_graph=True run the original's forward of "
                          f"{type(self._original).__name__} once more",
                          "Compute inner gradients inside of the module, or apply rkmate to a module that "
                          "contains the whole step")
        return self._run_original(args, kwargs)

    def _run_original(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the original without a plan."""
        return self._original(*args, **kwargs)

    def _first_step(self, ready: Executable) -> FirstStep | None:
        """Return a measurement of a plan's first step, if it is wanted and the device can measure it."""
        if not ready.ran and (is_sharded(self) or is_sharded(self._original)):
            self._tell_of_gathered(ready.plan)
        device = devices.of(ready.compiled.device)
        statistics = device.statistics if self._run_settings.verify else None
        if statistics is None or ready.measured:
            return None
        ready.measured = True
        device.warm_up()            # libraries take the memory that they keep
        return FirstStep(statistics, ready.plan.peak_bytes, ready.plan.budget_bytes,
                         self._original.parameters())

    def _tell_of_gathered(self, plan: Plan) -> None:
        """Warn that a module that is sharded as one unit takes more than its plan knows."""
        params = [*self._original.parameters()]
        gathered = sum(p.nbytes for p in params)
        taken = gathered + max(plan.peak_bytes, sum(p.nbytes for p in params if p.requires_grad))
        if taken > plan.budget_bytes:
            self._tell("gathered", (
                f"{type(self._original).__name__} is sharded as one unit: its gathered parameters "
                f"({gathered:,} bytes) and their whole gradients come on top of its plan. A step takes about "
                f"{taken:,} bytes or more of a budget of {plan.budget_bytes:,}. Shard its layers, then the "
                "model (fully_shard(layer), fully_shard(model); for DeepSpeed, set_z3_leaf_modules), and "
                "call rkmate.apply(model, budget=...): such a budget is that of the step"))

    def _refuse_around(self) -> None:
        """Raise `ArgumentError` for a call that a plan cannot follow because of what is around the module."""
        refuse_flat_parameters(self._original)

    def _new_signature(self, key: Any, args: tuple[Any, ...],
                       kwargs: dict[str, Any]) -> Specialization | None:
        self._refuse_around()
        if len(self._plans) and not self._plans.has_prototype(key):
            if self._run_settings.on_new_shape == "error":
                raise ArgumentError("a call differs from the planned ones in "
                                    f"{self._plans.kept.differing(key)}; and on_new_shape is \"error\": "
                                    "\"plan\" makes a plan for it, \"original\" runs the original")
            if self._run_settings.on_new_shape == "original":
                if "shape" not in self._told:       # such a call may come in every step
                    self._tell("shape", "a call differs from the planned ones in "
                                        f"{self._plans.kept.differing(key)}: the original module runs "
                                        "instead, without a budget")
                return None
            if "plan" not in self._told:
                self._told.add("plan")
                logger.warning("a call differs from the planned ones in %s: a plan is made for it, and "
                               "kept (this is said once, and how long such plans took after 10 and 100)",
                               self._plans.kept.differing(key))
        if key in self._unplanned or not self._has_something_to_train(args, kwargs):
            return None
        try:
            known = self._plans.make(key, args, kwargs)
        except CaptureError as error:
            self._leave_unplanned(key, error)
            return None
        self._reader.follow(known.capture)
        return known

    def _leave_unplanned(self, key: Guards, error: CaptureError) -> None:
        """Let a call run as it is that cannot be planned any more. Raises the error if it never could be."""
        if self._plans.kept.has_flags(key.flags) or not self._plans.kept.has_parts(key.flags):
            raise error
        self._note_unplanned(key)
        warn(f"a call differs from the planned ones in {self._plans.kept.differing(key)}, and such a call "
             f"cannot be planned: the original module runs instead, without a budget. {error}")

    def _note_unplanned(self, key: Guards) -> None:
        """Remember a signature that cannot be planned: such calls run as they are."""
        if len(self._unplanned) >= _MOST_UNPLANNED:
            self._unplanned.clear()
        self._unplanned.add(key)

    def _has_something_to_train(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return whether anything requires a gradient; otherwise the original keeps nothing for a
        backward."""
        return any(p.requires_grad for p in self._original.parameters()) or \
            any(t.requires_grad for t in tensors_in((args, kwargs)))

    def _tell(self, what: str, message: str) -> None:
        if what not in self._told:
            self._told.add(what)
            warn(message)

    # -- being the original ---------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "forward" and getattr(value, "__self__", None) is self._original:
            self._tell("forward", f"forward is set to a method of the wrapped {type(self._original).__name__}"
                                  ": calls run it without a plan, and without a budget. "
                                  "rkmate.apply(model, budget=...) plans a forward that is set later")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        """Return the plan in one line."""
        return repr(self.plan) if self._latest is not None else "no plan yet"

    def _made_with(self) -> tuple[Any, ...]:
        """Return values for a copy: it follows the same plans, and the first call of each signature finds its
        own."""
        return self._plans.planning, tuple(self._plans.all()), self._lengths

    def _added(self) -> dict[str, Any]:
        added = super()._added()
        if added.get("forward") is self._planned_forward:
            del added["forward"]
        return added


def _with_signature_of(model: nn.Module | type[nn.Module]) -> Any:
    """Return the planned forward with the original's signature: libraries look at its argument names."""
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


@functools.lru_cache(maxsize=256)
def _class_for(kind: type[nn.Module], base: type[PlannedModule]) -> type[PlannedModule]:
    """Return a class whose `forward` has the signature of the original's class, where trainers look for the
    names of labels. A pickle names its base instead."""
    return type(f"Planned{kind.__name__}", (base,), {
        "forward": _with_signature_of(kind), "__doc__": base.__doc__,
        "__module__": base.__module__, "_made_for": kind})


def outside_of_dynamo(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run a planned module inside a compiled function, which breaks its graph around the module."""
    from rkmate.runtime.uncompiled import run_uncompiled

    return run_uncompiled(forward, *args, **kwargs)


def _traced_here() -> bool:
    """Return whether this thread is capturing or exporting a module that contains this one.

    Torch's flag does not say: it is one for all threads.
    """
    return capture_lock.is_mine() or inside_fake_mode()

