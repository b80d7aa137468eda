"""Models that libraries hand out in eval mode: their plans are for training."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from rkmate.errors import ArgumentError

logger = logging.getLogger("rkmate")


@contextmanager
def flags_to_plan(model: nn.Module, training: bool | None) -> Iterator[None]:
    """Inside, a model's train flags are those to plan for; afterwards they are what they were.

    ``from_pretrained`` returns models in eval mode, and a Trainer switches to train mode later.

    Args:
        training: None: of a model in eval mode as its own `train` sets them, which is said, and of others
            as they are. True: as its `train` sets them. False: as they are.

    Raises:
        ArgumentError: `training` is something else.
    """
    if training not in (None, True, False):
        raise ArgumentError(f"training is {training!r}; it should be True, False or None")
    if training is False or (training is None and model.training):
        yield
        return
    before = [(m, m.training) for m in model.modules()]
    if training is None:
        logger.warning("%s is in eval mode: it is planned in train mode (training=False plans it as it is)",
                       type(model).__name__)
    model.train()
    try:
        yield
    finally:
        for m, flag in before:
            m.training = flag
