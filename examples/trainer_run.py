"""What the scripts with trainers of Hugging Face share: a run, its figures, and a small tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Trainer, TrainerCallback

from rkmate import Plan
from rkmate.measure.step import measure_peak

WORDS = 124


@dataclass
class Run:
    """A training run, plain or inside a budget."""

    model: torch.nn.Module
    losses: list[float]
    """Of each step; then those of evaluations."""
    peak_bytes: int
    """Measured in the second training step: above what stood before it, gradients left out."""
    plans: list[Plan] = field(default_factory=list)
    loaded: Any = None
    """What the saved model does once it is loaded: its loss, and what it generates."""

    def show(self) -> None:
        """Print the figures."""
        print("losses", *(f"{loss:.6f}" for loss in self.losses))
        print(f"peak of a step {self.peak_bytes:,} bytes")
        for plan in self.plans:
            print(f"    budget {plan.budget_bytes:,}: {plan!r}")
        print(f"{len(self.plans)} plans")
        print("saved, loaded, evaluated, generated:", self.loaded)


def train(trainer: Trainer, callbacks: Sequence[TrainerCallback]) -> Run:
    """Train; the second step is measured, with gradients made before it."""
    step, peaks = trainer.training_step, []

    def measured(model: torch.nn.Module, *args: Any) -> torch.Tensor:
        peaks.append(0)
        if len(peaks) != 2:
            return step(model, *args)
        for p in model.parameters():
            if p.requires_grad and p.grad is None:
                p.grad = torch.zeros_like(p)
        found = measure_peak(lambda: step(model, *args))
        peaks[1] = found.peak
        return found.result

    trainer.training_step = measured
    trainer.train()
    logs = trainer.state.log_history
    losses = [log[name] for name in ("loss", "eval_loss") for log in logs if name in log]
    return Run(trainer.model, losses, peaks[1], [p for c in callbacks for p in c.plans])


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w123, and what marks begin, end and padding."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(WORDS))]
    made = Tokenizer(models.WordLevel({w: i for i, w in enumerate(names)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", bos_token="<s>",
                                   eos_token="</s>", unk_token="<unk>")


def words(length: int) -> str:
    """A text of random words."""
    return " ".join(f"w{i}" for i in torch.randint(0, WORDS, (length,)).tolist())
