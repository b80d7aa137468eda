"""Allocators and profiler: events of the CPU's memory, the history of CUDA's, and switches of libraries."""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import sys
import threading
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from unittest import mock

import torch
from torch.autograd import profiler

from rkmate.support.planning_lock import gc_pause

_Variable = TypeVar("_Variable", ctypes.c_bool, ctypes.c_int)
_QUIET = "99"
"""A log level of the profiler's library above all that it prints."""
_ERRORS_ONLY = 2
"""The log level of torch's core library that leaves warnings out."""


class Allocation(NamedTuple):
    """An allocation (bytes > 0) or a free (bytes < 0) that the profiler saw."""

    ns: int
    """Time, on the profiler's clock."""
    address: int
    bytes: int
    total: int
    """Bytes of all threads after it, over a fixed level: of the CPU, of the blocks whose sizes its allocator
    remembers."""


_YOUNG = range(1 if sys.version_info >= (3, 14) else 2)
"""Generations of the garbage collector through which an object passes while it is young."""


def living(kinds: Container[Any], since: list[Any] | None = None) -> list[Any]:
    """Return the objects of these types that the garbage collector knows. `since`: a list; of objects that
    were made before it, some or all are left out."""
    if since is not None:
        with gc_pause():        # no object grows older between the two looks
            looks = [_seen(kinds, since, generation) for generation in _YOUNG]
        # Objects grow old together: while the list is young, so is all that was made after it.
        if any(is_there for is_there, _ in looks):
            return [t for _, found in looks for t in found]
    return _seen(kinds, since)[1]


def _seen(kinds: Container[Any], since: Any, generation: int | None = None) -> tuple[bool, list[Any]]:
    """Return whether an object is in a generation of the garbage collector (None: all), and the objects of
    these types there. Refer to the others as briefly as possible: meanwhile no thread can complete a tuple
    that it is building (`SystemError`)."""
    objects = gc.get_objects(generation)            # often a million
    found = list(compress(objects, map(kinds.__contains__, map(type, objects))))
    is_there = generation is not None and any(o is since for o in objects)
    objects.clear()             # it may hold the frame that holds it
    return is_there, found


def is_profiling() -> bool:
    """Return whether a profiler is running, or warming up: torch ends the process where one that warms up
    goes on after another one has run."""
    return bool(profiler._is_profiler_enabled or torch._C._autograd._profiler_enabled()) or any(
        p.profiler is not None and p.profiler.kineto_results is None for p in with_schedules())


def with_schedules() -> list[torch.profiler.profile]:
    """Return the profilers of `torch.profiler` that somebody has: their schedules may start them."""
    if "ProfilerStep" not in profiler.KinetoStepTracker._step_dict:
        return []           # looking through all objects takes long
    return living({torch.profiler.profile})


def allocations(results: Any, kind: str, index: int | None) -> list[Allocation]:
    """Return the allocations and frees of a device, in order of time.

    results: of a profiler (``kineto_results``). kind, index: the device; None for any index.
    """
    allocation = torch._C._profiler._EventType.Allocation
    found: list[Allocation] = []
    todo = list(results.experimental_event_tree())
    while todo:
        node = todo.pop()
        todo.extend(node.children)
        if node.tag != allocation:
            continue
        fields = node.extra_fields
        where = fields.device
        if (where.type, index if index is None else where.index) == (kind, index):
            found.append(Allocation(node.start_time_ns, fields.ptr, fields.alloc_size,
                                    fields.total_allocated))
    found.sort(key=lambda change: change.ns)
    return found


@contextmanager
def memory_events() -> Iterator[Any]:
    """Run a profiler that records each allocation and free. Its results (``kineto_results``) can be read
    afterwards.

    Of operations it records those of torch and `mark`, and not what is exchanged with other ranks: if that is
    over only when the profiler has stopped, torch writes its end to freed memory.

    If a profiler runs when Python ends, torch ends the process by a segmentation fault, and so it is stopped
    before. Only a thread that lives on (a daemon) keeps what it runs, which torch then leaves alone."""
    session: Any = profiler.profile(use_cpu=True, profile_memory=True)
    thread = threading.current_thread()
    enable = partial(_ENABLE, scopes={torch._C._profiler.RecordScope.FUNCTION})
    with _silence(), ExitStack() as stack:
        def stop() -> None:
            if thread is threading.current_thread() or not thread.is_alive():
                stack.close()

        with mock.patch.object(profiler, "_enable_profiler", enable):
            stack.enter_context(session)
        stack.callback(atexit.unregister, atexit.register(stop))
        yield session


_ENABLE: Any = vars(profiler)["_enable_profiler"]


def mark(name: str) -> Any:
    """Return a context that `memory_events` records under a name."""
    return torch._C._profiler._RecordFunctionFast(name)


@contextmanager
def _silence() -> Iterator[None]:
    """Keep the profiler's notices off the standard error.

    It announces each start and stop, and warns about each free of a block that it does not know.
    The first is decided by the environment, which is read when the profiler starts.
    """
    level = core_variable(LOG_LEVEL, ctypes.c_int)
    verbosity = level.value if level is not None else 0
    announced = os.environ.get("KINETO_LOG_LEVEL")
    if announced is None:
        os.environ["KINETO_LOG_LEVEL"] = _QUIET
    if level is not None:
        level.value = max(verbosity, _ERRORS_ONLY)
    try:
        yield
    finally:
        if level is not None:
            level.value = verbosity
        if announced is None:
            os.environ.pop("KINETO_LOG_LEVEL", None)


def core_variable(name: str, kind: type[_Variable]) -> _Variable | None:
    """Return a global variable of torch's core library; None where the build has no such symbol."""
    file = {"win32": "c10.dll", "darwin": "libc10.dylib"}.get(sys.platform, "libc10.so")
    try:
        library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / file))
        return kind.in_dll(library, name)
    except (OSError, ValueError):
        return None


REMEMBERS_SIZES = "FLAGS_caffe2_report_cpu_memory_usage"
"""Variable: whether the CPU's allocator remembers the size of each block."""
LOG_LEVEL = "FLAGS_caffe2_log_level"
"""Variable: below which level the core library prints nothing."""


def uses_onednn() -> bool:
    """Return whether convolutions on a CPU may run by oneDNN."""
    return bool(torch._C._get_mkldnn_enabled())


# -- CUDA --------------------------------------------------------------------------------------

def is_recording_history() -> bool:
    """Return whether the CUDA allocator records its history."""
    return bool(torch._C._cuda_isHistoryEnabled())


def record_history(enabled: bool) -> None:
    """Start or stop recording requests and frees, without stacks."""
    memory: Any = torch.cuda.memory
    if enabled:
        memory._record_memory_history(context=None, stacks="python")
    else:
        memory._record_memory_history(enabled=None)


def history(device: int) -> Sequence[Mapping[str, Any]]:
    """Return what was recorded on a device, oldest first."""
    memory: Any = torch.cuda.memory
    entries: Sequence[Mapping[str, Any]] = memory._snapshot()["device_traces"][device]
    return entries


def allocator_snapshot() -> Mapping[str, Any]:
    """Return the CUDA allocator's segments and blocks."""
    memory: Any = torch.cuda.memory
    found: Mapping[str, Any] = memory._snapshot()
    return found


def mark_history(device: int, text: str) -> None:
    """Put an entry with a text into the recorded history: a request and its free."""
    memory: Any = torch.cuda.memory
    before = memory._get_memory_metadata()
    memory._set_memory_metadata(text)
    torch.empty(1, device=torch.device("cuda", device))
    memory._set_memory_metadata(before)


def keep_busy(cycles: int) -> None:
    """Let the current CUDA stream do nothing for some cycles."""
    torch.cuda._sleep(cycles)
