"""The public face: `wrap`, `apply`, `plan`, `tradeoff`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from rkmate.budget import Budget, parse_budget
from rkmate.devices import GPU
from rkmate.errors import ArgumentError, InfeasibleBudget, PlanError
from rkmate.graph.capture.gradient_places import refuse_data_parallelism
from rkmate.graph.capture.refusals import refuse_what_cannot_repeat
from rkmate.graph.capture.train_mode import flags_to_plan
from rkmate.pipeline import elsewhere
from rkmate.pipeline.device_budget import device_share
from rkmate.pipeline.loss_inside import loss_inside, traceable
from rkmate.pipeline.offload import Place
from rkmate.pipeline.planning import make_curve, make_plan
from rkmate.pipeline.prepare import check_model, trace
from rkmate.pipeline.settings import Compile, Gradients, Settings, settings_of_call
from rkmate.planners.registry import SENDING
from rkmate.planners.registry import planner as find_planner
from rkmate.runtime.apply import planned_call_of, put_plan_into, put_plans_into_layers, take_plan_from
from rkmate.runtime.lengths import checked_lengths
from rkmate.runtime.module import NewShape, PlannedModule
from rkmate.runtime.plan_cache import Planning
from rkmate.runtime.recorded_step import check_device
from rkmate.runtime.sharded import sharded_layers
from rkmate.show.curve import Curve
from rkmate.show.plan import Plan
from rkmate.support.progress import Progress

_M = TypeVar("_M", bound=nn.Module)


def wrap(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
         budget: int | float | str | None = None, planner: str = "rockmate", progress: bool = True,
         plan: Plan | None = None, costs: str | None = None, verify: bool = True,
         on_new_shape: NewShape = "plan", trains: str | int | Sequence[str | int] | None = None,
         training: bool | None = None, planning_seconds: float | None = None, calls: int | None = None,
         gradients: Gradients | None = None, compile: Compile | None = None, offload: Place | None = None,
         offload_bytes: int | str | None = None, settings: Settings | None = None,
         loss: Callable[..., Any] | None = None, loss_args: Sequence[Any] = (),
         loss_kwargs: Mapping[str, Any] | None = None,
         lengths: Sequence[int] | None = None, pad: Mapping[str, float] | None = None,
         cuda_graph: bool = False) -> PlannedModule:
    """An equivalent module that trains inside a memory budget.

    Args:
        model: the module to train.
        args, kwargs: sample inputs of its forward, of the size that it will be trained with.
        budget: bytes (int), text ("600MiB", "1.5GB"), a float in (0, 1], which is a fraction of the
            model's own peak, or ``"auto"``: the largest whose steps fit in what is free on the CUDA
            device, gradients, the states of Adam and the allocator's fragments counted. It bounds what a
            training step allocates above what stands before it, parameter gradients left out.
        planner: how the schedule is found. ``"rockmate"`` takes the fastest schedule of several methods;
            the methods by themselves, to compare them, are ``"rk-rotor"``, ``"rotor"``, ``"revolve"``
            (dynamic programs over a chain of blocks), ``"sequential"`` (equal segments),
            ``"chen"`` (square-root segments), ``"checkmate"``, ``"checkmate-lp"`` (an integer program over
            every operation, and its rounded relaxation), ``"lower-sets"``, ``"lower-sets-memory"``,
            ``"lower-sets-exact"``, ``"lower-sets-exact-memory"``, ``"lower-sets-no-liveness"``,
            ``"dtr"`` (a replayed run-time policy), ``"save-set"`` (an integer program of what is saved at
            a few times), ``"save-all"`` and ``"recompute-all"``; ``"auto"`` asks most of these for half a
            minute, and says which was best.
        progress: show progress on a terminal.
        plan: a plan made before (`Plan.load`), instead of a budget.
        costs: ``"measured"`` runs each unique block once; ``"analytic"`` runs nothing. Unless given, what
            the settings say, which is ``"measured"`` by default.
        verify: on devices that count what they allocate (CUDA), measure the first training step, and warn
            when it is over its budget. On any device, what that step sends away (`offload`) has to come
            back with the same checksum.
        on_new_shape: what a call with other shapes, dtypes or constants does: ``"plan"`` makes a
            plan for it with the same budget, ``"original"`` runs the original module, ``"error"``
            raises.
        trains: which outputs the loss is computed from: ``"all"``, or a list of names (keys and
            fields, ``"aux.0"`` for the first of those under ``aux``) and numbers of output tensors. Unless
            given: ``log_probs`` where there is one (what trl's trainers take), else the output named
            ``loss`` if it is a scalar, else the scalars, else all but by-products such as caches and
            hidden states. A loss that leads to others is right, too, but its first step runs the forward
            twice.
        training: the train flags to plan for. Unless given, the module's own; or, where it is in eval mode
            (as ``from_pretrained`` returns it), those that its `train` sets, which is said. True: these in
            any case; False: as they are. Calls with other flags get plans of their own.
        planning_seconds: the limit of a planner that can stop early (the integer programs on the
            whole graph, ``auto``, ``dtr``); their own unless given.
        calls: how many times the module is called before the backward (siamese networks, contrastive
            losses); once, unless given. The budget then holds for the whole step of so many calls, and
            a fraction is one of the original's peak over as many.
        gradients: ``"in_place"``: the backward adds the gradients of parameters straight to what stands in
            ``.grad``, so that no gradient of a weight is a tensor of its own ([what that saves, and what is
            refused](gradients-in-place.md)); ``"returned"``: autograd gets them. Unless given, what the
            settings say, which is ``"returned"`` by default.
        compile: True: groups of operations between products, convolutions and attention are compiled by
            torch's compiler into kernels of their own ([what that gives, and what it needs](compile.md)):
            the plan takes less time and memory, and numbers agree with the original's within the type's
            precision; ``"auto"``: where a compiler works; False, unless given: every bit is the
            original's.
        offload: a place to which a step may send data while it computes, to have it back when it is needed:
            a folder on a disk, or ``"host"``, the host's memory, for a model on a GPU. What goes there, and
            when, is planned beside what is recomputed, by how fast the place is ([offload](offload.md)).
            Unless given, what the settings say, which is nowhere by default.
        offload_bytes: how much may be there at once, of all `calls`, bytes or text ("20GiB"); as much as
            there is room for, unless given.
        settings: of the stages, `rkmate.Settings`: ``costs``, as above; ``cut``, how long blocks may be;
            ``measure``, how long operations are measured; ``options``, the integer programs of the
            blocks; ``slots`` of the dynamic program; ``planning_seconds``, as above; ``chunked_loss``, when
            wide products and their losses are computed a few rows at a time (``"auto"``: where the step
            does not fit whole and that is faster, or nothing else fits; ``"always"``; ``"never"``);
            ``tiled_mlps``, the same of wide MLPs (``"auto"``: where nothing else fits);
            ``layouts``, whether networks of convolutions work with their channels last (``"keep"``, the
            default, bit for bit; ``"auto"``: where that is measured to be faster; ``"channels_last"``);
            ``deferred_outputs``, whether logits beside such a loss are computed when they are read
            (``"auto"``, ``"never"``); ``opaque``, submodules that run as they are, where they cannot be
            captured; ``planner``, how long the default planner looks
            (`rkmate.PlannerSettings`); ``kept_plans_bytes``, how much memory plans may take; ``keep_pages``,
            whether the process keeps what steps on a CPU free ([pages that stay](pages.md)).
        loss: a function or module that gets the model's output; ``wrap(model, args, kwargs, loss=fn,
            loss_args=(y,))`` is ``wrap(with_loss(model, fn), args, {**kwargs, "loss_args": (y,)})``: a module
            that returns the loss (`rkmate.with_loss`), and plans it with the model.
        loss_args, loss_kwargs: samples of what the loss gets after the output.
        lengths: sequence lengths (dimension 1 of the arguments) to plan for now, beside the sample's.
        pad: a padding value by argument name: a call whose length is between those of `lengths` is padded to
            the next one, and its outputs are cut back. Without it, `lengths` only plans ahead.
        cuda_graph: record the step of each plan as CUDA graphs, forward and backward, and replay them: two
            calls of the host for each step ([what that asks for](limits.md#cuda-graphs)).

    Returns:
        A module with the same parameters, buffers, outputs and gradients; ``.plan`` and
        ``.source`` show what it does.

    Raises:
        InfeasibleBudget: no schedule fits; ``.minimum_bytes`` is the smallest budget.
        CaptureError: the model has no static graph; the message names the operation and the line.
        ArgumentError: an argument is wrong.
        PlanError: `plan` does not belong to this model.
        OffloadError: `offload` could not be written or read when it was measured.
        CompilerError: `compile` is True, and there is no compiler that works.
        DeviceMemoryError: too little is free even to measure the operations.
        PlanningTimeout, SolverError: the planner found nothing in its time, or a solver failed.
    """
    model, kwargs = loss_inside(model, kwargs, loss, loss_args, loss_kwargs)
    args, kwargs = checked_sample(model, args, kwargs)
    planning = _planning(_in_bytes(budget, model), plan, planner, costs, settings, progress,
                         planning_seconds, trains, calls, gradients, compile,
                         offload=offload, offload_bytes=offload_bytes)
    ahead = checked_lengths(model, lengths, pad)
    if cuda_graph:
        check_device([*{t.device for t in (*model.parameters(), *model.buffers())}],
                     sends=planning.settings.offload is not None)
        planning = replace(planning, cuda_graph=True,
                           settings=replace(planning.settings, deferred_outputs="never"))
    if pad is not None:         # every call of another length reads its outputs, to cut them back
        planning = replace(planning, settings=replace(planning.settings, deferred_outputs="never"))
    with flags_to_plan(model, training):
        module = PlannedModule(model, planning, verify, _checked(on_new_shape))
        module.plan_for(args, kwargs, plan)
        if ahead is not None:
            module.plan_ahead(ahead, args, kwargs)
    return module


def apply(model: _M, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *,
          budget: int | float | str | None = None, planner: str = "rockmate", progress: bool = True,
          plan: Plan | None = None, costs: str | None = None, verify: bool = True,
          on_new_shape: NewShape = "plan", trains: str | int | Sequence[str | int] | None = None,
          training: bool | None = None, planning_seconds: float | None = None, calls: int | None = None,
          gradients: Gradients | None = None, compile: Compile | None = None, offload: Place | None = None,
          offload_bytes: int | str | None = None, settings: Settings | None = None) -> _M:
    """Make a module train inside a memory budget, in place: it stays what it is for everything else.

    Its class, attributes, state dictionary, ``save_pretrained``, ``generate`` and adapters are its own; its
    calls follow a plan where gradients are recorded. A call is planned as a whole: with the module's
    hooks, and with what a library has put in the place of its forward. Copies and pickles of the module
    are without a plan: apply one to them, too.

    Args:
        model: the module to train. `remove` undoes what this does; applying again replaces it. The layers
            of a model that was sharded by ``fully_shard`` are planned each by itself, with a share of the
            budget; `applied` then shows the plan of each layer.
        args, kwargs: sample inputs, to plan now. Unless given, the first call that records gradients is
            planned when it comes: with the real batch, in the mode that it is trained in.
        budget: as of `wrap`; a fraction is one of the peak of the first call.
        planner, progress, plan, costs, verify, on_new_shape, trains, training, planning_seconds, calls,
            gradients, compile, offload, offload_bytes, settings: as of `wrap`. ``training`` concerns sample
            inputs alone.

    Returns:
        The module that was given. `applied` shows its plan.

    Raises:
        What `wrap` raises; without sample inputs, some of it at the first call.
    """
    sampled = args is not None or kwargs is not None
    if plan is not None and not sampled:
        raise ArgumentError("plan is given without the sample inputs that it belongs to: give args or kwargs")
    if isinstance(model, PlannedModule):
        raise ArgumentError("the module is a wrapped one already: apply a budget to the module itself "
                            "(.original)")
    check_model(model)
    layers = sharded_layers(model)
    if layers and settings_of_call(settings, None, gradients=gradients).gradients == "in_place":
        refuse_data_parallelism(*layers)
    if layers and sampled:
        raise ArgumentError(f"{type(model).__name__} has sharded layers, whose parameters are there in a "
                            "step alone: leave the sample inputs out, and the first step is planned")
    if sampled:
        args, kwargs = checked_sample(model, () if args is None else args, kwargs)
    planning = _planning(_in_bytes(budget, model), plan, planner, costs, settings, progress,
                         planning_seconds, trains, calls, gradients, compile,
                         offload=offload, offload_bytes=offload_bytes)
    if layers:
        put_plans_into_layers(model, layers, planning, verify, _checked(on_new_shape))
        return model
    call = put_plan_into(model, planning, verify, _checked(on_new_shape))
    if sampled:
        try:
            with flags_to_plan(model, training):
                call.whole.plan_for(tuple(args or ()), dict(kwargs or {}), plan)
        except BaseException:
            take_plan_from(model)
            raise
    return model


def remove(model: _M) -> _M:
    """Undo `apply`: the module, and each part of it, runs as it did before. Returns it. Nothing happens to
    modules that have no plan."""
    check_model(model)
    for module in model.modules():
        take_plan_from(module)
    return model


def applied(model: nn.Module) -> PlannedModule | None:
    """What shows the plan of a module that `apply` was called with: its ``.plan`` and ``.source``, as of what
    `wrap` returns. None for other modules."""
    check_model(model)
    call = planned_call_of(model)
    return None if call is None else call.latest


def plan(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
         budget: int | float | str, planner: str = "rockmate", progress: bool = True,
         costs: str | None = None, trains: str | int | Sequence[str | int] | None = None,
         training: bool | None = None, planning_seconds: float | None = None, calls: int | None = None,
         gradients: Gradients | None = None, compile: Compile | None = None, offload: Place | None = None,
         offload_bytes: int | str | None = None, settings: Settings | None = None,
         loss: Callable[..., Any] | None = None, loss_args: Sequence[Any] = (),
         loss_kwargs: Mapping[str, Any] | None = None, device: GPU | str | None = None) -> Plan:
    """The plan that `wrap` would follow, without generating code. Same arguments and errors.

    `device`: a GPU that need not be here (`rkmate.devices.H100`, or ``"h100"``), to plan for it: times are
    then estimates, ``budget="auto"`` is what it has left for a step, and the model may be on the CPU or on
    the meta device. The plan's note says what is not known; see [planning elsewhere](planning-elsewhere.md).
    """
    gpu, model, args, kwargs = elsewhere.sample_for(device, model, args, kwargs)
    model, kwargs = loss_inside(model, kwargs, loss, loss_args, loss_kwargs)
    with elsewhere.on_gpu(gpu, model):
        args, kwargs = checked_sample(model, args, kwargs)
        planning = _planning(_in_bytes(budget, model), None, planner, costs, settings, progress,
                             planning_seconds, trains, calls, gradients, compile, gpu,
                             offload, offload_bytes)
        with flags_to_plan(model, training):
            traced = trace(model, args, kwargs, planning.settings, Progress(progress))
        made = make_plan(traced, planning.budget, planning.planner).plan
    return elsewhere.told(made, gpu)


def tradeoff(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
             budgets: Sequence[int | float | str] | None = None, planner: str = "rockmate",
             progress: bool = True, costs: str | None = None,
             trains: str | int | Sequence[str | int] | None = None, training: bool | None = None,
             planning_seconds: float | None = None, gradients: Gradients | None = None,
             compile: Compile | None = None, offload: Place | None = None,
             offload_bytes: int | str | None = None, settings: Settings | None = None,
             loss: Callable[..., Any] | None = None, loss_args: Sequence[Any] = (),
             loss_kwargs: Mapping[str, Any] | None = None, device: GPU | str | None = None) -> Curve:
    """Plans along the curve of time against memory, from the largest budget to the smallest.

    One capture and one measurement serve all of them, and so do the options of a graph's blocks (larger
    tiles of a head have options of their own). Without `budgets`: from the model's own peak to the smallest
    one that the original's operations meet, in ten steps. The result is a sequence of plans that can be drawn
    (``.plot("curve.svg")``). Raises `InfeasibleBudget` for a budget that was asked for and cannot be met, and
    otherwise what `wrap` raises. `device`: as of `plan`.
    """
    gpu, model, args, kwargs = elsewhere.sample_for(device, model, args, kwargs)
    model, kwargs = loss_inside(model, kwargs, loss, loss_args, loss_kwargs)
    with elsewhere.on_gpu(gpu, model):
        args, kwargs = checked_sample(model, args, kwargs)
        wanted = None if budgets is None else [parse_budget(_in_bytes(b, model)) for b in budgets]
        planning = _planning(1.0, None, planner, costs, settings, progress, planning_seconds, trains,
                             gradients=gradients, compile=compile, gpu=gpu,
                             offload=offload, offload_bytes=offload_bytes)
        with flags_to_plan(model, training):
            traced = trace(model, args, kwargs, planning.settings, Progress(progress))
        made = make_curve(traced, wanted, planning.planner)
    return Curve(tuple(elsewhere.told(plan, gpu) for plan in made))


def _in_bytes(budget: Any, model: nn.Module) -> Any:
    """``"auto"`` as a share of the device; other budgets as they are."""
    return device_share(model) if isinstance(budget, str) and budget == "auto" else budget


def checked_sample(model: Any, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sample inputs as a tuple and a dict. Raises `ArgumentError` for what is wrong with them or the
    model, and `CaptureError` for what a planned step could not repeat."""
    check_model(model)
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(f"args is {type(args).__name__}; it should be a tuple with the sample "
                            "positional arguments: (x,) for one tensor")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs is {type(kwargs).__name__}; it should be a mapping of argument "
                            "names to sample values")
    args, kwargs = tuple(args), dict(kwargs or {})
    refuse_what_cannot_repeat(traceable(model), args, kwargs)
    return args, kwargs


def _checked(on_new_shape: Any) -> NewShape:
    if on_new_shape not in ("plan", "original", "error"):
        raise ArgumentError(f'on_new_shape is {on_new_shape!r}; it should be "plan", "original" or "error"')
    return on_new_shape  # type: ignore[no-any-return]


def _planning(budget: Any, plan: Plan | None, planner: str, costs: str | None, settings: Settings | None,
              progress: bool, planning_seconds: float | None, trains: Any,
              calls: int | None = None, gradients: str | None = None, compile: Compile | None = None,
              gpu: GPU | None = None, offload: Place | None = None,
              offload_bytes: int | str | None = None) -> Planning:
    if (budget is None) == (plan is None):
        raise ArgumentError("give a budget or a plan, and not both")
    if plan is not None and not isinstance(plan, Plan):
        raise ArgumentError(f"plan is {type(plan).__name__}; it should be a rkmate.Plan")
    name = find_planner(planner).name
    checked = Budget(bytes=plan.budget_bytes) if plan is not None else parse_budget(budget)
    base = settings_of_call(settings, costs, trains, gradients, compile, offload, offload_bytes)
    if base.offload is not None and plan is None and name not in SENDING:
        raise ArgumentError(f"planner is {name!r}, which recomputes alone: leave offload out, or take one "
                            f"that sends data away ({', '.join(map(repr, SENDING))})")
    if gpu is not None:
        base = elsewhere.estimating(base, costs)
    elif base.offload is not None:
        base.offload.check_folder()
    if calls is not None:
        base = replace(base, calls=calls)
    if planning_seconds is not None:
        if not planning_seconds > 0:
            raise ArgumentError(f"planning_seconds is {planning_seconds}; it should be a positive "
                                "number of seconds")
        base = replace(base, planning_seconds=planning_seconds)
    return Planning(checked, name, base, progress)


__all__ = ["InfeasibleBudget", "PlanError", "applied", "apply", "plan", "remove", "tradeoff", "wrap"]
