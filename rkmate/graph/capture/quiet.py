"""What torch says about a trace that fails, kept from the user: it comes back as the exception.

Only what this thread says is kept back. Uses private names of torch (the modules whose `print` it is, and
the loggers of its tracers); tested with torch 2.13.
"""

from __future__ import annotations

import builtins
import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest import mock


def _printing() -> tuple[ModuleType, ...]:
    """Modules that print the graph so far, and the line of a traced graph that failed, to the standard
    error. The first takes seconds to load, with torch._dynamo."""
    import torch.export._trace
    import torch.fx.graph_module

    return torch.export._trace, torch.fx.graph_module


_LOGGERS = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextmanager
def quiet() -> Iterator[None]:
    """While a module is captured. What other threads print and log, and the model itself, is seen."""
    here = threading.get_ident()

    def printed(*values: Any, **how: Any) -> None:
        if threading.get_ident() != here:
            builtins.print(*values, **how)

    def is_seen(record: logging.LogRecord) -> bool:
        return record.thread != here or record.levelno >= logging.CRITICAL

    loggers = [logging.getLogger(name) for name in _LOGGERS]
    with ExitStack() as stack:
        for module in _printing():
            stack.enter_context(mock.patch.object(module, "print", printed, create=True))
        for logger in loggers:
            logger.addFilter(is_seen)
            stack.callback(logger.removeFilter, is_seen)
        yield
