"""Scenarios of `field.py`: ways of training a model of transformers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from scenarios.base import Scenario, Task, looped, stepped, training
from scenarios.models import BATCHES, DECODER, SPEECH, T5, WHISPER, calling, loss_of, made


def _checkpointing(reentrant: bool) -> Callable[[Any], Any]:
    def change(model: Any) -> Any:
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model
    return change


def _half(model: Any) -> Any:
    return model.to(torch.bfloat16)


def _frozen_encoder(model: Any) -> Any:
    model.freeze_encoder()
    return _checkpointing(True)(model)


def _autocast(model: Any, batch: dict[str, Any]) -> Task:
    def step(m: Any) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return loss_of(m(**batch))
    return Task(model, step)


def _accumulating(model: Any, batch: dict[str, Any]) -> Task:
    def step(m: Any) -> torch.Tensor:
        loss_of(m(**batch)).backward()
        return loss_of(m(**batch))
    return Task(model, step)


def _two_losses(model: Any, batch: dict[str, Any]) -> Task:
    return Task(model, lambda m: loss_of(m(**batch)) + loss_of(m(**batch)))


def _loss_outside(model: Any, batch: dict[str, Any]) -> Task:
    labels = batch["labels"]
    given = {k: v for k, v in batch.items() if k != "labels"}
    return Task(model, lambda m: F.cross_entropy(m(**given).logits.flatten(0, 1), labels.flatten()))


def _lengths(model: Any, batch: dict[str, Any]) -> Task:
    count = iter(range(10**6))

    def step(m: Any) -> torch.Tensor:
        length = (24, 20, 16)[next(count) % 3]
        return loss_of(m(**{k: v[:, :length] for k, v in batch.items()}))
    return Task(model, step)


def _generated() -> Task:
    model = made("T5ForConditionalGeneration", "T5", {**T5, "use_cache": True})
    batch = BATCHES["translated"]()

    def train(m: Any) -> list[float]:
        losses = stepped(m, lambda m, _: m(**batch).loss, 2)
        m.eval()
        losses.append(float(m.generate(batch["input_ids"], max_new_tokens=5).sum()))
        m.train()
        m.resize_token_embeddings(107, mean_resizing=False)
        return losses + stepped(m, lambda m, _: m(**batch).loss, 3)
    return looped(model, lambda m, _: m(**batch).loss, train)


def _way(name: str, model: str, config: str, options: dict[str, Any], batch: str = "labelled",
         change: Callable[[Any], Any] = lambda model: model, lines: str = "",
         step: Callable[..., Task] = calling, budget: float = 0.7) -> Scenario:
    return Scenario("transformers", name, f"{model}(config){lines}", lambda: step(
        change(made(model, config, options)), BATCHES[batch]()), ("transformers",), budget)


def _llama(name: str, **others: Any) -> Scenario:
    return _way(name, "LlamaForCausalLM", "Llama", DECODER, **others)


SCENARIOS: tuple[Scenario, ...] = (
    _llama("llama, other lengths", step=_lengths, budget=0.8),
    _llama("llama, bf16", change=_half, lines=".bfloat16()"),
    _llama("llama, autocast", step=_autocast),
    _llama("llama, loss outside", step=_loss_outside, budget=0.8),
    _llama("llama, accumulation", step=_accumulating),
    _llama("llama, two calls", step=_two_losses),
    _llama("llama, checkpointing", change=_checkpointing(False),
           lines=".gradient_checkpointing_enable()", budget=1.0),
    _llama("llama, reentrant checkpointing", change=_checkpointing(True), budget=1.0,
           lines='.gradient_checkpointing_enable({"use_reentrant": True})'),
    _way("whisper, frozen encoder", "WhisperForConditionalGeneration", "Whisper", WHISPER, "spectrum",
         change=_frozen_encoder, lines=".freeze_encoder(), reentrant checkpointing", budget=1.0),
    _way("wav2vec2, default, checkpointing", "Wav2Vec2ForCTC", "Wav2Vec2", SPEECH, "spoken",
         change=_checkpointing(False), lines=".gradient_checkpointing_enable()", budget=0.9),
    training("transformers", "t5, generation, then another vocabulary", "model", _generated),
)
