"""The transformers Trainer on several ranks, inside a budget for each rank's step: a callback is all that
differs from the plain script.

Usage: torchrun --nproc-per-node 2 examples/ranks_trainer.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rkmate

STEPS, BATCH, LENGTH, VOCABULARY = 3, 4, 32, 128


def main(plain: bool) -> list[float]:
    """Train a small GPT-2 on random tokens. Returns the losses, averaged over ranks."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY,
                                       n_positions=LENGTH, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": (ids := torch.randint(0, VOCABULARY, (LENGTH,))), "labels": ids}
            for _ in range(2 * STEPS * BATCH)]
    callbacks = [] if plain else [rkmate.integrations.BudgetCallback(0.7, progress=False)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model, TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
            logging_steps=1, disable_tqdm=True, save_strategy="no"), train_dataset=data, callbacks=callbacks)
        trainer.train()
    return [log["loss"] for log in trainer.state.log_history if "loss" in log]


if __name__ == "__main__":
    found = main("--plain" in sys.argv)
    if torch.distributed.get_rank() == 0:
        print("losses", ", ".join(map(repr, found)))
