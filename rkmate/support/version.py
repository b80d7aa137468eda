"""The version of rkmate, and the state of its source files."""

from __future__ import annotations

import functools
from importlib.metadata import PackageNotFoundError, version

from rkmate.support.warn import PACKAGE


def own_version() -> str:
    """Return the version of this package."""
    try:
        return version("rkmate")
    except PackageNotFoundError:        # run from a source tree that was never installed
        return "source"


@functools.cache
def source_state() -> tuple[int, int]:
    """Return the number of the package's source files, and when the newest of them was changed. What is kept
    on disk differs between versions, and in a source tree from one edit to the next."""
    files = [f.stat().st_mtime_ns for f in PACKAGE.rglob("*.py")]
    return len(files), max(files)
