"""Recorded work (CUDA graphs): calls of the device that are recorded once and replayed by one call.

What is recorded does not run. Its memory comes from a pool of its own and stays reserved for the next replay,
and addresses are fixed. Random operations read the state of their generator anew at each replay; those that
draw the same numbers twice have generators of their own, two with one seed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from rkmate.device import registry
from rkmate.device.cuda import Cuda

T = TypeVar("T")
_SPREAD = 0x9E3779B97F4A7C15
"""Keeps the seeds of several generators apart."""


class Recorder:
    """Records on one device; all recordings share a pool of memory."""

    def __init__(self, device: torch.device) -> None:
        """Raises `ValueError` for a device that cannot record."""
        if not can_record(device):
            raise ValueError(device)
        self.device = device
        self._pool: Any = torch.cuda.graph_pool_handle()
        self._default = registry.of(device).generator()

    def record(self, run: Callable[[], T], generators: Sequence[torch.Generator] = ()
               ) -> tuple[Callable[[], None], T]:
        """Record the work of `run` on the device. Returns a function that replays it, and the result, whose
        tensors each replay writes. `generators`: generators that `run` draws from in addition to the default
        one. The current stream is restored if recording fails, too."""
        graph = torch.cuda.CUDAGraph()
        for generator in generators:
            graph.register_generator_state(generator)
        with torch.cuda.device(self.device), torch.cuda.stream(torch.cuda.current_stream(self.device)), \
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = run()
        return graph.replay, result

    @contextmanager
    def waiting_is_an_error(self) -> Iterator[None]:
        """Make operations that the host would wait for raise `RuntimeError` (as far as torch knows them), in
        the whole process. A recording that such an operation breaks off leaves the allocator in the middle of
        it."""
        before = torch.cuda.get_sync_debug_mode()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")         # torch says once that it does not know all of them
            torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode(before)

    def generators(self, names: Sequence[str]) -> list[torch.Generator]:
        """Return a new generator for each random operation; operations of one name will draw the same
        numbers."""
        return [torch.Generator(self.device) for _ in names]

    @contextmanager
    def drawing_from(self, generator: torch.Generator) -> Iterator[None]:
        """Let the default generator stand for another one while something is recorded."""
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)

    def seed(self, named: Sequence[tuple[str, torch.Generator]]) -> None:
        """Seed the generators before a replay: generators of one name are made equal, those of other names
        differ. All follow the default generator, which advances."""
        seed, offset = self._default.initial_seed(), self._default.get_offset()
        numbers = {name: k + 1 for k, name in enumerate(dict.fromkeys(name for name, _ in named))}
        for name, generator in named:
            generator.manual_seed((seed + _SPREAD * numbers[name]) % (1 << 63))
            generator.set_offset(offset)
        if named:
            self._default.set_offset(offset + 4)


def can_record(device: torch.device) -> bool:
    """Return whether work on a device can be recorded."""
    return isinstance(registry.of(device), Cuda)
