"""Lightning's FSDP2 strategy inside a budget for each rank's step: a callback is all that differs from the
plain script.

Usage: torchrun --nproc-per-node 2 examples/ranks_lightning.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from ranks_fsdp2 import BATCH, LENGTH, WORDS, Model
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

from rkmate.integrations.lightning import BudgetCallback

STEPS = 4


class Task(lightning.LightningModule):
    """Training of the model, which is made and sharded when training begins."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def configure_model(self) -> None:
        """Make and shard the model."""
        torch.manual_seed(0)
        self.net = Model()
        mesh = self.device_mesh["data_parallel"]
        for layer in self.net.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.net, mesh=mesh)

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        """The loss of one batch."""
        loss = self.net(batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(plain: bool) -> list[float]:
    """Train for a few steps on random words. Returns the losses."""
    torch.manual_seed(0)
    data = TensorDataset(torch.randint(0, WORDS, (2 * STEPS * BATCH, LENGTH)))
    task = Task()
    with tempfile.TemporaryDirectory() as folder:
        lightning.Trainer(
            max_steps=STEPS, accelerator="cpu", devices=2, logger=False, default_root_dir=folder,
            strategy=ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
            callbacks=[] if plain else [BudgetCallback(0.9, progress=False)], enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False).fit(task, DataLoader(data, BATCH))
    return task.losses


if __name__ == "__main__":
    found = main("--plain" in sys.argv)
    if torch.distributed.get_rank() == 0:
        print("losses", ", ".join(map(repr, found)))
