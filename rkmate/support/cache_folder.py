"""The folder in which the package keeps what it need not do twice."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_folder() -> Path:
    """Return the folder of cached entries: ``RKMATE_CACHE_DIR``, else the platform's cache folder."""
    named = os.environ.get("RKMATE_CACHE_DIR")
    if named:
        return Path(named)
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "rkmate" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "rkmate"
    xdg = os.environ.get("XDG_CACHE_HOME")
    return (Path(xdg) if xdg else Path.home() / ".cache") / "rkmate"
