"""Warnings that point at the caller's own line."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from pathlib import Path

from rkmate.errors import RkmateWarning

PACKAGE = Path(__file__).parent.parent
"""The folder of this package."""
_INSIDE: tuple[str, ...] = (str(PACKAGE) + os.sep, contextlib.__file__,
                            functools.__file__, "<rkmate")
"""Beginnings of names of files that a warning skips; the last one is that of generated code."""


def warn(message: str) -> None:
    """Warn, naming the first line on the stack that is neither this package's nor torch's."""
    inside = _INSIDE
    if torch := sys.modules.get("torch"):    # where it is not loaded, none of its frames is on the stack
        inside += tuple(folder + os.sep for folder in torch.__path__)
    frame, level = sys._getframe(1), 2
    while frame.f_code.co_filename.startswith(inside):
        if frame.f_back is None:        # a thread of the autograd engine: nobody called
            level = 2
            break
        frame, level = frame.f_back, level + 1
    warnings.warn(message, RkmateWarning, stacklevel=level)
