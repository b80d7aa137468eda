"""A bank of small models: what the package must be right on.

Each entry is a function that makes the model, inputs of its forward and a loss, the same at every
call with the same seed. A step takes a fraction of a second on one core; activations outweigh
parameters.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable

from tests.models.convolutions import batch_norm_cnn, densenet, unet
from tests.models.language import bert, gpt2, llama, t5
from tests.models.oddities import tied, views
from tests.models.sample import Sample
from tests.models.sequences import (
    lstm,
    mlp_mixer,
    transformer,
    transformer_decoder,
    transformer_encoder,
)
from tests.models.vision import regnet, resnet, vit

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")     # read when it is imported

BANK: dict[str, Callable[..., Sample]] = {f.__name__: f for f in (
    gpt2, bert, llama, t5, vit, resnet, regnet, transformer_encoder, transformer_decoder,
    transformer, mlp_mixer, unet, densenet, batch_norm_cnn, lstm, views, tied)}
"""Name -> function of `seed`, and of `dropout` where the model has any."""

WITH_DROPOUT: tuple[str, ...] = tuple(
    name for name, make in BANK.items() if "dropout" in inspect.signature(make).parameters)

__all__ = ["BANK", "WITH_DROPOUT", "Sample"]
