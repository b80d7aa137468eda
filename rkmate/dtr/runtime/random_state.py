"""Generators' states, kept as bytes so that a repetition draws the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from rkmate import device as devices
from rkmate.device.random_state import set_state, state_of

__all__ = ["generator_of", "replayed", "state_of"]


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator that a random operation draws from."""
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    for value in args:
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device")
    for value in args:
        if isinstance(value, torch.Tensor):
            device = value.device
            break
    return devices.of("cpu" if device is None else device).generator()


@contextmanager
def replayed(generator: torch.Generator, state: bytes) -> Iterator[None]:
    """Draw from ``state`` inside the block; the generator continues as before after it."""
    now = state_of(generator)
    set_state(generator, state)
    try:
        yield
    finally:
        set_state(generator, now)
