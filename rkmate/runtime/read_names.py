"""What a forward may read, told by its code: the names that it asks objects for, and the global variables."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass
from inspect import unwrap
from types import CodeType, FunctionType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from rkmate.graph.capture.state import MISSING, NUMBERS

_COMPARED = (*NUMBERS, str)
"""Types of the global variables that are compared."""
HOLDERS = (Namespace, SimpleNamespace)
"""Types of global objects whose attributes are compared, next to data classes."""
_ASKS = {"getattr", "hasattr"}
"""Functions that ask an object for an attribute by its name."""
_MOST = 4096
"""Members of a list or dictionary that are compared, at most."""
_DEEP = 3
"""Lists and dictionaries inside of each other that are looked into."""


class Globals:
    """The global variables of a module, as attributes of an object."""

    def __init__(self, variables: dict[str, Any]) -> None:
        self.__dict__ = variables


@dataclass
class Read:
    """What the forward of a class, and what that calls, may read."""

    asked: list[str] = field(default_factory=list)
    """Names that it asks an object for with a default."""
    names: set[str] = field(default_factory=set)
    """All names in its code."""
    variables: dict[tuple[int, str], tuple[dict[str, Any], str]] = field(default_factory=dict)
    """Global variables: the dictionary and the name, after the id of the dictionary and the name."""


def read_by_forward(kind: type) -> Read:
    """Return what the forward of a class of the user, its methods and functions of the user may read."""
    members = [vars(c) for c in classes_of_user(kind)]
    found = Read()
    asked: set[str] = set()
    todo = ["forward"]
    functions: list[Any] = []
    followed: set[int] = set()
    while todo or functions:
        if not functions:
            name = todo.pop()
            functions = [unwrap(getattr(d[name], "fget", d[name])) for d in members if name in d]
            continue
        function = functions.pop()
        code: list[Any] = [getattr(function, "__code__", None)]
        variables = getattr(function, "__globals__", {})
        while code:
            c = code.pop()
            if c is None or id(c) in followed:
                continue
            followed.add(id(c))
            code += [k for k in c.co_consts if isinstance(k, CodeType)]
            if not _ASKS.isdisjoint(c.co_names):
                asked.update(k for k in c.co_consts if isinstance(k, str) and k.isidentifier())
            todo += [k for k in c.co_names if k not in found.names]
            found.names.update(c.co_names)
            functions += _note_variables(found, variables, c.co_names)
    found.asked = sorted(k for k in asked if not k.startswith("__"))
    return found


def _note_variables(found: Read, variables: dict[str, Any], names: Iterable[str]) -> list[Any]:
    """Note the global variables among some names. Returns the functions of the user among them."""
    functions = []
    for name in names:
        value = variables.get(name)
        if isinstance(value, FunctionType) and not _is_of_torch(value.__module__):
            functions.append(unwrap(value))
        elif isinstance(value, ModuleType) and not _is_of_torch(value.__name__):
            for inner in names:
                if isinstance(vars(value).get(inner), _COMPARED):
                    found.variables[id(vars(value)), inner] = vars(value), inner
        elif not name.startswith("__") and (
                isinstance(value, (*_COMPARED, *HOLDERS)) or holds_numbers(value)
                or (is_dataclass(value) and not isinstance(value, type))):
            found.variables[id(variables), name] = variables, name
    return functions


def classes_of_user(kind: type) -> list[type]:
    """Return a class and its bases, without those of torch and Python."""
    return [c for c in kind.__mro__ if not c.__module__.startswith(("torch.", "builtins"))]


def _is_of_torch(module: str | None) -> bool:
    return module is None or module == "torch" or module.startswith("torch.")


def members_of(value: Any, depth: int = _DEEP, written: Mapping[int, Mapping[Any, Any]] | None = None
               ) -> list[Any]:
    """Return the members of a list or dictionary, keys included, and of those in it. `written`: by the id of
    such a list or dictionary, the members to return instead of those at some keys or places."""
    found: list[Any] = []
    instead = (written or {}).get(id(value))
    if isinstance(value, dict):
        value = value if instead is None else {
            k: v for k, v in {**value, **instead}.items() if v is not MISSING}
        value = *value, *value.values()
    elif instead is not None:
        value = [instead.get(k, v) for k, v in enumerate(value)]
    for member in value if isinstance(value, (list, tuple)) else ():
        inside = isinstance(member, (dict, list)) and depth > 1
        found += members_of(member, depth - 1, written) if inside else [member]
    return found


def holds_numbers(value: Any) -> bool:
    """Return whether a value is a list or dictionary of numbers, and perhaps of other things."""
    if not isinstance(value, (dict, list)) or isinstance(value, nn.Module) or len(value) > _MOST:
        return False
    members = value.values() if isinstance(value, dict) else value
    return any(isinstance(m, NUMBERS) or holds_numbers(m) for m in members)
