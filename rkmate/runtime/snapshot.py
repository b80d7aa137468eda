"""The attributes of a module at one moment, and whether a module has changed since it was last walked."""

from __future__ import annotations

import hashlib
import weakref
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import chain, repeat
from operator import attrgetter, is_
from types import BuiltinFunctionType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rkmate.errors import ArgumentError
from rkmate.graph.capture.forward_code import (
    MISSING,
    Place,
    classes_of_user,
    holds_numbers,
    members_of,
    read_by_forward,
)
from rkmate.graph.capture.state import Assigned
from rkmate.torch_seam.compiler import TensorGuards, dict_version
from rkmate.torch_seam.containers import PLAIN, attributes_in
from rkmate.torch_seam.modules import (
    BUFFERS,
    HOOK_KINDS,
    HOOKED,
    PARAMETERS,
    SUBMODULES,
    flat_views,
    forward_pre_hooks_of,
    gathered_names,
)
from rkmate.torch_seam.patches.libraries import weight_made_by
from rkmate.torch_seam.patches.modules import global_backward_hooks, global_forward_hooks

# -- Parts of keys ---------------------------------------------------------------------------------
#
# Hashable stand-ins for values that a captured step has baked in.


TEXTS = 16
"""Members of a list of texts that is compared by value, at most: a longer one may be a log that grows."""
FUNCTIONS = (type, FunctionType, MethodType, BuiltinFunctionType)


class Part:
    """A part of a key, with its hash: equal where the content is."""

    __slots__ = ("_hash", "content")

    def __init__(self, content: tuple[Any, ...] = ()) -> None:
        self.content = content
        self._hash = hash(content)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Part) and self._hash == other._hash
                                 and self.content == other.content)

    def or_new(self, content: tuple[Any, ...]) -> Part:
        """Return this part if it has that content, else a new part."""
        return self if self.content == content else Part(content)


class Same(Part):
    """Objects as a part of a key: equal to these objects alone.

    It refers to them: as long as a plan is kept under it, no other object gets their addresses.
    """

    __slots__ = ("objects",)

    def __init__(self, objects: Sequence[Any] = ()) -> None:
        super().__init__(tuple(map(id, objects)))
        self.objects = objects

    def is_of(self, objects: Sequence[Any]) -> bool:
        """Return whether the part stands for these objects, in this order."""
        return identical(self.objects, objects)


def identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    """Return whether both are the very same objects, in one order."""
    return len(some) == len(others) and all(map(is_, some, others))


def by_value(value: Any) -> Any:
    """Return the key of a value: a scalar, a tuple of scalars, or a short list of texts (names of adapters,
    which a library sets anew), by value; a partial function by its function and arguments; any other object
    by identity."""
    if isinstance(value, PLAIN):
        return type(value), value
    if isinstance(value, tuple):
        return type(value), tuple(map(by_value, value))
    if type(value) is list and 0 < len(value) <= TEXTS and all(isinstance(v, str) for v in value):
        return list, tuple(value)
    if isinstance(value, partial) and not vars(value):
        return (type(value), by_value(value.func), by_value(value.args),
                tuple((k, by_value(v)) for k, v in value.keywords.items()))
    if isinstance(value, MethodType):       # made anew whenever one asks for it
        return "method", Same((value.__func__, value.__self__))
    return "object", Same((value,))


def by_content(value: Any, above: frozenset[int] = frozenset()) -> Any:
    """Return the key of an argument by everything that it holds: containers, arrays, and the attributes of
    objects.

    `above`: ids of what holds it, as it may hold itself. Raises `ArgumentError` for what can neither be taken
    apart nor be compared.
    """
    if isinstance(value, PLAIN):
        return type(value), value
    if id(value() if isinstance(value, weakref.ref) else value) in above:
        return "itself"
    if isinstance(value, (*FUNCTIONS, nn.Module, torch.Tensor)):
        return by_value(value)
    above = above | {id(value)}
    content, state = _parts_of(value, above), attributes_in(value)
    if content is None and (not state or _says_what_it_equals(value)):
        try:
            hash(value)
            return type(value), value
        except TypeError:
            if not state and not isinstance(getattr(value, "__dict__", None), dict):
                raise ArgumentError(
                    f"an argument holds a {type(value).__name__}, and rkmate cannot tell whether it has "
                    "changed since the call was planned: pass tensors, numbers, containers or objects "
                    "with attributes") from None
    return type(value), content, tuple((k, by_content(v, above)) for k, v in sorted(state.items()))


def _parts_of(value: Any, above: frozenset[int]) -> Any:
    """Return the content of a container or an array; None for any other object."""
    if isinstance(value, (list, tuple, deque)):
        return tuple(by_content(v, above) for v in value)
    if isinstance(value, Mapping):
        return tuple((by_content(k, above), by_content(v, above)) for k, v in value.items())
    if isinstance(value, Set):
        return frozenset(by_content(v, above) for v in value)
    if isinstance(value, slice):                # has no hash before Python 3.12
        return tuple(by_content(v, above) for v in (value.start, value.stop, value.step))
    if isinstance(value, np.ndarray) and value.dtype.kind in "mM":      # dates have no memory of their own
        return str(value.dtype), by_content(value.view("i8"), above)
    try:
        array = memoryview(value)
    except (TypeError, ValueError, BufferError):
        return None
    return None if "O" in array.format else (         # addresses of objects
        array.format, array.shape, array.strides, hashlib.sha256(array.tobytes()).digest())


def _says_what_it_equals(value: Any) -> bool:
    """Return whether the class of a value has a hash, and all attributes in slots (some may be caches)."""
    own: Any = type(value).__hash__
    return not hasattr(value, "__dict__") and own is not object.__hash__


# -- Snapshots of attributes -----------------------------------------------------------------------
#
# The plain attributes of a module at one moment, as a value.
#
# A trace bakes in what it reads from attributes: numbers, flags, functions, and the same in objects that a
# module holds (its configuration). Which attributes those are is found once (`attributes_of`); a `Snapshot`
# is what stands in them, and what that is in a key. Whether they are as they were is asked at every call, so
# a snapshot compares objects by identity, in one loop.


_OPEN = (dict, list, set, ModuleType)
"""Types that can change without a trace of it, and that are too large to compare at every call."""
_SKIPPED = {"training", HOOKED, "_is_hf_initialized"}
_WRITTEN_BY_SAVING = {"architectures", "dtype"}
"""Attributes that `save_pretrained` of transformers writes into a configuration: they describe the file."""
_LISTS = {"merged_adapters", "_active_adapter"}
"""Lists of names that decide what a forward computes: of peft's layers."""
HOOKS_OF_FORWARD = "the forward hooks"
"""The path of the hooks in the content of a snapshot."""
_FOLLOWED = 16
"""States that are known to mean no other plan."""

Written = Mapping[int, Mapping[Any, Any]]
"""The id of a list or dictionary -> key or place of a member -> what stood there."""
Overrides = Mapping[tuple[int, str], Any]
"""Values to take for those in objects that modules hold: (id of the object's dictionary, name) -> value."""


class Attribute(NamedTuple):
    """A plain attribute of a module of the model, or a global variable that its forward reads."""

    module: nn.Module | None
    """The module; None for a global variable."""
    place: Place
    path: str
    """Path from the model on, for messages."""


class Box(NamedTuple):
    """A list or dictionary, held by a module, an object of a module, a global variable, a class or a variable
    of an enclosing function: with tensors among its members, with numbers that the forward may read, or one
    of `_LISTS`. Of classes and enclosing functions also a single value."""

    place: Place
    path: str
    first: Sequence[Any] | None = None
    """The members that it had first, if each planned forward changes all of them: a key has these."""
    written: Written = MappingProxyType({})
    """The members that each planned forward changes, as they were first: a key has these."""

    def members(self) -> Sequence[Any]:
        """Return the members, including keys: the current ones, if they are compared."""
        if self.first is not None:
            return self.first
        held = self.place.read()
        return members_of(held, written=self.written) if isinstance(held, (list, dict)) else [held]

    @property
    def shared(self) -> Any:
        """Identity of the list or dictionary, which several boxes may share; the place of a single value."""
        held = self.place.read()
        return id(held) if isinstance(held, (list, dict)) else self.place.key


@dataclass(frozen=True)
class Attributes:
    """The attributes of a model that are compared."""

    plain: tuple[Attribute, ...]
    boxes: tuple[Box, ...]
    left_out: Overrides = field(default_factory=dict)
    """The attributes that each planned forward assigns: a key has these values of it."""
    names: frozenset[str] = frozenset()
    """The names in the code of the forward, and those that it asks for."""

    def in_boxes(self) -> list[Any]:
        """Return the members of all boxes now."""
        return [t for box in self.boxes if box.first is None for t in box.members()]

    def without(self, old: Overrides, written: Mapping[tuple[int, str], Written]) -> Attributes:
        """The attributes with some left out. `written`: of lists and dictionaries, only these members."""
        left_out = {**old, **self.left_out}

        def box(b: Box, places: Sequence[tuple[int, str]]) -> Box:
            if not all(place in written for place in places):
                return b._replace(first=tuple(b.members()))
            more = {k: v for place in places for k, v in written[place].items()}
            return b._replace(written={k: {**more.get(k, {}), **b.written.get(k, {})}
                                       for k in (*more, *b.written)})

        # Several modules may hold one list.
        lists: dict[Any, list[tuple[int, str]]] = {}
        for b in self.boxes:
            if (place := b.place.key) in old:
                lists.setdefault(b.shared, []).append(place)
        return replace(self, left_out=left_out, boxes=tuple(
            box(b, lists[b.shared]) if b.shared in lists else b for b in self.boxes))


def attributes_of(model: nn.Module) -> Attributes:
    """Return the attributes that exist now, `forward`, and those that an object may get later: for which a
    class has a plain value, or that its forward asks for (`getattr` with a default, `hasattr`); and the
    attributes of classes, global variables and variables of enclosing functions that the forward reads.
    Others that a library's forward adds later do not belong to a plan."""
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    held: dict[type, list[Any]] = {}
    for m in model.modules():
        held.setdefault(type(m), []).extend(
            f for values in (m.__dict__, *(m.__dict__[kind] for kind in HOOK_KINDS))
            for f in values.values() if isinstance(f, (FunctionType, MethodType, partial)))
    reads = {kind: read_by_forward(kind, functions) for kind, functions in held.items()}
    names = frozenset().union(*(read.names for read in reads.values()))
    later = {kind: dict.fromkeys((*_defaults(kind), *(k for k in read.asked if k not in _SKIPPED)))
             for kind, read in reads.items()}
    plain: list[Attribute] = []
    boxes: list[Box] = []
    for path, m in model.named_modules():
        prefix = f"{path}." if path else ""
        # Computed by a hook before each forward, which is part of the plan; or a gathered parameter.
        made = {weight_made_by(h) for h in forward_pre_hooks_of(m).values()} | {
            *gathered_names(m), *flat_views(m)}
        there = [k for k, v in m.__dict__.items()
                 if k not in _SKIPPED and k not in made and not isinstance(v, _OPEN)]
        plain += [Attribute(m, Place(m.__dict__, k), prefix + k)
                  for k in dict.fromkeys(("forward", *there, *later[type(m)]))]
        boxes += [Box(Place(m.__dict__, k), prefix + k) for k, v in m.__dict__.items()
                  if k not in (PARAMETERS, BUFFERS)
                  and (k in _LISTS or (k in names and holds_numbers(v)) or any(
                      isinstance(t, torch.Tensor) and id(t) not in own for t in members_of(v)))]
        boxes += [Box(Place(held.__dict__, k), f"{prefix}{name}.{k}") for name, held in m.__dict__.items()
                  if _has_attributes(held) for k, v in held.__dict__.items()
                  if k in names and holds_numbers(v)]
    around = {key: found for read in reads.values() for key, found in read.around.items()}
    boxes += [Box(p, f"{p.holder.__name__}.{p.name}" if isinstance(p.holder, type) else
                  f"the variable {p.name} of an enclosing function") for p in around.values()]
    variables = {key: found for read in reads.values() for key, found in read.variables.items()}
    for place in variables.values():
        path = f"the global variable {place.name}"
        if isinstance(place.read(), (dict, list)):
            boxes.append(Box(place, path))
        else:
            plain.append(Attribute(None, place, path))
    return Attributes(tuple(plain), tuple(boxes), names=names.union(*(read.asked for read in reads.values())))


def _defaults(kind: type) -> list[str]:
    """Return the names for which a class of the user has a plain value."""
    return sorted({k for c in classes_of_user(kind) for k, v in vars(c).items()
                   if isinstance(v, PLAIN) and not k.startswith("__") and k not in _SKIPPED})


@dataclass(frozen=True, eq=False)
class Snapshot:
    """The values of a model's plain attributes at one moment."""

    attributes: Attributes
    dicts: Sequence[dict[str, Any]]
    """For each value, the dictionary that holds it; the next two have an entry for each value, too."""
    keys: Sequence[str]
    values: Sequence[Any]
    hooks: Sequence[Any]
    members: Sequence[Any]
    """Members of all boxes."""
    part: Part
    """Part of a key: (path, stand-in for the value) of each value."""

    def is_now(self, hooks: Sequence[Any]) -> bool:
        """Return whether all is as it was, object by object. Quick: this is asked at every call."""
        return identical(hooks, self.hooks) and (
            not self.attributes.boxes or identical(self.attributes.in_boxes(), self.members)) and \
            all(map(is_, map(dict.get, self.dicts, self.keys, repeat(MISSING)), self.values))


def snapshot(attributes: Attributes, hooks: Sequence[Any] = (), overrides: Overrides | None = None
             ) -> Snapshot:
    """Return the attributes as they are; with `overrides`, as they would be with those values."""
    overrides = {**attributes.left_out, **(overrides or {})}
    read: list[tuple[dict[str, Any], str, Any]] = []
    content: list[tuple[str, Any]] = []
    numbers: dict[int, int] = {}
    """Objects with attributes of their own, in the order in which they are met."""
    for module, place, path in attributes.plain:
        name: str = place.name
        d: Any = place.holder
        left_out = (id(d), name) in attributes.left_out
        value = overrides.get((id(d), name), d.get(name, MISSING))
        read += [] if left_out else [(d, name, value)]
        if name == "forward" and _is_own(value, module):
            value = MISSING
        if isinstance(value, RemovableHandle):
            content.append((path, RemovableHandle))      # the hooks themselves are compared
            continue
        if not _has_attributes(value):
            content.append((path, by_value(value)))
            continue
        known = id(value) in numbers
        inside = [] if known else list(_leaves(value.__dict__, overrides))
        runs_it = not known and _leads_to(value, module)
        if runs_it:
            kind: Any = type(value)
            read_here = _read_of(kind, attributes.names)
            inside = [(k, v) for k, v in inside if k in read_here]
        if hasattr(value, "save_pretrained"):
            inside = [(k, v) for k, v in inside if k not in _WRITTEN_BY_SAVING]
        read += [(value.__dict__, k, v) for k, v in inside
                 if (id(value.__dict__), k) not in attributes.left_out]
        # An object is the one that was met as such a number, and told by its content; one without
        # content by what `by_value` says.
        content.append((path, (type(value), numbers.setdefault(id(value), len(numbers)))
                        if known or inside or runs_it else by_value(value)))
        content += [(f"{path}.{k}", by_value(v)) for k, v in inside]
    content += [(box.path, tuple(map(by_value, box.members()))) for box in attributes.boxes]
    if hooks:
        content.append((HOOKS_OF_FORWARD, tuple(map(by_value, hooks))))
    return Snapshot(attributes, [d for d, _, _ in read], [k for _, k, _ in read], [v for _, _, v in read],
                    hooks, attributes.in_boxes(), Part(tuple(content)))


def before(now: Snapshot, assigned: Sequence[Assigned]) -> Snapshot:
    """Return the attributes as they were before some assignments to what is there now."""
    return snapshot(now.attributes, now.hooks,
                    {a.place.key: a.old for a in assigned})


class Equivalents:
    """States of a module's attributes that mean the same plan as an earlier one."""

    def __init__(self) -> None:
        self._first: OrderedDict[Part, Part] = OrderedDict()

    def of(self, part: Part) -> Part:
        """Return the first of the states that mean the same as this one."""
        return self._first.get(part, part)

    def add(self, part: Part, earlier: Part) -> None:
        """Note that `part` means from now on what `earlier` means. The oldest such entry may be forgotten."""
        if part != earlier:
            self._first[part] = earlier
            while len(self._first) > _FOLLOWED:
                self._first.popitem(last=False)


def _leaves(content: dict[str, Any], overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """Return the plain attributes of an object that a module holds; those that are overridden are there,
    too."""
    more = (k for d, k in overrides if d == id(content) and k not in content)
    for k in (*content, *more):
        v = overrides.get((id(content), k), content.get(k, MISSING))
        if k not in _SKIPPED and v is not MISSING and _is_leaf(v):
            yield k, v


def _leads_to(value: Any, module: Any) -> bool:
    """Return whether an object that a module holds refers to that module, or to what contains it: a trainer
    that runs it, and no description of it."""
    held = [*value.__dict__.values()]
    held += [v for h in held if _has_attributes(h) for v in h.__dict__.values()]
    above = {id(m): m for m in held if isinstance(m, nn.Module)}
    return any(module is part for m in above.values() for part in m.modules())


@lru_cache(maxsize=64)
def _read_of(kind: type, names: frozenset[str]) -> frozenset[str]:
    """Return the names of an object's attributes that a forward with these names in its code may read: by
    itself, or through methods of the object's class."""
    read = read_by_forward(kind, begin=names)
    return names.union(read.names, read.asked)


def _is_own(forward: Any, m: Any) -> bool:
    """Return whether a module's forward is that of its class, which libraries leave there after a wrapper
    of theirs."""
    return isinstance(forward, MethodType) and forward.__self__ is m \
        and forward.__func__ is getattr(type(m), "forward", None)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*PLAIN, *FUNCTIONS, tuple, torch.Tensor))


def _has_attributes(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_leaf(value) \
        and not isinstance(value, (nn.Module, *_OPEN))


# -- Unchanged modules -----------------------------------------------------------------------------
#
# Whether a module is as it was when it was walked over, told without walking over it.
#
# Python counts the changes of each dictionary. Attributes, submodules, parameters, buffers and hooks all
# stand in dictionaries: where their counts are the same, they hold the same objects. What can change in
# place is compared itself: the forms of tensors, and what classes have for a forward.


_TENSORS = (PARAMETERS, BUFFERS)
_content = attrgetter("__dict__")
_form = attrgetter("dtype", "device", "shape", "requires_grad")


class _Probe:
    """An object with an attribute."""

    def __init__(self) -> None:
        self.value = 0


def counts_assignments() -> bool:
    """Return whether an assignment to an attribute changes the count of its object's dictionary."""
    probe = _Probe()
    before = dict_version(probe.__dict__)
    probe.value = 1
    return bool(dict_version(probe.__dict__) != before)


_COUNTED = dict_version is not None and counts_assignments()


class Walk:
    """The objects that a walk over a module has passed."""

    __slots__ = ("_around", "_attributes", "_dicts", "_empty", "_filled", "_forms", "_forwards", "_globals",
                 "_kinds", "_modules", "_objects", "_quick", "_snapshot", "_tensors", "_types", "_versions")

    def __init__(self, modules: Sequence[nn.Module], attributes: Snapshot) -> None:
        """`modules`: the module and all modules in it. `attributes`: their current attributes."""
        self._modules, self._snapshot = modules, attributes
        self._types = [*map(type, modules)]
        self._kinds = [*dict.fromkeys(self._types)]
        self._dicts = [*map(_content, modules)]
        inside = [d[name] for d in self._dicts for name in (*HOOK_KINDS, *_TENSORS, SUBMODULES)]
        globals_ = {id(a.place.holder) for a in attributes.attributes.plain if a.module is None}
        counted = [d for d in attributes.dicts if id(d) not in globals_]    # a script assigns others
        self._globals = [(d, k, v) for d, k, v in zip(
            attributes.dicts, attributes.keys, attributes.values, strict=True) if id(d) in globals_]
        every = {id(d): d for d in (*self._dicts, *inside, *counted)}.values()
        self._empty = [d for d in every if not d]
        self._filled = [d for d in every if d]
        self._tensors = [d[name].values() for d in self._dicts for name in _TENSORS if d[name]]
        self._versions = [*map(dict_version, self._filled)]
        objects = {id(d): d for d in (*self._dicts, *counted)}
        self._objects = [] if _COUNTED else [*objects.values()]
        self._attributes = _content_of(self._objects)
        self._around = _around()
        self._forwards = forwards(self._kinds)
        self._forms = self._forms_now()
        self._quick = None if self._forms is None else _quick_forms(self._tensors_now())
        """Check of the tensors for one call; it may fail for other reasons, too (autocast)."""

    def is_now(self) -> bool:
        """Return whether another one would come by the same."""
        boxes = self._snapshot.attributes.boxes
        return identical([*map(type, self._modules)], self._types) \
            and identical([*map(_content, self._modules)], self._dicts) \
            and not any(self._empty) and [*map(dict_version, self._filled)] == self._versions \
            and identical(_content_of(self._objects), self._attributes) \
            and identical(_around(), self._around) and identical(forwards(self._kinds), self._forwards) \
            and self._has_its_forms() and all(d.get(k, MISSING) is v for d, k, v in self._globals) \
            and (not boxes or identical(self._snapshot.attributes.in_boxes(), self._snapshot.members))

    def _has_its_forms(self) -> bool:
        if self._quick is not None and self._quick.check(*self._tensors_now()):
            return True
        return self._forms is not None and self._forms_now() == self._forms

    def _tensors_now(self) -> list[torch.Tensor]:
        return [t for some in self._tensors for t in some if t is not None]

    def _forms_now(self) -> tuple[list[Any], list[Any]] | None:
        """Return the forms of parameters and buffers; None if some are not ordinary tensors."""
        tensors = self._tensors_now()
        if any(t.layout is not torch.strided for t in tensors):
            return None
        return [*map(_form, tensors)], [*map(torch.Tensor.stride, tensors)]


def _quick_forms(tensors: Sequence[torch.Tensor]) -> Any:
    """Return a check of types, dtypes, devices, sizes, strides, and whether a gradient is recorded; None if
    torch has none (nested tensors)."""
    try:
        sizes: Any = [[*t.shape] for t in tensors]
        strides: Any = [[*t.stride()] for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (RuntimeError, TypeError):
        return None


def forwards(types: Sequence[type]) -> list[Any]:
    """Return the forwards of classes: libraries replace those, too. Other descriptors make one at each
    access."""
    return [f for t in types if isinstance(f := getattr(t, "forward", None), FunctionType)]


def _content_of(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    """Return names and values in dictionaries, one after another."""
    return [*chain.from_iterable(dicts), *chain.from_iterable(map(dict.values, dicts))]


def _around() -> list[Any]:
    forward, backward = global_forward_hooks(), global_backward_hooks()
    return [*forward, None, *backward]

