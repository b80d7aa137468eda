"""The plain attributes of a module at one moment, as a value.

A trace bakes in what it reads from attributes: numbers, flags, functions, and the same in objects that a
module holds (its configuration). Which attributes those are is found once (`attributes_of`); a `Snapshot`
is what stands in them, and what that is in a key. Whether they are as they were is asked at every
call, so a snapshot compares objects by identity, in one loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import is_
from types import MethodType, ModuleType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from rkmate.graph.capture.state import MISSING, Assigned
from rkmate.runtime.key_parts import FUNCTIONS, SCALARS, Part, by_value, identical
from rkmate.torch_seam.modules import BUFFERS, PARAMETERS, forward_pre_hooks_of
from rkmate.torch_seam.patches.libraries import weight_made_by

_OPEN = (dict, list, set, ModuleType)
"""What can change without a trace of it; too much to compare at every call."""
_SKIPPED = {"training", "_is_full_backward_hook", "_is_hf_initialized"}
_WRITTEN_BY_SAVING = {"architectures", "dtype"}
"""What `save_pretrained` of transformers writes into a configuration: it describes the file."""
_LISTS = {"merged_adapters", "_active_adapter"}
"""Lists of names that decide what a forward computes: of peft's layers."""
_FOLLOWED = 16
"""States that are known to mean no other plan."""

Overrides = Mapping[tuple[int, str], Any]
"""Values to take for those in objects that modules hold: (id of the object's dictionary, name) -> value."""


class Attribute(NamedTuple):
    """A plain attribute of a module of the model."""

    holder: nn.Module
    name: str
    path: str
    """From the model on, for messages."""


class Box(NamedTuple):
    """A list or dictionary with tensors among its members, or one of `_LISTS`, held by a module."""

    holder: nn.Module
    name: str
    path: str

    def members(self) -> Sequence[Any]:
        """What is in it now; its keys, too."""
        return _members(self.holder.__dict__.get(self.name))


@dataclass(frozen=True)
class Attributes:
    """Which attributes of a model are compared."""

    plain: tuple[Attribute, ...]
    boxes: tuple[Box, ...]

    def in_boxes(self) -> list[Any]:
        """The members of all boxes now."""
        return [t for box in self.boxes for t in box.members()]


def attributes_of(model: nn.Module) -> Attributes:
    """Those that are there now, and `forward`: what a library's forward adds later is of no plan."""
    own = {id(t) for t in (*model.parameters(), *model.buffers())}
    plain: list[Attribute] = []
    boxes: list[Box] = []
    for path, m in model.named_modules():
        prefix = f"{path}." if path else ""
        # Computed by a hook before each forward, which is part of the plan.
        made = {weight_made_by(h) for h in forward_pre_hooks_of(m).values()}
        names = [k for k, v in m.__dict__.items()
                 if k not in _SKIPPED and k not in made and not isinstance(v, _OPEN)]
        plain += [Attribute(m, k, prefix + k) for k in dict.fromkeys(("forward", *names))]
        boxes += [Box(m, k, prefix + k) for k, v in m.__dict__.items()
                  if k not in (PARAMETERS, BUFFERS)
                  and (k in _LISTS or any(isinstance(t, torch.Tensor) and id(t) not in own
                                          for t in _members(v)))]
    return Attributes(tuple(plain), tuple(boxes))


@dataclass(frozen=True, eq=False)
class Snapshot:
    """What stands in a model's plain attributes at one moment."""

    attributes: Attributes
    dicts: Sequence[dict[str, Any]]
    """Where each value stands; here and in the next two, one entry for a value."""
    keys: Sequence[str]
    values: Sequence[Any]
    hooks: Sequence[Any]
    members: Sequence[Any]
    """Of all boxes."""
    part: Part
    """Of a key: (path, stand-in for the value) of each."""

    def is_now(self, hooks: Sequence[Any]) -> bool:
        """Whether all is as it was, object by object. Quick: this is asked at every call."""
        return identical(hooks, self.hooks) and (
            not self.attributes.boxes or identical(self.attributes.in_boxes(), self.members)) and \
            all(map(is_, map(dict.get, self.dicts, self.keys, repeat(MISSING)), self.values))


def snapshot(attributes: Attributes, hooks: Sequence[Any] = (), overrides: Overrides | None = None
             ) -> Snapshot:
    """The attributes as they are; with `overrides`, as they would be with those values."""
    overrides = overrides or {}
    read: list[tuple[dict[str, Any], str, Any]] = []
    content: list[tuple[str, Any]] = []
    numbers: dict[int, int] = {}
    """Objects with attributes of their own, in the order in which they are met."""
    for holder, name, path in attributes.plain:
        d = holder.__dict__
        value = d.get(name, MISSING)
        read.append((d, name, value))
        if name == "forward" and _is_own(value, holder):
            value = MISSING
        if isinstance(value, RemovableHandle):
            content.append((path, RemovableHandle))      # the hooks themselves are compared
            continue
        if not _has_attributes(value):
            content.append((path, by_value(value)))
            continue
        known = id(value) in numbers
        inside = [] if known else list(_leaves(value.__dict__, overrides))
        if hasattr(value, "save_pretrained"):
            inside = [(k, v) for k, v in inside if k not in _WRITTEN_BY_SAVING]
        read += [(value.__dict__, k, v) for k, v in inside]
        # An object is the one that was met as such a number, and told by its content; one without
        # content by what `by_value` says.
        content.append((path, (type(value), numbers.setdefault(id(value), len(numbers)))
                        if known or inside else by_value(value)))
        content += [(f"{path}.{k}", by_value(v)) for k, v in inside]
    content += [(box.path, tuple(map(by_value, box.members()))) for box in attributes.boxes]
    if hooks:
        content.append(("the forward hooks", tuple(map(by_value, hooks))))
    return Snapshot(attributes, [d for d, _, _ in read], [k for _, k, _ in read], [v for _, _, v in read],
                    hooks, attributes.in_boxes(), Part(tuple(content)))


def before(now: Snapshot, assigned: Sequence[Assigned]) -> Snapshot:
    """The attributes as they were before some assignments to what is there now."""
    return snapshot(now.attributes, now.hooks,
                    {(id(a.holder.__dict__), a.name): a.old for a in assigned})


class Equivalents:
    """States of a module's attributes that mean the same plan as an earlier one."""

    def __init__(self) -> None:
        self._first: OrderedDict[Part, Part] = OrderedDict()

    def of(self, part: Part) -> Part:
        """The first of the states that mean the same as this one."""
        return self._first.get(part, part)

    def add(self, part: Part, earlier: Part) -> None:
        """From now on `part` means what `earlier` means; the oldest such entry may be forgotten."""
        if part != earlier:
            self._first[part] = earlier
            while len(self._first) > _FOLLOWED:
                self._first.popitem(last=False)


def _leaves(content: dict[str, Any], overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """The plain attributes of an object that a module holds; those that are overridden are there, too."""
    more = (k for d, k in overrides if d == id(content) and k not in content)
    for k in (*content, *more):
        v = overrides.get((id(content), k), content.get(k, MISSING))
        if k not in _SKIPPED and v is not MISSING and _is_leaf(v):
            yield k, v


def _members(value: Any) -> Sequence[Any]:
    if isinstance(value, dict):
        return (*value, *value.values())
    return value if isinstance(value, list) else ()


def _is_own(forward: Any, m: nn.Module) -> bool:
    """Whether it is the class's forward, which libraries leave in a module after a wrapper of theirs."""
    return isinstance(forward, MethodType) and forward.__self__ is m \
        and forward.__func__ is type(m).forward


def _is_leaf(value: Any) -> bool:
    return isinstance(value, (*SCALARS, *FUNCTIONS, tuple, torch.Tensor))


def _has_attributes(value: Any) -> bool:
    return isinstance(getattr(value, "__dict__", None), dict) and not _is_leaf(value) \
        and not isinstance(value, (nn.Module, *_OPEN))
