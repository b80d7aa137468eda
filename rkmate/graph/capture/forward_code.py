"""What a forward may read and assign, told by its code: the names that it asks objects for, global variables,
variables of enclosing functions, and attributes of classes; and the places where such values stand."""

from __future__ import annotations

import dis
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, is_dataclass
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from torch import nn

MISSING = object()
"""Stands for a value that is not there."""
NUMBERS = (int, float, complex)
"""Types of the numbers that are looked at in lists and dictionaries."""


class Place(NamedTuple):
    """A name, and what a value stands under it in: a dictionary (of attributes, or of global variables), a
    class, or the variable of an enclosing function itself."""

    holder: dict[Any, Any] | type | CellType
    name: Any

    @property
    def key(self) -> tuple[int, Any]:
        """The identity of the holder, and the name."""
        return id(self.holder), self.name

    def read(self) -> Any:
        """Return the value; `MISSING` if there is none."""
        if isinstance(self.holder, CellType):
            try:
                return self.holder.cell_contents
            except ValueError:                  # it has no value yet
                return MISSING
        return (vars(self.holder) if isinstance(self.holder, type) else self.holder).get(self.name, MISSING)

    def write(self, value: Any) -> None:
        """Put a value there, or nothing (`MISSING`)."""
        if isinstance(self.holder, CellType):
            self.holder.cell_contents = value
        elif isinstance(self.holder, type):
            setattr(self.holder, self.name, value)
        elif value is MISSING:
            self.holder.pop(self.name, None)
        else:
            self.holder[self.name] = value


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


@dataclass
class Read:
    """Names that the forward of a class, and what that calls, may read."""

    asked: list[str] = field(default_factory=list)
    """Names that it asks an object for with a default."""
    names: set[str] = field(default_factory=set)
    """All names in its code."""
    variables: dict[tuple[int, str], Place] = field(default_factory=dict)
    """Global variables, and attributes of objects that are such variables, by the keys of their places."""
    around: dict[tuple[int, str], Place] = field(default_factory=dict)
    """Attributes of classes, and variables of enclosing functions, by the keys of their places."""
    assigned: set[str] = field(default_factory=set)
    """The names of attributes, and of variables of enclosing functions, that it assigns itself."""

    def note(self, place: Place, names: Iterable[str]) -> None:
        """Note a value of a class or an enclosing function, where it is a number, text, a list or dictionary
        of numbers, or an object of such. `names`: of the attributes that may be read."""
        value = place.read()
        if place.name.startswith("__") or isinstance(value, type):
            return
        if isinstance(value, _COMPARED) or holds_numbers(value) or _is_record(value):
            self.around[place.key] = place
        if _is_record(value):
            inside = [Place(vars(value), k) for k in names]
            self.variables.update({p.key: p for p in inside if isinstance(v := p.read(), _COMPARED)
                                   or holds_numbers(v)})


def line_that_assigns(holder: Any, name: str) -> str:
    """Return where the forward of an object, or what that calls, assigns an attribute, for a message; empty
    where nothing of the user's code does."""
    return next((line for _, line, instruction in _instructions_of([type(holder)])
                 if instruction.opname == "STORE_ATTR" and instruction.argval == name), "")


def line_that_draws(kinds: Iterable[type], generator: object) -> str:
    """Return where the forwards of some classes, or what they call, call a method of a generator of Python's
    or NumPy's by a global name (``random.random``, ``np.random.rand``), for a message; empty where none
    does."""
    value: Any = None
    for function, line, instruction in _instructions_of(kinds):
        if instruction.opname == "LOAD_GLOBAL":
            value = function.__globals__.get(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and isinstance(value, ModuleType):
            value = getattr(value, instruction.argval, None)
        else:
            value = None
        if getattr(value, "__self__", None) is generator:
            return line
    return ""


def _instructions_of(kinds: Iterable[type]) -> Iterator[tuple[FunctionType, str, dis.Instruction]]:
    """Yield the instructions of the forwards of some classes, and of what they call: the function that each
    is in, the words for its line, and the instruction."""
    for function in (f for kind in dict.fromkeys(kinds) for f in functions_of(kind)):
        for code in _codes_in(function.__code__):
            lines, line = dict(dis.findlinestarts(code)), None
            for instruction in dis.get_instructions(code):
                line = lines.get(instruction.offset) or line
                yield function, f" at {code.co_filename}:{line}", instruction


def functions_of(kind: type, held: Iterable[Any] = (), begin: Iterable[str] = ("forward",)
                 ) -> Iterator[FunctionType]:
    """Yield the functions of the user that the forward of a class may call by name: methods, global ones,
    those of an enclosing function, and what they decorate. `held`: functions in attributes of such a module,
    and hooks. `begin`: names of the methods to begin with."""
    members = [vars(c) for c in classes_of_user(kind)]
    todo, names = list(held), dict.fromkeys(begin)
    followed: set[int] = set()
    seen = set[str]()
    while todo or names:
        if not todo:
            name, _ = names.popitem()
            seen.add(name)
            todo = [getattr(d[name], "fget", None) or d[name] for d in members if name in d]
            continue
        for function in _functions_in(todo.pop()):
            if id(function) in followed:
                continue
            followed.add(id(function))
            yield function
            todo += [p.read() for p in variables_around(function)]
            for c in _codes_in(function.__code__):
                todo += map(function.__globals__.get, sorted(globals_of(c)))
                names |= dict.fromkeys(k for k in c.co_names if k not in seen)


def read_by_forward(kind: type, held: Iterable[Any] = (), begin: Iterable[str] = ("forward",)) -> Read:
    """Return what the forward of a class of the user, its methods and functions of the user may read; for
    `held` and `begin` see `functions_of`."""
    found = Read()
    asked, told = set[str](), set[str]()
    closed: list[Place] = []
    named: dict[int, Any] = {id(c): c for c in classes_of_user(kind)}
    for function in functions_of(kind, held, begin):
        closed += variables_around(function)
        around = [p.read() for p in variables_around(function)]
        for c in _codes_in(function.__code__):
            texts = {k for k in c.co_consts if isinstance(k, str) and k.isidentifier()}
            if not _ASKS.isdisjoint(c.co_names):
                asked |= texts
            if "setattr" in c.co_names:
                told |= texts
            found.names.update(c.co_names)
            found.assigned.update(name for how, name in stores_of(c) if how != "STORE_GLOBAL")
            _note_variables(found, function.__globals__, c)
            around += map(function.__globals__.get, globals_of(c))
        named |= {id(value): value for value in around if _is_of_user(value)}
    for place in closed:
        if place.name not in found.assigned:
            found.note(place, found.names)
    for c in named.values():
        for name in found.names.intersection(vars(c)) - found.assigned:
            found.note(Place(c, name), found.names)
    found.asked = sorted(k for k in asked - told if not k.startswith("__"))
    return found


def variables_around(function: FunctionType) -> list[Place]:
    """Return the variables of enclosing functions that a function uses."""
    return [*map(Place, function.__closure__ or (), function.__code__.co_freevars)]


@lru_cache(maxsize=1024)
def globals_of(code: CodeType) -> frozenset[str]:
    """Return the names of the global variables that some code reads or assigns, but no attributes' names."""
    return frozenset(i.argval for i in dis.get_instructions(code)
                     if i.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL"))


@lru_cache(maxsize=1024)
def stores_of(code: CodeType) -> tuple[tuple[str, str], ...]:
    """Return the attributes, global variables, and variables of enclosing functions that some code assigns:
    (instruction, name) of each."""
    return tuple((i.opname, i.argval) for i in dis.get_instructions(code)
                 if i.opname in ("STORE_ATTR", "STORE_GLOBAL", "STORE_DEREF"))


@lru_cache(maxsize=1024)
def _codes_in(code: CodeType) -> tuple[CodeType, ...]:
    """Return the code of a function, and of the functions in it."""
    return code, *(c for k in code.co_consts if isinstance(k, CodeType) for c in _codes_in(k))


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


def _note_variables(found: Read, variables: dict[str, Any], code: CodeType) -> None:
    """Note the global variables that some code reads."""
    for name in sorted(globals_of(code)):
        value = variables.get(name)
        places: list[Place] = []
        if isinstance(value, ModuleType) and not _is_of_torch(value.__name__):
            places = [p for k in code.co_names if isinstance((p := Place(vars(value), k)).read(), _COMPARED)]
        elif not name.startswith("__") and (
                isinstance(value, (*_COMPARED, *HOLDERS)) or holds_numbers(value)
                or (is_dataclass(value) and not isinstance(value, type))):
            places = [Place(variables, name)]
        found.variables.update({p.key: p for p in places})


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
