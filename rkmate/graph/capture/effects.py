"""Changes that a forward leaves behind next to its result: of attributes, of objects among its arguments, of
lists and dictionaries in which the model or its hooks collect tensors.

A trace sees none of them. What a traced forward has left there is found when it is over; its tensors are
further outputs of the step, and each planned forward writes them where the model's own forward does. A number
that a forward only adds to is added to.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MethodDescriptorType, WrapperDescriptorType
from typing import Any

import torch
from torch import nn

from rkmate.errors import CaptureError
from rkmate.graph.capture.answers import Answer
from rkmate.graph.capture.forward_code import MISSING, NUMBERS
from rkmate.graph.capture.state import COUNTS, Assigned, Filled, Number
from rkmate.graph.capture.structure import HeldByModule, Structure, take_apart
from rkmate.torch_seam.containers import PLAIN, pytree, tensors_in
from rkmate.torch_seam.patches.modules import MadeByFirstCall
from rkmate.torch_seam.tensors import storage_id

Tensors = Sequence[Any]
"""The tensors among the arguments, then the outputs of a step."""


@dataclass(frozen=True)
class Written:
    """An attribute that each forward assigns, and does not read."""

    assigned: Assigned
    value: Structure
    """Around `Tensors`."""
    step: int | float | None = None
    """The amount that a forward adds to a number; None where it assigns the same value each time."""

    def repeat(self, tensors: Tensors) -> None:
        """Assign it, after a planned forward."""
        place, new = self.assigned.place, self.assigned.new
        if self.step is not None:
            place.write(place.read() + self.step)
        elif self.value.count:
            place.write(self.value.fill(list(tensors)))
        elif place.read() is not new:
            place.write(new)


@dataclass(frozen=True)
class ChangedObject:
    """An object among the arguments that a forward changes (a key-value cache)."""

    leaf: int
    """The object's number among the leaves of the arguments."""
    after: Structure
    """Around `Tensors`."""

    def repeat(self, leaves: Sequence[Any], tensors: Tensors) -> None:
        """Change the caller's object, which stays the object that it is."""
        _move_into(leaves[self.leaf], self.after.fill(list(tensors)), {})


@dataclass(frozen=True)
class Collected:
    """A list or dictionary into which each forward puts tensors or flags, which it does not read."""

    filled: Filled
    members: Structure
    """The new members, around `Tensors`."""
    at: tuple[Any, ...] = ()
    """The keys that lead to it, if it is among the arguments of a call."""
    appends: bool = False
    """Whether a list gets them in addition to those that it has."""

    def repeat(self, tensors: Tensors, args: Any, kwargs: Any) -> None:
        """Put the members into the container, after a planned forward."""
        held, members = self._held(args, kwargs), self.members.fill(list(tensors))
        if isinstance(held, dict):
            for k in self.filled.old.keys() - self.filled.new.keys():
                held.pop(k, None)
            held.update(members)
        elif isinstance(members, dict):
            for k, v in members.items():
                held[k:k + 1] = [v]
        else:
            held[len(held) if self.appends else 0:] = members

    def now(self, args: Any, kwargs: Any) -> Any:
        """Return the members that a forward has just put there."""
        held, names = self._held(args, kwargs), self.members.fill([None] * self.members.count)
        if isinstance(names, dict):
            return {k: held.get(k) if isinstance(held, dict) else held[k] for k in names}
        return held[len(held) - len(names):]

    def _held(self, args: Any, kwargs: Any) -> Any:
        if not self.at:
            return self.filled.held
        first, *keys = self.at
        return functools.reduce(operator.getitem, keys,
                                args[first] if isinstance(first, int) else kwargs[first])


@dataclass(frozen=True)
class Counted:
    """A number of a class, in a dictionary, a global one, or one of an enclosing function that each forward
    changes, and does not read."""

    number: Number
    new: Any
    """Value after the first forward."""
    step: int | float | None
    """The amount that a forward adds; None where it assigns the same value each time."""

    def repeat(self) -> None:
        """Change it, after a planned forward."""
        place = self.number.place
        place.write(self.new if self.step is None else place.read() + self.step)


def counted(name: str, numbers: Sequence[tuple[Number, Any]], alike: bool) -> tuple[Counted, ...]:
    """Return what each forward does to some numbers, after a second one. `numbers`: with what the first one
    made of them. `alike`: whether both have otherwise done the same. Raises `CaptureError` where they have
    not, or have changed a number in different ways."""
    found = []
    for number, new in numbers:
        now, step = number.place.read(), _step(number.old, new)
        asked = isinstance(now, Watched) and now.was_asked
        if not alike or asked or (now != new and (step is None or step != _step(new, now))):
            raise CaptureError(f"{name}: the forward changes {number.name}; {COUNTS}")
        found.append(Counted(number, new, None if now == new else step))
    return tuple(found)


@dataclass(frozen=True)
class Effects:
    """Everything that a forward leaves changed, except tensors that it writes to."""

    attributes: tuple[Written, ...] = ()
    objects: tuple[ChangedObject, ...] = ()
    collected: tuple[Collected, ...] = ()
    numbers: tuple[Counted, ...] = ()
    answers: tuple[Answer, ...] = ()
    """Answers that a forward has to find for all of this, and its result, to be right."""

    def __bool__(self) -> bool:
        return bool(self.attributes or self.objects or self.collected or self.numbers)

    def repeat(self, args: Any, kwargs: Any, tensors: Tensors) -> None:
        """Make the changes that the forward makes, after a planned one with these arguments."""
        for written in self.attributes:
            written.repeat(tensors)
        for each in self.collected:
            each.repeat(tensors, args, kwargs)
        for number in self.numbers:
            number.repeat()
        if self.objects:
            leaves = pytree.tree_leaves((args, kwargs))
            for changed in self.objects:
                changed.repeat(leaves, tensors)

    def left_in(self, args: Any, kwargs: Any) -> dict[int, torch.Tensor]:
        """Return the tensors that a forward without a plan has just left in its arguments, by their numbers
        among `Tensors`."""
        leaves = pytree.tree_leaves((args, kwargs)) if self.objects else []
        found: dict[int, torch.Tensor] = {}
        for structure, value in (*((o.after, leaves[o.leaf]) for o in self.objects),
                                 *((c.members, c.now(args, kwargs)) for c in self.collected if c.at)):
            tensors, now = take_apart(value, result=True)
            if len(now.slots) == len(structure.slots):
                found |= dict(zip(structure.slots, (tensors[k] for k in now.slots), strict=True))
        return found


def found_effects(assigned: Sequence[Assigned], filled: Sequence[tuple[tuple[Any, ...], Filled]],
                  changed: Sequence[tuple[int, Any]], tensors: Sequence[torch.Tensor],
                  held: Iterable[tuple[int, HeldByModule]]) -> tuple[Effects, list[torch.Tensor]]:
    """Return the changes of one forward (attributes; lists and dictionaries, with the keys of those among the
    arguments; and objects among the arguments with their numbers), and its tensors with those of the changes.
    `tensors`: those among the arguments, and in the result. `held`: where modules hold tensors, after their
    identities: an attribute that is assigned one of these is that tensor."""
    every = list(tensors)
    places = {a.place.key for a in assigned}
    stay = {k: h for k, h in held if (id(vars(h.module)), h.name) not in places}

    def apart(value: Any) -> Structure:
        nonlocal every
        if value is MISSING:
            return take_apart(None, result=True)[1]
        before = len(every)
        every, structure = take_apart(value, result=True, after=every, held=stay)
        # What is made of tensors alone counts them; a constant counts none.
        return replace(structure, count=len(every) if tensors_in(value) else 0) if before else structure

    attributes = tuple(Written(a, apart(a.new)) for a in assigned)
    objects = tuple(ChangedObject(k, apart(value)) for k, value in changed)
    collected = tuple(Collected(f, apart(f.changes()), at, bool(at) and f.is_longer) for at, f in filled
                      if f.place not in places)                          # not replaced by another list
    return Effects(attributes, objects, collected), every


def repeated(effects: Effects, again: Sequence[Assigned], name: str, *, hooks: bool) -> Effects:
    """The effects, with what a second forward has done from where the first one has left the attributes. A
    plain attribute that only the first one assigns is none, except for a flag of a module: the second
    assignment cannot be seen. `hooks`: whether the first forward adds hooks, which a flag may stand for.

    Raises:
        CaptureError: a plain attribute changes otherwise than by counting.
    """
    second = {(id(a.holder), a.name): a for a in again}
    attributes = []
    for written in effects.attributes:
        first, then = written.assigned, second.get((id(written.assigned.holder), written.assigned.name))
        asked = then is not None and isinstance(then.new, Watched) and then.new.was_asked
        if then is not None and isinstance(first.new, PLAIN) and (asked or then.new != first.new):
            step = _step(first.old, first.new)
            if asked or step is None or step != _step(then.old, then.new):
                is_new = first.old is MISSING or first.old is None
                counts = is_new and not asked and _step(then.old, then.new) is not None
                raise (MadeByFirstCall if counts else CaptureError)(_differs(name, first, asked))
            written = replace(written, step=step)
        elif then is not None and _values(first.new) != _values(then.new):
            raise CaptureError(_differs(name, first, asked))
        flag = type(first.old) is type(first.new) is bool and isinstance(first.holder, nn.Module)
        if then is not None or tensors_in(first.new) or (flag and not hooks):
            attributes.append(written)
    return replace(effects, attributes=tuple(attributes))


def _differs(name: str, assigned: Assigned, decides: bool) -> str:
    """Return the message for an attribute that a forward gives another value in each call."""
    why, instead = (
        " and decides what it does",
        "Keep such state in a buffer (register_buffer), or pass it as an argument") if decides else (
        " (a time, or a number that is computed from the one before)",
        "Assign it outside of the forward, or keep it in a buffer (register_buffer)")
    return (f"{name}: the forward assigns {assigned.path}{assigned.line}, which is another value in each "
            f"call{why}; a captured step would not repeat that. {instead}")


def _values(value: Any) -> list[Any]:
    """Return the plain values in containers, and those like them that are equal by value (times, paths)."""
    return [x if isinstance(x, PLAIN) else hash(x) for x in pytree.tree_leaves(value)
            if isinstance(x, PLAIN) or type(x).__module__ in _STANDARD]


_STANDARD = ("datetime", "decimal", "fractions", "pathlib", "uuid")
"""Modules of Python's whose objects are values."""


def collected_again(effects: Effects, again: Effects) -> Effects | None:
    """Return the effects of a forward, with what a second one has shown: whether lists grow, or begin anew.
    None if it has filled other lists and dictionaries, or in another way."""
    second = {c.at or id(c.filled.held): c for c in again.collected}
    found = []
    for c in effects.collected:
        then = second.pop(c.at or id(c.filled.held), None)
        one, constants = c.filled, c.filled.constants()
        before = one.changes()
        if not c.at and isinstance(one.held, dict) and any(
                one.held.get(k, v) != v for k, v in constants.items()
                if isinstance(v, NUMBERS) and not isinstance(v, bool)):
            raise MadeByFirstCall(f"the forward counts in {one.path} under a key that its first call makes; "
                                  "a captured step would not repeat that. Set it to 0 outside of the forward")
        if then is None:
            if isinstance(one.held, list) and not tensors_in(before):
                continue                # a first call puts values there
            if len(constants) < len(before):
                return None
            found.append(c)             # it finds the flags as it leaves them
            continue
        two = then.filled
        now = two.changes()
        if isinstance(before, dict) and isinstance(now, dict):
            if before.keys() - constants.keys() != now.keys() - constants.keys() or \
                    any(now.get(k, v) != v for k, v in constants.items()):
                return None
        elif len(before) != len(now) or _values(before) != _values(now) or (
                two.is_longer != one.is_longer and (one.old or not one.is_longer)):
            return None             # only of a list that was empty does the first not tell whether it grows
        found.append(replace(c, appends=two.is_longer))
    return None if second else replace(effects, collected=tuple(found))


def _step(old: Any, new: Any) -> int | float | None:
    numbers = (int, float)
    if isinstance(old, bool) or not isinstance(old, numbers) or not isinstance(new, numbers):
        return None
    return int(new) - int(old) if isinstance(new, int) and isinstance(old, int) else new - old


def read_before(effects: Effects, constants: Iterable[torch.Tensor]) -> list[Assigned]:
    """The attributes whose tensors from before a graph reads."""
    read = set(map(storage_id, constants))
    return [w.assigned for w in effects.attributes if w.assigned.old is not MISSING
            and any(type(t) is torch.Tensor and storage_id(t) in read for t in tensors_in(w.assigned.old))]


def is_state(assigned: Assigned) -> bool:
    """Whether an attribute can be kept as a buffer is: a tensor of a module, replaced by one of its form."""
    old, new = assigned.old, assigned.new
    return isinstance(assigned.holder, nn.Module) and type(old) is torch.Tensor and not old.requires_grad \
        and isinstance(new, torch.Tensor) and (old.shape, old.dtype, old.device) == (
            new.shape, new.dtype, new.device) and not new.requires_grad


def told_apart(value: Any) -> Any:
    """An equal value that is another object, so that its being assigned again is seen."""
    if type(value) in _WATCHED:
        return _WATCHED[type(value)](value)
    if type(value) is str:
        return "".join([*value, ""]) if len(value) > 1 else value
    return (*value,) if type(value) is tuple and value and value is not (*value,) else value


class Watched:
    """A number that tells whether it was asked for: compared, converted, or computed with other than by
    adding to it."""

    def __new__(cls, value: Any, asked: list[None] | None = None) -> Watched:
        made = super().__new__(cls, value)      # type: ignore[call-arg]
        made._asked = [] if asked is None else asked
        return made

    _asked: list[None]

    @property
    def was_asked(self) -> bool:
        """Whether somebody has asked for this number, or for one that it was made of."""
        return bool(self._asked)


class _WatchedInt(Watched, int):
    pass


class _WatchedFloat(Watched, float):
    pass


_WATCHED = {int: _WatchedInt, float: _WatchedFloat}


def _counting(base: type, name: str) -> Any:
    def count(self: Watched, other: Any) -> Any:
        found = getattr(base, name)(self, other)
        return found if found is NotImplemented else _WATCHED[type(found)](found, self._asked)
    return count


def _asking(base: type, name: str) -> Any:
    def ask(self: Watched, *others: Any) -> Any:
        self._asked.append(None)
        return getattr(base, name)(self, *others)
    return ask


_COUNTING = ("__add__", "__radd__", "__sub__")
_SILENT = ("__repr__", "__getattribute__", "__getnewargs__", "__format__")
"""Methods that a log needs, and Python itself."""
for _base, _kind in _WATCHED.items():
    for _name, _method in vars(_base).items():
        if isinstance(_method, (WrapperDescriptorType, MethodDescriptorType)) and _name not in _SILENT:
            setattr(_kind, _name, (_counting if _name in _COUNTING else _asking)(_base, _name))


def _move_into(old: Any, new: Any, seen: dict[int, Any]) -> Any:
    """Let an object have what another one of its kind has; what stands in its place."""
    if id(old) in seen:
        return old
    if isinstance(new, (torch.Tensor, *PLAIN)) or type(old) is not type(new):
        return new
    seen[id(old)] = old
    if isinstance(old, dict):
        for k in [k for k in old if k not in new]:
            del old[k]
        for k, v in new.items():
            old[k] = _move_into(old[k], v, seen) if k in old else v
    elif isinstance(old, list):
        old[:] = [*(_move_into(a, b, seen) for a, b in zip(old, new, strict=False)), *new[len(old):]]
    elif isinstance(old, (tuple, set, frozenset)):
        return new
    elif not isinstance(old, (weakref.ref, nn.Module)) and isinstance(getattr(old, "__dict__", None), dict):
        _move_into(old.__dict__, new.__dict__, seen)
    return old
