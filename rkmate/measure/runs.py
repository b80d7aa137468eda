"""Runs of a measured operation: repeated, with the processor's caches in the state that a step leaves."""

from __future__ import annotations

import functools
import logging
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import fx

from rkmate.device import Device
from rkmate.graph.ops.properties import is_view
from rkmate.ir.cd import CDGraph
from rkmate.measure.settings import MeasureSettings
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.nodes import VALUE

logger = logging.getLogger("rkmate")

# -- Caches ----------------------------------------------------------------------------------------
#
# The processor's caches as an operation of a step finds them.
#
# Run again and again, an operation finds what it reads where its last run has left it, and writes where its
# last result was: products seem a tenth faster than they are between others, activations several times. A
# step whose data is larger than the caches finds there what was made just before, and little else.


BEFORE = 3
"""Results of this number of preceding computations are still in the caches."""


def as_in_a_step(settings: MeasureSettings, device: Device, step_bytes: int) -> MeasureSettings:
    """Return the settings, which say whether caches are emptied. `step_bytes`: what goes through them in a
    step."""
    cold = step_bytes > device.cache_bytes if settings.cold is None else settings.cold
    return replace(settings, cold=cold and device.cache_bytes > 0)


def made_just_before(graph: CDGraph, i: int) -> list[int]:
    """Return the inputs that a C node finds in the caches."""
    return [j for j in graph.c[i].inputs
            if (made := graph.producer[j]) is not None and i - BEFORE <= made < i]


class Caches:
    """Empties the caches of a device between timed runs. Holds a buffer of their size."""

    def __init__(self, device: Device) -> None:
        self._bytes = device.cache_bytes
        self._buffer = torch.empty(self._bytes * 5 // 4, dtype=torch.uint8, device=device.torch_device)

    def tell_if_over(self, limit: int) -> None:
        """Say, once in a process, if the buffer alone takes more than `limit` bytes."""
        taken = self._buffer.nbytes
        if taken > limit and taken not in _told:
            _told.add(taken)
            logger.info(
                "measuring takes a buffer of %s bytes, as large as the processor's caches, which is more "
                "than the budget of %s bytes. It is gone before the step begins. To measure without it: "
                'Settings(measure=MeasureSettings(cold=False)), or costs="analytic"',
                f"{taken:,}", f"{limit:,}")

    def empty(self, but: Iterable[torch.Tensor]) -> None:
        """Empty them, `but` for some tensors."""
        self._buffer.fill_(0)
        for value in but:
            if value.is_floating_point() and value.nbytes <= self._bytes // 2:
                value.sum()


_told: set[int] = set()
"""The sizes of buffers of which a message has said that they are larger than a budget."""


def touched_bytes(graph: fx.Graph) -> int:
    """Return bytes of all that a graph's operations make: what goes through the caches in a step."""
    values = [n.meta.get(VALUE) for n in graph.nodes if n.op == "call_function" and not is_view(n)]
    return sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.layout is torch.strided)


# -- Runs ------------------------------------------------------------------------------------------
#
# How long operations take, and how often each is timed.


LITTLE = 0.005
"""Share of a step: an operation that takes less in all of its runs need not be timed thoroughly."""
K = TypeVar("K", bound=Hashable)


def runs_within(seconds: Mapping[K, float], allowance: float, most: int) -> dict[K, int]:
    """Return the number of runs of each operation. One run takes `seconds`; all runs together take at most
    `allowance` seconds, and each operation runs at most `most` times.

    Operations get equal time, as far as they need it: the shortest come first, and what they leave of their
    part goes to the longer ones. What takes longer than its part is not run.
    """
    result = dict.fromkeys(seconds, 0)
    left, still = max(0.0, allowance), len(seconds)
    for key, one in sorted(seconds.items(), key=lambda item: item[1]):
        part = left / still
        runs = most if one * most <= part else int(part / one)
        result[key] = runs
        left -= runs * one
        still -= 1
    return result


def median(seconds: Iterable[float]) -> float:
    """Return the median of several runs: a step finds an operation neither undisturbed nor more disturbed
    than usual. Of two middle values the smaller one counts, so that one slow run of two does not count."""
    return statistics.median_low(seconds)


class Timings:
    """Seconds of operations, by their keys. Equal operations share their runs."""

    def __init__(self, device: Device, settings: MeasureSettings) -> None:
        self._device, self._settings = device, settings
        self._first: dict[Any, float] = {}
        self._timed: dict[Any, list[float]] = {}
        self._runs: Mapping[Any, int] = {}
        self._spent = 0.0
        self._number = 0
        self._pass: dict[Any, list[float]] = {}
        """Runs of this pass."""
        self._done: set[Any] = set()
        """Keys of what was timed in this walk."""

    def start_walk(self, number: int) -> None:
        """Start a walk over the blocks, in which each operation may be timed once more. A pass consists of
        `MeasureSettings.repeats` walks. `number`: counted from 0."""
        self._number, repeat = divmod(number, max(1, self._settings.repeats))
        if not repeat:
            self._pass.clear()
        self._done.clear()

    def share(self, step: float, often: Counter[Any]) -> None:
        """Decide how often each operation that was clocked is timed. `step`: seconds of all operations of a
        step that are not known yet. `often`: how many times a step runs each operation; what takes little of
        the step in all of its runs is timed once in a pass."""
        settings = self._settings
        allowance = max(settings.least_seconds, settings.share * step - self._spent)
        runs = runs_within(self._first, allowance, settings.passes * settings.repeats)
        self._runs = {key: min(n, settings.passes) if self._first[key] * often[key] < LITTLE * step else n
                      for key, n in runs.items()}

    def seconds(self, key: Any) -> float:
        """Return the seconds of an operation: the median of its timed runs, or its first, clocked run if
        there is none."""
        return median(self._timed[key]) if key in self._timed else self._first[key]

    def wanted(self, key: Any) -> bool:
        """Return whether an operation is still to be timed in this walk: equal ones share its runs."""
        return key not in self._done and len(self._pass.get(key, ())) < self._repeats(key) and \
            sum(self._pass.get(key, ())) < self._settings.enough_seconds

    def clock(self, call: Callable[[], Any], key: Any) -> Any:
        """Run an operation for another reason, with a clock as a first estimate; its result."""
        self._device.synchronize()
        begin = time.perf_counter()
        result = call()
        self._device.synchronize()
        seconds = time.perf_counter() - begin
        self._first[key] = min(seconds, self._first.get(key, seconds))
        self._spent += seconds
        return result

    def time(self, call: Callable[[], Any], key: Any) -> Any:
        """Time an operation once; its result."""
        seconds, result = self._device.timed(call)
        self._timed.setdefault(key, []).append(seconds)
        self._pass.setdefault(key, []).append(seconds)
        self._done.add(key)
        return result

    def _repeats(self, key: Any) -> int:
        """Return the runs of an operation in this pass. An operation's runs are spread over the passes."""
        if key not in self._runs:
            return self._settings.repeats
        return -((self._number - self._runs[key]) // self._settings.passes)


def signature(target: Any, args: Any, kwargs: Any) -> Any:
    """Return the key of an operation: equal for operations that take equally long."""
    def freeze(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return (tuple(a.shape), a.stride(), a.dtype)
        if isinstance(a, (list, tuple)):
            return tuple(freeze(x) for x in a)
        return repr(a)
    return (target, freeze(args), tuple((k, freeze(v)) for k, v in sorted(kwargs.items())))


def copied_forms(call: functools.partial[Any], there: Collection[int]) -> tuple[Any, ...]:
    """Return the forms of arguments that were copied for a call, because they turned out not to be views.
    `there`: addresses of the storages that the call reads."""
    return tuple((tuple(a.shape), a.dtype) for a in pytree.tree_leaves((call.args, call.keywords))
                 if isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() not in there)
