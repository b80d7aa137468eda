"""The cache folder, and JSON files in it."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import sys
import uuid
from pathlib import Path
from typing import Any

from rkmate.support.warn import warn

# -- The folder in which the package keeps what it need not do twice -------------------------------

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


MOST_BYTES = 64 << 20
"""Bytes that the files of one kind may take."""


# -- JSON files that appear whole or not at all, whoever else writes them --------------------------

def write_json(path: Path, content: Any, *, indent: int | None = None) -> None:
    """Write a file, replacing the one that was there. If that fails, the old file stays, and no other file is
    left.

    Raises:
        OSError: the file cannot be written: a full disk, no folder, no permission.
        TypeError: `content` is not JSON.
    """
    text = json.dumps(content, indent=indent) + "\n"
    path = path.resolve()                       # a link stays a link
    if path.exists() and not path.is_file():    # a pipe, or a device: there is nothing to replace
        path.write_text(text, encoding="utf-8")
        return
    part = path.with_name(f".{path.name[:64]}.{uuid.uuid4().hex}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def read_json(path: Path) -> Any:
    """Return a file's content; None where there is none. Warns about a file that is no JSON, and counts it as
    none. The file counts as used (`keep_newest`)."""
    try:
        text = path.read_text(encoding="utf-8")
        with contextlib.suppress(OSError):
            os.utime(path)
        return json.loads(text)
    except OSError:
        return None
    except ValueError as error:
        warn(f"{path} is broken and will not be used ({error}): what it kept is made again; delete the file")
        return None


def keep_newest(folder: Path, most_bytes: int = MOST_BYTES) -> None:
    """Delete the files of a folder that were used longest ago, if all together take more than `most_bytes`,
    until a quarter of that is free. Other processes may write to the folder, or do the same, meanwhile."""
    found = []
    with os.scandir(folder) as files:
        for file in files:
            with contextlib.suppress(OSError):      # another process has deleted it
                found.append((file.stat().st_mtime_ns, file.stat().st_size, file.path))
    total = sum(size for _, size, _ in found)
    if total <= most_bytes:
        return
    for _, size, path in sorted(found):
        if total <= most_bytes * 3 // 4:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size


_keep_newest_once = functools.cache(keep_newest)
"""`keep_newest`, once a process for each folder: for files of a few kilobytes."""


def store_json(path: Path, content: Any, *, is_small: bool = True) -> OSError | None:
    """Write a file of the cache, with its folder, and delete others if the folder is full. `is_small`: of a
    few kilobytes, so that it is enough to look at the folder once a process.

    Returns:
        The error if the file cannot be written: that costs time later, nothing else.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content)
        (_keep_newest_once if is_small else keep_newest)(path.parent)
    except OSError as error:
        return error
    return None
