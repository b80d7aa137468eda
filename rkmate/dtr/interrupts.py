"""Ctrl-C between two operations, never in the middle of one."""

from __future__ import annotations

import signal
import threading
from types import FrameType


class Interrupts:
    """Holds ``KeyboardInterrupt`` back while the runtime's own state is between two values.

    Only where Python's default handler is installed, and in the main thread, which alone gets it.
    """

    __slots__ = ("busy", "waiting", "_installed")

    def __init__(self) -> None:
        self.busy = False
        """An operation is being run and recorded."""
        self.waiting = False
        """An interrupt came meanwhile."""
        self._installed = False

    def install(self) -> None:
        """Take over from the default handler."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._arrive)
            self._installed = True

    def remove(self) -> None:
        """Give the default handler back."""
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def deliver(self) -> None:
        """Raise what waits."""
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if not self.busy:
            raise KeyboardInterrupt
        self.waiting = True
