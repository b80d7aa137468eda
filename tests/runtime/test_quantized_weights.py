"""Frozen weights that are made of other tensors: quantized bases under adapters."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_map

import rkmate
from rkmate.errors import ArgumentError
from rkmate.measure.step import measure_step


class Rounded(torch.Tensor):
    """Eight bits a number, and a scale for each row; every operation works on the plain tensor."""

    values: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, values: torch.Tensor, scale: torch.Tensor) -> Rounded:
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype)

    def __init__(self, values: torch.Tensor, scale: torch.Tensor) -> None:
        self.values, self.scale = values, scale

    @classmethod
    def of(cls, t: torch.Tensor) -> Rounded:
        scale = t.abs().amax(1, keepdim=True) / 127
        return cls((t / scale).round().to(torch.int8), scale)

    def plain(self) -> torch.Tensor:
        return self.values.to(self.scale.dtype) * self.scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["values", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, torch.Tensor], meta: None, size: Any,
                             stride: Any) -> Rounded:
        return cls(inner["values"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(func(args[0].values), func(args[0].scale))
        args, kwargs = tree_map(lambda v: v.plain() if isinstance(v, cls) else v, (args, kwargs or {}))
        return func(*args, **kwargs)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(64, 64)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(Adapted() for _ in range(5)))
        for layer in self.layers:
            layer.base.weight = nn.Parameter(Rounded.of(layer.base.weight.detach()), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def test_they_are_planned_as_the_tensors_that_they_are_made_of() -> None:
    x = torch.randn(96, 64)
    plain, model = Net(), Net()
    planned = rkmate.wrap(model, (x,), budget=0.6, progress=False)
    peak = measure_step(planned, lambda: planned(x).backward(), timeline=False).peak
    assert peak <= planned.plan.budget_bytes < measure_step(plain, lambda: plain(x).backward()).peak
    for module in (plain, planned):
        module.zero_grad()
        module(x).backward()
    assert all(map(torch.equal, gradients(plain), gradients(model)))
    # Another tensor in the place of one is read at the next call.
    for net in (plain, model):
        net.layers[2].base.weight = nn.Parameter(Rounded.of(torch.ones(64, 64)), requires_grad=False)
    assert torch.equal(planned(x), plain(x))


def test_they_are_not_trained() -> None:
    model = Net()
    model.layers[1].base.weight.requires_grad_(True)
    with pytest.raises(ArgumentError, match=r"layers\.1\.base\.weight is a Rounded that requires a gradient"):
        rkmate.wrap(model, (torch.randn(4, 64),), budget=0.6, progress=False)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
def test_lora_on_a_quantized_llama(bits: int) -> None:
    pytest.importorskip("torchao")
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, vocab_size=120, max_position_embeddings=64, use_cache=False)
        base = transformers.LlamaForCausalLM(config)
        bases = Int8WeightOnlyConfig() if bits == 8 else IntxWeightOnlyConfig(weight_dtype=torch.int4)
        quantize_(base, bases,
                  filter_fn=lambda m, name: isinstance(m, nn.Linear) and "layers" in name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # peft's own
            adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return adapted.train()

    ids = torch.randint(0, 120, (4, 32))
    batch = {"input_ids": ids, "labels": ids}
    plain, model = build(), build()
    planned = rkmate.wrap(model, (), batch, budget=0.6, progress=False)
    seen = measure_step(planned, lambda: planned(**batch).loss.backward(), timeline=False)
    assert seen.peak <= planned.plan.budget_bytes
    for module in (plain, planned):
        module.zero_grad()
        module(**batch).loss.backward()
    assert gradients(plain)
    assert all(map(torch.equal, gradients(plain), gradients(model)))
