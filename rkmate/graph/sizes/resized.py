"""A captured graph at another size, from captures at known sizes and dry runs of all of them.

A number of the graph (a literal, a length, a stride) is known by what it is in each of the known
captures: what was (128, 256) there is what the dry runs' numbers that were (128, 256) are at the new size.
Nothing is extrapolated. Where one such row has two values at the new size, or none, there is no answer.
Captures with other numbers give further ones, too, where operators compute with all of them in one way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import fx, nn

from rkmate.graph.capture.answers import Kinds
from rkmate.graph.capture.captured import Capture
from rkmate.graph.capture.structure import Structure, TensorForm, form_of, take_apart
from rkmate.graph.ops.properties import kind_of_number
from rkmate.graph.sizes.dry_run import Recording, dry_run
from rkmate.torch_seam.nodes import TENSOR_META, VALUE, add_like
from rkmate.torch_seam.tensors import FakeTensor, FakeTensorMode, fake_like, read_directly, storage_id

Number = int | float


class _Unknown(Exception):
    """The answer is not certain."""


@dataclass(frozen=True)
class Known:
    """A capture, and the dry run of the same call."""

    capture: Capture
    recording: Recording


@read_directly()
def resized(known: Sequence[Known], new: Recording, common: SideBySide | None = None) -> Capture | None:
    """Return the capture of a new call; None if it is not certain.

    Two captures at least, in which the sizes that differ now were different ones. `common`: of the same
    captures, where it is at hand.
    """
    if len(known) < 2 or any(k.recording.text != new.text for k in known):
        return None
    try:
        numbers = _numbers([k.recording.numbers for k in known], new.numbers)
        return (common or SideBySide([k.capture for k in known])).at(numbers, new)
    except _Unknown:
        return None


@read_directly()
def side_by_side(known: Sequence[Known]) -> SideBySide | None:
    """Return the common structure of captures, for `resized` to use several times; None if they are not
    alike."""
    try:
        return SideBySide([k.capture for k in known])
    except _Unknown:
        return None


def _numbers(known: Sequence[Sequence[Number]], new: Sequence[Number]) -> dict[tuple[Any, ...], Number]:
    """Return, for each row of numbers at the known sizes, the number at the new size."""
    found: dict[tuple[Any, ...], Number] = {}
    for row, now in zip(zip(*known, strict=True), new, strict=True):
        if isinstance(row[0], float):
            row = (float, *row)            # 1.0 is no 1
        if found.setdefault(row, now) != now:
            raise _Unknown(f"{row} is {found[row]} and {now}")
    return found


class _Place(NamedTuple):
    """Something that stands at a place of its list at every size."""

    list: Literal["node", "number", "tensor"]
    at: int


class _Form(NamedTuple):
    """A tensor without its storage; numbers by their places."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool


class SideBySide:
    """Captures gone through side by side: one graph, with places for the numbers in which they differ."""

    def __init__(self, captures: Sequence[Capture]) -> None:
        """Compare captures. Raises an error that `resized` handles if they are not alike."""
        self.captures = tuple(captures)
        self._rows: list[tuple[Any, ...]] = []
        self._row_of: dict[str, int] = {}
        self._forms: dict[_Form, int] = {}
        self._storages: dict[tuple[int, ...], int] = {}
        self._tensor_of: dict[tuple[int, ...], int] = {}
        self._first: list[Any] = []
        """Each tensor of the first capture."""
        self._tensors: list[tuple[int, int, bool]] = []
        """Form, storage, and whether it is the first in its storage."""
        self._place: dict[fx.Node, _Place] = {}
        self._nodes: list[tuple[fx.Node, Any, Any, dict[str, Any], Any]] = []
        """Nodes of the first capture, with the new one's arguments, keywords, notes and value, which have
        places."""
        self._read()
        self._check()
        modes = {id(m): m for t in self._first for m in [getattr(t, "fake_mode", None)]}
        self._mode: FakeTensorMode | None = modes.popitem()[1] if len(modes) == 1 else None
        """The fake mode of all tensors of the first capture."""

    # -- reading --------------------------------------------------------------------------

    def _read(self) -> None:
        lists = [list(c.graph.nodes) for c in self.captures]
        _same([len(nodes) for nodes in lists])
        for row in zip(*lists, strict=True):
            first = row[0]
            _same([(n.op, n.name, n.target) for n in row])
            args, kwargs = self._argument([n.args for n in row]), self._argument([n.kwargs for n in row])
            meta = {k: v for k, v in first.meta.items() if k not in (TENSOR_META, VALUE)}
            value = self._value([n.meta[VALUE] for n in row]) if VALUE in first.meta else _NONE
            self._place[first] = _Place("node", len(self._nodes))
            self._nodes.append((first, args, kwargs, meta, value))

    def _check(self) -> None:
        first = self.captures[0]
        for c in self.captures[1:]:
            if list(c.sources.values()) != list(first.sources.values()) \
                    or c.constants.keys() != first.constants.keys() \
                    or c.differentiable != first.differentiable \
                    or any(not _equal(t, first.constants[k]) for k, t in c.constants.items()) \
                    or self._places(c) != self._places(first) \
                    or [a.path for a in c.assigned] != [a.path for a in first.assigned]:
                raise _Unknown("captures of other structure")

    @staticmethod
    def _places(c: Capture) -> Any:
        return ([None if n is None else n.name for n in c.outputs],
                [(s, n.name) for s, n in c.mutations], [(s, n.name) for s, n in c.grads],
                [n.name for n in c.sources])

    def _argument(self, row: Sequence[Any]) -> Any:
        first = row[0]
        if isinstance(first, fx.Node):
            _same([n.name for n in row])
            return self._place[first]
        if isinstance(first, (tuple, list)):
            _same([len(v) for v in row])
            made = [self._argument(v) for v in zip(*row, strict=True)]
            return tuple(made) if isinstance(first, tuple) else made
        if isinstance(first, dict):
            _same([list(v) for v in row])
            return {k: self._argument([v[k] for v in row]) for k in first}
        return self._number(row)

    def _number(self, row: Sequence[Any]) -> Any:
        first = row[0]
        if isinstance(first, bool) or not isinstance(first, (int, float)):
            _same(row)
            return first
        return _Place("number", self._row(tuple(row)))

    def _row(self, row: tuple[Any, ...]) -> int:
        """Return the place of a number's row; those of floats are apart from those of integers."""
        written = repr(row)                 # 1.0 is no 1, and 0.0 not -0.0
        if written not in self._row_of:
            self._row_of[written] = len(self._rows)
            self._rows.append((float, *row) if isinstance(row[0], float) else row)
        return self._row_of[written]

    def _value(self, row: Sequence[Any]) -> Any:
        first = row[0]
        if isinstance(first, torch.Tensor):
            return self._tensor(row)
        if isinstance(first, (tuple, list)):
            _same([len(v) for v in row])
            made = [self._value(v) for v in zip(*row, strict=True)]
            return type(first)(made)
        return self._number(row)

    def _tensor(self, row: Sequence[torch.Tensor]) -> _Place:
        at = tuple(map(id, row))
        if at not in self._tensor_of:
            first = row[0]
            _same([(t.dtype, t.device, t.dim(), t.requires_grad, type(t)) for t in row])
            form = _Form(tuple(map(self._row, zip(*(tuple(t.shape) for t in row), strict=True))),
                         tuple(map(self._row, zip(*(t.stride() for t in row), strict=True))),
                         self._row(tuple(int(t.storage_offset()) for t in row)), first.dtype, first.device,
                         first.requires_grad)
            storages = [t.untyped_storage() for t in row]
            key = tuple(storage_id(s) for s in storages)
            owns = key not in self._storages
            # Who owns the storage comes first: what it holds, and no more.
            if owns and any(s.nbytes() != _bytes(t.shape, t.stride(), int(t.storage_offset()),
                                                 t.element_size())
                            for s, t in zip(storages, row, strict=True)):
                raise _Unknown("a storage of another size than its tensor")
            storage = self._storages.setdefault(key, len(self._storages))
            self._tensor_of[at] = len(self._tensors)
            self._first.append(first)
            self._tensors.append((self._forms.setdefault(form, len(self._forms)), storage, owns))
        return _Place("tensor", self._tensor_of[at])

    # -- at another size ------------------------------------------------------------------

    def at(self, numbers: Mapping[tuple[Any, ...], Number], new: Recording) -> Capture:
        """Return the capture in which each row is the number that `numbers` says. Raises as `__init__`
        does."""
        first = self.captures[0]
        if new.result.count != first.result.count:
            raise _Unknown("other results")
        values = [_now(row, numbers) for row in self._rows]
        tensors = self._tensors_at(values)
        graph, nodes = fx.Graph(), list[fx.Node]()
        lists: Mapping[str, Sequence[Any]] = {"node": nodes, "number": values, "tensor": tensors}
        for old, args, kwargs, meta, value in self._nodes:
            node = add_like(graph, old, _filled(args, lists), _filled(kwargs, lists))
            node.meta.update(meta)
            if value is not _NONE:
                node.meta[VALUE] = _filled(value, lists)
            nodes.append(node)
        at = {old: node for (old, *_), node in zip(self._nodes, nodes, strict=True)}
        return replace(
            first, graph=graph, sources={at[n]: s for n, s in first.sources.items()},
            outputs=tuple(None if n is None else at[n] for n in first.outputs),
            mutations=tuple((s, at[n]) for s, n in first.mutations),
            grads=tuple((s, at[n]) for s, n in first.grads), result=new.result)

    def _same_as_first(self, values: Sequence[Any]) -> list[bool]:
        """Return, for each tensor, whether it can be the first capture's: it has one size in all captures, as
        parameters and their gradients have, and its storage holds only such tensors."""
        if self._mode is None:
            return [False] * len(self._tensors)
        fixed = [type(row[0]) is int and row[0] == now for row, now in zip(self._rows, values, strict=True)]
        forms = [all(fixed[k] for k in (*f.shape, *f.stride, f.offset)) for f in self._forms]
        kept: set[int] = set()
        result = []
        for k, storage, owns in self._tensors:
            same = forms[k] and (owns or storage in kept)
            if same and owns:
                kept.add(storage)
            result.append(same)
        return result

    def _tensors_at(self, values: Sequence[Any]) -> list[FakeTensor]:
        same = self._same_as_first(values)
        mode = FakeTensorMode() if self._mode is None else self._mode
        forms = [f._replace(shape=tuple(values[k] for k in f.shape),
                            stride=tuple(values[k] for k in f.stride), offset=values[f.offset])
                 for f in self._forms]
        owners: dict[int, torch.Tensor] = {}
        made: list[FakeTensor] = []
        alike: dict[torch.device, FakeTensor] = {}
        for number, (k, storage, owns) in enumerate(self._tensors):
            f = forms[k]
            if same[number]:
                made.append(self._first[number])
                if owns:
                    owners[storage] = made[-1]
                continue
            if owns and not f.offset:
                plain = torch.empty_strided(f.shape, f.stride, dtype=f.dtype, device="meta")
            else:
                held = owners[storage].untyped_storage() if not owns else torch.UntypedStorage(
                    _bytes(f.shape, f.stride, f.offset, f.dtype.itemsize), device="meta")
                plain = torch.empty(0, dtype=f.dtype, device="meta").set_(held, f.offset, f.shape, f.stride)
            if owns:
                owners[storage] = plain
            if f.device not in alike:
                alike[f.device] = FakeTensor(mode, torch.empty(0, device="meta"), f.device)
            made.append(fake_like(alike[f.device], plain, f.requires_grad))
        return made


_NONE = object()
"""Stands for the value of a node without one."""


def _now(row: tuple[Any, ...], numbers: Mapping[tuple[Any, ...], Number]) -> Number:
    """Return the number of a row at the new size."""
    found = numbers.get(row)
    if found is not None:
        return found
    # A number of the tracer's own: the same at all known sizes, and no size.
    if row[0] is float:
        row = row[1:]
    _same(row)
    made: Number = row[0]
    return made


def _filled(value: Any, lists: Mapping[str, Sequence[Any]]) -> Any:
    """Return a value with its places filled."""
    kind = type(value)
    if kind is _Place:
        return lists[value.list][value.at]
    if kind is tuple:
        return tuple([_filled(v, lists) for v in value])
    if isinstance(value, (tuple, list)):
        return kind([_filled(v, lists) for v in value])
    if kind is dict:
        return {k: _filled(v, lists) for k, v in value.items()}
    return value


def _bytes(shape: Sequence[int], stride: Sequence[int], offset: int, each: int) -> int:
    if 0 in shape:
        return 0
    return (offset + 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True))) * each


def _same(row: Sequence[Any]) -> None:
    if any(v != row[0] for v in row[1:]):
        raise _Unknown(f"{row[0]} and {row[1]}")


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and a.device == b.device
                      and torch.equal(a, b))


# -- Known captures of a call ----------------------------------------------------------------------


@dataclass
class KnownCall:
    """A call that was captured in full."""

    capture: Capture
    forms: tuple[TensorForm, ...]
    """Forms of the arguments' tensors."""
    recording: Recording | None = None
    """The dry run; made when it is first needed."""
    recorded: bool = False
    common: SideBySide | None = None
    """Structure that its capture has in common with others, from the last time that it was needed."""
    numbers: tuple[float, ...] = ()
    """Numbers that the call was made with, other ones in other calls of the family: those of arguments and
    attributes."""


def known_call(capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any],
               recording: Recording | None = None, numbers: tuple[float, ...] = ()) -> KnownCall:
    """Return a call, its capture and, where it was made, its dry run."""
    tensors, structure = take_apart((args, kwargs), result=False)
    return KnownCall(replace(capture, inputs=structure), tuple(map(form_of, tensors)), recording,
                     recording is not None, numbers=numbers)


def possible(sizes: Sequence[Sequence[Number]], known: Sequence[Sequence[Sequence[Number]]]) -> bool:
    """Return whether the sizes and numbers of known calls, each of the same tensors, may tell those of a new
    one: what is the same in all of them is the same in it."""
    if len(known) < 2:
        return False
    for places in zip(sizes, *known, strict=True):
        for now, *before in zip(*places, strict=True):
            if now not in before and len(set(before)) == 1:
                return False
    return True


def one_family(known: KnownCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call of contiguous tensors differs from a known one in their lengths at most, and in
    none that is 0 or 1, which torch treats otherwise (broadcasting, strides)."""
    tensors, structure = take_apart((args, kwargs), result=False)
    if not structure.is_plain or structure != known.capture.inputs:
        return False
    return all(
        a.dtype == b.dtype and a.device == b.device and a.requires_grad == b.requires_grad
        and len(a.shape) == len(b.shape)
        and _is_contiguous(a) and _is_contiguous(b)
        and all(m == n or min(m, n) > 1 for m, n in zip(a.shape, b.shape, strict=True))
        for a, b in zip(map(form_of, tensors), known.forms, strict=True))


def _is_contiguous(form: TensorForm) -> bool:
    return torch.empty_strided(form.shape, form.stride, device="meta").is_contiguous()


def derived(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
            known: Sequence[KnownCall], numbers: tuple[float, ...] = ()
            ) -> tuple[Capture | None, Recording | None]:
    """Return the capture of a call from known ones, if that is certain; and the dry run of the call.

    The calls differ in the sizes of their tensors and in their `numbers` alone, and arguments that libraries
    look at are of the same kinds; one thread at a time.
    """
    tensors, structure = take_apart((args, kwargs), result=False)
    new = _recorded(model, structure, [form_of(t) for t in tensors], known[-1].capture.looked, numbers)
    if new is None:
        return None, None
    _record(model, known)
    pairs, common = _alike(known, new)
    found = None if common is None else resized(pairs, new, common)
    return (None if found is None else replace(found, inputs=structure)), new


def compare_known(model: nn.Module, known: Sequence[KnownCall]) -> None:
    """Do what `derived` needs of known calls alone ahead of the first new one; one thread at a time."""
    _record(model, known)
    latest = known[-1].recording
    if latest is not None:
        _alike(known, latest)


def _record(model: nn.Module, known: Sequence[KnownCall]) -> None:
    for k in known:
        if not k.recorded:
            k.recording, k.recorded = _recorded(model, k.capture.inputs, k.forms, k.capture.looked,
                                                k.numbers), True


def _recorded(model: nn.Module, inputs: Structure, forms: Sequence[TensorForm], looked: Kinds,
              numbers: tuple[float, ...]) -> Recording | None:
    """Return a dry run, whose numbers end with those that the call was made with: a patched operation may
    read them as they are."""
    made = dry_run(model, inputs, forms, looked=looked)
    return None if made is None else replace(made, numbers=(*made.numbers, *numbers))


def _alike(known: Sequence[KnownCall], new: Recording) -> tuple[list[Known], SideBySide | None]:
    """Return the known calls that do the operations of another one in its ways, and what they have in common,
    if it is at hand in whatever order they came; None where they are too few, or have nothing in common."""
    # A first call may set an attribute that later ones find set (transformers' `problem_type`).
    same = [k for k in known if k.recording is not None and k.recording.text == new.text
            and all(a == b or type(a) is not float or kind_of_number(a) == kind_of_number(b)
                    for a, b in zip(k.recording.numbers, new.numbers, strict=True))
            and [a.path for a in k.capture.assigned] == [a.path for a in known[-1].capture.assigned]]
    pairs = {id(k.capture): Known(k.capture, k.recording) for k in same if k.recording is not None}
    if len(pairs) < 2:
        return [], None
    for k in same:
        if k.common is not None and {id(c) for c in k.common.captures} == set(pairs):
            return [pairs[id(c)] for c in k.common.captures], k.common
    same[0].common = side_by_side(list(pairs.values()))
    return list(pairs.values()), same[0].common
