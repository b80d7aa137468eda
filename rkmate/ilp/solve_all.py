"""The options of several blocks, side by side where there are cores, and from the cache.

Threads, not processes: nearly all of the time is spent inside HiGHS, which runs without the
interpreter's lock, and a thread needs no second import of the package.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import closing
from dataclasses import replace

from rkmate.errors import ArgumentError
from rkmate.ilp.cache import OptionCache, fingerprint
from rkmate.ilp.grid import OptionSet, block_options
from rkmate.ilp.settings import OptionSettings
from rkmate.ir.cd import CDGraph
from rkmate.support.cache import cache_folder
from rkmate.support.processes import cores

_Finished = tuple[int, OptionSet | BaseException]


def solve_options(graphs: Sequence[CDGraph], settings: OptionSettings | None = None, *,
                  workers: int | None = None, cache: OptionCache | bool = True,
                  seconds: float | None = None,
                  on_progress: Callable[[int, int], None] | None = None) -> list[OptionSet]:
    """Return the options of each graph, in order.

    `workers`: how many blocks at a time; None takes the cores that this process may use. `cache`:
    True for the cache folder of this machine, False for none. `seconds`: a limit of this call alone, next to
    the settings'; options that lack time for it are not stored. `on_progress` is called in the
    calling thread with (blocks done, blocks in all). Raises what the first failing block raises;
    on an interrupt the blocks at work stop first.
    """
    settings = settings or OptionSettings()
    if workers is not None and workers < 1:
        raise ArgumentError(f"workers is {workers}; it should be at least 1")
    if cache is True:
        cache = OptionCache(cache_folder())
    store = cache or None
    results: list[OptionSet | None] = [None] * len(graphs)
    todo: list[int] = []
    done = 0

    def advance(i: int) -> None:
        nonlocal done
        done += first.count(i)
        if on_progress is not None:
            on_progress(done, len(graphs))

    # Graphs that are equal except for names share one solve.
    same: dict[tuple[str, tuple[float, ...]], int] = {}
    first = [same.setdefault((fingerprint(g, settings), tuple(c.time for c in g.c)), i)
             for i, g in enumerate(graphs)]
    for i in sorted(same.values()):
        results[i] = store.load(graphs[i], settings) if store is not None else None
        if results[i] is None:
            todo.append(i)
        else:
            advance(i)
    limit = settings.total_limit if seconds is None else min(seconds, settings.total_limit)
    with closing(_solved(graphs, todo, settings, workers, limit)) as solved:
        for i, result in solved:
            results[i] = result
            if store is not None and (seconds is None or not result.timed_out):
                store.store(graphs[i], settings, result)
            advance(i)
    return [found for i in first if (found := results[i]) is not None]


def _solved(graphs: Sequence[CDGraph], todo: Iterable[int], settings: OptionSettings, workers: int | None,
            limit: float) -> Generator[tuple[int, OptionSet], None, None]:
    """Yield the options of some of the graphs, each with its number, as threads find them. `limit`: seconds
    for all."""
    # The largest first: a long solve that starts last would leave the other cores idle.
    todo = sorted(todo, key=lambda i: -len(graphs[i].c))
    count = min(len(todo), workers if workers is not None else cores())
    finished: queue.SimpleQueue[_Finished] = queue.SimpleQueue()
    waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
    for i in todo:
        waiting.put(i)
    stop = threading.Event()
    begin = time.perf_counter()

    def share() -> OptionSettings:
        left = max(0.0, limit - (time.perf_counter() - begin))
        return replace(settings, block_limit=min(settings.block_limit,
                                                 left * count / max(1, waiting.qsize())))

    def work() -> None:
        while not stop.is_set():
            try:
                now = share()
                i = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                finished.put((i, block_options(graphs[i], now, stop=stop)))
            except BaseException as error:   # handed to the caller, who raises it
                finished.put((i, error))
                return

    threads = [threading.Thread(target=work, name=f"rkmate-options-{k}") for k in range(count)]
    for thread in threads:
        thread.start()
    try:
        for _ in todo:
            i, result = _next(finished)
            if isinstance(result, BaseException):
                raise result
            yield i, result
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _next(finished: queue.SimpleQueue[_Finished]) -> _Finished:
    """Wait in short pieces: on Windows nothing else lets Ctrl-C through."""
    while True:
        try:
            return finished.get(timeout=0.5)
        except queue.Empty:
            continue
