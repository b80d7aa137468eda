"""Accelerate inside a budget; one line differs from the plain script.

Usage: python examples/trainer_accelerate.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from accelerate import Accelerator, load_checkpoint_in_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import rkmate

STEPS, BATCH, WIDTH = 5, 64, 64


def make() -> nn.Module:
    """A net with dropout."""
    layers = [m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def main(plain: bool) -> nn.Module:
    """Train for a few steps on random points, save, load and evaluate; returns the trained model."""
    torch.manual_seed(0)
    model = make()
    x = torch.randn(STEPS * BATCH, WIDTH)
    y = x.sum(1, keepdim=True).sin()
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    if not plain:
        rkmate.apply(model, budget=0.7, progress=False)         # or after `prepare`, on the unwrapped model
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(x, y), BATCH))

    def step(points: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.mse_loss(model(points), values)
        accelerator.backward(loss)
        return loss.detach()

    losses = []
    for points, values in loader:
        optimizer.zero_grad()
        losses.append(step(points, values).item())
        optimizer.step()
    shown = rkmate.applied(accelerator.unwrap_model(model))
    if shown is not None:
        peak = rkmate.measure_step(model, lambda: step(x[:BATCH], y[:BATCH])).peak
        print(f"{peak:,} bytes measured in a budget of {shown.plan.budget_bytes:,} "
              f"({shown.plan.baseline_peak_bytes:,} without)")
    other = make()
    with tempfile.TemporaryDirectory() as folder:
        accelerator.save_model(model, folder)
        load_checkpoint_in_model(other, folder)
    with torch.no_grad():
        found = nn.functional.mse_loss(other.eval()(x), y).item()
    print(f"losses {', '.join(f'{v:.6f}' for v in losses)}; loaded again, evaluated: {found:.4f}")
    return accelerator.unwrap_model(model)


if __name__ == "__main__":
    main("--plain" in sys.argv)
