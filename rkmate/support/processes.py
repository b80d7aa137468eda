"""The processor's cores, and solvers that run so that Ctrl-C reaches them."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

# -- Count the processor's cores -------------------------------------------------------------------

def cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return max(1, len(os.sched_getaffinity(0)))
    return os.cpu_count() or 1


# -- Running a solver so that Ctrl-C reaches it ----------------------------------------------------

def run_on_the_side(run: Callable[[], object], stop: Callable[[], object]) -> None:
    """Run to the end; on an interrupt, stop it first and raise then.

    The interpreter is free while HiGHS runs. Called from the main thread it would hold back Ctrl-C
    until the time limit, so there it runs on the side.
    """
    if threading.current_thread() is not threading.main_thread():
        run()
        return
    side = threading.Thread(target=run, daemon=True)
    side.start()
    try:
        side.join()
    except BaseException:
        stop()
        side.join()
        raise
