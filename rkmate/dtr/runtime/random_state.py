"""Generators' states, kept as bytes so that a repetition draws the same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """The generator that a random operation draws from."""
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
    device = torch.device(device) if device is not None else torch.device("cpu")
    if device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]
    return torch.default_generator


def state_of(generator: torch.Generator) -> bytes:
    """The generator's state, outside the tensors' memory."""
    return bytes(generator.get_state().numpy().tobytes())


@contextmanager
def replayed(generator: torch.Generator, state: bytes) -> Iterator[None]:
    """Draw from ``state`` inside the block; the generator continues as before after it."""
    now = generator.get_state()
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    try:
        yield
    finally:
        generator.set_state(now)
