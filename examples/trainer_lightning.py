"""Lightning inside a budget; one line differs from the plain script.

Usage: python examples/trainer_lightning.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rkmate
from rkmate.integrations.lightning import BudgetCallback

STEPS, BATCH, WIDTH = 5, 64, 64


class Task(lightning.LightningModule):
    """Regression with any net."""

    def __init__(self) -> None:
        super().__init__()
        layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, 1))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch."""
        points, values = batch
        loss = nn.functional.mse_loss(self.net(points), values)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch: list[torch.Tensor], index: int) -> None:
        """The loss of one batch, without dropout."""
        points, values = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(points), values))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(lightning.Callback):
    """What was planned, and what a step took."""

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """The plan is there until the fit ends."""
        net, (points, values) = pl_module.net, next(iter(trainer.train_dataloader))
        shown = rkmate.applied(net)
        if shown is not None:
            net.train()
            measured = rkmate.measure_step(
                net, lambda: nn.functional.mse_loss(net(points), values).backward())
            print(f"{measured.peak:,} bytes measured in a budget of {shown.plan.budget_bytes:,} "
                  f"({shown.plan.baseline_peak_bytes:,} without)")


def main(plain: bool) -> nn.Module:
    """Train for a few steps on random points, save, load and evaluate; returns the trained task."""
    torch.manual_seed(0)
    task = Task()
    x = torch.randn(STEPS * BATCH, WIDTH)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), BATCH)
    callbacks = [] if plain else [BudgetCallback(0.7, progress=False), Watch()]
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(max_steps=STEPS, accelerator="cpu", logger=False, callbacks=callbacks,
                                    default_root_dir=folder, enable_checkpointing=False,
                                    enable_progress_bar=False, enable_model_summary=False)
        trainer.fit(task, data, data)
        file = Path(folder) / "task.ckpt"
        trainer.save_checkpoint(file)
        other = Task.load_from_checkpoint(file)
        found = trainer.validate(other, data, verbose=False)[0]["val_loss"]
    print(f"losses {', '.join(f'{v:.6f}' for v in task.losses)}; loaded again, evaluated: {found:.4f}")
    return task


if __name__ == "__main__":
    main("--plain" in sys.argv)
