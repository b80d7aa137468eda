"""Image classifiers of transformers, small, with random weights; imported when they are made."""

from __future__ import annotations

import torch

from tests.models.sample import Sample, own_loss

CLASSES = 10


def images(batch: int, side: int) -> dict[str, torch.Tensor]:
    """Random images with labels."""
    return {"pixel_values": torch.randn(batch, 3, side, side),
            "labels": torch.randint(CLASSES, (batch,))}


def vit(dropout: float = 0.0, seed: int = 0) -> Sample:
    """Vision transformer."""
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(seed)
    config = ViTConfig(num_hidden_layers=3, hidden_size=64, num_attention_heads=4,
                       intermediate_size=256, image_size=32, patch_size=4, num_labels=CLASSES,
                       hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout)
    return Sample(ViTForImageClassification(config).train(), (), images(4, 32), own_loss)


def resnet(seed: int = 0) -> Sample:
    """ResNet with bottleneck blocks, as in ResNet-50."""
    from transformers import ResNetConfig, ResNetForImageClassification

    torch.manual_seed(seed)
    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[2, 2],
                          num_labels=CLASSES)
    return Sample(ResNetForImageClassification(config).train(), (), images(4, 64), own_loss)


def regnet(seed: int = 0) -> Sample:
    """RegNet Y: squeeze and excitation."""
    from transformers import RegNetConfig, RegNetForImageClassification

    torch.manual_seed(seed)
    config = RegNetConfig(embedding_size=16, hidden_sizes=[32, 64], depths=[1, 2], groups_width=16,
                          layer_type="y", num_labels=CLASSES)
    return Sample(RegNetForImageClassification(config).train(), (), images(4, 64), own_loss)
