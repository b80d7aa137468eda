"""Scenarios of `field.py`: frozen bases that bitsandbytes and torchao quantize, under adapters, and torchao's
training for quantization."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from scenarios.base import Scenario, blocks, to_zero, training
from scenarios.models import TARGETS, calling, ids, llama


def _quantized(model: nn.Module, layer: Callable[[nn.Linear], nn.Module]) -> None:
    """Replace the linear layers of a Llama's blocks."""
    for module in list(model.model.layers.modules()):       # type: ignore[union-attr]
        for name, inner in list(module.named_children()):
            if isinstance(inner, nn.Linear):
                setattr(module, name, layer(inner))


def _of_bitsandbytes(bits: int) -> Callable[[nn.Linear], nn.Module]:
    def made(linear: nn.Linear) -> nn.Module:
        import bitsandbytes as bnb

        sizes = linear.in_features, linear.out_features
        layer: nn.Module = bnb.nn.Linear4bit(*sizes, bias=False, quant_type="nf4") if bits == 4 else \
            bnb.nn.Linear8bitLt(*sizes, bias=False, has_fp16_weights=False)
        layer.load_state_dict(linear.state_dict())
        return layer.to("cpu").requires_grad_(False)
    return made


def _adapted(model: Any, checkpointing: bool = False, **options: Any) -> Any:
    import peft

    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=checkpointing)
    model = peft.get_peft_model(model, peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, **TARGETS, **options)).train()
    words = ids()
    return calling(model, {"input_ids": words, "labels": words.clone()})


def _in_bits(bits: int, **options: Any) -> Any:
    model = llama()
    _quantized(model, _of_bitsandbytes(bits))
    setattr(model, f"is_loaded_in_{bits}bit", True)
    return _adapted(model, **options)


def _weights_alone(config: str, **options: Any) -> Any:
    import torchao.quantization as torchao

    model = llama()
    torchao.quantize_(model.model.layers, getattr(torchao, config)(**options))
    return _adapted(model.requires_grad_(False))


def _for_quantization(activations: bool) -> Any:
    import torchao.quantization as torchao
    from torchao.quantization.qat import IntxFakeQuantizeConfig, QATConfig

    model = blocks()
    torchao.quantize_(model, QATConfig(
        activation_config=IntxFakeQuantizeConfig(torch.int8, "per_token", is_symmetric=False)
        if activations else None,
        weight_config=IntxFakeQuantizeConfig(torch.int4, group_size=32), step="prepare"))
    return to_zero(model)


def _scenario(library: str, name: str, lines: str, make: Callable[[], Any], **others: Any) -> Scenario:
    return training(library, name, lines, make, "transformers", "peft", **others)


QLORA = "get_peft_model(prepare_model_for_kbit_training(model), LoraConfig(...))"
SCENARIOS: tuple[Scenario, ...] = (
    _scenario("bitsandbytes", "qlora, 4 bits", QLORA, lambda: _in_bits(4)),
    _scenario("bitsandbytes", "qlora, 8 bits", QLORA, lambda: _in_bits(8)),
    _scenario("bitsandbytes", "qlora, 4 bits, dropout", QLORA, lambda: _in_bits(4, lora_dropout=0.1)),
    _scenario("bitsandbytes", "qlora, 4 bits, checkpointing", QLORA,
              lambda: _in_bits(4, checkpointing=True), budget=1.0),
    _scenario("torchao", "int8 weights, lora", "get_peft_model(model, LoraConfig(...))",
              lambda: _weights_alone("Int8WeightOnlyConfig")),
    _scenario("torchao", "training for int8 activations, int4 weights", "model",
              lambda: _for_quantization(True)),
    _scenario("torchao", "training for int4 weights", "model", lambda: _for_quantization(False)),
)
