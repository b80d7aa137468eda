"""A captured graph at another depth: of alike layers, a few are traced, and the others are copies.

A dry run of the whole model shows what every layer does. If its operations, in the forward and the backward,
are those of a shorter model with the operations of some layers repeated, then the shorter model is captured,
and its graph is extended in the same way. In any doubt, the whole model is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from rkmate.errors import CaptureError
from rkmate.graph.capture import hints
from rkmate.graph.capture.answers import kinds_of
from rkmate.graph.capture.capture import capture as capture_whole
from rkmate.graph.capture.captured import Capture, Source
from rkmate.graph.capture.effects import Effects
from rkmate.graph.capture.opaque import Opaque
from rkmate.graph.capture.structure import form_of, take_apart
from rkmate.graph.sizes.dry_run import Recording, Steps, dry_run
from rkmate.graph.sizes.layers import UNITS, Layers, Run, layers_of, shorter
from rkmate.torch_seam.containers import pytree
from rkmate.torch_seam.modules import parameters_proper
from rkmate.torch_seam.nodes import VALUE, WISH, add_like, is_backward, moved, renamed, sequence_number
from rkmate.torch_seam.patches.autograd import REGION, renewed_region
from rkmate.torch_seam.patches.features import check_once
from rkmate.torch_seam.tensors import FakeTensor, fake_like, read_directly, storage_id
from rkmate.torch_seam.trace import load

Reference = tuple[int, int]
"""A value: the item that makes it, and its number among the item's values."""
Copy = tuple[int, int]
"""An item of the shorter list, and how many units further it stands in the longer one."""


class _Differs(Exception):
    """The whole is not what the shorter model says."""


def captured(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
             opaque: Opaque = ()) -> tuple[Capture, Recording | None]:
    """Return the joint graph of one training step, as `capture_whole` does, and the dry run of the step if
    one was made. Of layers that are alike, a few are traced, where that is certain to give the graph of the
    whole. Raises `CaptureError`, `ArgumentError`."""
    with parameters_proper(model):
        layers = layers_of(model) if opaque in ((), "auto") else None
        if layers is not None:
            try:
                return _by_layers(model, args, kwargs, layers)
            except (_Differs, CaptureError):
                pass
        return capture_whole(model, args, kwargs, opaque), None


def _by_layers(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any],
               layers: Layers) -> tuple[Capture, Recording]:
    check_once()
    load()
    tensors, inputs = take_apart((args, kwargs), result=False)
    forms = [form_of(t) for t in tensors]
    short = shorter(model, layers)
    looked = tuple(kinds_of(tensors).items())
    few = dry_run(short, inputs, forms, looked=looked, steps=True)
    if few is None or few.steps is None:
        raise _Differs("no dry run")
    layers = _in_order(layers, few.steps)
    pattern = pattern_of(few.steps, layers)         # before the whole's dry run, which takes longer
    whole = dry_run(model, inputs, forms, looked=looked, steps=True)
    if whole is None or whole.steps is None:
        raise _Differs("no dry run of the whole")
    compare(few.steps, whole.steps, layers, pattern)
    found = capture_whole(short, args, kwargs)
    if found.recipe is not None or found.repeats or found.effects != Effects():
        raise _Differs("values or effects")
    with read_directly():
        return replace(_Longer(found, layers).capture(), result=whole.result), whole


def _in_order(layers: Layers, few: Steps) -> Layers:
    """Return the runs in the order in which the forward calls them."""
    def begins(run: Run) -> int:
        own = {few.inputs + k for k, name in enumerate(few.entered) if name.startswith(f"{run.path}.")}
        return next((k for k, read in enumerate(few.references) if any(x in own for x, _ in read)), 0)

    return Layers(sorted(layers.runs, key=begins))


# -- Lists that repeat themselves ------------------------------------------------------------------

def copies_of(units: Sequence[int], extra: Sequence[int]) -> list[Copy]:
    """Return the items of the longer list, in order, from the units of the shorter list's items.

    The second unit of a run is followed by its copies where units ascend, and comes after them where units
    descend. `extra`: copies of each run.
    """
    blocks: list[tuple[int, int, int]] = []
    for k, unit in enumerate(units):
        if blocks and blocks[-1][0] == unit:
            blocks[-1] = (unit, blocks[-1][1], k + 1)
        else:
            blocks.append((unit, k, k + 1))
    order: list[Copy] = []
    for number, (unit, start, end) in enumerate(blocks):
        shifts = [0]
        if unit >= 0 and unit % UNITS == 1:
            further = range(1, extra[unit // UNITS] + 1)
            around = [b[0] for b in blocks[max(number - 1, 0):number + 2] if b[0] == unit + 1]
            if len(around) != 1:
                raise _Differs("no order of the layers")
            ascends = number + 1 < len(blocks) and blocks[number + 1][0] == unit + 1
            shifts = [0, *further] if ascends else [*reversed(further), 0]
        order += [(k, shift) for shift in shifts for k in range(start, end)]
    return order


def _pairs(units: Sequence[int]) -> list[tuple[int, int]]:
    """Return the items of the second unit of each run, each with the item of the third."""
    second, third = ([k for k, u in enumerate(units) if u >= 0 and u % UNITS == at] for at in (1, 2))
    if [units[k] + 1 for k in second] != [units[k] for k in third]:
        raise _Differs("layers of other lengths")
    return list(zip(second, third, strict=True))


class Pattern:
    """A list of items that refer to one another, in which runs of units repeat themselves."""

    def __init__(self, units: Sequence[int], references: Sequence[Sequence[Reference]],
                 tokens: Sequence[Hashable], extra: Sequence[int],
                 fixed: Callable[[int], Hashable | None] = lambda item: None) -> None:
        """Compare the second and the third unit of each run. Raises an error if they differ.

        units: of each item, -1 outside of all runs. tokens: of each item, what is equal in all units. fixed:
        of an item that is never copied, as it has the same value in all units, the value.
        """
        self.units, self.extra, self._fixed = units, extra, fixed
        self._next: dict[Reference, Reference] = {}
        """Values that the third unit reads where the second one reads a value."""
        self._previous: dict[Reference, Reference] = {}
        self.twins: dict[int, int] = {}
        """For each item of a second unit the one of the third."""
        self.twins = dict(_pairs(units))
        self._twin_before = {b: a for a, b in self.twins.items()}
        for a, b in self.twins.items():
            if tokens[a] != tokens[b]:
                raise _Differs(f"items {a} and {b} of two layers")
        self.also(units, references)

    def also(self, units: Sequence[int], references: Sequence[Sequence[Reference]]) -> None:
        """Compare what further items of the second and third units read."""
        for a, b in _pairs(units):
            if len(references[a]) != len(references[b]):
                raise _Differs("layers read other numbers of values")
            for x, y in zip(references[a], references[b], strict=True):
                self._compare(x, y, units[a] // UNITS)

    def _compare(self, x: Reference, y: Reference, run: int) -> None:
        """Compare what the second and the third unit of a run read."""
        m, n = self._unit(x), self._unit(y)
        if m < 0 or m // UNITS != run:
            same = x == y or (self._fixed(x[0]) is not None and self._fixed(x[0]) == self._fixed(y[0]))
            if not same:
                raise _Differs("layers read different values")
        elif n != m + 1 or x[1] != y[1] or self.twins.get(x[0], y[0]) != y[0] \
                or self._next.setdefault(x, y) != y or self._previous.setdefault(y, x) != x:
            raise _Differs("layers read values of different layers")

    def _unit(self, x: Reference) -> int:
        return -1 if self._fixed(x[0]) is not None else self.units[x[0]]

    def at(self, x: Reference, unit: int, shift: int) -> tuple[Reference, int]:
        """Return what a copy of an item reads for a value that the item reads: a value, and its shift."""
        m = self._unit(x)
        if m < 0:
            return x, 0
        run, at = divmod(m, UNITS)
        extra = self.extra[run]
        if unit < 0 or unit // UNITS != run:
            if at in (0, UNITS - 1):
                return x, 0
            raise _Differs("a value inside of a run is read outside of it")
        own = unit % UNITS
        if own == 1:
            if at == 1:
                return x, shift
            if at == 0 and (shift == 0 or x in self._next):
                return (x, 0) if shift == 0 else (self._next[x], shift - 1)
            if at == 2 and (shift == extra or x[0] in self._twin_before):
                return (x, 0) if shift == extra else ((self._twin_before[x[0]], x[1]), shift + 1)
        elif own == 2 and at in (1, 2, 3):
            return x, extra if at == 1 else 0
        elif (own == 0 and at != 2) or (own == UNITS - 1 and at != 1):
            return x, 0
        raise _Differs("a value of a distant layer is read")


def _spread(first: Sequence[int], references: Sequence[Sequence[Reference]], backward: int,
            apart: Collection[int] = ()) -> list[int]:
    """Return the units of items in the order of their work: a unit of the forward begins with the first item
    that reads something of it, and one of the backward ends where the next one reads something of its own.

    first: units of the items that do no work, and come first. backward: the first item of the backward.
    apart: items that belong to the last unit that they read, wherever they stand: copies of outputs, and
    what makes the gradients of these.
    """
    units = [*first]
    now, begin = -1, max(backward, len(first))
    for k in range(len(first), len(references)):
        units.append(max((units[x] for x, _ in references[k] if x < begin or x in apart), default=-1))
        if k < backward and k not in apart:
            now = units[k] = max(units[k], now)
    now, silent = -1, [k for k in range(backward, len(units)) if units[k] < 0]
    for k in reversed(range(backward, len(units))):
        if k not in apart:
            now = units[k] = max(units[k], now)
    for k in silent:
        if k > backward and k not in apart and k - 1 not in apart:
            units[k] = units[k - 1]
    return units


# -- Steps of dry runs -----------------------------------------------------------------------------

def pattern_of(few: Steps, layers: Layers) -> Pattern:
    """Return the steps of the shorter model as a list in which layers repeat themselves. Raises an error if
    the layers in the middle differ."""
    units = _spread([*([-1] * few.inputs), *map(layers.unit, few.entered)], few.references, few.backward,
                    range(few.backward - len(few.outputs), few.backward + few.tangents))
    return Pattern(units, few.references, few.tokens, [run.extra for run in layers.runs])


def compare(few: Steps, whole: Steps, layers: Layers, pattern: Pattern) -> None:
    """Raise an error unless the steps of the whole model are those of the shorter one, with the steps of some
    layers repeated. `pattern`: of the shorter one's steps."""
    begin, units, extra = few.inputs + len(few.entered), pattern.units, pattern.extra
    order = copies_of(units, extra)
    if len(order) != len(whole.tokens) or whole.inputs != few.inputs \
            or sum(item < few.backward for item, _ in order) != whole.backward:
        raise _Differs("another number of steps")
    place = {copy: k for k, copy in enumerate(order)}

    def now(x: Reference, unit: int, shift: int) -> Reference:
        (item, number), further = pattern.at(x, unit, shift)
        return place[item, further], number

    for k, (item, shift) in enumerate(order):
        if few.tokens[item] != whole.tokens[k] or whole.references[k] != tuple(
                [now(x, units[item], shift) for x in few.references[item]]):
            raise _Differs(f"step {k} of the whole")
        if few.inputs <= item < begin and layers.whole(few.entered[item - few.inputs], shift) \
                != whole.entered[k - whole.inputs]:
            raise _Differs("other parameters")
    names = [layers.unit(name) for name, _ in few.gradients]
    pattern.also(names, [[] if x is None else [x] for _, x in few.gradients])
    gradients = []
    for item, shift in copies_of(names, extra):
        name, x = few.gradients[item]
        gradients.append((layers.whole(name, shift), None if x is None else now(x, names[item], shift)))
    assigned = tuple((layers.whole(path), value) for path, value in few.assigned)
    outputs = [units[x[0]] for x in few.outputs]
    if tuple(gradients) != whole.gradients or assigned != whole.assigned or whole.outputs != tuple(
            [now(few.outputs[k], outputs[k], shift) for k, shift in copies_of(outputs, extra)]):
        raise _Differs("other results")


# -- The longer graph ------------------------------------------------------------------------------

_SMALL = 1 << 12
"""Elements of a constant that is compared with those of other layers."""


class _Longer:
    """The capture of the whole model, made from that of the shorter one."""

    def __init__(self, few: Capture, layers: Layers) -> None:
        self.few, self.layers = few, layers
        self.extra = [run.extra for run in layers.runs]
        self.nodes = [n for n in few.graph.nodes if n.op != "output"]
        number = {n: k for k, n in enumerate(self.nodes)}
        self.number = number
        begin = next((k for k, n in enumerate(self.nodes) if n.op != "placeholder"), len(self.nodes))
        backward = next((k for k, n in enumerate(self.nodes) if k >= begin and is_backward(n)),
                        len(self.nodes))
        if any(n.op == "call_function" and not is_backward(n) for n in self.nodes[backward:]):
            raise _Differs("forward and backward are mixed")
        self.leaves = [pytree.tree_leaves(n.meta.get(VALUE)) for n in self.nodes]
        self.owner: dict[int, Reference] = {}
        """Storage -> the first value in it."""
        for k, leaves in enumerate(self.leaves):
            for j, t in enumerate(leaves):
                if isinstance(t, torch.Tensor):
                    self.owner.setdefault(storage_id(t), (k, j))
        references = [self._references(k, n) for k, n in enumerate(self.nodes)]
        self.copies = {k for k, n in enumerate(self.nodes[:backward])
                       if n in few.outputs and n.target is torch.ops.aten.clone.default}
        """Copies of outputs, with which the forward ends."""
        self.units = _spread([self._unit_of(few.sources[n]) for n in self.nodes[:begin]],
                             references, backward, self.copies)
        self.outputs = copies_of([-1 if n is None else self.units[number[n]] for n in few.outputs],
                                 self.extra)
        """The outputs of the whole."""
        for k, n in enumerate(self.nodes[:begin]):
            source = few.sources[n]
            if source.kind == "tangent":
                of = few.outputs[int(source.key)]
                assert of is not None
                self.units[k] = self.units[number[of]]
        self.content = {k: c for k, n in enumerate(self.nodes) if (c := self._content(k, n)) is not None}
        self.pattern = Pattern(self.units, references, [self._token(k, n) for k, n in enumerate(self.nodes)],
                               self.extra, self.content.get)
        for entries in (few.mutations, few.grads):
            self.pattern.also([self._unit_of(s) for s, _ in entries],
                              [[(number[n], 0)] for _, n in entries])
        self.widths = self._widths(backward)
        self.newest = max((s for k, n in enumerate(self.nodes[:backward]) if k not in self.copies
                           and (s := sequence_number(n)) is not None), default=-1)

    # -- reading --------------------------------------------------------------------------

    def _unit_of(self, source: Source) -> int:
        return self.layers.unit(str(source.key)) if source.kind in ("param", "buffer") else -1

    def _widths(self, backward: int) -> list[int]:
        """Return, for each run, by how much autograd's numbers grow from one unit to the next."""
        found: list[set[int]] = [set() for _ in self.extra]
        for a, b in self.pattern.twins.items():
            first, second = sequence_number(self.nodes[a]), sequence_number(self.nodes[b])
            if a < backward and a not in self.copies and first is not None and second is not None:
                found[self.units[a] // UNITS].add(second - first)
        if any(len(w) != 1 for w in found):
            raise _Differs("autograd's numbers")
        return [w.pop() for w in found]

    def _references(self, k: int, node: fx.Node) -> list[Reference]:
        """Return what a node reads, and the owners of the storages in which its values are."""
        found: list[Reference] = []
        fx.node.map_arg((node.args, node.kwargs), lambda n: found.append((self.number[n], 0)))
        for j, t in enumerate(self.leaves[k]):
            if isinstance(t, torch.Tensor) and self.owner[storage_id(t)] != (k, j):
                found.append(self.owner[storage_id(t)])
        return found

    def _content(self, k: int, node: fx.Node) -> Hashable:
        """Return the content of a constant; None of anything else."""
        source = self.few.sources.get(node)
        if source is None or source.kind != "constant":
            return None
        value = self.few.constants[str(source.key)]
        if value.numel() > _SMALL or value.layout is not torch.strided:
            return k
        return form_of(value), repr(value.tolist())

    def _token(self, k: int, node: fx.Node) -> Hashable:
        if k in self.content:
            return self.content[k]
        source = self.few.sources.get(node)
        name = None if source is None else (
            source.kind, "" if source.kind == "tangent" else self.layers.within(str(source.key)))
        said = repr(fx.node.map_arg((node.args, node.kwargs), lambda n: None))
        return node.op, id(node.target) if source is None else name, said, tuple(
            [form_of(t) if isinstance(t, torch.Tensor) else t for t in self.leaves[k]])

    # -- writing --------------------------------------------------------------------------

    def capture(self) -> Capture:
        """Return the capture of the whole model."""
        few, graph = self.few, fx.Graph()
        made: dict[Copy, fx.Node] = {}
        sources: dict[fx.Node, Source] = {}
        self._made: dict[Copy, list[Any]] = {}
        self._stacks: dict[Any, Mapping[str, tuple[str, Any]]] = {}
        self._marks: dict[Any, Any] = {}
        self._alike: dict[torch.device, FakeTensor] = {}

        def now(node: fx.Node, unit: int, shift: int) -> fx.Node:
            (item, _), further = self.pattern.at((self.number[node], 0), unit, shift)
            return made[item, further]

        for k, shift in copies_of(self.units, self.extra):
            if shift and k in self.content:
                continue
            node, unit = self.nodes[k], self.units[k]
            read = functools.partial(now, unit=unit, shift=shift)
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), read)
            new = made[k, shift] = add_like(graph, node, args, kwargs)
            new.meta.update(self._meta(k, shift))
            if VALUE in node.meta:
                self._made[k, shift] = leaves = self._values(k, shift)
                spec = pytree.tree_structure(node.meta[VALUE])
                new.meta[VALUE] = pytree.tree_unflatten(leaves, spec)
            if node in few.sources:
                sources[new] = self._source(few.sources[node], shift)

        def entries(old: Sequence[tuple[Source, fx.Node]]) -> tuple[tuple[Source, fx.Node], ...]:
            units = [self._unit_of(source) for source, _ in old]
            return tuple([(self._source(old[k][0], shift), now(old[k][1], units[k], shift))
                          for k, shift in copies_of(units, self.extra)])

        return replace(
            few, graph=graph, sources=sources,
            outputs=tuple([None if n is None else now(n, self.units[self.number[n]], shift)
                           for k, shift in self.outputs for n in (few.outputs[k],)]),
            differentiable=tuple([few.differentiable[k] for k, _ in self.outputs]),
            mutations=entries(few.mutations), grads=entries(few.grads),
            assigned=tuple(replace(a, path=self.layers.whole(a.path)) for a in few.assigned))

    def _source(self, source: Source, shift: int) -> Source:
        if source.kind == "tangent":
            return replace(source, key=self.outputs.index((int(source.key), shift)))
        if source.kind not in ("param", "buffer"):
            return source
        return replace(source, key=self.layers.whole(str(source.key), shift))

    def _meta(self, k: int, shift: int) -> dict[str, Any]:
        """Return a node's notes for its copy."""
        node, unit = self.nodes[k], self.units[k]

        def sequence(number: int) -> int | None:
            if k in self.copies and shift:      # nothing in the backward is derived from it
                return None
            # The sums of gradients that autograd makes itself come after everything, too.
            if number > self.newest or k in self.copies:
                return number + sum(w * e for w, e in zip(self.widths, self.extra, strict=True))
            if unit < 0:
                return number
            run, at = divmod(unit, UNITS)
            before = sum(w * e for w, e in zip(self.widths[:run], self.extra[:run], strict=True))
            return number + before + self.widths[run] * (0, shift, self.extra[run], self.extra[run])[at]

        def stack(old: Mapping[str, tuple[str, Any]]) -> Mapping[str, tuple[str, Any]]:
            found = self._stacks.get((id(old), unit, shift))
            if found is None:
                found = self._stacks[id(old), unit, shift] = renamed(
                    old, lambda path: _below(path, lambda p: self.layers.moved(p, unit, shift)))
            return found

        def mark(key: str, value: Any) -> Any:
            if not shift or key not in _RENEWED:
                return value
            if is_backward(node):       # those of the forward count
                return None
            if (key, value, shift) not in self._marks:
                self._marks[key, value, shift] = _RENEWED[key](value)
            return self._marks[key, value, shift]

        return moved(node.meta, sequence, stack, mark)

    def _values(self, k: int, shift: int) -> list[Any]:
        """Return the values of a node's copy: tensors in the storages of what they are views of."""
        made: list[Any] = []
        for j, t in enumerate(self.leaves[k]):
            if not isinstance(t, torch.Tensor):
                made.append(t)
                continue
            if type(t) is not FakeTensor:
                raise _Differs("a value of another kind")
            owner = self.owner[storage_id(t)]
            if owner == (k, j):
                held = t.untyped_storage() if not shift else \
                    torch.UntypedStorage(t.untyped_storage().nbytes(), device="meta")
            elif owner[0] == k:
                held = made[owner[1]].untyped_storage()
            else:
                (item, place), further = self.pattern.at(owner, self.units[k], shift)
                held = self._made[item, further][place].untyped_storage()
            if not shift and storage_id(held) == storage_id(t):
                made.append(t)
                continue
            plain = torch.empty(0, dtype=t.dtype, device="meta").set_(
                held, t.storage_offset(), t.shape, t.stride())
            if t.device not in self._alike:
                self._alike[t.device] = FakeTensor(t.fake_mode, torch.empty(0, device="meta"), t.device)
            made.append(fake_like(self._alike[t.device], plain, t.requires_grad))
        return made


_RENEWED: dict[str, Callable[[Any], Any]] = {WISH: hints.renewed, REGION: renewed_region}
"""Marks of nodes that have a number of their own in each layer."""


def _below(path: str, rename: Callable[[str], str]) -> str:
    """Rename the path of a module in the model that the tracer has wrapped."""
    head, dot, rest = path.partition(".")
    return head + dot + rename(rest) if dot else path
