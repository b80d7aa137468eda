"""A model under DeepSpeed's ZeRO stage 3 inside a budget for each rank's step; one line differs from the
plain script.

Usage: torchrun --nproc-per-node 2 examples/ranks_deepspeed.py [--plain]
"""

from __future__ import annotations

import os
import sys

import torch
from torch import nn

import rkmate

os.environ.setdefault("DS_ACCELERATOR", "cpu")
STEPS, BATCH, LENGTH, WIDTH, WORDS = 6, 8, 32, 64, 512
CONFIG = {
    "train_micro_batch_size_per_gpu": BATCH,
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "zero_optimization": {
        "stage": 3,
        "reduce_bucket_size": 100_000,
        "stage3_param_persistence_threshold": 1_000,
        "leaf_module": {"classes": ["Layer", "Head"]},      # as deepspeed.utils.set_z3_leaf_modules says it
    },
}


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the activations."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Head(nn.Module):
    """The end of the model, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.product = nn.Linear(WIDTH, WORDS)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self.product(x).flatten(0, 1), ids.flatten())


class Model(nn.Module):
    """Words, layers, head and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = Head()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the loss."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        loss: torch.Tensor = self.head(x, ids)
        return loss


def main(plain: bool) -> list[float]:
    """Train for a few steps. Returns the losses of this rank."""
    import deepspeed

    deepspeed.init_distributed("gloo")
    torch.manual_seed(0)
    model = Model()
    if not plain:
        rkmate.apply(model, budget=0.7, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=CONFIG)
    losses = []
    for k in range(STEPS):
        torch.manual_seed(10 * k + torch.distributed.get_rank())
        loss = engine(torch.randint(0, WORDS, (BATCH, LENGTH)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = main("--plain" in sys.argv)
    if torch.distributed.get_rank() == 0:
        print("losses", ", ".join(map(repr, found)))
    torch.distributed.destroy_process_group()
