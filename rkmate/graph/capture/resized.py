"""A captured graph at another size, from captures at known sizes and dry runs of all of them.

A number of the graph (a literal, a length, a stride) is known by what it is in each of the known
captures: what was (128, 256) there is what the dry runs' numbers that were (128, 256) are at the new size.
Nothing is extrapolated. Where one such row has two values at the new size, or none, there is no answer.

Uses private names of torch (fake tensors, a storage's identity); tested with torch 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from rkmate.graph.capture.capture import Capture
from rkmate.graph.capture.dry_run import Recording

Number = int | float


class _Unknown(Exception):
    """There is no answer."""


@dataclass(frozen=True)
class Known:
    """A capture, and the dry run of the same call."""

    capture: Capture
    recording: Recording


def resized(known: Sequence[Known], new: Recording) -> Capture | None:
    """What a capture of the new call would be; None where that is not certain.

    Two captures at least, in which the sizes that differ now were different ones.
    """
    if len(known) < 2 or any(k.recording.text != new.text for k in known):
        return None
    try:
        numbers = _numbers([k.recording.numbers for k in known], new.numbers)
        return _Copy([k.capture for k in known], numbers).capture(new)
    except _Unknown:
        return None


def _numbers(known: Sequence[Sequence[Number]], new: Sequence[Number]) -> dict[tuple[Any, ...], Number]:
    """What each row of numbers at the known sizes is at the new one."""
    found: dict[tuple[Any, ...], Number] = {}
    for row, now in zip(zip(*known, strict=True), new, strict=True):
        if isinstance(row[0], float):
            row = (float, *row)            # 1.0 is no 1
        if found.setdefault(row, now) != now:
            raise _Unknown(f"{row} is {found[row]} and {now}")
    return found


class _Copy:
    """Captures gone through side by side."""

    def __init__(self, captures: Sequence[Capture], numbers: Mapping[tuple[Any, ...], Number]) -> None:
        self.captures = captures
        self.numbers = numbers
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.nodes: dict[fx.Node, fx.Node] = {}
        self._storages: dict[tuple[int, ...], torch.UntypedStorage] = {}
        self._tensors: dict[tuple[int, ...], FakeTensor] = {}

    def capture(self, new: Recording) -> Capture:
        first = self.captures[0]
        lists = [list(c.graph.nodes) for c in self.captures]
        _same([len(nodes) for nodes in lists])
        for row in zip(*lists, strict=True):
            self._node(row)
        for c in self.captures[1:]:
            if list(c.sources.values()) != list(first.sources.values()) \
                    or c.constants.keys() != first.constants.keys() \
                    or c.differentiable != first.differentiable \
                    or any(not _equal(t, first.constants[k]) for k, t in c.constants.items()) \
                    or self._places(c) != self._places(first) \
                    or [a.path for a in c.assigned] != [a.path for a in first.assigned]:
                raise _Unknown("captures of other structure")
        if new.result.count != first.result.count:
            raise _Unknown("other results")
        at = self.nodes
        return replace(
            first, graph=self.graph, sources={at[n]: s for n, s in first.sources.items()},
            outputs=tuple(None if n is None else at[n] for n in first.outputs),
            mutations=tuple((s, at[n]) for s, n in first.mutations),
            grads=tuple((s, at[n]) for s, n in first.grads), result=new.result)

    @staticmethod
    def _places(c: Capture) -> Any:
        return ([None if n is None else n.name for n in c.outputs],
                [(s, n.name) for s, n in c.mutations], [(s, n.name) for s, n in c.grads],
                [n.name for n in c.sources])

    def _node(self, row: Sequence[fx.Node]) -> None:
        first = row[0]
        _same([(n.op, n.name, n.target) for n in row])
        args = self._argument([n.args for n in row])
        kwargs = self._argument([n.kwargs for n in row])
        node = self.graph.create_node(first.op, first.target, args, kwargs, first.name, first.type)
        node.meta = dict(first.meta)
        node.meta.pop("tensor_meta", None)
        if "val" in first.meta:
            node.meta["val"] = self._value([n.meta["val"] for n in row])
        self.nodes[first] = node

    def _argument(self, row: Sequence[Any]) -> Any:
        first = row[0]
        if isinstance(first, fx.Node):
            _same([n.name for n in row])
            return self.nodes[first]
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
        found = self.numbers.get((float, *row) if isinstance(first, float) else tuple(row))
        if found is not None:
            return found
        # A number of the tracer's own: the same at all known sizes, and no size.
        _same(row)
        return first

    def _value(self, row: Sequence[Any]) -> Any:
        first = row[0]
        if isinstance(first, torch.Tensor):
            return self._tensor(row)
        if isinstance(first, (tuple, list)):
            _same([len(v) for v in row])
            made = [self._value(v) for v in zip(*row, strict=True)]
            return type(first)(made)
        return self._number(row)

    def _tensor(self, row: Sequence[torch.Tensor]) -> FakeTensor:
        at = tuple(map(id, row))
        if at in self._tensors:
            return self._tensors[at]
        first = row[0]
        _same([(t.dtype, t.device, t.dim(), t.requires_grad, type(t)) for t in row])
        shape = [self._number(n) for n in zip(*(t.shape for t in row), strict=True)]
        stride = [self._number(n) for n in zip(*(t.stride() for t in row), strict=True)]
        offset = self._number([t.storage_offset() for t in row])
        storages = [t.untyped_storage() for t in row]
        key = tuple(s._cdata for s in storages)
        storage = self._storages.get(key)
        if storage is None:
            # Who owns the storage comes first: what it holds, and no more.
            if any(s.nbytes() != _bytes(t.shape, t.stride(), int(t.storage_offset()), t.element_size())
                   for s, t in zip(storages, row, strict=True)):
                raise _Unknown("a storage of another size than its tensor")
            storage = torch.UntypedStorage(_bytes(shape, stride, offset, first.element_size()), device="meta")
            self._storages[key] = storage
        plain = torch.empty(0, dtype=first.dtype, device="meta").set_(storage, offset, shape, stride)
        made = FakeTensor(self.mode, plain, first.device, requires_grad=first.requires_grad)
        self._tensors[at] = made
        return made


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


