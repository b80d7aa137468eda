"""accelerate's FSDP2 plugin inside a budget for each rank's step: one line differs from the plain script.

Usage: torchrun --nproc-per-node 2 examples/ranks_accelerate.py [--plain]
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from ranks_fsdp2 import BATCH, LENGTH, WORDS, Model

import rkmate

STEPS = 4


def accelerated() -> Accelerator:
    """An accelerator that shards layers. On CPUs accelerate ignores the plugin, so it is set here."""
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Layer"],
        cpu_ram_efficient_loading=False)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin)
    if accelerator.distributed_type is not DistributedType.FSDP:
        accelerator.state.distributed_type = DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    return accelerator


def main(plain: bool) -> list[float]:
    """Train for a few steps on random words. Returns the losses of the first rank."""
    accelerator = accelerated()
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    if not plain:
        rkmate.apply(model, budget=0.9, progress=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    losses = []
    for step in range(STEPS):
        torch.manual_seed(2 * step + accelerator.process_index)
        loss = model(torch.randint(0, WORDS, (BATCH, LENGTH)))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


if __name__ == "__main__":
    found = main("--plain" in sys.argv)
    if torch.distributed.get_rank() == 0:
        print("losses", ", ".join(map(repr, found)))
    torch.distributed.destroy_process_group()
