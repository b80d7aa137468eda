"""What a forward may read, told by its code: the names that it asks objects for, global variables, variables
of enclosing functions, and attributes of classes."""

from __future__ import annotations

import dis
import functools
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from rkmate.graph.capture.state import MISSING, NUMBERS, globals_of

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
    """Global variables: the dictionary and the name, after the id of the dictionary and the name. Likewise
    attributes of objects that are such variables."""
    around: dict[tuple[int, str], tuple[type | CellType, str]] = field(default_factory=dict)
    """Attributes of classes, and variables of enclosing functions: the class or the cell, and the name."""
    assigned: set[str] = field(default_factory=set)
    """The names of attributes, and of variables of enclosing functions, that it assigns itself."""

    def note(self, holder: type | CellType, name: str, value: Any, names: Iterable[str]) -> None:
        """Note a value of a class or an enclosing function, where it is a number, text, a list or dictionary
        of numbers, or an object of such. `names`: of the attributes that may be read."""
        if name.startswith("__") or isinstance(value, type):
            return
        if isinstance(value, _COMPARED) or holds_numbers(value) or _is_record(value):
            self.around[id(holder), name] = holder, name
        if _is_record(value):
            content = vars(value)
            self.variables.update({(id(content), k): (content, k) for k in names
                                   if isinstance(content.get(k), _COMPARED) or holds_numbers(content.get(k))})


def read_by_forward(kind: type, held: Iterable[Any] = (), begin: Iterable[str] = ("forward",)) -> Read:
    """Return what the forward of a class of the user, its methods and functions of the user may read. `held`:
    functions in attributes of such a module, and hooks. `begin`: names of the methods to begin with."""
    members = [vars(c) for c in classes_of_user(kind)]
    found = Read()
    asked, told = set[str](), set[str]()
    todo = [*begin]
    functions: list[Any] = [f for h in held for f in _functions_in(h)]
    followed: set[int] = set()
    closed: list[tuple[str, CellType]] = []
    named: dict[int, Any] = {id(c): c for c in classes_of_user(kind)}
    while todo or functions:
        if not functions:
            name = todo.pop()
            functions = [f for d in members if name in d
                         for f in _functions_in(getattr(d[name], "fget", None) or d[name])]
            continue
        function = functions.pop()
        code: list[Any] = [getattr(function, "__code__", None)]
        variables = getattr(function, "__globals__", {})
        if code[0] is not None and id(function) not in followed:
            followed.add(id(function))
            closed += zip(code[0].co_freevars, function.__closure__ or (), strict=True)
            for cell in function.__closure__ or ():
                value = content_of(cell)
                functions += _functions_in(value)
                if _is_of_user(value):
                    named[id(value)] = value
        while code:
            c = code.pop()
            if c is None or id(c) in followed:
                continue
            followed.add(id(c))
            code += [k for k in c.co_consts if isinstance(k, CodeType)]
            texts = {k for k in c.co_consts if isinstance(k, str) and k.isidentifier()}
            if not _ASKS.isdisjoint(c.co_names):
                asked |= texts
            if "setattr" in c.co_names:
                told |= texts
            todo += [k for k in c.co_names if k not in found.names]
            found.names.update(c.co_names)
            found.assigned.update(_assigned_in(c))
            functions += _note_variables(found, variables, c)
            for value in map(variables.get, globals_of(c)):
                if _is_of_user(value):
                    named[id(value)] = value
    for name, cell in closed:
        if name not in found.assigned:
            found.note(cell, name, content_of(cell), found.names)
    for c in named.values():
        for name in found.names.intersection(vars(c)) - found.assigned:
            found.note(c, name, vars(c)[name], found.names)
    found.asked = sorted(k for k in asked - told if not k.startswith("__"))
    return found


_ASSIGNS = {"STORE_ATTR", "STORE_DEREF"}


@functools.lru_cache(maxsize=1024)
def _assigned_in(code: CodeType) -> frozenset[str]:
    """Return the names of attributes, and of variables of enclosing functions, that a function assigns."""
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in _ASSIGNS)


def content_of(cell: CellType) -> Any:
    """Return the value of a variable of an enclosing function; `MISSING` if it has none yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return MISSING


def _functions_in(value: Any) -> Iterator[FunctionType]:
    """Return a function of the user, and what it decorates."""
    while value is not None:
        value = value.func if isinstance(value, partial) else \
            value.__func__ if isinstance(value, (MethodType, staticmethod, classmethod)) else value
        if isinstance(value, FunctionType) and not _is_of_torch(value.__module__):
            yield value
        value = getattr(value, "__wrapped__", None) if isinstance(value, FunctionType) else \
            value if isinstance(value, (partial, MethodType)) else None


def _is_record(value: Any) -> bool:
    return isinstance(value, HOLDERS) or (is_dataclass(value) and not isinstance(value, type)
                                          and hasattr(value, "__dict__"))


def _is_of_user(value: Any) -> bool:
    return isinstance(value, type) and not value.__module__.startswith(("torch.", "builtins"))


def _note_variables(found: Read, variables: dict[str, Any], code: CodeType) -> list[Any]:
    """Note the global variables that some code reads. Returns the functions of the user among them."""
    functions: list[Any] = []
    for name in sorted(globals_of(code)):
        value = variables.get(name)
        if isinstance(value, FunctionType):
            functions += _functions_in(value)
        elif isinstance(value, ModuleType) and not _is_of_torch(value.__name__):
            for inner in code.co_names:
                if isinstance(vars(value).get(inner), _COMPARED):
                    found.variables[id(vars(value)), inner] = vars(value), inner
        elif not name.startswith("__") and (
                isinstance(value, (*_COMPARED, *HOLDERS)) or holds_numbers(value)
                or (is_dataclass(value) and not isinstance(value, type))):
            found.variables[id(variables), name] = variables, name
    return functions


def classes_of_user(kind: type) -> list[type]:
    """Return a class and its bases, without those of torch and Python."""
    return [*filter(_is_of_user, kind.__mro__)]


def _is_of_torch(module: str | None) -> bool:
    return module is None or module == "torch" or module.startswith(("torch.", "rkmate."))


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
