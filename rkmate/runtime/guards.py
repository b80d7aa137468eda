"""What a plan is specialised on, read cheaply at each call.

The module is walked over at every call. What is as it was at the latest call gives the very part of
the key that it gave then, with its hash: only what has changed is hashed, and compared with the keys
of other plans.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from itertools import repeat
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn

from rkmate import device as devices
from rkmate.graph.capture.library_paths import is_observer, weight_made_by
from rkmate.graph.capture.state import MISSING, Assigned
from rkmate.graph.capture.structure import Structure, take_apart

_SCALARS = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.layout,
            torch.memory_format)
_FUNCTIONS = (type, FunctionType, MethodType, BuiltinFunctionType)
_OPEN = (dict, list, set, ModuleType)
"""What can change without a trace of it; too much to compare at every call."""
_SKIPPED = {"training", "_is_full_backward_hook", "_is_hf_initialized"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_REMEMBERED = 4
"""Sets of submodules whose attributes are known by name."""
_FOLLOWED = 16
"""States of attributes that are known to mean no other plan."""


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
        """This part where it has that content, else a new one."""
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
        """Whether it stands for these objects, in this order."""
        return _identical(self.objects, objects)


class Flags(NamedTuple):
    """Which modules there are, and what is switched on in them."""

    parts: Same
    """The submodules with their names and classes."""
    flags: Part
    """Train flags, numbers of hooks, and which parameters take a gradient."""


class Look(NamedTuple):
    """A module at one moment."""

    flags: Flags
    attributes: Part
    """Values of plain attributes, each after its name; and the hooks."""
    places: Part
    """Devices, dtypes, shapes and strides of parameters and buffers, and which are one tensor."""
    kinds: frozenset[str]
    """The types of these devices."""


class Signature(NamedTuple):
    """What a plan is specialised on."""

    flags: Flags
    attributes: Part
    inputs: tuple[Any, ...]
    """Of each tensor among the arguments: shape, dtype, device, whether it takes a gradient, strides."""
    structure: Any
    """Where they stand among the arguments."""
    constants: tuple[Any, ...]
    """The other arguments."""
    autocast: tuple[Any, ...]
    places: Part
    default_dtype: torch.dtype


class Watch:
    """A module's parts, flags, attributes, parameters and buffers.

    A captured step has them baked in, all but the values of parameters and buffers: another of them
    means another plan.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._known: OrderedDict[Same, _Attributes] = OrderedDict()
        self._attributes: _Attributes
        self._latest = Look(Flags(Same(), Part()), Part(), Part(), frozenset())
        self.look()

    def follow(self, assigned: Sequence[Assigned]) -> None:
        """Take down the new values of attributes that no plan tells from their old ones."""
        if assigned:
            self._attributes.follow(assigned)

    def look(self) -> Look:
        """Walk over the module as it is now."""
        modules: list[nn.Module] = [self._model]
        parts: list[Any] = []
        flags: list[Any] = []
        hooks: list[Any] = []
        places: list[Any] = []
        numbers: dict[int, int] = {}
        for m in modules:                       # grows while it is walked
            d = m.__dict__
            flags.append(m.training)
            for kind in _HOOKS:
                if d[kind]:
                    mine = [h for h in d[kind].values() if not is_observer(h)]
                    if mine:
                        flags.append((kind, len(mine)))
                        hooks += mine
            tensors = d["_parameters"].values()
            if tensors:
                flags += [t is not None and t.requires_grad for t in tensors]
            if d["_buffers"]:
                tensors = (*tensors, *d["_buffers"].values())
            for t in tensors:
                if t is not None:
                    places += (t.dtype, t.device, t.shape,
                               t.stride() if t.layout is torch.strided else t.layout,
                               numbers.setdefault(id(t), len(numbers)))
            children = d["_modules"]
            if children:
                parts.append(m)
                parts += children
                parts += children.values()
                modules += [c for c in children.values() if c is not None]
        types: list[type] = list(map(type, modules))
        parts += types
        # Libraries replace the forwards of classes, too. Other descriptors make one at each access.
        parts += [f for t in dict.fromkeys(types)
                  if isinstance(f := getattr(t, "forward", None), FunctionType)]
        latest = self._latest
        same = latest.flags.parts
        if same.is_of(parts):
            attributes = self._attributes
        else:
            same = Same(parts)
            self._attributes = attributes = self._attributes_of(same)
        place = latest.places.or_new(tuple(places))
        kinds = latest.kinds if place is latest.places else devices.autocast_kinds(
            p for p in places if isinstance(p, torch.device))
        look = Look(Flags(same, latest.flags.flags.or_new(tuple(flags))), attributes.now(hooks),
                    place, kinds)
        self._latest = look
        return look

    def _attributes_of(self, parts: Same) -> _Attributes:
        known = self._known.get(parts)
        if known is None:
            known = self._known[parts] = _Attributes(self._model)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return known


class _State(NamedTuple):
    """Plain attributes at one moment: where each stands, its value, and what it is in a key."""

    dicts: list[dict[str, Any]]
    keys: list[str]
    values: list[Any]
    hooks: list[Any]
    members: list[Any]
    part: Part
    means: Part
    """The part that it stands for: an earlier one, where only values differ that no plan tells apart."""


class _Attributes:
    """The plain attributes of a module's parts, as long as these are the same modules.

    Those that are there at first, and `forward`: what a library's forward adds later is of no plan.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names: list[tuple[nn.Module, list[tuple[str, str]]]] = []
        self._boxes: list[tuple[str, dict[str, Any], str]] = []      # lists and dictionaries of tensors
        own = {id(t) for t in (*model.parameters(), *model.buffers())}
        for path, m in model.named_modules():
            prefix = f"{path}." if path else ""
            # Computed by a hook before each forward, which is part of the plan.
            made = {weight_made_by(h) for h in m._forward_pre_hooks.values()}
            names = [k for k, v in m.__dict__.items()
                     if k not in _SKIPPED and k not in made and not isinstance(v, _OPEN)]
            self._names.append((m, [(k, prefix + k) for k in dict.fromkeys(("forward", *names))]))
            self._boxes += [(prefix + k, m.__dict__, k) for k, v in m.__dict__.items()
                            if k not in ("_parameters", "_buffers")
                            and any(isinstance(t, torch.Tensor) and id(t) not in own for t in _members(v))]
        self._followed: OrderedDict[Part, Part] = OrderedDict()
        self._latest = self._read([], {})

    def now(self, hooks: list[Any]) -> Part:
        """What stands for the values in a key."""
        state = self._latest
        if not (_identical(hooks, state.hooks) and (
                not self._boxes or _identical(self._in_boxes(), state.members)) and
                all(map(is_, map(dict.get, state.dicts, state.keys, repeat(MISSING)), state.values))):
            state = self._read(hooks, {})
            self._latest = state = state._replace(means=self._followed.get(state.part, state.part))
        return state.means

    def follow(self, assigned: Sequence[Assigned]) -> None:
        """The values as they are now stand for the same as those before the assignments."""
        latest = self._latest
        hooks = latest.hooks
        before = self._read(hooks, {(id(a.holder.__dict__), a.name): a.old for a in assigned}).part
        after = self._read(hooks, {}).part
        before = self._followed.get(before, before)
        if before == latest.means:
            before = latest.means             # the very part of a key: found without a comparison
        if after != before:
            self._followed[after] = before
            while len(self._followed) > _FOLLOWED:
                self._followed.popitem(last=False)
        self._latest = latest._replace(means=self._followed.get(latest.part, latest.part))

    def _read(self, hooks: list[Any], instead: Mapping[tuple[int, str], Any]) -> _State:
        """`instead`: values to take for those that are there, by holder's dictionary and name."""
        dicts: list[dict[str, Any]] = []
        keys: list[str] = []
        values: list[Any] = []
        found: list[Any] = []
        objects: dict[int, int] = {}
        for m, names in self._names:
            d = m.__dict__
            for key, name in names:
                value = d.get(key, MISSING)
                dicts.append(d)
                keys.append(key)
                values.append(value)
                if key == "forward" and _is_own(value, m):
                    value = MISSING
                if not _has_attributes(value):
                    found.append((name, _plain(value)))
                    continue
                seen = id(value) in objects
                found.append((name, (type(value), objects.setdefault(id(value), len(objects)))))
                if seen:
                    continue
                content = value.__dict__
                before = len(found)
                for k in (*content, *(k for i, k in instead if i == id(content) and k not in content)):
                    v = instead.get((id(content), k), content.get(k, MISSING))
                    if k not in _SKIPPED and v is not MISSING and _is_leaf(v):
                        dicts.append(content)
                        keys.append(k)
                        values.append(v)
                        found.append((f"{name}.{k}", _plain(v)))
                if len(found) == before:
                    # Nothing to tell it by (a `functools.partial`, say) but itself.
                    found[-1] = name, _plain(value)
        found += [(name, tuple(map(_plain, _members(d.get(k))))) for name, d, k in self._boxes]
        if hooks:
            found.append(("the forward hooks", tuple(map(_plain, hooks))))
        part = Part(tuple(found))
        return _State(dicts, keys, values, hooks, self._in_boxes(), part, part)

    def _in_boxes(self) -> list[Any]:
        return [t for _, d, k in self._boxes for t in _members(d.get(k))]


def _members(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list) else ()


def _identical(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _is_own(forward: Any, m: nn.Module) -> bool:
    """Whether it is the class's forward, which libraries leave in a module after a wrapper of theirs."""
    return isinstance(forward, MethodType) and forward.__self__ is m \
        and forward.__func__ is type(m).forward


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*_SCALARS, *_FUNCTIONS, tuple, torch.Tensor))


def _has_attributes(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_leaf(value) \
        and not isinstance(value, (nn.Module, *_OPEN))


def _plain(value: Any) -> Any:
    """A value that a trace bakes in, as a part of a key: itself, or that it is this very object."""
    if isinstance(value, _SCALARS):
        return type(value), value
    if isinstance(value, tuple):
        return type(value), tuple(map(_plain, value))
    if isinstance(value, MethodType):       # made anew whenever one asks for it
        return "method", Same((value.__func__, value.__self__))
    return "object", Same((value,))


def signature(watch: Watch, args: Sequence[Any], kwargs: Mapping[str, Any]
              ) -> tuple[Signature, list[torch.Tensor]]:
    """What a plan is specialised on; and the tensors among the arguments."""
    tensors, structure = take_apart((tuple(args), dict(kwargs)), result=False)
    shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad,
                    t.stride() if t.layout is torch.strided and not t.is_nested else t.layout)
                   for t in tensors)
    look = watch.look()
    kinds = {"cpu", *look.kinds, *devices.autocast_kinds(t.device for t in tensors)}
    autocast = tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted(kinds)
                     if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))
    return Signature(look.flags, look.attributes, shapes, structure.spec, _constants(structure), autocast,
                     look.places, torch.get_default_dtype()), tensors


def _constants(structure: Structure) -> tuple[Any, ...]:
    return tuple(frozen(c, set()) for c in structure.constants())


def frozen(value: Any, above: set[int]) -> Any:
    """A hashable stand-in: equal for values that a captured step cannot tell apart."""
    if isinstance(value, _SCALARS):
        return type(value), value
    if id(value) in above:
        return "itself"
    above = above | {id(value)}
    if isinstance(value, (list, tuple)):
        return type(value), tuple(frozen(v, above) for v in value)
    if isinstance(value, dict):
        return type(value), tuple((frozen(k, above), frozen(v, above)) for k, v in value.items())
    if isinstance(value, (*_FUNCTIONS, nn.Module)):
        return _plain(value)
    state = getattr(value, "__dict__", None)
    if state:
        return type(value), tuple((k, frozen(v, above)) for k, v in sorted(state.items()))
    try:
        hash(value)
    except TypeError:
        return "object", Same((value,))
    return type(value), value
