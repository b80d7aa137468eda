"""The transformers Trainer inside a memory budget: a callback is all that differs from the plain script.

It trains, evaluates and saves as it goes, takes the best checkpoint at the end, loads what it has saved,
evaluates that again and generates.

Usage: python examples/trainer_transformers.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import torch
from trainer_run import Run, train
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

import rkmate

BATCH, LENGTH, VOCABULARY = 4, 32, 128


def main(plain: bool, budget: int | float | str = 0.7, steps: int = 4, **options: Any) -> Run:
    """Train a small GPT-2 on random tokens. `options`: of the callback."""
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=VOCABULARY,
                                       n_positions=LENGTH, bos_token_id=0, eos_token_id=0))
    data = [{"input_ids": (ids := torch.randint(0, VOCABULARY, (LENGTH,))), "labels": ids}
            for _ in range(steps * BATCH)]
    callbacks = [] if plain else [rkmate.integrations.BudgetCallback(budget, **options)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
            logging_steps=1, disable_tqdm=True, eval_strategy="steps", eval_steps=2, save_strategy="steps",
            save_steps=2, load_best_model_at_end=True)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6], callbacks=callbacks)
        run = train(trainer, callbacks)
        trainer.save_model(f"{folder}/trained")
        loaded = GPT2LMHeadModel.from_pretrained(f"{folder}/trained")
        metrics = Trainer(loaded, arguments, eval_dataset=data[:6]).evaluate()
        tokens = loaded.generate(data[0]["input_ids"][None, :8], max_new_tokens=4, do_sample=False,
                                 attention_mask=torch.ones(1, 8, dtype=torch.long))
        run.loaded = metrics["eval_loss"], tokens.tolist()
    return run


if __name__ == "__main__":
    main("--plain" in sys.argv).show()
