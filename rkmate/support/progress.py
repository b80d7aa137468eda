"""Progress of planning, on a terminal; silent elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger("rkmate")

DELAY = 1.0
"""Seconds: a stage that is done sooner is not shown. And how often one is shown anew."""
_PLAIN = "{desc}, {elapsed}"
_COUNTED = "{desc}: {n_fmt} of {total_fmt} |{bar:20}| {elapsed}, {remaining} left"


class Progress:
    """Shows which stage runs and how far it is."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled and sys.stderr.isatty()

    @contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A stage of `total` parts; call the result with the number of parts done."""
        logger.info("%s", name)
        with tqdm(total=total, desc=f"rkmate: {name}", disable=not self.enabled, leave=False,
                  file=sys.stderr, delay=DELAY, bar_format=_COUNTED if total else _PLAIN) as bar:
            def tick(done: int) -> None:
                bar.update(max(0, done - bar.n))
            if not self.enabled:
                yield tick
                return
            over = threading.Event()
            clock = threading.Thread(target=_keep_shown, args=(bar, over), daemon=True)
            clock.start()
            try:
                yield tick
            finally:
                over.set()
                clock.join()


def _keep_shown(bar: tqdm[None], over: threading.Event) -> None:
    """One long operation reports nothing: its time goes on all the same."""
    while not over.wait(max(DELAY, 0.1)):
        bar.refresh()
