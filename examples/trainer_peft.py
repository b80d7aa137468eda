"""LoRA adapters (peft) trained inside a memory budget by the transformers Trainer.

The base is frozen: only the adapters have gradients, and only they are saved. After training they are
loaded onto a fresh base, merged into it, and the result generates.

Usage: python examples/trainer_peft.py [--plain]
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from trainer_run import Run, train
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import rkmate

BATCH, LENGTH, VOCABULARY = 4, 32, 128


def base() -> LlamaForCausalLM:
    """The model to adapt; always with the same weights."""
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=2, hidden_size=32, intermediate_size=64, num_attention_heads=2,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, bos_token_id=1, eos_token_id=2,
        pad_token_id=0))


def main(plain: bool, budget: int | float | str = 0.7, steps: int = 4, **options: Any) -> Run:
    """Train adapters on random tokens. `options`: of the callback."""
    model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"],
                                              lora_dropout=0.1))
    model.print_trainable_parameters()
    data = [{"input_ids": (ids := torch.randint(3, VOCABULARY, (LENGTH,))), "labels": ids}
            for _ in range(steps * BATCH)]
    callbacks = [] if plain else [rkmate.integrations.BudgetCallback(budget, **options)]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, max_steps=steps, per_device_train_batch_size=BATCH, use_cpu=True, report_to=[],
            logging_steps=1, disable_tqdm=True, eval_strategy="epoch", save_strategy="no", learning_rate=1e-2)
        trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:6], callbacks=callbacks)
        run = train(trainer, callbacks)
        trainer.save_model(folder)
        saved = sorted(path.name for path in Path(folder).glob("*.safetensors"))
        loaded = PeftModel.from_pretrained(base(), folder)
        metrics = Trainer(loaded, arguments, eval_dataset=data[:6]).evaluate()
        with loaded.disable_adapter(), torch.no_grad():
            without = loaded(**{k: v[None] for k, v in data[0].items()}).loss.item()
        tokens = loaded.merge_and_unload().generate(
            data[0]["input_ids"][None, :8], max_new_tokens=4, do_sample=False,
            attention_mask=torch.ones(1, 8, dtype=torch.long))
        run.loaded = metrics["eval_loss"], without, saved, tokens.tolist()
    return run


if __name__ == "__main__":
    main("--plain" in sys.argv).show()
