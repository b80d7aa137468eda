"""Public names that load their modules when they are first used (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def lazy_names(package: str, places: Mapping[str, Sequence[str]],
               packages: Sequence[str] = (),
               explain: Callable[[Exception], Exception | None] = lambda error: None
               ) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and the ``__dir__`` of a package.

    Args:
        package: its full name.
        places: by module, the names that it defines.
        packages: packages inside, by the last part of their names.
        explain: returns the error to raise instead of one with which a module does not load; None for that.
    """
    homes = {name: module for module, names in places.items() for name in names}

    def load(name: str) -> Any:
        if name not in homes and name not in packages:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(homes.get(name, f"{package}.{name}"))
        except (ImportError, AttributeError) as error:
            better = explain(error)
            if better is None:
                raise
            raise better from error
        if name in packages:
            return module
        found = getattr(module, name)
        setattr(sys.modules[package], name, found)
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *packages})

    return load, names
