"""The public calls: `wrap`, `apply`, `remove`, `plan`, `tradeoff`, `max_batch_size`, `shared_plan`.

What they take in common is declared once, in `rkmate.settings`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn

from rkmate.budget import Budget, listed, parse_budget
from rkmate.devices import GPU
from rkmate.errors import ArgumentError, CaptureError
from rkmate.graph.capture.refusals import refuse_parallelism, refuse_what_cannot_repeat, uncompiled
from rkmate.parts.apply import (
    planned_call_of,
    put_plan_into,
    put_plans_into_layers,
    put_plans_into_members,
    take_plan_from,
    wrapped_by_parts,
)
from rkmate.parts.one_budget import sharded_layers
from rkmate.pipeline import elsewhere
from rkmate.pipeline.device_budget import ADAM_STATES, BatchSize, device_share, largest_batch
from rkmate.pipeline.loss import loss_inside, traceable, without_loss
from rkmate.pipeline.model import as_before, flags_to_plan, refuse_data_parallelism
from rkmate.pipeline.prepare import Blocked, Measured, Traced, check_model, trace
from rkmate.pipeline.refuse import room_within
from rkmate.pipeline.search import make_curve, make_plan
from rkmate.pipeline.settings import Settings
from rkmate.planners.registry import SENDING
from rkmate.planners.registry import planner as find_planner
from rkmate.runtime.agreement import SHARED, Ranks, description, shared, shows_signs
from rkmate.runtime.kept_plans import Planning
from rkmate.runtime.module import PlannedModule
from rkmate.runtime.padding import checked_lengths
from rkmate.runtime.recorded_step import check_device
from rkmate.settings import Chosen, Options, check_default_planner, check_no_settings_of_wrap, chosen
from rkmate.show.curve import Curve
from rkmate.show.plan import Plan
from rkmate.support.progress import Progress
from rkmate.torch_seam.modules import inside_of_flat, is_sharded
from rkmate.torch_seam.trace import several_ranks

if TYPE_CHECKING:
    from typing_extensions import Unpack

_M = TypeVar("_M", bound=nn.Module)


def wrap(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
         budget: int | float | str | None = None, plan: Plan | None = None,
         loss: Callable[..., Any] | None = None, loss_args: Sequence[Any] = (),
         **options: Unpack[Options]) -> PlannedModule:
    """Return an equivalent module that trains inside a memory budget.

    Args:
        model: the module to train.
        args, kwargs: sample inputs of its forward, of the size that it will be trained with.
        budget: bytes (int), text ("600MiB", "1.5GB", "50%"), a float in (0, 1], which is a fraction of the
            model's own peak, or ``"auto"``: the largest budget whose steps fit into the free memory of the
            CUDA device, together with gradients, the states of Adam and the allocator's fragments. The budget
            bounds the bytes that a training step allocates on top of what is in memory before the step.
            Gradients of parameters do not count.
        plan: a plan made before (`Plan.load`), instead of a budget.
        loss: a function or module that receives the model's output. ``wrap(model, args, kwargs, loss=fn,
            loss_args=(y,))`` means ``wrap(with_loss(model, fn), args, {**kwargs, "loss_args": (y,)})``: the
            module returns the loss (`rkmate.with_loss`), and the plan includes it.
        loss_args: samples of the loss's arguments after the output.
        options: `rkmate.Options`, which every planning call takes: ``calls`` before a backward, ``compile``
            groups of operations, ``offload`` data to a target, ``settings`` for everything else
            (`rkmate.Settings`), and whether to show ``progress``.

    Returns:
        A module with the same parameters, buffers, outputs and gradients; ``.plan`` and
        ``.source`` show what it does.

    Raises:
        InfeasibleBudget: no schedule fits; ``.minimum_bytes`` is the smallest budget.
        CaptureError: the model has no static graph; the message names the operation and the line.
        ArgumentError: an argument is wrong.
        UnknownOption: a keyword is unknown; the message names the nearest option.
        PlanError: `plan` does not belong to this model.
        OffloadError: the target of `offload` could not be written or read while it was measured.
        CompilerError: `compile` is True, and no compiler works.
        DeviceMemoryError: too little memory is free even to measure single operations.
        PlanningTimeout, SolverError: the planner found nothing within its time limit, or a solver failed.
    """
    call = chosen(options, wrap)
    run = call.settings.run
    model, kwargs = loss_inside(uncompiled(model), kwargs, loss, loss_args, call.loss_kwargs)
    args, kwargs = checked_sample(model, args, kwargs, whole=False)
    planning = _planning(_in_bytes(budget, model), plan, call)
    ahead = checked_lengths(model, run.lengths, run.pad)
    if run.cuda_graph:
        check_device([*{t.device for t in (*model.parameters(), *model.buffers())}],
                     sends=planning.settings.offload is not None)
    if planning.settings.parts not in (None, "never"):
        if run.of_wrap:
            raise ArgumentError(f"parts is {planning.settings.parts!r}, and RunSettings has "
                                f"{', '.join(run.of_wrap)}, which only a plan of the whole model follows: "
                                "leave out one of the two")
        return wrapped_by_parts(model, _counting(planning, plan), run.training, args, kwargs, plan)
    with flags_to_plan(model, run.training):
        module = PlannedModule(model, planning)
        with _parts_named(model, planning.settings):
            module.plan_for(args, kwargs, plan)
        if ahead is not None:
            module.plan_ahead(ahead, args, kwargs)
    return module


def apply(model: _M, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *,
          budget: int | float | str | None = None, plan: Plan | None = None,
          **options: Unpack[Options]) -> _M:
    """Make a module train inside a memory budget, in place. The module object stays the same.

    Its class, attributes, state dictionary, ``save_pretrained``, ``generate`` and adapters do not change; its
    calls follow a plan if gradients are recorded. A call is planned as a whole, with the module's hooks, and
    with a forward that a library has set on the module. Deep copies of the module keep to the same budget;
    pickles have no plan: call `apply` on what is loaded.

    Args:
        model: the module to train. `remove` undoes `apply`; a second `apply` replaces the first. If the model
            is sharded by ``fully_shard``, by ``FullyShardedDataParallel``, or by DeepSpeed's ZeRO stage 3
            with layers that ``set_z3_leaf_modules`` names, before or after this call, each sharded layer (the
            innermost ones) gets a plan of its own, and so does the rest of the forward after the last of
            them: they share the budget of the whole step. `applied` then shows the plan of each layer, and of
            the rest. The members of a ``ModuleList`` or ``ModuleDict`` (the pipeline stages of a rank, where
            there are several ranks) share one budget in the same way, for all of their calls up to an
            optimizer's step.
        args, kwargs: sample inputs, to plan now. Without them, the first call that records gradients is
            planned when it comes: with the real batch, in the mode that it is trained in.
        budget: bytes (int), text ("600MiB", "50%"), a float in (0, 1], which is a fraction of the peak of the
            first call, or ``"auto"``, as for `wrap`.
        plan: a plan made before (`Plan.load`), instead of a budget, with the sample inputs that it belongs
            to.
        options: `rkmate.Options`, as for `wrap`. ``RunSettings(training=...)`` concerns sample inputs alone.

    Returns:
        The module that was given. `applied` shows its plan.

    Raises:
        What `wrap` raises; without sample inputs, some of it at the first call.
    """
    call = chosen(options, apply)
    check_no_settings_of_wrap(call.settings, "apply")
    run = call.settings.run
    sampled = args is not None or kwargs is not None
    if plan is not None and not sampled:
        raise ArgumentError("plan is given without the sample inputs that it belongs to: give args or kwargs")
    if isinstance(model, PlannedModule):
        raise ArgumentError("the module is already wrapped: apply a budget to the module itself "
                            "(.original)")
    check_model(model)
    given, model = model, cast(_M, inside_of_flat(model) or model)
    layers = sharded_layers(model)
    shared = bool(layers) or model is not given
    if not shared and not is_sharded(model):        # a sharded layer's parameters are seen in its first call
        refuse_parallelism(model, later=not sampled)
    if shared and call.settings.gradients == "in_place":
        refuse_data_parallelism(*given.modules())
    if shared and sampled:
        raise ArgumentError(f"{type(model).__name__} has sharded layers, whose parameters exist only "
                            "during a step: leave out the sample inputs, and the first step is planned")
    if sampled:
        args, kwargs = checked_sample(model, () if args is None else args, kwargs, whole=False)
    planning = _planning(_in_bytes(budget, model), plan, call)
    if isinstance(model, (nn.ModuleList, nn.ModuleDict)) and not sampled and several_ranks():
        put_plans_into_members(model, planning)
        return model
    if shared:
        put_plans_into_layers(model, layers, planning, None if model is given else given)
        return given
    planning = _counting(planning, plan)
    if planning.settings.parts is None:
        planning = replace(planning, settings=replace(
            planning.settings, parts="never" if planning.settings.pins else "auto"))
    planned = put_plan_into(model, planning)
    if sampled:
        planned.plan_now(run.training, tuple(args or ()), dict(kwargs or {}), plan)
    return model


def remove(model: _M) -> _M:
    """Undo `apply`: the module and its submodules run as before. Returns the module. Modules without a plan
    do not change."""
    check_model(model, compiled=True)
    for module in model.modules():
        take_plan_from(module)
    return model


def applied(model: nn.Module) -> PlannedModule | None:
    """Return the module that shows the plan of `model` after `apply`, in its ``.plan`` and ``.source``, as a
    module that `wrap` returns does; None for a module without `apply`."""
    if not isinstance(model, torch.jit.ScriptModule):       # such a part of a model has no plan
        check_model(model, compiled=True)
    call = planned_call_of(model)
    return None if call is None else call.latest


def plan(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
         budget: int | float | str, loss: Callable[..., Any] | None = None, loss_args: Sequence[Any] = (),
         device: GPU | str | None = None, **options: Unpack[Options]) -> Plan:
    """Return the plan that `wrap` would follow, without generating code.

    Args:
        model: the module to train.
        args, kwargs: sample inputs of its forward, of the size that it will be trained with.
        budget: bytes (int), text ("600MiB", "50%"), a float in (0, 1], which is a fraction of the model's own
            peak, or ``"auto"``, as for `wrap`.
        loss, loss_args: a loss that the plan includes, and its arguments after the output, as for `wrap`.
        device: a GPU to plan for, which this machine need not have (`rkmate.devices.H100`, or ``"h100"``).
            Times are then estimates, ``budget="auto"`` is the memory that the GPU has left for a step, and
            the model may be on the CPU or on the meta device. The plan's note says what is unknown; see
            [planning elsewhere](planning-elsewhere.md).
        options: `rkmate.Options`, as for `wrap`.

    Raises:
        InfeasibleBudget: no schedule fits; ``.minimum_bytes`` is the smallest budget.
        CaptureError: the model has no static graph; the message names the operation and the line.
        RkmateError: the other errors of `wrap`.
    """
    call = chosen(options, plan)
    gpu, model, args, kwargs = elsewhere.sample_for(device, model, args, kwargs)
    model, kwargs = loss_inside(model, kwargs, loss, loss_args, call.loss_kwargs)
    with elsewhere.on_gpu(gpu, model), as_before(model):
        with _parts_named(model, call.settings, gpu):
            planning, traced = _traced(model, args, kwargs, budget, call, gpu)
        made = make_plan(traced, planning.budget, planning.planner).plan
    return elsewhere.told(made, gpu)


def tradeoff(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
             budgets: Sequence[int | float | str] | None = None, loss: Callable[..., Any] | None = None,
             loss_args: Sequence[Any] = (), device: GPU | str | None = None,
             **options: Unpack[Options]) -> Curve:
    """Return plans along the curve of time against memory, from the largest budget to the smallest.

    One capture and one measurement serve all plans, and so do the options of a graph's blocks (larger tiles
    of a head have options of their own). The result is a sequence of plans that prints as a table and can be
    drawn (``.plot("curve.svg")``).

    Args:
        model: the module to train.
        args, kwargs: sample inputs of its forward, of the size that it will be trained with.
        budgets: bytes, text or fractions, each as for `wrap`. None: ten steps from the model's own peak to
            the smallest budget that the original's operations can meet.
        loss, loss_args: a loss that the plans include, and its arguments after the output, as for `wrap`.
        device: a GPU to plan for, which this machine need not have, as for `plan`.
        options: `rkmate.Options`, as for `wrap`.

    Raises:
        InfeasibleBudget: one of `budgets` cannot be met; ``.minimum_bytes`` is the smallest budget.
        CaptureError: the model has no static graph; the message names the operation and the line.
        RkmateError: the other errors of `wrap`.
    """
    call = chosen(options, tradeoff)
    gpu, model, args, kwargs = elsewhere.sample_for(device, model, args, kwargs)
    model, kwargs = loss_inside(model, kwargs, loss, loss_args, call.loss_kwargs)
    with elsewhere.on_gpu(gpu, model), as_before(model):
        with _parts_named(model, call.settings, gpu):
            args, kwargs = checked_sample(model, args, kwargs)
            wanted = None if budgets is None else [
                parse_budget(_in_bytes(b, model)) for b in listed(budgets, "budgets", "budgets")]
            planning = _planning(1.0, None, call, gpu)
            with flags_to_plan(model, call.settings.run.training):
                traced = trace(model, args, kwargs, planning.settings, Progress(call.progress))
        made = make_curve(traced, wanted, planning.planner)
    return Curve(tuple(elsewhere.told(plan, gpu) for plan in made))


def max_batch_size(model: nn.Module, make_inputs: Callable[[int], Any], *,
                   device_memory: int | str | None = None, optimizer_states: int = ADAM_STATES,
                   most: int = 1 << 16, device: GPU | str | None = None,
                   **options: Unpack[Options]) -> BatchSize:
    """Return the largest batch whose training step fits in a device, and what it costs.

    Batch sizes are doubled until a step no longer fits, then narrowed to the last one that does.

    Args:
        model: the module to train; a model in eval mode is planned in train mode.
        make_inputs: function from a batch size to ``args``, or to ``(args, kwargs)`` with a tuple and a dict.
        device_memory: memory of the whole device, in bytes or text ("24GiB"); parameters, buffers, gradients
            and optimizer state are subtracted. None: the free memory of the model's CUDA device.
        optimizer_states: number of tensors of a parameter's size that the optimizer keeps for each
            parameter: 2 for Adam and AdamW, 1 for SGD with momentum, 0 for SGD.
        most: largest batch size to try.
        device: a GPU to plan for, as for `plan`: costs are then estimated, and `device_memory` is the GPU's
            by default.
        options: `rkmate.Options`, as for `wrap`. Each of `calls` gets a batch of the returned size. With
            `compile`, each size that is tried has its own groups, and takes seconds to compile.

    Raises:
        InfeasibleBudget: not even a batch of one fits.
        ArgumentError: an argument is wrong, or the model alone does not fit.
    """
    call = chosen(options, max_batch_size)
    check_default_planner(call.settings, "max_batch_size asks the default planner: leave it out")
    check_model(model)
    gpu, model, _, _ = elsewhere.sample_for(device, model, (), {})

    def inputs(size: int) -> Any:
        return elsewhere.sample_for(gpu, None, make_inputs(size), {})[2]
    with elsewhere.on_gpu(gpu, model), as_before(model):
        settings = call.settings if gpu is None else elsewhere.estimating(call.settings, None)
        found = largest_batch(model, inputs, settings, Progress(call.progress), device_memory=device_memory,
                              optimizer_states=optimizer_states, most=most)
    return replace(found, plan=elsewhere.told(found.plan, gpu))


def shared_plan(model: nn.Module, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
                budget: int | float | str, group: Any = None,
                new_shapes: Literal["shared", "own"] = "shared", **options: Unpack[Options]) -> Plan:
    """Return the plan that the first process of a group makes, in every process of the group.

    Measured times differ from process to process, so each process would find a plan of its own. Call this in
    every process of the group, and pass the result to `wrap` or `apply` as ``plan``. Before anything is
    planned, the processes compare model, arguments, budget, settings and versions. All of them measure, and
    the plan counts on the slowest process for each operation. A process waits for another one as long as that
    one plans, and otherwise at most for the group's timeout.

    Args:
        model, args, kwargs, budget: the module, sample inputs of its forward, and the budget, as for `plan`;
            equal in all processes.
        group: the process group; the default group by default.
        new_shapes: what happens to calls that are not planned yet. ``"shared"``: the processes compare them,
            and the first one plans for all, so every process has to make each such call. ``"own"``: each
            process plans alone, for inputs whose shapes differ from process to process.
        options: `rkmate.Options`, as for `plan`. The target of `offload` should be as fast for all processes
            as for the first one. Each process passes ``offload=`` again to `wrap`, possibly another folder.

    Raises:
        ArgumentError: there is no process group.
        RankError: the processes differ in what they plan, which the message names, or one of them takes
            no part, or cannot measure its operations. Every other process raises this.
        RkmateError: what the first process raised, in every process.
    """
    call = chosen(options, shared_plan)
    if new_shapes not in ("shared", "own"):
        raise ArgumentError(f'new_shapes is {new_shapes!r}; it should be "shared" or "own"')
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError("shared_plan needs a process group: call "
                            "torch.distributed.init_process_group first, or use rkmate.plan")

    if dist.get_world_size(group) == 1:
        return plan(model, args, kwargs, budget=budget, **call.options())
    ranks = Ranks(group, advice=SHARED)
    ranks.agree(description(model, args, kwargs, call.settings, budget))

    @functools.cache
    def tried() -> tuple[Planning, Traced] | Exception:
        try:
            return _traced(model, args, kwargs, budget, call)
        except Exception as error:
            return error

    def own() -> tuple[Planning, Traced]:
        found = tried()
        if isinstance(found, Exception):
            raise found
        return found

    def made(by: Measured) -> Plan:
        planning, traced = own()
        return make_plan(replace(traced, measured_by=by), planning.budget, planning.planner).plan

    def measured() -> tuple[Traced, Callable[[Blocked], int]]:
        planning, traced = own()
        return traced, room_within(planning.budget)

    with shows_signs(), as_before(model):
        if not ranks.leads and call.settings.costs != "analytic":
            # All begin to measure at the same time. What fails here is told where costs are compared.
            tried()
        found = ranks.led(made, lambda plan: plan, lambda plan: plan,
                          lambda said: ranks.measure_too(said, measured))
    return shared(ranks, found) if new_shapes == "shared" else found


def _traced(model: nn.Module, args: Any, kwargs: Any, budget: Any, call: Chosen, gpu: GPU | None = None
            ) -> tuple[Planning, Traced]:
    """Check what is to be planned, and capture it."""
    args, kwargs = checked_sample(model, args, kwargs)
    planning = _planning(_in_bytes(budget, model), None, call, gpu)
    with flags_to_plan(model, call.settings.run.training):
        return planning, trace(model, args, kwargs, planning.settings, Progress(call.progress))


@contextmanager
def _parts_named(model: nn.Module, settings: Settings, gpu: GPU | None = None) -> Iterator[None]:
    """Name planning by parts in the error of a model that cannot be captured, and has parts. `gpu`: one that
    is not here, for which no parts are planned."""
    try:
        yield
    except CaptureError as error:
        if gpu is not None or settings.parts == "never" or not any(without_loss(model).children()):
            raise
        raise CaptureError(f"{str(error).rstrip('.')}. rkmate.apply(model, budget=...), or wrap with "
                           "settings=rkmate.Settings(parts=\"auto\"), plans the parts of such a model "
                           "that can be planned ('By parts' in docs/recipes.md).") from error


def _in_bytes(budget: Any, model: nn.Module) -> Any:
    """Return ``"auto"`` as a share of the device, and any other budget unchanged."""
    return device_share(model) if isinstance(budget, str) and budget == "auto" else budget


def checked_sample(model: Any, args: Any, kwargs: Any, *, whole: bool = True
                   ) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Sample inputs as a tuple and a dict. Raises `ArgumentError` for what is wrong with them or the
    model, and `CaptureError` for what a planned step of the whole model could not repeat, unless `whole` is
    False: parts of the model may be planned."""
    check_model(model)
    if not isinstance(args, (tuple, list)):
        raise ArgumentError(f"args is {type(args).__name__}; it should be a tuple with the sample "
                            "positional arguments: (x,) for one tensor")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise ArgumentError(f"kwargs is {type(kwargs).__name__}; it should be a mapping of argument "
                            "names to sample values")
    args, kwargs = tuple(args), dict(kwargs or {})
    with nullcontext() if whole else suppress(CaptureError):
        refuse_what_cannot_repeat(traceable(model), args, kwargs)
    return args, kwargs


def _counting(planning: Planning, plan: Plan | None) -> Planning:
    """Return the planning of a module that is planned in place: its first step counts the calls before a
    backward, unless that is known."""
    counts = plan is None and planning.settings.calls == 1
    return replace(planning, counts_calls=True) if counts else planning


def _planning(budget: Any, plan: Plan | None, call: Chosen, gpu: GPU | None = None) -> Planning:
    """Check a budget or a plan, and what they need of the settings. Raises `ArgumentError`."""
    if (budget is None) == (plan is None):
        raise ArgumentError("give a budget or a plan, and not both")
    if plan is not None and not isinstance(plan, Plan):
        raise ArgumentError(f"plan is {type(plan).__name__}; it should be a rkmate.Plan")
    settings = call.settings
    name = find_planner(settings.planner_name).name
    checked = Budget(bytes=plan.budget_bytes) if plan is not None else parse_budget(budget)
    if settings.offload is not None and plan is None and name not in SENDING:
        raise ArgumentError(f"planner is {name!r}, which only recomputes: leave out offload, or choose a "
                            f"planner that sends data away ({', '.join(map(repr, SENDING))})")
    if gpu is not None:
        settings = elsewhere.estimating(settings, call.costs)
    elif settings.offload is not None:
        settings.offload.check_folder()
    return Planning(checked, name, settings, call.progress)
