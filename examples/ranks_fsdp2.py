"""A model sharded by `fully_shard` (FSDP2) inside a budget for each rank's step; one line differs from the
plain script. Its checkpoint can be loaded by another number of ranks.

Usage: torchrun --nproc-per-node 2 examples/ranks_fsdp2.py [--plain] [--save FOLDER | --load FOLDER]
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import rkmate

STEPS, BATCH, LENGTH, WIDTH, WORDS = 4, 8, 32, 64, 512


class Layer(nn.Module):
    """A residual layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Add to the activations."""
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """Words, layers, head and loss."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


def main(plain: bool, save: str = "", load: str = "") -> list[float]:
    """Train for a few steps, on the batches that follow if a checkpoint is loaded. Returns the losses."""
    torch.manual_seed(0)
    model = Model()
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if not plain:
        rkmate.apply(model, budget=0.9, progress=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if load:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.load(parts, checkpoint_id=load)
        set_state_dict(model, optimizer, model_state_dict=parts["model"],
                       optim_state_dict=parts["optimizer"])
    losses = []
    for k in range(STEPS):
        torch.manual_seed(100 * bool(load) + 10 * k + dist.get_rank())
        loss = model(torch.randint(0, WORDS, (BATCH, LENGTH)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if save:
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        checkpoint.save(parts, checkpoint_id=save)
    return losses


if __name__ == "__main__":
    dist.init_process_group("gloo")
    folders = {flag: sys.argv[sys.argv.index(f"--{flag}") + 1] for flag in ("save", "load")
               if f"--{flag}" in sys.argv}
    found = main("--plain" in sys.argv, **folders)
    if dist.get_rank() == 0:
        print("losses", ", ".join(map(repr, found)))
    dist.destroy_process_group()
