"""Lightning with a planned model; one line differs from the plain script.

Usage: python examples/trainer_lightning.py [--plain]
"""

from __future__ import annotations

import sys

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rkmate

STEPS, BATCH = 5, 16


class Task(lightning.LightningModule):
    """Regression with any net."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch."""
        points, values = batch
        return nn.functional.mse_loss(self.net(points), values)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main(plain: bool) -> nn.Module:
    """Train for a few steps on random points; returns the trained net."""
    torch.manual_seed(0)
    net: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(),
                                   nn.Linear(64, 1))
    x = torch.randn(STEPS * BATCH, 32)
    if not plain:
        net = rkmate.wrap(net, (x[:BATCH],), budget=0.9, progress=False)
    data = DataLoader(TensorDataset(x, x.sum(1, keepdim=True).sin()), BATCH)
    lightning.Trainer(max_steps=STEPS, accelerator="cpu", logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False).fit(Task(net), data)
    return net


if __name__ == "__main__":
    main("--plain" in sys.argv)
