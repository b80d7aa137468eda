"""RegNet on handwritten digits, inside a memory budget.

python examples/regnet.py --budget 0.7 --compare
"""

from __future__ import annotations

import torch
import transformers
from images import Digits
from training import arguments, train


def regnet() -> transformers.RegNetForImageClassification:
    """Random weights; the widths and depths of RegNetY-400MF."""
    config = transformers.RegNetConfig(
        embedding_size=32, hidden_sizes=[48, 104, 208, 440], depths=[1, 3, 6, 6], groups_width=8,
        layer_type="y", num_labels=10)
    return transformers.RegNetForImageClassification(config)


if __name__ == "__main__":
    transformers.logging.set_verbosity_error()
    options = arguments(__doc__, budget="0.7", steps=10)
    torch.manual_seed(0)
    train(regnet(), Digits(batch=8, side=96), options)
