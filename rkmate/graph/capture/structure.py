"""Arguments and results of a module as flat lists of tensors and their structure, forms of tensors, and
parameters that consist of plain tensors."""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch

from rkmate.errors import CaptureError
from rkmate.torch_seam.containers import (
    PLAIN,
    attributes_in,
    objects_in,
    pytree,
    tensors_behind,
    tensors_in,
)
from rkmate.torch_seam.dtensor import Placed, is_dtensor, local_part, placed
from rkmate.torch_seam.modules import buffers_of
from rkmate.torch_seam.tensors import is_unwrapped

# -- Structures around tensors ---------------------------------------------------------------------
#
# Standard containers (and what is registered with torch's pytree: Hugging Face outputs, named tuples) are
# taken apart by pytree. Any other object that can be copied (a dataclass, a key-value cache) becomes a
# *skeleton*: a deep copy in which every tensor is a numbered slot.


_LEAVES = frozenset((torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None)))
"""Types of everyday arguments, in which nothing else stands."""
GIVEN = "rkmate_given"
"""The keyword under which the rest of a sharded model's forward gets what sharded modules have returned."""


@dataclass(frozen=True)
class _Slot:
    """Stands for tensor number `index` inside a skeleton."""

    index: int
    placed: Placed | None = None
    """Placement of the DTensor that is made of it; None for a plain tensor."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        tensors = memo.get(_FILL)
        return self if tensors is None else self.of(tensors)

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return what stands here."""
        found = tensors[self.index]
        return found if self.placed is None else self.placed.of(found)


@dataclass(frozen=True)
class HeldByModule:
    """Stands for a tensor that a module holds (a buffer, an attribute): an attribute that the forward assigns
    may be that very tensor."""

    module: torch.nn.Module
    name: str

    def of(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Return the tensor that the module holds now."""
        return getattr(self.module, self.name)


def held_by_modules(model: torch.nn.Module) -> list[tuple[int, HeldByModule]]:
    """Return where the model's modules hold tensors that are no parameters, after the tensor's identity."""
    return [(id(t), HeldByModule(m, name)) for m in model.modules()
            for name, t in (*vars(m).items(), *buffers_of(m).items()) if isinstance(t, torch.Tensor)]


_FILL = -1   # memo key under which the tensors travel; no object has a negative id


@dataclass(frozen=True, eq=False)
class ReadLater:
    """Stands for the Python value of a traced tensor (`item`, `tolist`), which a trace has not: a forward may
    return it or keep it, and nothing else. A structure that is filled has the value in its place."""

    tensor: Any
    read: str
    """The method of the tensor that returns the value."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        found = copy.deepcopy(self.tensor, memo)
        if _FILL not in memo:
            return ReadLater(found, self.read)
        return getattr(found, self.read)() if isinstance(found, torch.Tensor) else found

    def _used(self, *_: object, **__: object) -> Any:
        raise TypeError("data-dependent: the forward computes with a number that it reads from a tensor")

    __bool__ = __str__ = __repr__ = __format__ = __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used
    __hash__ = None  # type: ignore[assignment]


def refuse_what_a_trace_leaves(values: Any) -> None:
    """Raise `ValueError` where values hold a number that stands for the value of a traced tensor, and
    `CaptureError` where a function holds a traced tensor."""
    if any(isinstance(v, (torch.SymInt, torch.SymFloat, torch.SymBool)) for v in objects_in(values)):
        raise ValueError("data-dependent: the forward returns or keeps a number that it reads from a tensor")
    if not all(map(is_unwrapped, tensors_behind(values))):
        raise CaptureError("the forward returns or keeps a function or a weak reference that leads to "
                           "tensors of this call, which a planned step would not make again: return the "
                           "tensors")


@dataclass(frozen=True)
class Structure:
    """Puts tensors back into the object that they were taken from."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]
    """For each leaf of the pytree: a `_Slot`, a plain constant, or a skeleton."""
    count: int
    """Number of tensors."""

    def fill(self, tensors: list[Any]) -> Any:
        """Return the object again, with these tensors in it."""
        leaves: list[Any] = []
        for leaf in self.leaves:
            if isinstance(leaf, (_Slot, HeldByModule)):
                leaves.append(leaf.of(tensors))
            elif isinstance(leaf, PLAIN):
                leaves.append(leaf)
            else:
                leaves.append(_copied(leaf, {_FILL: tensors}))
        return pytree.tree_unflatten(leaves, self.spec)

    def with_dtensors(self, places: Mapping[int, Placed]) -> Structure:
        """Return the structure that makes DTensors of some tensors, by number."""
        return dataclasses.replace(self, leaves=tuple(
            _Slot(leaf.index, places.get(leaf.index)) if isinstance(leaf, _Slot) else leaf
            for leaf in self.leaves))

    def held_by_objects(self, args: Any, kwargs: Any) -> dict[int, tuple[Any, list[int]]]:
        """Return, for each object that pytree does not know, by its number among the leaves, the object and
        the ids of its tensors."""
        leaves = pytree.tree_flatten((args, kwargs))[0]
        return {k: (leaf, [id(t) for t in tensors_in(leaf)]) for k, leaf in enumerate(leaves)
                if not isinstance(leaf, (*PLAIN, torch.Tensor))}

    def index_of(self, name: str) -> int | None:
        """Return the tensor under a key or attribute of the outermost container; None without one."""
        value = pytree.tree_unflatten(list(self.leaves), self.spec)
        found = value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)
        return found.index if isinstance(found, _Slot) else None

    def under(self, names: Collection[str]) -> set[int]:
        """Return the tensors under some keys or attributes of the outermost container."""
        value = pytree.tree_unflatten(list(self.leaves), self.spec)
        content = value if isinstance(value, Mapping) else getattr(value, "__dict__", {})
        return {s.index for k, v in content.items() if k in names
                for s in objects_in(v) if isinstance(s, _Slot)}

    def names(self) -> dict[str, frozenset[int]]:
        """Return the tensors under each key, field or index, with dots between: ``aux.0`` and ``aux``."""
        names: dict[str, frozenset[int]] = {}

        def visit(value: Any, path: str, above: frozenset[int]) -> frozenset[int]:
            if isinstance(value, _Slot):
                found = frozenset((value.index,))
            elif isinstance(value, PLAIN) or id(value) in above:     # it may refer to itself
                return frozenset()
            else:
                below = [visit(v, f"{path}.{k}" if path else str(k), above | {id(value)})
                         for k, v in _parts(value)]
                found = frozenset(i for part in below for i in part)
            if found and path:
                names[path] = found
            return found

        visit(pytree.tree_unflatten(list(self.leaves), self.spec), "", frozenset())
        return names

    def name_of(self, number: int) -> str:
        """Return the model's name of a tensor, such as ``logits``; without a name, its number."""
        return next((name for name, found in self.names().items() if found == {number}), str(number))

    @property
    def slots(self) -> list[int]:
        """The numbers of the tensors, in the order in which they stand in the object."""
        return [s.index for leaf in self.leaves if not isinstance(leaf, PLAIN)
                for s in objects_in(leaf) if isinstance(s, _Slot)]

    @property
    def is_plain(self) -> bool:
        """Whether nothing but tensors and plain constants stands in it."""
        return all(isinstance(leaf, (_Slot, *PLAIN)) for leaf in self.leaves)

    def constants(self) -> tuple[Any, ...]:
        """Return the leaves that are not tensors, and the placements of DTensors, in order: what a call is
        specialised on."""
        return tuple(leaf.placed if isinstance(leaf, _Slot) else leaf for leaf in self.leaves
                     if not isinstance(leaf, _Slot) or leaf.placed is not None)


def _parts(value: Any) -> list[tuple[Any, Any]]:
    """Return the direct members of a container or object, each after its key, index or name."""
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, (list, tuple)):
        return [*zip(getattr(value, "_fields", ()), value, strict=False), *enumerate(value),
                *enumerate(value, -len(value))]
    return list(attributes_in(value).items())


def take_apart(value: Any, *, result: bool, after: Sequence[torch.Tensor] = (),
               held: Mapping[int, HeldByModule] = MappingProxyType({})
               ) -> tuple[list[torch.Tensor], Structure]:
    """Return the tensors of `value`, in order, and the structure around them. `after`: tensors that come
    before them, and that a ``result`` may hold, too. `held`: where modules hold tensors that are left out, by
    identity.

    Objects that pytree does not know, and that hold tensors, become skeletons. For a ``result``,
    the same tensor found twice is one slot. In arguments each occurrence has a number of its own, and the
    slot of the first occurrence stands for all that are `one_tensor`; of a DTensor the local part is taken.
    Other objects are kept as they are: the model gets the very object.
    """
    flat, spec = pytree.tree_flatten(value)
    tensors: list[torch.Tensor] = [*after]
    index: dict[int, int] = {id(t): k for k, t in enumerate(tensors)}

    def slot(t: torch.Tensor) -> _Slot:
        place = placed(t) if not result and is_dtensor(t) else None
        known = index.get(id(t))
        if known is None or not result:
            tensors.append(t if place is None else local_part(t))
        if known is None or not (result or (place is None and takes_gradients(t))):
            known = index[id(t)] = len(tensors) - 1
        return _Slot(known, place)

    leaves: list[Any] = []
    for leaf in flat:
        if isinstance(leaf, torch.Tensor):
            leaves.append(held.get(id(leaf)) or slot(leaf))
        elif isinstance(leaf, PLAIN) or not (result or tensors_in(leaf)):
            leaves.append(leaf)
        else:
            leaves.append(_skeleton(leaf, slot))
    return tensors, Structure(spec, tuple(leaves), len(tensors))


def takes_gradients(t: torch.Tensor) -> bool:
    """Return whether a tensor's numbers are such that it can require a gradient."""
    return t.is_floating_point() or t.is_complex()


def one_tensor(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return, for each tensor among the arguments of a call, the number of the first one that is the same
    object: a forward may ask whether they are (attention does), and their gradients are added up. Empty where
    no two are the same. Each index or mask counts as another tensor."""
    if len({*map(id, tensors)}) == len(tensors):
        return ()
    first: dict[int, int] = {}
    found = [first.setdefault(id(t), k) if takes_gradients(t) else k for k, t in enumerate(tensors)]
    return tuple(found) if found != [*range(len(found))] else ()


def take_call_apart(args: Sequence[Any], kwargs: Mapping[str, Any]
                    ) -> tuple[list[torch.Tensor], pytree.TreeSpec, tuple[Any, ...]]:
    """Return the tensors among the arguments of a call, where they stand, and the other leaves."""
    flat = (*args, *kwargs.values())
    if _LEAVES.issuperset(map(type, flat)):
        return ([v for v in flat if isinstance(v, torch.Tensor)], _spec_of_leaves(len(args), tuple(kwargs)),
                tuple([v for v in flat if not isinstance(v, torch.Tensor)]))
    tensors, structure = take_apart((tuple(args), dict(kwargs)), result=False)
    return tensors, structure.spec, structure.constants()


@functools.lru_cache(maxsize=256)
def _spec_of_leaves(count: int, names: tuple[str, ...]) -> pytree.TreeSpec:
    """Return the structure of a call with `count` positional arguments, each of them a leaf, and named
    ones."""
    return pytree.tree_flatten(((None,) * count, dict.fromkeys(names)))[1]


def _skeleton(value: Any, slot: Any) -> Any:
    return _copied(value, {id(t): slot(t) for t in tensors_in(value)})


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy. Raises `CaptureError` for an object that has none."""
    try:
        # A dictionary that looks for attributes among its keys may say that it has none in its own way.
        objects = objects_in(value)
        for held in reversed(objects):
            if isinstance(held, dict) and hasattr(type(held), "__getattr__"):
                new = memo[id(held)] = type(held).__new__(type(held))
                vars(new).update(copy.deepcopy(vars(held), memo))
                dict.update(new, {k: copy.deepcopy(v, memo) for k, v in held.items()})
        copied = copy.deepcopy(value, memo)
        # Weak references between objects lead to the copies.
        for held in objects_in(copied) if any(type(o) is weakref.ref for o in objects) else ():
            for name, v in [*getattr(held, "__dict__", {}).items()]:
                if type(v) is weakref.ref and id(v()) in memo:
                    held.__dict__[name] = weakref.ref(memo[id(v())])
        return copied
    except Exception as error:
        reason = str(error).partition(". ")[0]
        raise CaptureError("the forward takes, returns or keeps an object of the type "
                           f"{type(value).__name__}, which cannot be copied (copy.deepcopy: {reason}): use "
                           "tuples, lists, dictionaries or data classes of tensors") from error


# -- Forms of tensors ------------------------------------------------------------------------------


class TensorForm(NamedTuple):
    """A tensor without its values."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool = False
    offset: int = 0


def form_of(t: torch.Tensor) -> TensorForm:
    """Return the form of a tensor that an operation or a call takes."""
    return TensorForm(tuple(t.shape), tuple(t.stride()), t.dtype, t.device, t.requires_grad,
                      int(t.storage_offset()))


def like(f: TensorForm) -> torch.Tensor:
    """Return a tensor of this form without memory."""
    if not f.offset:
        return torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device="meta")
    extent = f.offset + 1 + sum((n - 1) * s for n, s in zip(f.shape, f.stride, strict=True))
    whole = torch.empty(max(extent, 0), dtype=f.dtype, device="meta")
    return whole.as_strided(f.shape, f.stride, f.offset)


# -- Pieces of tensors (quantized weights) ---------------------------------------------------------
#
# A tensor subclass with ``__tensor_flatten__`` (torchao's quantized weights) is captured as the plain tensors
# that it is made of, its pieces: these are what a step reads. A piece is named by the tensor's name and the
# attributes that lead to it: ``layers.0.weight@qdata``. Of a DTensor, the local part is such a piece.


_AT = "@"
LOCAL = "local"
"""The piece of a DTensor that is its local part."""


def is_made_of_pieces(tensor: torch.Tensor) -> bool:
    """Return whether a trace sees the tensors inside of one, and not itself."""
    return hasattr(type(tensor), "__tensor_flatten__")


def piece_name(name: str, attribute: str) -> str:
    """Return the name of a piece of a tensor, or of a piece."""
    return f"{name}{_AT}{attribute}"


def owner_name(name: str) -> str:
    """Return the name of the tensor that a piece belongs to; of a whole tensor its own."""
    return name.partition(_AT)[0]


def piece_of(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Return the piece of a tensor that a name stands for; the tensor itself where it stands for all of
    it."""
    for attribute in name.split(_AT)[1:]:
        tensor = local_part(tensor) if is_dtensor(tensor) else getattr(tensor, attribute)
    return tensor


def tensor_called(tensors: Mapping[str, torch.Tensor], name: str) -> torch.Tensor:
    """Return the tensor, or the piece of one, of this name. Raises `KeyError`."""
    return piece_of(tensors[owner_name(name)], name)

