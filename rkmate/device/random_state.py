"""States of generators, kept to be restored. They are bytes, and need no device's allocator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from rkmate.device.protocol import Device

STATE_BYTES = torch.default_generator.get_state().numel()
"""Bytes that torch allocates on the CPU for a moment when the state of the CPU's generator is read."""


def state_of(generator: torch.Generator) -> bytes:
    """Return a generator's state."""
    return bytes(generator.get_state().numpy().tobytes())


def set_state(generator: torch.Generator, state: bytes) -> None:
    """Put a generator back to a state."""
    generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))


@dataclass(frozen=True)
class RandomState:
    """The states of the default generators of the CPU and of some devices, at one moment."""

    generators: tuple[torch.Generator, ...]
    states: tuple[bytes, ...]

    @classmethod
    def of(cls, *devices: Device) -> RandomState:
        """Return the current states of the generators."""
        generators = tuple(dict.fromkeys((torch.default_generator, *(d.generator() for d in devices))))
        return cls(generators, tuple(map(state_of, generators)))

    def restore(self) -> None:
        """Put all of them back."""
        for generator, state in zip(self.generators, self.states, strict=True):
            set_state(generator, state)


@contextmanager
def unchanged_random_state(*devices: Device) -> Iterator[None]:
    """Restore the generators after the context: random numbers drawn inside, on the CPU or on a device,
    change nothing after it."""
    before = RandomState.of(*devices)
    try:
        yield
    finally:
        before.restore()
