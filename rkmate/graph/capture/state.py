"""Side effects of a traced forward: attributes that it assigns, lists and dictionaries that it fills, and
random numbers of the host."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from io import IOBase
from operator import is_
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

from rkmate import device as devices
from rkmate.device.random_state import RandomState, unchanged_random_state
from rkmate.errors import CaptureError
from rkmate.graph.capture.collectives import without_collectives
from rkmate.graph.capture.forward_code import (
    MISSING,
    NUMBERS,
    Place,
    functions_of,
    globals_of,
    line_that_assigns,
    line_that_draws,
    stores_of,
    variables_around,
)
from rkmate.graph.capture.hidden import LARGE, NOTED, OTHERS, Hidden, hidden_in, is_leaf, write
from rkmate.graph.capture.structure import take_apart
from rkmate.torch_seam.containers import PLAIN, tensors_in
from rkmate.torch_seam.modules import (
    HOOKS,
    REGISTRIES,
    SHARED,
    WEIGHT_LISTS,
    forward_hooks_of,
    forward_pre_hooks_of,
    planned_part_of_call,
)
from rkmate.torch_seam.patches.libraries import begins_anew, names_in
from rkmate.torch_seam.tensors import FakeTensor


@dataclass(frozen=True)
class Assigned:
    """An attribute that a forward has assigned."""

    path: str
    holder: Any
    """The module, or an object that a module has as an attribute (its configuration, say)."""
    name: str
    old: Any
    new: Any

    @property
    def place(self) -> Place:
        """The attribute, as a name in its holder's dictionary."""
        return Place(self.holder.__dict__, self.name)

    @property
    def line(self) -> str:
        """The line that assigns the attribute, for a message (`line_that_assigns`)."""
        return line_that_assigns(self.holder, self.name)

    def repeat(self) -> None:
        """Assign the attribute again, with zeros instead of traced tensors."""
        new = self.new
        if tensors_in(new):
            tensors, structure = take_apart(new, result=True)
            new = structure.fill([torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors])
        self.place.write(new)


_FLAGS = (bool, str)
"""Types of constants that a forward may put into lists and dictionaries."""


def filled(path: str, place: tuple[int, str], held: Any, old: Any) -> Filled | None:
    """Return what a forward has put into a list or dictionary; None if that is neither tensors nor flags.

    Raises:
        CaptureError: it counts numbers there, which would be the same ones in each planned step; except in a
            dictionary of an attribute (`PythonState.numbers_left`).
    """
    if _same_members(held, old):
        return None
    if not (isinstance(held, dict) and any(place)) and _counted_in(held, old):
        raise CaptureError(f"the forward changes the numbers in {path}, which a planned step would not do "
                           "again: keep such state in a buffer (register_buffer), or pass it as an argument")
    if isinstance(held, deque):
        raise CaptureError(f"the forward puts values into the deque {path}, which a planned step would "
                           "not do again: return them, or put them into a list")
    found = Filled(path, place, held, old, held.copy())
    is_effect = found.is_longer or tensors_in(found.changes()) or found.constants() or begins_anew(held)
    return found if is_effect else None


def _counted_in(held: Any, old: Any) -> list[Any]:
    """Return the keys or places of numbers in a list or dictionary that are others."""
    if isinstance(held, dict):
        members = [(k, v, held.get(k)) for k, v in old.items()]
    else:
        members = [*zip(range(len(old)), old, held, strict=False)]
    # Their text is compared, as a number may note who asks for it (`told_apart`).
    return [k for k, was, now in members if _is_counted(was, now) and repr(now) != repr(was)]


def _is_counted(was: Any, now: Any) -> bool:
    """Return whether a member is a number before and after: one that a forward may count up."""
    return isinstance(was, NUMBERS) and isinstance(now, NUMBERS) and not type(was) is type(now) is bool


@dataclass(frozen=True)
class Filled:
    """A list or dictionary whose members a forward has changed: of the model, of a hook, or global."""

    path: str
    place: tuple[int, str]
    """The key of the attribute that leads to it (`Place.key`)."""
    held: Any
    old: Any
    """A copy from before the forward."""
    new: Any
    """A copy from after it."""

    @property
    def is_longer(self) -> bool:
        """Whether the container is a list that begins with all members from before."""
        return isinstance(self.held, list) and len(self.new) > len(self.old) \
            and all(map(is_, self.old, self.new))

    def changes(self) -> Any:
        """Return the members that are new: those after the members from before, or by their keys or places.
        All members of a list that has become shorter, or begins otherwise and has become longer. Not those
        that are counted (`Number`)."""
        if isinstance(self.held, list):
            if self.is_longer or len(self.new) != len(self.old):
                return self.new[len(self.old):] if self.is_longer else self.new
            return {k: v for k, v in enumerate(self.new) if self.old[k] is not v}
        return {k: v for k, v in self.new.items()
                if (was := self.old.get(k, MISSING)) is not v and not _is_counted(was, v)}

    def replaced(self) -> dict[Any, Any] | None:
        """Return what stood where the new members stand, by their keys or places (`MISSING` for nothing).
        None where other members have gone."""
        changes = self.changes()
        old = self.old if isinstance(self.old, dict) else dict(enumerate(self.old))
        if not isinstance(changes, dict) or not (
                isinstance(self.held, list) or old.keys() <= self.new.keys()):
            return None
        return {k: old.get(k, MISSING) for k in changes}

    def constants(self) -> dict[Any, Any]:
        """Return the flags and names among the new members, and numbers that had no place before."""
        changes, found = self.changes(), {}
        for k, old in (self.replaced() or {}).items():
            v = changes[k]
            if (type(v) in _FLAGS and (old is None or old is MISSING or type(old) is type(v))) or (
                    old is MISSING and isinstance(v, NUMBERS)):
                found[k] = v
        return found

    def repeat(self) -> None:
        """Fill the container again, with zeros instead of traced tensors."""
        tensors, structure = take_apart(self.changes(), result=True)
        members = structure.fill([torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in tensors])
        if isinstance(members, dict):
            pairs = enumerate(self.new) if isinstance(self.held, list) else self.new.items()
            new = {k: members.get(k, v) for k, v in pairs}
            members = [*new.values()] if isinstance(self.held, list) else new
        write(self.held, [*self.old, *members] if self.is_longer else members)


def members_of(args: Any, kwargs: Any) -> dict[tuple[Any, ...], tuple[Any, Any]]:
    """Return the lists and dictionaries among the arguments of a call, each with a copy, by the keys that
    lead to it."""
    found: dict[tuple[Any, ...], tuple[Any, Any]] = {}

    def visit(value: Any, keys: tuple[Any, ...]) -> None:
        if type(value) in NOTED:
            found[keys] = value, value.copy()
        if isinstance(value, (list, tuple, dict)) and len(value) <= LARGE and len(keys) < 5:
            for k, v in value.items() if isinstance(value, dict) else enumerate(value):
                visit(v, (*keys, k))

    for k, v in [*enumerate(args), *kwargs.items()]:
        visit(v, (k,))
    return found


def _reached_by(function: Any) -> Iterator[tuple[str, Any]]:
    """Return the objects that a function may change without being handed them, with names."""
    if isinstance(function, partial):
        yield from (("an argument", v) for v in (*function.args, *function.keywords.values()))
        function = function.func
    if isinstance(function, MethodType):
        yield type(function.__self__).__name__, function.__self__
        function = function.__func__
    if not isinstance(function, FunctionType):
        yield type(function).__name__, function
        return
    yield from ((p.name, v) for p in variables_around(function) if (v := p.read()) is not MISSING)
    yield from (("a default", v) for v in (*(function.__defaults__ or ()),
                                           *(function.__kwdefaults__ or {}).values()))
    yield from ((name, function.__globals__[name]) for name in globals_of(function.__code__)
                if name in function.__globals__)


COUNTS = ("a captured step would not repeat that. Do so outside of the forward and pass the value, or "
           "compute it from a buffer (register_buffer) that counts")


@dataclass(frozen=True)
class Number:
    """A number outside of the model's objects (of a class, a global one, or one of an enclosing function), or
    in a dictionary."""

    name: str
    """In words."""
    place: Place
    old: Any
    """The value at one moment."""
    attribute: tuple[int, str] | None = None
    """The attribute that leads to the dictionary, as in `Filled.place`."""


def _numbers_around(forward: FunctionType) -> Iterator[Number]:
    """Yield the numbers that a forward assigns to global variables and to those of an enclosing function."""
    variables = {p.name: p for p in variables_around(forward)}
    for how, name in stores_of(forward.__code__):
        if how == "STORE_GLOBAL":
            words, place = f"the global variable {name}", Place(forward.__globals__, name)
        elif how == "STORE_DEREF" and name in variables:
            words, place = f"the variable {name} of an enclosing function", variables[name]
        else:
            continue
        if type(value := place.read()) in NUMBERS:
            yield Number(words, place, value)


def _functions_of(modules: Sequence[nn.Module]) -> tuple[FunctionType, ...]:
    """Return the functions of the user that the forward of modules of one class may call."""
    held = (v for m in modules for v in m.__dict__.values() if isinstance(v, FunctionType))
    return tuple(functions_of(type(modules[0]), held))


class PythonState:
    """The attributes of every submodule, and of the objects that they hold, and the members of lists and
    dictionaries, at one moment: to compare with and to go back to."""

    def __init__(self, model: nn.Module) -> None:
        self._modules = [(name, m, dict(m.__dict__),
                          {f: dict(m.__dict__[f]) for f in REGISTRIES if f in m.__dict__})
                         for name, m in model.named_modules() if not isinstance(m, torch.jit.ScriptModule)]
        self._trained = [(p, p.requires_grad) for p in model.parameters()]
        objects = {id(v): (f"{name + '.' if name else ''}{k}", v) for name, m, d, _ in self._modules
                   for k, v in d.items() if _is_object(v)}
        self._holders: list[tuple[str, Any, dict[str, Any]]] = [
            *((path, m, attributes) for path, m, attributes, _ in self._modules),
            *((path, v, dict(v.__dict__)) for path, v in objects.values())]
        self._containers: dict[int, tuple[str, tuple[int, str], Any, Any]] = {}
        for path, holder, attributes in self._holders:
            self._note_members(path, holder, attributes)
        hooks = [h for m in model.modules()
                 for h in (*forward_hooks_of(m).values(), *forward_pre_hooks_of(m).values())]
        kinds: dict[type, list[nn.Module]] = {}
        for m in model.modules():
            kinds.setdefault(type(m), []).append(m)
        forwards = [f for kind in kinds if isinstance(f := getattr(kind, "forward", None), FunctionType)]
        self._functions = [*hooks, *forwards]
        functions = dict.fromkeys(f for same in kinds.values() for f in _functions_of(same))
        self._numbers = [n for f in functions for n in _numbers_around(f)]
        named = (v for f in functions for k in names_in(f.__code__)
                 if isinstance(v := f.__globals__.get(k), type))
        self._numbers += [Number(f"{c.__name__}.{k}", Place(c, k), v)
                          for c in dict.fromkeys(c for k in (*kinds, *named) for c in k.__mro__)
                          if not c.__module__.startswith(("torch.", "builtins"))
                          for k, v in vars(c).items() if type(v) in NUMBERS]
        for h in hooks:
            for name, value in _reached_by(h):
                self._note(name, (0, ""), value)
                if _is_object(value) and id(value) not in objects:
                    objects[id(value)] = name, value
                    self._holders.append((name, value, dict(value.__dict__)))
                    self._note_members(name, value, value.__dict__)
        for forward in forwards:
            for name, value in _reached_by(forward):
                self._note(name, (0, ""), value)
        self._hidden = [*self._hidden_state(functions)]
        for kind in kinds:
            for c in kind.__mro__ if not kind.__module__.startswith("torch.") else ():
                for name, value in vars(c).items() if not c.__module__.startswith("torch.") else ():
                    self._note(f"{c.__name__}.{name}", (0, ""), value)

    def _hidden_state(self, functions: Iterable[FunctionType]) -> Iterator[Hidden]:
        """Yield what has a state that nothing else here looks at."""
        seen = {id(holder) for _, holder, _ in self._holders
                if not is_leaf(holder) and not isinstance(holder, deque)}
        for path, _, attributes in self._holders:
            for k, v in attributes.items():
                if k not in REGISTRIES and k not in SHARED and not isinstance(v, PLAIN):
                    yield from hidden_in(f"{path}.{k}" if path else k, v, seen, inside=False)
        for f in functions:
            yield from hidden_in(f.__name__, vars(f), seen, inside=True)
            for v in (*(f.__defaults__ or ()), *(f.__kwdefaults__ or {}).values()):
                yield from hidden_in(f"of a default of {f.__name__}", v, seen, inside=True)
            for name, v in _reached_by(f):
                if is_leaf(v):
                    yield from hidden_in(name, v, seen, inside=True)

    def hidden_changes(self) -> list[Hidden]:
        """Return what has another state now, as it is now."""
        return [h.now() for h in self._hidden if h.has_changed()]

    def _note_members(self, path: str, holder: Any, attributes: Mapping[str, Any]) -> None:
        for k, v in attributes.items():
            if isinstance(v, ContextVar):
                self._note(f"{path}.{k}", (id(holder.__dict__), k), v.get(None))
            if k not in REGISTRIES and not (isinstance(holder, nn.RNNBase) and k in WEIGHT_LISTS):
                self._note(f"{path}.{k}" if path else k, (id(holder.__dict__), k), v)

    def _note(self, path: str, place: tuple[int, str], value: Any, depth: int = 2) -> None:
        """Note the members of a list or dictionary, and of those in it."""
        if type(value) not in NOTED or id(value) in self._containers:
            return
        self._containers[id(value)] = path, place, value, value.copy()
        if depth and len(value) <= LARGE:
            for k, v in value.items() if isinstance(value, dict) else enumerate(value):
                self._note(f"{path}[{k!r}]", place, v, depth - 1)

    def restore(self) -> None:
        """Put every attribute, every registry and the flags of parameters back."""
        for _, _, attributes, registries in self._modules:
            for field, content in registries.items():
                now = attributes[field]
                if not _same(now, content):
                    now.clear()
                    now.update(content)
        for _, holder, attributes in self._holders:
            if _same(holder.__dict__, attributes):
                continue
            for k in {*holder.__dict__, *attributes}:
                if holder.__dict__.get(k, MISSING) is not (old := attributes.get(k, MISSING)):
                    Place(holder.__dict__, k).write(old)
        for p, trained in self._trained:
            if p.requires_grad != trained:
                p.requires_grad_(trained)
        self.restore_numbers()
        self.restore_members()
        for hidden in self._hidden:
            if hidden.has_changed():
                hidden.restore()

    def restore_numbers(self) -> None:
        """Put numbers of classes, global ones, and those of enclosing functions back alone."""
        for number in self.numbers_left():
            number.place.write(number.old)

    def restore_members(self) -> None:
        """Put lists and dictionaries back alone, and their members: an export that has failed leaves copies
        of them."""
        for _, holder, attributes in self._holders:
            now = holder.__dict__
            for k, v in attributes.items():
                if id(v) in self._containers and now.get(k, MISSING) is not v:
                    now[k] = v
        for _, _, held, members in self._containers.values():
            if not _same_members(held, members):
                write(held, members)

    def containers(self) -> list[Any]:
        """Return the lists and dictionaries whose members are other objects now."""
        return [held for _, _, held, members in self._containers.values()
                if not _same_members(held, members)]

    def filled(self) -> list[Filled]:
        """Return the lists and dictionaries with other tensors among their members now."""
        return [f for path, place, held, members in self._containers.values()
                if (f := filled(path, place, held, members)) is not None]

    def refuse_iterators(self, model: nn.Module) -> None:
        """Raise `CaptureError` where a forward reads an iterator in an attribute of its module, which nobody
        can set back once a trace has advanced it."""
        for path, m, attributes, _ in self._modules:
            for name, value in attributes.items():
                if isinstance(value, Iterator) and not isinstance(value, IOBase) and any(
                        name in names_in(f.__code__) for f in _functions_of([m])):
                    raise CaptureError(f"{type(model).__name__}: the forward advances the iterator "
                                       f"{path}{'.' * bool(path)}{name}; {COUNTS}")

    def numbers_left(self) -> list[Number]:
        """Return the numbers of classes, global ones, those of enclosing functions, and those in dictionaries
        of attributes that have changed."""
        return [*(number for number in self._numbers if number.place.read() != number.old),
                *(Number(f"{path}[{k!r}]", Place(held, k), members[k], place)
                  for path, place, held, members in self._containers.values()
                  if isinstance(held, dict) and any(place) and not _same_members(held, members)
                  for k in _counted_in(held, members))]

    def leaked(self) -> str | None:
        """Return the name of something in which a trace has left one of its tensors, to be asked after
        `restore`; None if there is nothing."""
        for path, holder, _ in self._holders:
            for k, v in holder.__dict__.items():
                if k not in REGISTRIES and _holds_traced(v):
                    return f"{path}.{k}" if path else k
        for kind in dict.fromkeys(type(m) for _, m, _, _ in self._modules):
            if not kind.__module__.startswith("torch."):
                for k, v in vars(kind).items():
                    if _holds_traced(v):
                        return f"{kind.__name__}.{k}"
        return next((name for function in self._functions for name, v in _reached_by(function)
                     if _holds_traced(v)), None)

    def has_hooks_of(self, other: PythonState) -> bool:
        """Return whether the modules have the same hooks at another moment."""
        return all(_same(mine[field], its[field]) for mine, its in zip(
            self.hooks(), other.hooks(), strict=True) for field in HOOKS)

    def hooks(self) -> list[Mapping[str, Any]]:
        """Return the registries of hooks of all modules, as they were."""
        return [registries for *_, registries in self._modules]

    def restore_hooks(self) -> None:
        """Put the hooks back alone."""
        for _, m, _, registries in self._modules:
            for field in HOOKS:
                m.__dict__[field].clear()
                m.__dict__[field].update(registries[field])

    def assigned(self) -> list[Assigned]:
        """Return the attributes that are other objects now."""
        found = []
        for path, holder, attributes in self._holders:
            if _same(holder.__dict__, attributes):
                continue
            for k in sorted({*holder.__dict__, *attributes}):
                old, new = attributes.get(k, MISSING), holder.__dict__.get(k, MISSING)
                # A recurrent layer keeps lists of its weights, which the tracer swaps.
                if old is not new and not (isinstance(holder, nn.RNNBase) and k in WEIGHT_LISTS):
                    found.append(Assigned(f"{path + '.' if path else ''}{k}", holder, k, old, new))
        return found


def _same(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> bool:
    """Return whether two dictionaries hold the same objects under the same names."""
    return len(now) == len(before) and all(now.get(k, MISSING) is v for k, v in before.items())


def _same_members(now: Any, before: Any) -> bool:
    if isinstance(now, dict):
        return _same(now, before)
    return len(now) == len(before) and all(map(is_, now, before))


def _is_object(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) \
        and not isinstance(value, (*OTHERS, dict, list, set))


def _holds_traced(value: Any, depth: int = 3) -> bool:
    """Return whether a value is a tensor of a trace, or holds one, a few levels down."""
    if isinstance(value, torch.Tensor):
        return isinstance(value, FakeTensor)
    if isinstance(value, (dict, list, tuple, set, deque)):
        members: Any = value.values() if isinstance(value, dict) else value
    elif _is_object(value):
        members = value.__dict__.values()
    else:
        return False
    return depth > 0 and len(members) <= LARGE and any(_holds_traced(v, depth - 1) for v in list(members))


class HostDraws:
    """The states of Python's and NumPy's own generators."""

    def __init__(self) -> None:
        self._python = random.getstate()
        # NumPy's global generator exists only once NumPy is loaded.
        self._numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
        self._loaded = len(sys.modules)

    def drawn_by_imports(self) -> bool:
        """Return whether draws may be those of modules that were imported meanwhile."""
        return len(sys.modules) > self._loaded and bool(self._drawn())

    def refuse_change(self, model: nn.Module) -> None:
        """Raise when the forward has drawn from one of them: a captured step would repeat the draw."""
        drew = self._drawn()
        if drew:
            kinds = [type(m) for m in model.modules()]
            where = [f"{name}{line_that_draws(kinds, call.__self__)}" for name, call in drew.items()]
            raise CaptureError(
                f"{type(model).__name__}: the forward draws from {' and '.join(where)}; a captured "
                "step would repeat the draw of its trace. Draw with torch (torch.rand), which is "
                "part of the step.")

    def _drawn(self) -> dict[str, Any]:
        """Return a method of each generator whose state is another now, by the generator's name."""
        drew: dict[str, Any] = {}
        if random.getstate() != self._python:
            drew["random"] = random.random
        if self._numpy is not None:
            numpys = sys.modules["numpy"].random
            now = numpys.get_state()
            if now[2:] != self._numpy[2:] or (now[1] != self._numpy[1]).any():
                drew["numpy.random"] = numpys.rand
        return drew

    def restore(self) -> None:
        """Put both back."""
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy"].random.set_state(self._numpy)


class BuffersAndDraws:
    """The buffers of a model and the states of all generators, before a forward that was for nothing."""

    def __init__(self, model: nn.Module) -> None:
        self._buffers = [(b, b.detach().clone()) for b in model.buffers()]
        self._draws, self._host = RandomState.of(*devices.in_use()), HostDraws()

    @torch.no_grad()
    def restore(self) -> None:
        """Put buffers and generators back. Buffers that did not change keep their versions."""
        for buffer, value in self._buffers:
            if value.layout is not torch.strided or not torch.equal(buffer, value):
                buffer.copy_(value)
        self._draws.restore()
        self._host.restore()

def complete(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run a forward, as its first call may make what later ones read (tables, say): that stays. Its random
    draws, what it writes to buffers, and what it counts up, do not: a list or dictionary that it makes stays
    as it is made. Raises `CaptureError` where it resizes a buffer, or where a second call returns something
    else, or writes to a buffer that the first has made."""
    tensors, structure = take_apart((args, kwargs), result=False)
    before = [(name, t, t.detach().clone()) for name, t in model.named_buffers()]
    numbers, results = [_numbers_in(model)], list[list[torch.Tensor]]()
    held: list[Hidden] = []
    for n in range(2):
        with unchanged_random_state(*devices.in_use()), torch.no_grad(), without_collectives():
            given, named = structure.fill([t.detach().clone() for t in tensors])
            try:
                results.append(take_apart(planned_part_of_call(model)(*given, **named), result=True)[0])
            finally:
                for name, t, value in before:
                    if t.shape != value.shape:
                        raise CaptureError(resizes(model, name))
                    t.data.copy_(value)     # a step that goes on may have saved it for its backward
        numbers.append(_numbers_in(model))
        results[-1] += [t.detach().clone() for _, t in model.named_buffers()]
        if not n:
            seen = set[int]()
            held = [h for m in model.modules() for k, v in vars(m).items() if k not in REGISTRIES
                    for h in hidden_in(k, v, seen, inside=True)]
    if len(results[0]) != len(results[1]) or not all(map(torch.equal, *results)):
        raise CaptureError("a second call returns something else")
    start, first, second = numbers
    for (m, k), number in second.items():
        if (made := first.get((m, k), number)) != number:
            vars(m)[k] = start.get((m, k), made - (number - made))
    for h in held:
        if h.has_changed():
            h.set_back()


def _numbers_in(model: nn.Module) -> dict[tuple[nn.Module, str], int | float]:
    """Return the numbers in attributes of modules."""
    return {(m, k): v for m in model.modules() for k, v in vars(m).items() if type(v) in (int, float)}


def resizes(model: nn.Module, name: str) -> str:
    """Return the message for a buffer that the first call makes larger: the problem, and what to do."""
    return (f"{type(model).__name__}: the forward resizes the buffer {name!r}, which a captured step would "
            "not repeat. Where only the first call does so (observers of torch.ao.quantization), call the "
            "model once before it is wrapped")
