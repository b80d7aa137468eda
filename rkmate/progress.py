"""Progress of planning, on a terminal; silent elsewhere."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

logger = logging.getLogger("rkmate")


class Progress:
    """Shows which stage runs and how far it is."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled and sys.stderr.isatty()

    @contextmanager
    def stage(self, name: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """A stage of `total` parts; call the result with the number of parts done."""
        logger.info("%s", name)
        with tqdm(total=total, desc=f"rkmate: {name}", disable=not self.enabled, leave=False,
                  file=sys.stderr, delay=1.0) as bar:
            def tick(done: int) -> None:
                bar.update(max(0, done - bar.n))
            yield tick
