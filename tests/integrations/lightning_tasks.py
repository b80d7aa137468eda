"""Tasks of Lightning, and their training, with and without a budget.

Importing Lightning takes seconds: tests do so, and the collection of tests does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rkmate
from rkmate.integrations.lightning import BudgetCallback
from tests.semantics.steps import Tower


class Task(lightning.LightningModule):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 4)
        self.net = Tower(dropout=0.1)
        self.fails = fails
        self.seen: list[Any] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self.net(batch[0]).pow(2).mean()
        shown = rkmate.applied(self.net)
        self.seen.append(None if shown is None else shown.plan)
        if self.fails and index == 1:
            raise RuntimeError("on purpose")
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Configured(Task):
    """A task that makes its model when training begins, as it should where that is sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.net = None

    def configure_model(self) -> None:
        if self.net is None:
            torch.manual_seed(1)
            self.scale, self.net = nn.Linear(4, 4), Tower(dropout=0.1)


class Layers(Task):
    """Its layers are attributes."""

    def __init__(self, own_call: bool) -> None:
        super().__init__()
        self.net = nn.Linear(16, 96)
        self.encoder = nn.Sequential(nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU())
        self.decoder = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 16))
        self.own_call = own_call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.decoder(self.encoder(torch.tanh(self.net(x))))
        return out

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss = (self(batch[0]) if self.own_call else self.forward(batch[0])).pow(2).mean()
        self.seen.append([n for n, m in self.named_modules() if (shown := rkmate.applied(m)) is not None
                          and shown.has_plan])
        return loss  # type: ignore[no-any-return]


class Validated(Task):
    """Its forward is its own, and the trainer validates it."""

    plans: set[int]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.net(self.scale(x[:, :4]).repeat(1, 4))
        return out

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss: torch.Tensor = self(batch[0]).pow(2).mean()
        shown = rkmate.applied(self)
        assert shown is not None
        self.plans = {*map(id, shown._plans.all())}
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        self(batch[0])


def fit(task: Task, folder: Path, *callbacks: Any, logger: Any = False, epochs: int = 1) -> Task:
    torch.manual_seed(0)
    data = DataLoader(TensorDataset(torch.randn(3 * 64, 16)), 64)
    lightning.Trainer(max_epochs=epochs, accelerator="cpu", logger=logger, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
                      log_every_n_steps=1 if logger else None, callbacks=list(callbacks)
                      ).fit(task, data, data if isinstance(task, Validated) else None)
    return task


def task(**options: Any) -> Task:
    torch.manual_seed(1)
    return Task(**options)


def budget(module: str | None = None, size: float = 0.8) -> BudgetCallback:
    return BudgetCallback(size, module, progress=False, settings=rkmate.Settings(costs="analytic"))
