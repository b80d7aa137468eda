"""trl's DPOTrainer inside a memory budget, with LoRA adapters: the reference is the model without them.

What the reference says is computed before training (``precompute_ref_log_probs``), so that a step is the
trained model's alone. The adapters are saved alone, loaded onto the base, evaluated again, and generate.

Usage: python examples/trainer_trl_dpo.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import datasets
import torch
from peft import LoraConfig, PeftModel
from trainer_run import Run, tokenizer, train, words
from transformers import LlamaConfig, LlamaForCausalLM
from trl import DPOConfig, DPOTrainer

import rkmate

BATCH, LENGTH = 4, 32


def base(vocabulary: int) -> LlamaForCausalLM:
    """The model to adapt; always with the same weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        vocab_size=vocabulary, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2,
        pad_token_id=0))


def main(plain: bool, budget: int | float | str = 1.0, steps: int = 3, precompute: bool = True,
         **options: Any) -> Run:
    """Train adapters on random preferences. `options`: of the callback."""
    words_to_ids = tokenizer()
    model = base(len(words_to_ids))
    data = datasets.Dataset.from_list([
        {"prompt": words(12), "chosen": " " + words(12), "rejected": " " + words(12)}
        for _ in range(steps * BATCH)])
    callbacks = [] if plain else [rkmate.integrations.BudgetCallback(budget, **options)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = DPOConfig(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
            logging_steps=1, disable_tqdm=True, eval_strategy="epoch", save_strategy="no", bf16=False,
            max_length=LENGTH, learning_rate=1e-2, precompute_ref_log_probs=precompute)
        adapters = LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        parts = {"args": arguments, "train_dataset": data, "eval_dataset": data.select(range(BATCH)),
                 "processing_class": words_to_ids}
        trainer = DPOTrainer(model, **parts, peft_config=adapters, callbacks=callbacks)
        run = train(trainer, callbacks)
        trainer.save_model(folder)
        loaded = PeftModel.from_pretrained(base(len(words_to_ids)), folder)
        loss = DPOTrainer(loaded, **parts).evaluate()["eval_loss"]
        asked = words_to_ids(data[0]["prompt"], return_tensors="pt", return_token_type_ids=False)
        tokens = loaded.generate(**asked, max_new_tokens=4, do_sample=False)
        run.loaded = loss, tokens.tolist()
    return run


if __name__ == "__main__":
    main("--plain" in sys.argv).show()
