"""The transformers Trainer on a planned model; one line differs from the plain script.

Usage: python examples/trainer_transformers.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rkmate

STEPS, BATCH, LENGTH = 5, 4, 32


def main(plain: bool) -> torch.nn.Module:
    """Train for a few steps on random tokens; returns the trained model."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=128,
                                       n_positions=LENGTH, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": (ids := torch.randint(0, 128, (LENGTH,))), "labels": ids}
            for _ in range(STEPS * BATCH)]
    sample = {k: torch.stack([d[k] for d in data[:BATCH]]) for k in data[0]}
    if not plain:
        model = rkmate.wrap(model, kwargs=sample, budget=0.7, progress=False)
    with tempfile.TemporaryDirectory() as folder:
        Trainer(model, TrainingArguments(
            output_dir=folder, max_steps=STEPS, per_device_train_batch_size=BATCH, use_cpu=True,
            report_to=[], save_strategy="no", disable_tqdm=True), train_dataset=data).train()
    return model


if __name__ == "__main__":
    main("--plain" in sys.argv)
