"""Read what torch's CUDA allocator did from the history that it keeps of requests and frees.

The statistics of the allocator have one peak, and it is the user's; the history can be read without touching
it, and knows the bytes that were asked for, where the statistics know the blocks that were handed out.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch

from rkmate.device.events import make_way
from rkmate.device.protocol import MeterError, MeterInUse, PartsMeter
from rkmate.ir.simulate import Peak
from rkmate.torch_seam import memory

T = TypeVar("T")
Entry = Mapping[str, Any]

_measuring = threading.Lock()
_numbers = itertools.count()


def levels(entries: Iterable[Entry], size_of: Callable[[int], int]) -> Iterator[tuple[int, int]]:
    """Yield (microseconds, requested bytes above the level at the start) after each request and each free.
    `size_of`: bytes that a request counts as."""
    live = 0
    for entry in entries:
        if entry["action"] == "alloc":
            live += size_of(entry["size"])
        elif entry["action"] == "free_completed":
            live -= size_of(entry["size"])
        else:
            continue
        yield entry["time_us"], live


def since(entries: Iterable[Entry], mark: str) -> list[Entry]:
    """Return the entries after the entry that a mark belongs to. Raises `MeterError` if the mark is lost."""
    found = list(entries)
    for k in range(len(found) - 1, -1, -1):
        if found[k].get("user_metadata") == mark and found[k]["action"] == "free_completed":
            return found[k + 1:]
    raise MeterError("the memory history that is being recorded is too short to measure with: record more "
                     "entries (max_entries), or stop it (torch.cuda.memory._record_memory_history(None))")


class History:
    """The allocator's history on one device, from `recording` on."""

    def __init__(self, device: int) -> None:
        self._device = device
        self.entries: list[Entry] = []
        """Once the recording is over."""

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record, or listen in where the user records. Raises `MeterError` where something is measured
        already, or too little is recorded."""
        make_way()
        if not _measuring.acquire(blocking=False):
            raise MeterInUse
        theirs = True
        try:
            torch.cuda.init()
            theirs = memory.is_recording_history()
            if not theirs:
                memory.record_history(True)
            start = f"rkmate start {next(_numbers)}"
            self.mark(start)
            yield
            self.entries = since(memory.history(self._device), start)
        finally:
            if not theirs:
                memory.record_history(False)
            _measuring.release()

    def mark(self, text: str) -> None:
        """Put an entry with a text into the history."""
        memory.mark_history(self._device, text)


def measure_peak(fn: Callable[[], T], device: int, size_of: Callable[[int], int], *,
                 timeline: bool = False) -> Peak[T]:
    """Call `fn`, which returns when the device is done, and measure what it asks the allocator for."""
    history = History(device)
    with history.recording():
        start = time.time_ns() / 1e3
        begin = time.perf_counter()
        result = fn()
        seconds = time.perf_counter() - begin
    found = list(levels(history.entries, size_of))
    told = tuple((max(0.0, us - start) / 1e6, level) for us, level in found) if timeline else ()
    return Peak(_highest(found), found[-1][1] if found else 0, seconds, result, told)


def _highest(found: Iterable[tuple[int, int]]) -> int:
    return max((0, *(level for _, level in found)))


class HistoryMeter(PartsMeter):
    """The peak of each of several parts of one run, from its history."""

    of_one_thread = False

    def __init__(self, device: int, size_of: Callable[[int], int], allocated: Callable[[], int]) -> None:
        """`allocated`: returns the bytes that are in memory now."""
        self._device, self._size_of, self._allocated = device, size_of, allocated
        self._histories: list[History] = []
        """Histories of the stretches between pauses, in order."""
        self._changes: list[int] = []
        """For each history, the bytes by which the pause before it has changed what is in memory."""
        self._open = ExitStack()

    @contextmanager
    def running(self) -> Iterator[None]:
        """See `PartsMeter`."""
        self._histories, self._changes = [], []
        with self._open:
            self._go_on(0)
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """See `PartsMeter`."""
        self._open.close()
        before = self._allocated()
        try:
            yield
        finally:
            self._go_on(self._allocated() - before)

    def _go_on(self, change: int) -> None:
        self._histories.append(History(self._device))
        self._changes.append(change)
        self._open.enter_context(self._histories[-1].recording())

    @contextmanager
    def part(self, number: int) -> Iterator[None]:
        """See `PartsMeter`."""
        history = self._histories[-1]
        history.mark(f"{_PART}{number}")
        yield
        history.mark(_END)

    def levels(self) -> dict[int, tuple[int, int]]:
        """See `PartsMeter`."""
        return levels_of_parts([h.entries for h in self._histories], self._size_of, self._changes)


def levels_of_parts(histories: Iterable[Iterable[Entry]], size_of: Callable[[int], int],
                    changes: Iterable[int]) -> dict[int, tuple[int, int]]:
    """Return the bytes at the start of each part and the most bytes in it, over the level at the start.
    `changes`: bytes by which the level has changed before each history."""
    found: dict[int, tuple[int, int]] = {}
    part: int | None = None
    live = 0
    for entries, by_pause in zip(histories, changes, strict=True):
        live += by_pause
        for entry in entries:
            text = entry.get("user_metadata", "")
            if text.startswith(_MARK):
                part = None if text == _END else int(text[len(_PART):])
                if part is not None:
                    found.setdefault(part, (live, live))
                continue
            for _, change in levels((entry,), size_of):
                live += change
            if part is not None:
                found[part] = found[part][0], max(found[part][1], live)
    return found


_MARK = "rkmate "
_PART, _END = f"{_MARK}part ", f"{_MARK}end"
