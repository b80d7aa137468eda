"""ResNet-18 on handwritten digits, inside a memory budget.

python examples/resnet.py --budget 0.7 --compare
"""

from __future__ import annotations

import torch
import transformers
from images import Digits
from training import arguments, train


def resnet18() -> transformers.ResNetForImageClassification:
    """Random weights; two basic layers in each of four stages."""
    config = transformers.ResNetConfig(depths=[2, 2, 2, 2], hidden_sizes=[64, 128, 256, 512],
                                       layer_type="basic", num_labels=10)
    return transformers.ResNetForImageClassification(config)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    options = arguments(__doc__, budget="0.7", steps=10)
    torch.manual_seed(0)
    train(resnet18(), Digits(batch=8, side=96), options)
