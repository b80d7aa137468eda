"""Models of transformers for the scenarios of `field.py`: small configurations, batches, and steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from scenarios.base import Scenario, Task

# -- Configurations --------------------------------------------------------------------------------

WORDS = 99
TEXT = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**TEXT, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4,
           "intermediate_size": 64, "max_position_embeddings": 64}
DECODER = {**ENCODER, "num_key_value_heads": 2, "use_cache": False}
BOTH = {**TEXT, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64,
        "max_position_embeddings": 64, "decoder_start_token_id": 1, "forced_eos_token_id": None,
        "use_cache": False}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4,
      "decoder_start_token_id": 0, "use_cache": False}
VISION = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64,
          "image_size": 32, "patch_size": 8}
SPEECH = {**ENCODER, "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3),
          "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2,
          "classifier_proj_size": 16, "mask_time_length": 2}
WHISPER = {**BOTH, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 32}
RESNET = {"embedding_size": 16, "hidden_sizes": [16, 24, 32], "depths": [1, 2, 1], "layer_type": "basic"}
DETR = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10,
        "num_labels": 5, "backbone_config": {**RESNET, "model_type": "resnet", "out_features": ["stage3"]}}
TARGETS = {"target_modules": ["q_proj", "v_proj"]}
"""What adapters change in a Llama."""


# -- Batches ---------------------------------------------------------------------------------------


MARK = 5
"""The word that stands for a part of an image or of a recording."""


def ids(length: int = 24, batch: int = 4) -> torch.Tensor:
    """Words of sentences."""
    return torch.randint(5, WORDS, (batch, length))


def marked(parts: int | list[int], length: int = 24) -> dict[str, Any]:
    """Two labelled sentences with marks. `parts`: how many in each."""
    words = ids(length, 2).clamp(min=10)
    for row, count in zip(words, parts if isinstance(parts, list) else [parts] * 2, strict=True):
        row[2:2 + count] = MARK
    return {"input_ids": words, "labels": words.masked_fill(words == MARK, -100)}


def _labelled() -> dict[str, Any]:
    words = ids()
    return {"input_ids": words, "labels": words.clone()}


def _padded() -> dict[str, Any]:
    given = _labelled()
    mask = torch.ones_like(given["input_ids"])
    mask[0, 16:] = 0
    return {**given, "attention_mask": mask}


BATCHES: dict[str, Callable[[], dict[str, Any]]] = {
    "labelled": _labelled,
    "padded": _padded,
    "translated": lambda: {"input_ids": ids(), "labels": ids(12)},
    "sentence": lambda: {"input_ids": ids(), "labels": torch.randint(0, 2, (4,))},
    "tokens": lambda: {"input_ids": ids(), "labels": torch.randint(0, 2, (4, 24))},
    "question": lambda: {"input_ids": ids(), "start_positions": torch.randint(0, 24, (4,)),
                         "end_positions": torch.randint(0, 24, (4,))},
    "image": lambda: {"pixel_values": torch.randn(4, 3, 32, 32), "labels": torch.randint(0, 2, (4,))},
    "spoken": lambda: {"input_values": torch.randn(2, 1600), "labels": ids(8, 2)},
    "spectrum": lambda: {"input_features": torch.randn(2, 16, 40), "labels": ids(8, 2)},
}
"""Batches by name; a module of scenarios adds its own."""


# -- Models and steps ------------------------------------------------------------------------------


def loss_of(output: Any) -> torch.Tensor:
    """The loss of a model's output, or a number made of its first tensor."""
    if getattr(output, "loss", None) is not None:
        return output.loss if not output.loss.dim() else output.loss.mean()  # type: ignore[no-any-return]
    first = next(v for v in output.values() if isinstance(v, torch.Tensor) and v.requires_grad)
    return first.float().pow(2).mean()


def made(model: str, config: str, options: dict[str, Any]) -> Any:
    """A model of transformers with random weights."""
    import transformers

    return getattr(transformers, model)(getattr(transformers, f"{config}Config")(**options)).train()


def calling(model: Any, batch: dict[str, Any]) -> Task:
    """A step that calls the model on a batch."""
    return Task(model, lambda m: loss_of(m(**batch)))


def step_of(model: Any) -> Task:
    """A step that calls a language model."""
    return calling(model, BATCHES["labelled"]())


def llama() -> Any:
    """A Llama with random weights."""
    return made("LlamaForCausalLM", "Llama", DECODER)


def adapted_llama() -> Any:
    """A Llama with adapters (LoRA)."""
    import peft

    return peft.get_peft_model(llama(), peft.LoraConfig(task_type="CAUSAL_LM", r=4, **TARGETS)).train()


# -- Scenarios -------------------------------------------------------------------------------------

Architecture = tuple[str, str, str, dict[str, Any], str, float]
"""Name, model, configuration, its options, batch, budget."""


def architecture(name: str, model: str, config: str, options: dict[str, Any], batch: str, budget: float,
                 *needs: str, skips_layers: bool = False) -> Scenario:
    """A model of transformers that trains on a batch."""
    return Scenario("transformers", name, f"{model}(config)", lambda: calling(
        made(model, config, options), BATCHES[batch]()), ("transformers", *needs), budget,
        skips_layers=skips_layers)
