"""How long operations take, and how often each is timed."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from typing import Any, TypeVar

import torch

from rkmate.device import Device
from rkmate.measure.settings import MeasureSettings
from rkmate.torch_seam.containers import pytree

K = TypeVar("K", bound=Hashable)


def runs_within(seconds: Mapping[K, float], allowance: float, most: int) -> dict[K, int]:
    """Runs of each operation, of which one takes so many `seconds`: all together within `allowance`
    seconds, each `most` times at most.

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
    """Of several runs: as a step finds an operation, neither undisturbed nor disturbed more than most. Of
    two in the middle the faster one, so that one slow run of two does not count."""
    return statistics.median_low(seconds)


class Timings:
    """Seconds of operations, by what they are known by. Equal ones share their runs."""

    def __init__(self, device: Device, settings: MeasureSettings) -> None:
        self._device, self._settings = device, settings
        self._first: dict[Any, float] = {}
        self._timed: dict[Any, list[float]] = {}
        self._runs: Mapping[Any, int] = {}
        self._spent = 0.0
        self._number = 0
        self._done: set[Any] = set()

    def start_pass(self, number: int) -> None:
        """Each operation may be timed once more. `number`: from 0."""
        self._number = number
        self._done.clear()

    def share(self, step: float) -> None:
        """Decide how often each operation that was clocked is timed. `step`: seconds of all operations of a
        step that are not known yet."""
        settings = self._settings
        allowance = max(settings.least_seconds, settings.share * step - self._spent)
        self._runs = runs_within(self._first, allowance, settings.passes * settings.repeats)

    def seconds(self, key: Any) -> float:
        """Of an operation: the median of its timed runs, or the clocked one where there is none."""
        return median(self._timed[key]) if key in self._timed else self._first[key]

    def wanted(self, key: Any) -> bool:
        """Whether an operation is still to be timed in this pass."""
        return key not in self._done and self._repeats(key) > 0

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

    def time(self, call: Callable[[], Any], key: Any, before: Callable[[], object] | None = None) -> Any:
        """Time an operation as often as this pass has runs for it; its result. `before`: called before each
        run."""
        times: list[float] = []
        result = None
        while len(times) < self._repeats(key) and sum(times) < self._settings.enough_seconds:
            result = None                # freed before the call, as its memory may serve again
            if before is not None:
                before()
            seconds, result = self._device.timed(call)
            times.append(seconds)
        self._timed.setdefault(key, []).extend(times)
        self._done.add(key)
        return result

    def _repeats(self, key: Any) -> int:
        """In this pass: an operation's runs are dealt out to the passes in turn."""
        if key not in self._runs:
            return self._settings.repeats
        return -((self._number - self._runs[key]) // self._settings.passes)


def signature(target: Any, args: Any, kwargs: Any) -> Any:
    """What an operation is known by: equal for those that take as long."""
    def freeze(a: Any) -> Any:
        if isinstance(a, torch.Tensor):
            return (tuple(a.shape), a.stride(), a.dtype)
        if isinstance(a, (list, tuple)):
            return tuple(freeze(x) for x in a)
        return repr(a)
    return (target, freeze(args), tuple((k, freeze(v)) for k, v in sorted(kwargs.items())))


def copied_forms(call: functools.partial[Any], there: Collection[int]) -> tuple[Any, ...]:
    """Forms of the arguments that were copied for a call: views that turned out to be none. `there`: where
    the storages are that it reads."""
    return tuple((tuple(a.shape), a.dtype) for a in pytree.tree_leaves((call.args, call.keywords))
                 if isinstance(a, torch.Tensor) and a.untyped_storage().data_ptr() not in there)
