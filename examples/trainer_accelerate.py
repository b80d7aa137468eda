"""accelerate around a planned model; one line differs from the plain script.

Usage: python examples/trainer_accelerate.py [--plain]
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rkmate

STEPS, BATCH = 5, 16


def main(plain: bool) -> nn.Module:
    """Train for a few steps on random points; returns the trained model."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64),
                                     nn.GELU(), nn.Linear(64, 1))
    x = torch.randn(STEPS * BATCH, 32)
    y = x.sum(1, keepdim=True).sin()
    if not plain:
        model = rkmate.wrap(model, (x[:BATCH],), budget=0.9, progress=False)
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x, y), BATCH))
    for points, values in loader:
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(points), values)
        accelerator.backward(loss)
        optimizer.step()
        accelerator.print(f"loss {loss.item():.4f}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main("--plain" in sys.argv)
