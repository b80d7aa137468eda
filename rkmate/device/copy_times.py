"""When copies end that nobody waits for, because the device computes meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from rkmate.device.copy_engine import StepCopies


def ends_by_threads(call: StepCopies, begin: Callable[[], object], out: Sequence[str], back: Sequence[str],
                    compute: Callable[[], object]) -> tuple[float, float]:
    """See `Device.ends_of`: two threads wait. What these raise is raised here."""
    now = time.perf_counter()
    begin()
    outs = _Waiting(call.leave, out, now)
    backs = _Waiting(call.arrive, back, now)
    try:
        while outs.is_alive() or backs.is_alive():
            compute()
    finally:
        outs.join()
        backs.join()
    for waiting in (outs, backs):
        if waiting.error is not None:
            raise waiting.error
    return outs.seconds, backs.seconds


class _Waiting(threading.Thread):
    """Waits for copies, and looks at the clock."""

    def __init__(self, wait: Callable[[str], None], keys: Sequence[str], start: float) -> None:
        super().__init__(daemon=True)
        self._wait, self._keys, self._since = wait, keys, start
        self.seconds = 0.0
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        """What the thread does."""
        try:
            for key in self._keys:
                self._wait(key)
        except Exception as error:
            self.error = error
        self.seconds = time.perf_counter() - self._since
