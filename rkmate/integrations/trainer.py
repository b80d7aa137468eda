"""A budget for transformers' Trainer, and for the trainers that are made from it (trl's).

`BudgetCallback` is made when it is first used: transformers takes seconds to load.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from rkmate.api import apply, remove
from rkmate.budget import parse_budget
from rkmate.errors import ArgumentError, MissingExtra
from rkmate.integrations.plan_log import PlanLog, writing
from rkmate.parts.apply import planned_call_of
from rkmate.planners.registry import planner as find_planner
from rkmate.runtime.module import FirstStep
from rkmate.settings import Options, check_no_settings_of_wrap, chosen
from rkmate.show.plan import Plan
from rkmate.support.warn import warn

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("rkmate")


class _BudgetCallback:
    """A callback that trains inside a memory budget: ``Trainer(..., callbacks=[BudgetCallback("6GiB")])``.

    When training begins, a budget is applied (`rkmate.apply`) to the model that Trainer was given: inside of
    what accelerate wraps around it, so that it is saved, evaluated and loaded as usual. The first batch is
    planned when it comes; the plan's figures are logged and put into the state's ``log_history``. When
    training ends, the model is as before. An error in between leaves the budget on it, unless the callback is
    a context around the training (``with BudgetCallback(...) as budget:``); `rkmate.remove` removes it.

    Args:
        budget: bytes (int), text ("6GiB", "50%"), a float in (0, 1], or ``"auto"``, as for `rkmate.apply`. It
            bounds each forward with its backward, so gradient accumulation takes no more than one batch.
        log_to: where the figures of each plan are logged: a ``SummaryWriter``, a run of Weights & Biases, or
            a function of the figures and the step, as for `rkmate.integrations.PlanLog`.
        options: `rkmate.Options`, as for `rkmate.apply`. With ``calls=2``, the model is called twice before
            each backward.

    Raises:
        ArgumentError: an argument is wrong. When training begins: the model cannot be planned, or is run
            in several threads (``DataParallel``).
        MissingExtra: transformers is not installed.
    """

    def __init__(self, budget: int | float | str, log_to: Any = None, **options: Unpack[Options]) -> None:
        call = chosen(options, _BudgetCallback.__init__)
        check_no_settings_of_wrap(call.settings, "BudgetCallback")
        find_planner(call.settings.planner_name)
        if budget != "auto":
            parse_budget(budget)
        self._budget = budget
        self._options = call.options()
        self._log_to = None if log_to is None else writing(log_to)
        self._log: PlanLog | None = None
        self._plans: list[Plan] = []
        self._first: FirstStep | None = None
        self._model: nn.Module | None = None

    def __enter__(self) -> _BudgetCallback:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the budget, however the training ended."""
        if self._model is not None:
            remove(self._model)
            self._model = None

    @property
    def plans(self) -> list[Plan]:
        """The plans of the latest training run: one for each shape of batch that came."""
        return list(self._plans)

    @property
    def measured_bytes(self) -> int | None:
        """Bytes that the first planned step took on top of the memory before it, including new parameter
        gradients. None before the step has ended, and on devices that do not count their allocations (the
        CPU)."""
        return self._first.peak if self._first is not None else None

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Apply the budget. Trainer has prepared the model: what accelerate put into it is planned, too."""
        if getattr(args, "n_gpu", 1) > 1:
            raise ArgumentError(f"Trainer runs the model on {args.n_gpu} devices in threads (DataParallel), "
                                "where no budget holds: start one process per device (torchrun, accelerate "
                                "launch), or show one device (CUDA_VISIBLE_DEVICES)")
        if getattr(args, "torch_compile", False):
            warn("torch_compile=True compiles nothing of a planned model, whose steps run its operations as "
                 "they are. BudgetCallback(..., compile=True) compiles groups of them inside of the plan")
        self._plans, self._first = [], None
        apply(model, budget=self._budget, **self._options)
        self._model = model
        self._log = None if self._log_to is None else PlanLog(model, self._log_to)
        call = planned_call_of(model)
        if call is not None:
            call.as_tensors = ("num_items_in_batch",)      # another one in each step

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Log what was planned, after a batch without an optimizer step."""
        self._look(state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Log what was planned, after an optimizer step."""
        self._look(state, model)

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Remove the budget, and log the measured bytes."""
        if self.measured_bytes is not None and state.is_world_process_zero:
            logger.warning("the first planned step took %s bytes, new parameter gradients included",
                           f"{self.measured_bytes:,}")
        remove(model)
        self._model = None

    def _look(self, state: Any, model: nn.Module) -> None:
        call = planned_call_of(model)
        if call is None:
            return                                    # the user has removed it
        said = bool(self._plans)
        self._plans, self._first = call.plans(), call.first_step
        if self._log is not None and state.is_world_process_zero:
            self._log(state.global_step)
        if self._plans and not said:
            self._say(self._plans[0], state, model)

    def _say(self, plan: Plan, state: Any, model: nn.Module) -> None:
        state.log_history.append({
            "rkmate_budget_bytes": plan.budget_bytes, "rkmate_peak_bytes": plan.peak_bytes,
            "rkmate_plain_peak_bytes": plan.baseline_peak_bytes, "rkmate_overhead": plan.overhead,
            "step": state.global_step})
        if state.is_world_process_zero:
            logger.warning("%s is trained inside a budget: %s%s", type(model).__name__, repr(plan)[1:-1],
                           ". Its checkpointing is left to the plan" if _checkpoints(model) else "")


def _checkpoints(model: nn.Module) -> bool:
    """Return whether some submodule is set to checkpoint its activations, as transformers does it."""
    return any(getattr(m, "gradient_checkpointing", False) is True for m in model.modules())


def __getattr__(name: str) -> Any:
    if name != "BudgetCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from transformers.trainer_callback import TrainerCallback
    except ModuleNotFoundError as error:
        raise MissingExtra("rkmate.integrations.BudgetCallback needs transformers: "
                           "pip install transformers accelerate") from error
    made = type(name, (_BudgetCallback, TrainerCallback),
                {"__doc__": _BudgetCallback.__doc__, "__module__": __name__})
    return globals().setdefault(name, made)
