"""trl's SFTTrainer inside a memory budget.

The model's forward is then trl's own, which computes the loss tile by tile over the vocabulary: it is planned
as it is. What is trained is saved, loaded, evaluated again, and generates.

Usage: python examples/trainer_trl_sft.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import datasets
import torch
from trainer_run import Run, tokenizer, train, words
from transformers import LlamaConfig, LlamaForCausalLM
from trl import SFTConfig, SFTTrainer

import rkmate

BATCH, LENGTH = 4, 32


def main(plain: bool, budget: int | float | str = 1.0, steps: int = 4, **options: Any) -> Run:
    """Fine-tune a small Llama on random words. `options`: of the callback."""
    torch.manual_seed(0)
    words_to_ids = tokenizer()
    model = LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        vocab_size=len(words_to_ids), max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2,
        pad_token_id=0))
    data = datasets.Dataset.from_list([{"text": words(LENGTH - 1)} for _ in range(steps * BATCH)])
    callbacks = [] if plain else [rkmate.integrations.BudgetCallback(budget, **options)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
            logging_steps=1, disable_tqdm=True, eval_strategy="epoch", save_strategy="no", bf16=False,
            max_length=LENGTH)
        trainer = SFTTrainer(model, arguments, train_dataset=data, eval_dataset=data.select(range(BATCH)),
                             processing_class=words_to_ids, callbacks=callbacks)
        run = train(trainer, callbacks)
        trainer.save_model(folder)
        loaded = LlamaForCausalLM.from_pretrained(folder)
        again = SFTTrainer(loaded, arguments, train_dataset=data, eval_dataset=data.select(range(BATCH)),
                           processing_class=words_to_ids)
        loss = again.evaluate()["eval_loss"]
        asked = words_to_ids(data[0]["text"][:20], return_tensors="pt", return_token_type_ids=False)
        tokens = loaded.generate(**asked, max_new_tokens=4, do_sample=False)
        run.loaded = loss, tokens.tolist()
    return run


if __name__ == "__main__":
    main("--plain" in sys.argv).show()
