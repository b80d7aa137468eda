"""States of generators, kept to be restored. They are bytes, and need no device's allocator."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

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


@contextmanager
def setting_refused(refuse: Callable[[], None]) -> Iterator[None]:
    """Call `refuse`, which raises, where a function of torch is to set the state of a default generator
    inside the context. Torch itself may (its tracer, ``torch.utils.checkpoint``)."""
    with ExitStack() as stack:
        for module in (torch, torch.random, torch.cuda):
            stack.enter_context(mock.patch.object(module, "set_rng_state", _Refusing(
                module.set_rng_state, refuse)))
        yield


class _Refusing:
    def __init__(self, plain: Callable[..., Any], refuse: Callable[[], None]) -> None:
        self._plain, self._refuse = plain, refuse

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        frame = sys._getframe(1)
        while frame.f_back is not None and frame.f_globals.get("__name__") in _PASSED_THROUGH:
            frame = frame.f_back
        if not frame.f_globals.get("__name__", "").startswith("torch."):
            self._refuse()
        return self._plain(*args, **kwargs)


_PASSED_THROUGH = {"torch.random", "torch.cuda.random", "contextlib"}
"""Modules between a function that sets a state, and who wants it set."""
