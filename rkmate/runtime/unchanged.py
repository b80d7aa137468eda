"""Whether a module is as it was when it was walked over, told without walking over it.

Python counts the changes of each dictionary. Attributes, submodules, parameters, buffers and hooks all stand
in dictionaries: where their counts are the same, they hold the same objects. What can change in place is
compared itself: the forms of tensors, and what classes have for a forward. Python 3.13 keeps the attributes
of an object next to its dictionary and does not count assignments to them; there, the values of attributes
are compared one by one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from types import FunctionType
from typing import Any

import torch
from torch import nn

from rkmate.runtime.key_parts import identical
from rkmate.runtime.snapshot import Snapshot
from rkmate.torch_seam.compiler import TensorGuards, dict_version
from rkmate.torch_seam.modules import BUFFERS, HOOK_KINDS, PARAMETERS, SUBMODULES
from rkmate.torch_seam.patches.modules import global_backward_hooks, global_forward_hooks

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
    """What a walk over a module has come by."""

    __slots__ = ("_around", "_attributes", "_dicts", "_empty", "_filled", "_forms", "_forwards", "_kinds",
                 "_modules", "_objects", "_quick", "_snapshot", "_tensors", "_types", "_versions")

    def __init__(self, modules: Sequence[nn.Module], attributes: Snapshot) -> None:
        """`modules`: the module and those in it. `attributes`: theirs, as they are now."""
        self._modules, self._snapshot = modules, attributes
        self._types = [*map(type, modules)]
        self._kinds = [*dict.fromkeys(self._types)]
        self._dicts = [*map(_content, modules)]
        inside = [d[name] for d in self._dicts for name in (*HOOK_KINDS, *_TENSORS, SUBMODULES)]
        every = {id(d): d for d in (*self._dicts, *inside, *attributes.dicts)}.values()
        self._empty = [d for d in every if not d]
        self._filled = [d for d in every if d]
        self._tensors = [d[name].values() for d in self._dicts for name in _TENSORS if d[name]]
        self._versions = [*map(dict_version, self._filled)]
        objects = {id(d): d for d in (*self._dicts, *attributes.dicts)}
        self._objects = [] if _COUNTED else [*objects.values()]
        self._attributes = _content_of(self._objects)
        self._around = _around()
        self._forwards = forwards(self._kinds)
        self._forms = self._forms_now()
        self._quick = None if self._forms is None else _quick_forms(self._tensors_now())
        """Of the same tensors, for one call; it says no for other reasons, too (autocast)."""

    def is_now(self) -> bool:
        """Whether another one would come by the same."""
        boxes = self._snapshot.attributes.boxes
        return identical([*map(type, self._modules)], self._types) \
            and identical([*map(_content, self._modules)], self._dicts) \
            and not any(self._empty) and [*map(dict_version, self._filled)] == self._versions \
            and identical(_content_of(self._objects), self._attributes) \
            and identical(_around(), self._around) and identical(forwards(self._kinds), self._forwards) \
            and self._has_its_forms() \
            and (not boxes or identical(self._snapshot.attributes.in_boxes(), self._snapshot.members))

    def _has_its_forms(self) -> bool:
        if self._quick is not None and self._quick.check(*self._tensors_now()):
            return True
        return self._forms is not None and self._forms_now() == self._forms

    def _tensors_now(self) -> list[torch.Tensor]:
        return [t for some in self._tensors for t in some if t is not None]

    def _forms_now(self) -> tuple[list[Any], list[Any]] | None:
        """Of parameters and buffers; None where some are no ordinary tensors."""
        tensors = self._tensors_now()
        if any(t.layout is not torch.strided for t in tensors):
            return None
        return [*map(_form, tensors)], [*map(torch.Tensor.stride, tensors)]


def _quick_forms(tensors: Sequence[torch.Tensor]) -> Any:
    """Compares types, dtypes, devices, sizes, strides, and whether a gradient is taken; None where torch
    cannot (nested tensors)."""
    try:
        sizes: Any = [[*t.shape] for t in tensors]
        strides: Any = [[*t.stride()] for t in tensors]
        return TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    except (RuntimeError, TypeError):
        return None


def forwards(types: Sequence[type]) -> list[Any]:
    """The forwards of classes: libraries replace those, too. Other descriptors make one at each access."""
    return [f for t in types if isinstance(f := getattr(t, "forward", None), FunctionType)]


def _content_of(dicts: Iterable[dict[str, Any]]) -> list[Any]:
    """Names and values in dictionaries, one after another."""
    return [*chain.from_iterable(dicts), *chain.from_iterable(map(dict.values, dicts))]


def _around() -> list[Any]:
    forward, backward = global_forward_hooks(), global_backward_hooks()
    return [*forward, None, *backward]
