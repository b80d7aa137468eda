"""Progress of planning, on a terminal and in a notebook; silent elsewhere."""

from __future__ import annotations

import importlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

logger = logging.getLogger("rkmate")

DELAY = 1.0
"""Seconds: a stage that is done sooner is not shown. And how often one is shown anew."""
_PLAIN = "{desc}, {elapsed}"
_NAMED = "{desc}: {n_fmt} of {total_fmt} |{bar:20}| {elapsed}{postfix}"
_COUNTED = "{desc}: {n_fmt} of {total_fmt} |{bar:20}| {elapsed}, {remaining} left"


class Tasks:
    """Tasks of one stage that differ: which one runs, and how long all of them will still take."""

    def __init__(self, bar: tqdm[None]) -> None:
        self._bar = bar
        self._name = ""
        self._left: float | None = None
        self._since = time.monotonic()

    def begin(self, name: str, left: float | None) -> None:
        """Begin a task. `left`: seconds for this task and all that follow; None: not known yet."""
        self._name, self._left, self._since = name, left, time.monotonic()
        logger.info("%s", name)
        self.show()

    def done(self) -> None:
        """End the task."""
        self._bar.update(1)

    def show(self) -> None:
        """Write the task's name and the time left next to the bar."""
        left = None if self._left is None else self._left - (time.monotonic() - self._since)
        self._bar.set_postfix_str(f"{time_left(left)}: {self._name}", refresh=False)


def time_left(seconds: float | None) -> str:
    """Return the time left in words: ``about 40 s left``."""
    if seconds is None:
        return "time left not known yet"
    if seconds < 90:
        return f"about {max(1, round(seconds))} s left"
    return f"about {round(seconds / 60)} min left"


def in_notebook() -> bool:
    """Return whether the code runs in a notebook's kernel (Jupyter, Colab)."""
    interactive = sys.modules.get("IPython")
    shell = None if interactive is None else interactive.get_ipython()
    return getattr(shell, "kernel", None) is not None


class Cell:
    """A file for bars in a notebook: the cell shows the line that was written last, in one place."""

    encoding = "utf-8"
    """For tqdm: bars are drawn with blocks."""

    def __init__(self) -> None:
        self._shown: Any = None

    def write(self, text: str) -> None:
        """Show a line instead of the one before."""
        line = {"text/plain": text.strip("\r ")}
        if self._shown is not None:
            self._shown.update(line, raw=True)
        elif line["text/plain"]:
            display = importlib.import_module("IPython.display").display
            self._shown = display(line, raw=True, display_id=True)

    def flush(self) -> None:
        """Do nothing: each line is shown at once."""


class Progress:
    """Shows which stage runs and how far it is."""

    def __init__(self, enabled: bool) -> None:
        notebook = in_notebook()
        self.enabled = enabled and (sys.stderr.isatty() or notebook)
        self._cell = Cell() if notebook else None
        self.part = ""
        """Text after the names of stages: which of several rounds of them runs."""

    @contextmanager
    def stage(self, name: str, total: int | None, *, at_most: float | None = None,
              then: str = "") -> Iterator[Callable[[int], None]]:
        """Show a stage of `total` parts. Call the yielded function with the number of parts done. `at_most`:
        seconds that the stage may take, if that is known. `then`: the stages that follow."""
        plain = _PLAIN if at_most is None else f"{_PLAIN} of at most {at_most:.0f} s"
        line = (_COUNTED if total else plain) + (f"; then {then}" if then else "")
        with self._shown(f"{name}{self.part}", total, line) as (bar, _):
            def tick(done: int) -> None:
                bar.update(max(0, done - bar.n))
            yield tick

    @contextmanager
    def tasks(self, name: str, total: int) -> Iterator[Tasks]:
        """Show a stage of `total` tasks, which give their names and expected times."""
        with self._shown(name, total, _NAMED) as (_, tasks):
            yield tasks

    @contextmanager
    def _shown(self, name: str, total: int | None, line: str) -> Iterator[tuple[tqdm[None], Tasks]]:
        logger.info("%s", name)
        with tqdm(total=total, desc=f"rkmate: {name}", disable=not self.enabled, leave=False,
                  file=self._cell or sys.stderr, delay=DELAY, bar_format=line) as bar:
            tasks = Tasks(bar)
            if not self.enabled:
                yield bar, tasks
                return
            over = threading.Event()
            refresh = tasks.show if line == _NAMED else _nothing
            clock = threading.Thread(target=_keep_shown, args=(bar, over, refresh), daemon=True)
            clock.start()
            try:
                yield bar, tasks
            finally:
                over.set()
                clock.join()
                bar.clear()     # tqdm does not where only the clock has shown it


def _nothing() -> None:
    """Do nothing: a stage without named tasks shows only its bar."""


def _keep_shown(bar: tqdm[None], over: threading.Event, refresh: Callable[[], None]) -> None:
    """Refresh the bar during a long operation that reports nothing."""
    while not over.wait(max(DELAY, 0.1)):
        refresh()
        bar.refresh()
