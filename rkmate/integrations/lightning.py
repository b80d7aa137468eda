"""A budget for Lightning's Trainer, as one of its callbacks."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from rkmate.api import applied, apply, remove
from rkmate.errors import ArgumentError, MissingExtra
from rkmate.graph.capture.refusals import uncompiled
from rkmate.integrations.plan_log import PlanLog
from rkmate.settings import Options, check_no_settings_of_wrap, chosen

try:
    from lightning.pytorch import Callback
except ImportError as error:
    raise MissingExtra("rkmate.integrations.lightning.BudgetCallback needs Lightning: "
                       "pip install lightning") from error

if TYPE_CHECKING:
    from typing_extensions import Unpack

logger = logging.getLogger("rkmate")


class BudgetCallback(Callback):
    """A callback that trains a LightningModule inside a memory budget:
    ``Trainer(callbacks=[BudgetCallback("6GiB")])``.

    The callback calls `rkmate.apply` before training, and `rkmate.remove` afterwards; in between, a plan is
    made for the first real batch. Checkpoints, ``validate``, ``test`` and ``predict`` work as without it. The
    trainer's loggers get the figures of each plan (`rkmate.integrations.PlanLog`).
    """

    def __init__(self, budget: int | float | str, module: str | None = None,
                 **options: Unpack[Options]) -> None:
        """Make a callback for one `Trainer.fit`, or for several.

        Args:
            budget: bytes (int), text ("6GiB", "50%"), or a float in (0, 1], as for `rkmate.wrap`.
            module: the name of the part of the LightningModule whose calls are planned (``"net"``,
                ``"model.encoder"``; ``""`` is the LightningModule itself). Unless given: the attribute that
                has nearly all of the parameters (on several ranks, most of them); else the LightningModule
                itself, whose calls in ``training_step`` (``self(x)``) are planned, and otherwise those of its
                layers, by parts. What ``training_step`` computes outside of that part (often the loss) is not
                planned: the budget reserves room for it, as for `rkmate.wrap`.
            options: `rkmate.Options`, as for `rkmate.apply`.

        Raises:
            ArgumentError: an argument is wrong; when the training begins: there is no such part.
        """
        self._budget = budget
        self._name = module
        call = chosen(options, BudgetCallback.__init__)
        check_no_settings_of_wrap(call.settings, "BudgetCallback")
        self._options = call.options()
        self._module: nn.Module | None = None
        self._log: PlanLog | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Find the part to plan, before the model is moved and wrapped; later if `configure_model` makes
        it."""
        if stage == "fit" and any(True for _ in pl_module.parameters()):
            self._begin(trainer, pl_module)

    def on_fit_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Find the part to plan if `configure_model` has made it."""
        if self._module is None:
            self._begin(trainer, pl_module)

    def _begin(self, trainer: Any, pl_module: nn.Module) -> None:
        name = part_of(pl_module, trainer.world_size) if self._name is None else self._name
        try:
            self._module = uncompiled(pl_module.get_submodule(name))
        except AttributeError:
            parts = ", ".join(n for n, _ in pl_module.named_children())
            raise ArgumentError(f"module is {name!r}, which {type(pl_module).__name__} does not have; "
                                f"its parts are {parts}") from None
        apply(self._module, budget=self._budget, **self._options)

        def write(figures: Mapping[str, float], step: int | None) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(dict(figures), step=step)
        self._log = PlanLog(self._module, write)

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any,
                           batch_idx: int) -> None:
        """Log the figures of new plans."""
        if self._log is not None:
            self._log(trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Say what was planned."""
        shown = None if self._module is None else applied(self._module)
        if shown is not None and shown.has_plan:
            logger.info("%s", repr(shown.plan))

    def on_fit_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """Remove the plan: the module is as before."""
        self._leave()

    def on_exception(self, trainer: Any, pl_module: nn.Module, exception: BaseException) -> None:
        """Remove the plan: the module is as before."""
        self._leave()

    def _leave(self) -> None:
        if self._module is not None:
            remove(self._module)
            self._module = self._log = None


NEARLY_ALL = 0.9
"""The share of the parameters that makes an attribute the part that is planned."""


def part_of(module: nn.Module, ranks: int) -> str:
    """Return the name of the part of a LightningModule that is planned.

    That is the child with nearly all of the parameters; otherwise the module itself (an empty name). In a
    process group of several ranks, where Lightning passes ``training_step`` through the module's own call, it
    is the child with most of them, and the module itself if none has half: its children are then planned by
    parts.
    """
    sizes = {name: sum(p.numel() for p in child.parameters()) for name, child in module.named_children()}
    whole = sum(p.numel() for p in module.parameters())
    name = max(sizes, key=sizes.__getitem__, default="")
    if ranks == 1:
        single = not name or not any(True for _ in module.get_submodule(name).children())
        return "" if single or sizes[name] < NEARLY_ALL * whole else name
    return name if 2 * sizes.get(name, 0) >= whole else ""
