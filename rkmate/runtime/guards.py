"""Guards: everything that a plan is specialised on, how it is read at each call, and what has changed since a
plan was made."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from rkmate import device as devices
from rkmate.graph.capture.answers import Kinds
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.state import Assigned
from rkmate.graph.capture.structure import one_tensor, take_call_apart
from rkmate.runtime.snapshot import (
    Equivalents,
    Overrides,
    Part,
    Same,
    Snapshot,
    Walk,
    Written,
    attributes_of,
    before,
    by_content,
    forwards,
    snapshot,
)
from rkmate.support.warn import warn
from rkmate.torch_seam.modules import BUFFERS, HOOK_KINDS, PARAMETERS, SUBMODULES
from rkmate.torch_seam.patches.features import GUARDS
from rkmate.torch_seam.patches.libraries import is_observer, recorded_here
from rkmate.torch_seam.patches.modules import global_backward_hooks, global_forward_hooks
from rkmate.torch_seam.versions import is_off

# -- Guards of a call ------------------------------------------------------------------------------
#
# Guards: what a plan is specialised on, read cheaply at each call.
#
# A captured step has the module and its arguments baked in, all but the values of tensors. Another module,
# flag, attribute, shape or constant means another plan. The module is walked over at every call: what is as
# it was at the latest call gives the very part of the key that it gave then, with its hash, and only what
# has changed is hashed and compared with the keys of other plans.


_REMEMBERED = 4
"""Sets of submodules whose attributes are known by name."""


class FlagGuards(NamedTuple):
    """The modules, and the flags that are set in them."""

    parts: Same
    """The submodules with their names and classes."""
    flags: Part
    """Train flags, numbers of hooks, and which parameters take a gradient."""


class ModuleGuards(NamedTuple):
    """The properties of the module that a plan is specialised on."""

    flags: FlagGuards
    attributes: Part
    """Values of plain attributes, each after its name; and the hooks."""
    places: Part
    """Devices, dtypes, shapes and strides of parameters and buffers, and which are one tensor."""
    kinds: frozenset[str]
    """The types of these devices."""


class Guards(NamedTuple):
    """The key under which a plan is found: everything that it is specialised on."""

    flags: FlagGuards
    attributes: Part
    inputs: tuple[Any, ...]
    """For each tensor among the arguments: shape, dtype, device, whether it requires a gradient, strides."""
    structure: Any
    """Positions of the tensors among the arguments."""
    constants: tuple[Any, ...]
    """The other arguments."""
    autocast: tuple[Any, ...]
    """For each device type for which autocast is on: the type, and the dtype."""
    kernels: tuple[bool, ...]
    """Kernels that torch may choose: of attention (`sdpa_kernel`), and of cuDNN."""
    places: Part
    default_dtype: torch.dtype
    kinds: Kinds = ()
    """Kinds of those tensors among the arguments whose values a library looks at."""
    values: tuple[str, ...] = ()
    """Observations of the inputs' values by the forward, if it looks at them."""
    records: tuple[Any, ...] = ()
    """Outputs of submodules that a library records in a call of the model around this one."""
    one: tuple[int, ...] = ()
    """Which of the tensors among the arguments are the same object (`one_tensor`)."""


class ModuleReader:
    """Reads a module's guards at each call, and remembers the latest."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._known: OrderedDict[Same, _AttributeReader] = OrderedDict()
        self._attributes: _AttributeReader
        self._walk: Walk | None = None
        self._latest = ModuleGuards(FlagGuards(Same(), Part()), Part(), Part(), frozenset())
        self.read()

    def follow(self, captured: Capture) -> None:
        """Note that a forward has assigned attributes, and would do so again: the state after the assignments
        means the same plan as the state before. What each planned forward assigns is not compared."""
        effects = captured.effects
        if effects:
            held = [c.filled for c in effects.collected]
            whole = {f.place for f in held if f.replaced() is None}
            written: dict[tuple[int, str], dict[int, Any]] = {}
            for f in held:
                if f.place not in whole:
                    written.setdefault(f.place, {})[id(f.held)] = f.replaced()
            numbers = [c.number for c in effects.numbers]
            members = {n.attribute: n.place.holder for n in numbers if n.attribute}
            for n in numbers:
                if n.attribute and n.attribute not in whole:
                    in_dictionaries = written.setdefault(n.attribute, {})
                    number, key = n.place.key
                    in_dictionaries[number] = {**in_dictionaries.get(number, {}), key: n.old}
            self._attributes.leave_out({**{w.assigned.place.key: w.assigned.old for w in effects.attributes},
                                        **{n.place.key: n.old for n in numbers},
                                        **{f.place: f.held for f in held},
                                        **members}, written)
            self._walk = None
        if captured.assigned:
            self._attributes.follow(captured.assigned)

    def read(self) -> ModuleGuards:
        """Return the module as it is now."""
        walk = self._walk
        if walk is None or not walk.is_now():
            return self._walked()
        if self._latest.attributes is not self._attributes.means:
            self._latest = self._latest._replace(attributes=self._attributes.means)
        return self._latest

    def _walked(self) -> ModuleGuards:
        """Walk over the module."""
        modules: list[nn.Module] = [self.model]
        parts: list[Any] = []
        flags: list[Any] = []
        around = global_forward_hooks(), global_backward_hooks()
        hooks: list[Any] = [*around[0], *around[1]]
        flags += map(len, around)
        places: list[Any] = []
        numbers: dict[int, int] = {}
        for m in modules:                       # grows while it is walked
            d = m.__dict__
            flags.append(m.training)
            for kind in HOOK_KINDS:
                if d[kind]:
                    mine = [h for h in d[kind].values() if not is_observer(h)]
                    if mine:
                        flags.append((kind, len(mine)))
                        hooks += mine
            tensors = d[PARAMETERS].values()
            if tensors:
                flags += [t is not None and t.requires_grad for t in tensors]
            if d[BUFFERS]:
                tensors = (*tensors, *d[BUFFERS].values())
            for t in tensors:
                if t is not None:
                    places += (t.dtype, t.device, t.shape,
                               t.stride() if t.layout is torch.strided else t.layout,
                               numbers.setdefault(id(t), len(numbers)))
            children = d[SUBMODULES]
            if children:
                parts.append(m)
                parts += children.keys()
                parts += children.values()
                # Whatever holds a TorchScript module is not planned as a whole.
                modules += [c for c in children.values()
                            if c is not None and not isinstance(c, torch.jit.ScriptModule)]
        types: list[type] = list(map(type, modules))
        parts += types
        parts += forwards([*dict.fromkeys(types)])
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
        self._latest = ModuleGuards(FlagGuards(same, latest.flags.flags.or_new(tuple(flags))),
                                    attributes.read(hooks), place, kinds)
        self._walk = None if is_off(GUARDS) else Walk(modules, attributes.latest)
        return self._latest

    def _attributes_of(self, parts: Same) -> _AttributeReader:
        known = self._known.get(parts)
        if known is None:
            known = self._known[parts] = _AttributeReader(self.model)
            while len(self._known) > _REMEMBERED:
                self._known.popitem(last=False)
        return known


class _AttributeReader:
    """Reads the plain attributes, as long as the module has the same submodules."""

    def __init__(self, model: nn.Module) -> None:
        self._equivalents = Equivalents()
        self.latest = snapshot(attributes_of(model))
        self.means = self.latest.part

    def read(self, hooks: list[Any]) -> Part:
        """Return the part of a key that stands for the values."""
        if not self.latest.is_now(hooks):
            self._take(snapshot(self.latest.attributes, hooks))
        return self.means

    def leave_out(self, old: Overrides, written: Mapping[tuple[int, str], Written]) -> None:
        """Attributes that are not compared; a key has the values that they had first. `written`: of lists
        and dictionaries among them, only these members."""
        attributes = self.latest.attributes
        self._take(snapshot(attributes.without(old, written), self.latest.hooks))

    def follow(self, assigned: Sequence[Assigned]) -> None:
        """Note that the current values mean the same as those before the assignments."""
        now = snapshot(self.latest.attributes, self.latest.hooks)
        earlier = self._equivalents.of(before(now, assigned).part)
        if earlier == self.means:
            earlier = self.means             # the very part of a key: found without a comparison
        self._equivalents.add(now.part, earlier)
        self.means = self._equivalents.of(self.latest.part)

    def _take(self, state: Snapshot) -> None:
        self.latest = state
        self.means = self._equivalents.of(state.part)


def as_captured(key: Guards, reader: ModuleReader, captured: Capture) -> Guards:
    """Return the key of a call whose capture may have completed the module first, with the module as it was
    captured."""
    if not captured.completed:
        return key
    now = reader.read()
    return key._replace(flags=now.flags, attributes=now.attributes, places=now.places)


def guards_of(reader: ModuleReader, args: Sequence[Any], kwargs: Mapping[str, Any]
              ) -> tuple[Guards, list[torch.Tensor]]:
    """Return the key of a plan for a call, and the tensors among the call's arguments."""
    tensors, structure, constants = take_call_apart(args, kwargs)
    shapes = tuple((t.shape, t.dtype, t.device, t.requires_grad,
                    t.stride() if t.layout is torch.strided and not t.is_nested else t.layout)
                   for t in tensors)
    module = reader.read()
    kinds = {*module.kinds, *devices.autocast_kinds(t.device for t in tensors)}
    return Guards(module.flags, module.attributes, shapes, structure, tuple(map(by_content, constants)),
                  autocast_now(kinds), _kernels(), module.places, torch.get_default_dtype(),
                  records=recorded_here(), one=one_tensor(tensors)), tensors


def autocast_now(kinds: Iterable[str]) -> tuple[tuple[str, torch.dtype], ...]:
    """Return the device types for which autocast is on, each with its dtype, among some and the CPU."""
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in sorted({"cpu", *kinds})
                 if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind))


def _kernels() -> tuple[bool, ...]:
    cuda = torch.backends.cuda
    return (cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled(),
            cuda.cudnn_sdp_enabled(), torch.backends.cudnn.enabled)


# -- What has changed ------------------------------------------------------------------------------
#
# What a call has that is not as it was planned, in words.


_MANY = 4
"""Values of one attribute that say that it will go on to change."""
_NAMED = 5
"""Attributes that a message names at most."""
_WORDS = {
    "inputs": "the shapes, dtypes, devices or strides of its tensors, or which of them require gradients",
    "structure": "how its arguments are put together",
    "constants": "an argument that is no tensor",
    "autocast": "the autocast state",
    "kernels": "which kernels torch may choose (sdpa_kernel, torch.backends.cudnn.enabled)",
    "places": "the shapes, dtypes, devices or strides of parameters or buffers, or which of them are tied",
    "default_dtype": "the default dtype",
    "kinds": "which of its masks are all ones, or which positions are in order",
    "records": "which outputs of its submodules are recorded (output_hidden_states, output_attentions)",
    "one": "which of its arguments are one tensor",
    "values": "what its forward reads from the values of its inputs, or how many elements they pick",
}


def differing(key: Guards, others: Iterable[Guards]) -> str:
    """Return how a call differs from the nearest planned call."""
    nearest = min((_differences(key, k) for k in others), key=len)
    return "; ".join(nearest)


def _differences(key: Guards, other: Guards) -> list[str]:
    found = []
    if key.flags != other.flags:
        found.append(_flags(key.flags, other.flags))
    names = _attributes(key, other)
    if names:
        more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        found.append(f"the values of {', '.join(names[:_NAMED])}{more}")
    return found + [text for field, text in _WORDS.items()
                    if getattr(key, field) != getattr(other, field)]


def _flags(flags: FlagGuards, other: FlagGuards) -> str:
    if flags.parts != other.parts:
        return "its submodules (which there are, their classes or forwards)"
    return "a submodule's train flag, number of hooks, or a parameter's requires_grad"


def _attributes(key: Guards, other: Guards) -> list[str]:
    now, before = dict(key.attributes.content), dict(other.attributes.content)
    return [name for name in (*now, *(n for n in before if n not in now))
            if now.get(name) != before.get(name)]


def changing(key: Guards, others: Iterable[Guards]) -> list[str]:
    """Return what had another value in each of the latest keys that are otherwise equal: attributes by name,
    or arguments.

    `others`: the latest last. Empty while the values are few.
    """
    others = list(others)
    numbers = [k.constants for k in others
               if k.constants != key.constants and k._replace(constants=key.constants) == key]
    if len({*numbers[1 - _MANY:], key.constants}) == _MANY:
        return ["an argument that is no tensor"]
    alike = [k.attributes for k in others
             if k.attributes != key.attributes and k._replace(attributes=key.attributes) == key]
    if len(alike) < _MANY - 1:
        return []
    *before, now = [dict(p.content) for p in (*alike[1 - _MANY:], key.attributes)]
    return [name for name in now if len({p.get(name) for p in (*before, now)}) == _MANY]


def warn_of_changes(model: str, names: Sequence[str]) -> None:
    """Warn that some values take plans of their own in every step."""
    warn(f"{model}: {', '.join(names[:_NAMED])} changed before each of the latest plans, and each value "
         "takes a plan of its own. Make a tensor or a number that changes during training a buffer "
         "(register_buffer, and copy_ for new values), or a tensor among the arguments")
