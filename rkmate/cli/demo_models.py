"""Factories of the demo models. Their table is in targets.py, which loads no torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Sample = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model and sample arguments; random weights, nothing is downloaded."""


def mlp() -> Sample:
    """Make a model of linear layers and GELU."""
    layers: list[nn.Module] = []
    for _ in range(8):
        layers += [nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.LayerNorm(256)]
    return nn.Sequential(*layers), (torch.randn(256, 256),), {}


def gpt2() -> Sample:
    """Make a GPT-2 with a language model's loss."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=1024, n_positions=128,
                        bos_token_id=0, eos_token_id=0)
    ids = torch.randint(0, 1024, (4, 128))
    model: Any = GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"             # else the first forward writes a notice
    return model.train(), (), {"input_ids": ids, "labels": ids, "use_cache": False}


def resnet() -> Sample:
    """Make a ResNet-18 with a classifier's loss."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2],
                          layer_type="basic", num_labels=10)
    model: nn.Module = ResNetForImageClassification(config)
    return model.train(), (), {"pixel_values": torch.randn(4, 3, 96, 96),
                               "labels": torch.randint(0, 10, (4,))}


class UNet(nn.Module):
    """Double convolutions with batch norm at each width; the results of the way down are joined to those of
    the way up."""

    def __init__(self, widths: Sequence[int] = (16, 32, 64), classes: int = 2) -> None:
        super().__init__()
        self.down = nn.ModuleList(map(_double, [3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, stride=2)
                                for a, b in zip(widths[-2::-1], widths[:0:-1], strict=True))
        self.join = nn.ModuleList(_double(2 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(widths[0], classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map images to class scores of each pixel."""
        kept: list[torch.Tensor] = []
        for i, block in enumerate(self.down):
            x = block(x if i == 0 else F.max_pool2d(x, 2))
            kept.append(x)
        kept.pop()
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([kept.pop(), up(x)], dim=1))
        scores: torch.Tensor = self.head(x)
        return scores


def _double(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for a in (inputs, outputs):
        layers += [nn.Conv2d(a, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs),
                   nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def unet() -> Sample:
    """Make a U-Net that scores each pixel."""
    return UNet().train(), (torch.randn(2, 3, 96, 96),), {}
