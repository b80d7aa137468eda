"""LoRA on a Llama, CPU: gradient checkpointing compared with a plan at the same peak, in one process.

The same adapters on the same frozen base train plain, with ``gradient_checkpointing_enable()``, and inside a
budget that is the measured peak of checkpointing, and half-way between that and the plain peak. Peaks are
measured by the CPU meter (`rkmate.measure_step`); the methods take their timed steps in turn, so that the
machine's mood is the same for all.

Usage: OMP_NUM_THREADS=1 python benchmarks/lora.py [--layers 4] [--steps 9] [--dropout 0.05]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
import warnings
from collections.abc import Callable

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import rkmate

WIDTH, LENGTH, BATCH, VOCABULARY = 256, 256, 4, 4096


def adapted(layers: int, dropout: float) -> nn.Module:
    """Adapters of rank 8 on queries and values of a Llama with random weights."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(LlamaConfig(
        num_hidden_layers=layers, hidden_size=WIDTH, intermediate_size=4 * WIDTH, num_attention_heads=4,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, use_cache=False))
    return get_peft_model(base, LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"],
                                           lora_dropout=dropout)).train()


def step_of(model: nn.Module) -> Callable[[], torch.Tensor]:
    """A training step without its optimizer; returns the loss."""
    ids = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))

    def step() -> torch.Tensor:
        torch.manual_seed(2)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss.detach()
    return step


def main() -> None:
    """Measure, and print a table of Markdown."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=9)
    parser.add_argument("--dropout", type=float, default=0.05)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=FutureWarning)
    plain = adapted(options.layers, options.dropout)
    checkpointed = copy.deepcopy(plain)
    checkpointed.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    methods = {"plain": plain, "gradient checkpointing": checkpointed}

    def peak(model: nn.Module) -> int:
        return rkmate.measure_step(model, step_of(model), timeline=False).peak

    peaks = {name: peak(model) for name, model in methods.items()}
    least = peaks["gradient checkpointing"]
    for name, budget in (("rkmate, at that peak", least),
                         ("rkmate, half-way to plain", (least + peaks["plain"]) // 2)):
        methods[name] = rkmate.apply(copy.deepcopy(plain), budget=budget, progress=False)
        peaks[name] = peak(methods[name])
    losses, times = {}, {name: [] for name in methods}
    for _ in range(options.steps):
        for name, model in methods.items():
            model.zero_grad()
            start = time.perf_counter()
            losses[name] = step_of(model)()
            times[name].append(time.perf_counter() - start)
    reference = statistics.median(times["plain"])
    print(f"{options.layers} layers, width {WIDTH}, {BATCH} sequences of {LENGTH}, vocabulary {VOCABULARY}")
    checkpointing = statistics.median(times["gradient checkpointing"])
    print("| method | peak of a step | time of a step | against plain | against checkpointing | loss |\n"
          "|---|---|---|---|---|---|")
    for name in methods:
        seconds = statistics.median(times[name])
        print(f"| {name} | {peaks[name] / 2**20:.1f} MiB ({peaks[name] / peaks['plain']:.0%}) "
              f"| {seconds:.3f} s | {seconds / reference:.2f} | {seconds / checkpointing:.2f} "
              f"| {'equal' if torch.equal(losses[name], losses['plain']) else 'differs'} |")


if __name__ == "__main__":
    main()
