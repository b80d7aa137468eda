"""Public names that load their modules when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(package: str, places: Mapping[str, Sequence[str]],
               packages: Sequence[str] = ()) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package.

    Args:
        package: its full name.
        places: by module, the names that it defines.
        packages: packages inside, by the last part of their names.
    """
    homes = {name: module for module, names in places.items() for name in names}

    def load(name: str) -> Any:
        if name in packages:
            return importlib.import_module(f"{package}.{name}")
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(importlib.import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)
        return found
    return load
