"""A step that runs as it is, observed: how many bytes its parts, and the rest of it, keep for the backward,
and which gradients are in flight.

Saved tensors are counted where autograd packs them and lets them go, each storage once. Gradients are counted
where autograd's nodes hand them on. On the CPU, forward, loss and backward are measured, too: what is not
saved, temporary memory inside of operations, and what a backward computes again.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from rkmate.device.events import OpenRun
from rkmate.device.protocol import MeterError, PartsMeter
from rkmate.parts.part_calls import REST, Figures, PartCall
from rkmate.runtime.followed_step import MORE
from rkmate.torch_seam.containers import tensors_in
from rkmate.torch_seam.dtensor import bytes_held
from rkmate.torch_seam.tensors import is_spread_out, key_of, saved_tensors_seen, storage_lives, version_of

_MADE = 5
"""Times its own bytes that a caller makes, and keeps, of a result that more calls follow: mean, deviation,
noise, sample and divergence of a latent distribution."""
_SCALAR = 64
"""Bytes of an output that is no input of a loss, but a loss."""
MOST = 256
"""Calls of parts in a step whose moments are told apart, at most."""
_LOSS = REST
"""The number of what the caller does between forward and backward."""


@dataclass
class Held:
    """A storage that autograd holds for the backward."""

    bytes: int
    owner: int
    call: PartCall | None = None
    """The call that has saved it."""
    references: int = 0


class _Packed:
    """The object that autograd holds instead of a saved tensor, until it lets it go."""

    __slots__ = ("_key", "_step", "tensor")

    def __init__(self, tensor: torch.Tensor, step: ObservedStep, key: int | None) -> None:
        self.tensor, self._step, self._key = tensor, step, key

    def __del__(self) -> None:
        if self._key is not None:
            self._step.let_go(self._key)


class ObservedStep(Figures):
    """Counts the bytes of one step, or of several that begin before the first backward."""

    def __init__(self, fixed: Iterable[torch.Tensor], meter: PartsMeter | None = None) -> None:
        """`fixed`: parameters and buffers, which are there anyway. `meter`: measures the step; None where
        nothing does."""
        super().__init__()
        self.meter = meter
        self._stretch: Any = None
        self._backward: OpenRun | None = None
        """The run of the meter from the end of the forward on."""
        self._levels: dict[int, tuple[int, int, frozenset[int]]] = {}
        """Node of the backward -> when it began: the bytes of the rest, those of gradients, and the calls
        that held something."""
        self._holding: frozenset[int] | None = None
        """The calls that hold something now; None: to be found again."""
        self._handing: frozenset[int] = frozenset()
        """The calls whose results nothing saves, and other calls take: until their own backward."""
        self._after: tuple[int, frozenset[int]] = 0, frozenset()
        """Bytes of the rest, and the calls that hold something, when the latest outermost call returned."""
        self._returned = 0
        """Bytes of the step at that moment."""
        self._noted: dict[tuple[int, frozenset[int]], int] = {}
        self._calls: dict[int, PartCall] = {}
        self._stretches: list[tuple[PartCall | None, int, int, frozenset[int]]] = []
        """Stretches of the forward: the call of a part, what the rest held at the beginning, what parts
        held, and which."""
        fixed = [*fixed]
        self._fixed = {k for t in fixed if (k := key_of(t)) is not None}
        self._parameters = [weakref.ref(t) for t in fixed if t.requires_grad and t.is_leaf]
        self._version = self._version_now()
        self._hooks: list[Any] = []
        self._without: set[int] = set()
        """Ids of the parameters that have no gradient yet."""
        self._inside = 0
        """The number of the node that runs; 0 while none does."""
        self._stretches_of: dict[int, list[tuple[int, int]]] = defaultdict(list)
        """Further stretches of a node, whose backward contains another one: the number of each, and the bytes
        of parameters' gradients that were new by then, which no budget counts."""
        self._given: set[int] = set()
        """Storages that the caller holds: arguments of the outermost call."""
        self._held: dict[int, Held] = {}
        self._saved: Counter[int] = Counter()
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        """Storage of an output of a part -> the output, and the part's number."""
        self._open: list[PartCall] = []
        self._depth = 0
        self._new: list[PartCall] = []
        self._count = 0
        self._key = object()
        self._nodes: dict[int, int] = {}
        """Marks of parts' nodes (in their metadata, at the key) -> the part, while the forward runs."""
        self._pending: dict[tuple[int, int], dict[int, int]] = {}
        """(node, input) -> the gradient that waits there: storage -> bytes."""
        self._from_inside: set[tuple[int, int]] = set()
        """(node, result) to which a gradient came from another node of its part."""
        self._from_outside: set[tuple[int, int]] = set()
        """(node, result) to which a gradient came from elsewhere."""
        self._sums: dict[int, int] = {}
        """Id of a parameter that the rest uses several times -> the number of its sum of gradients."""
        self._owner_of: dict[int, int] = {}
        self._of_node = iter(range(1, 1 << 62))
        self.backward_seen = False
        self._more = 0
        """Calls from outside after the first backward."""

    # -- the forward ----------------------------------------------------------------------

    @contextmanager
    def outermost(self, given: Any) -> Iterator[None]:
        """Around a call that contains everything to observe. `given`: its arguments."""
        self._depth += 1
        if self._depth == 1:
            self.finish()
            self._given = {k for t in tensors_in(given) if t.grad_fn is None and (k := key_of(t)) is not None}
        try:
            with saved_tensors_seen(self._pack, attrgetter("tensor")), self._measured():
                yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._nodes.clear()
        if not self._depth:
            self._measure_backward()

    @contextmanager
    def _measured(self) -> Iterator[None]:
        """Measure the stretches of the forward between calls of parts: temporary memory, too."""
        meter = self.meter
        if meter is None or self._depth > 1:
            yield
            return
        self._stretches.clear()
        try:
            running = meter.running()
            running.__enter__()
        except MeterError:                      # somebody measures, or profiles
            self.meter = None
            yield
            return
        error: BaseException | None = None
        try:
            self._begin_stretch()
            yield
        except BaseException as e:
            error = e
            raise
        finally:
            self._end_stretch()
            running.__exit__(type(error) if error else None, error, None)
            if error is None:
                for number, peak in meter.peaks().items():
                    call, level, others, held = self._stretches[number]
                    self.peak = max(self.peak, level + others + peak)
                    self._note(0 if call is None else call.number, level + peak * (call is None), held)
                    if call is not None:
                        call.peak = peak
                    elif others:
                        self.alone = max(self.alone, level + peak)
                    else:
                        self.early = max(self.early, level + peak)

    def _begin_stretch(self, call: PartCall | None = None) -> None:
        if self.meter is not None and self._depth:
            self._stretch = self.meter.part(len(self._stretches))
            self._stretches.append((call, self._saved[REST] + self.unsaved,
                                    self._saved.total() - self._saved[REST], self.holding))
            self._stretch.__enter__()

    def _note(self, running: int, level: int, held: frozenset[int] | None = None) -> None:
        """Note a moment."""
        if self._count > MOST:
            self._noted.clear()
        key = running, self.holding if held is None else held
        self._noted[key] = max(level, self._noted.get(key, 0))

    @property
    def moments(self) -> dict[tuple[int, frozenset[int]], int]:
        """(the number of the call that runs, or 0; the calls that hold something) -> bytes of the rest, at
        most. Empty for a step of very many calls."""
        level, held = self._after
        self._note(0, level + self.loss, held)
        return {} if self._count > MOST else self._noted

    @property
    def holding(self) -> frozenset[int]:
        """The numbers of the calls that hold something now."""
        if self._holding is None:
            self._holding = self._handing.union(
                number for number, size in self._saved.items() if size and number)
        return self._holding

    def _end_stretch(self) -> None:
        stretch, self._stretch = self._stretch, None
        if stretch is not None:
            stretch.__exit__(None, None, None)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Around what is no part of the step."""
        running = self._stretch is not None
        self._end_stretch()
        try:
            yield
        finally:
            self._end_stretch()
            if running:
                self._begin_stretch()

    def result(self, outputs: Any, given: Any) -> None:
        """The outermost call has returned: from now on its backward is observed."""
        found = tensors_in(outputs)
        taught = 0
        for t in found:
            key = key_of(t)
            if key is not None and not self._is_known(key):
                self.outputs += t.untyped_storage().nbytes()
            if t.requires_grad and bytes_held(t) > _SCALAR:
                taught += bytes_held(t)
        self._follow([(t.grad_fn, t.output_nr) for t in found if t.grad_fn is not None],
                     {self._mark(t.grad_fn) for t in tensors_in(given)})
        level = self._saved[REST] + self.unsaved + self.outputs
        self.kept = max(self.kept, self._saved.total())
        # Of a loss that the caller computes: log-softmax, its gradient and the one that leaves it.
        self.between += _MADE * self.loss // 3
        self.loss = 3 * taught
        self.beside, self.alone = max(self.beside, level), max(self.alone, level)
        self._after = level, self.holding
        self._returned = self._saved.total() + self.unsaved + self.outputs
        self.peak = max(self.peak, self._returned)

    @contextmanager
    def part(self, tensors: Sequence[torch.Tensor]) -> Iterator[PartCall]:
        """Around the call of a part. `tensors`: among its arguments."""
        keys = {k for t in tensors if (k := key_of(t)) is not None}
        sources = [*map(self._edge, tensors)]
        call = PartCall(self._count + 1, keys, {mark for mark, _ in sources}, sources)
        call.shared = {k for k, t in enumerate(tensors) if t.requires_grad and t.grad_fn is None}
        self._count += 1
        self._open.append(call)
        self._calls[call.number] = call
        try:
            call.level = self._saved[REST] + self.unsaved
            self._note(call.number, call.level)
            with self.apart():
                self._begin_stretch(call)
                yield call
                self._end_stretch()
        finally:
            self._open.pop()
        self._new.append(call)
        for t in tensors:
            key = key_of(t)
            if key is None or key in self._fixed or key in self._given or key in self._held:
                continue
            maker, size = self._maker_of(key), t.untyped_storage().nbytes()
            if maker == REST:
                self.unsaved += size
                self._given.add(key)            # once
            elif maker != call.number:
                self._calls[maker].handed.setdefault(key, (size, set()))[1].add(call.number)
                self._handing, self._holding = self._handing | {maker}, None

    def returned(self, call: PartCall, found: Sequence[torch.Tensor | None]) -> None:
        """A part has returned these tensors; None for what is not known."""
        for k, t in enumerate(found):
            key = None if t is None else key_of(t)
            if t is not None and key is not None and key not in call.inputs:
                self._made[key] = weakref.ref(t), call.number
                call.living[k] = key, storage_lives(t)
            call.outputs.append(self._edge(t))
        todo: list[Any] = [t.grad_fn for t in found if t is not None]
        while todo:
            node = todo.pop()
            if not (mark := self._mark(node)) or mark in self._nodes or mark in call.edges:
                continue
            self._nodes[mark] = call.number
            todo += [following for following, _ in node.next_functions]

    def _mark(self, node: Any) -> int:
        """Return what stands for a node (0 for None): a reference would keep alive what the forward drops."""
        return 0 if node is None else node.metadata.setdefault(self._key, next(self._of_node))

    def _edge(self, t: torch.Tensor | None) -> tuple[int, int]:
        return (0, -1) if t is None else (self._mark(t.grad_fn), t.output_nr)

    def _pack(self, tensor: torch.Tensor) -> _Packed:
        key = key_of(tensor)
        if key is None or key in self._fixed or key in self._given:
            return _Packed(tensor.detach(), self, None)
        held = self._held.get(key)
        if held is None:
            held = self._held[key] = Held(tensor.untyped_storage().nbytes(), self._owner(key))
            self._saved[held.owner] += held.bytes
            self._holding = None
            if self._open and held.owner == self._open[-1].number:
                held.call = self._open[-1]
                held.call.saved += held.bytes
            elif held.owner != REST:
                self._calls[held.owner].handed.setdefault(key, (held.bytes, set()))[1].add(REST)
        held.references += 1
        return _Packed(tensor.detach(), self, key)

    def let_go(self, key: int) -> None:
        """Autograd lets a saved tensor go."""
        held = self._held.get(key)
        if held is not None:
            held.references -= 1
            if not held.references:
                del self._held[key]
                self._saved[held.owner] -= held.bytes
                self._holding = None
                if held.call is not None and any(held.call is c for c in self._open):
                    held.call.saved -= held.bytes

    @property
    def is_inside_part(self) -> bool:
        """Whether a part is running."""
        return bool(self._open)

    def ends_before_call(self, *, until_trained: bool) -> bool:
        """Count a call from outside after the first backward. Returns whether it belongs to the next step:
        nothing is held, or only what no backward seems to come to. A step may go on with results of earlier
        calls (a generator's, a slope that is penalised). `until_trained`: it goes on until parameters have
        changed, whatever is held."""
        self._more += 1
        if until_trained:
            return self.is_trained or self._more > MORE
        if not self.is_empty:
            gc.collect()                        # what only a circle of references holds
        return self.is_empty or self._more > MORE

    @property
    def is_trained(self) -> bool:
        """Whether parameters have changed since the step began."""
        return self._version != self._version_now()

    def _version_now(self) -> int:
        return next((version_of(p) for ref in self._parameters[:1] if (p := ref()) is not None), -1)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is held: the results were dropped, or a backward is over."""
        return not self._held

    def _owner(self, key: int) -> int:
        if not self._open or key in self._open[-1].inputs:
            return self._maker_of(key)
        return self._open[-1].number

    def _maker_of(self, key: int) -> int:
        made = self._made.get(key)
        return REST if made is None or made[0]() is None else made[1]

    def _is_known(self, key: int) -> bool:
        return key in self._fixed or key in self._given or key in self._held or self._maker_of(key) != REST

    # -- the backward ---------------------------------------------------------------------

    def _follow(self, begin: Sequence[Any], end: set[int]) -> None:
        """Observe the nodes from some on, up to others (their marks), which come from outside of the call."""
        ids: dict[int, int] = {}
        order: list[Any] = []
        todo = [n for n, _ in begin]
        users: dict[tuple[int, int], set[int]] = defaultdict(set)
        for node, k in begin:
            users[self._mark(node), k].add(REST)
        sums: Counter[Any] = Counter()
        while todo:
            node = todo.pop()
            if type(node).__name__ == "AccumulateGrad":
                sums[node] += 1
            if (mark := self._mark(node)) in ids or mark in end or node in sums:
                continue
            ids[mark] = next(self._of_node)
            order.append(node)
            for following, k in node.next_functions:
                if following is not None:
                    users[self._mark(following), k].add(self._nodes.get(mark, REST))
                    todo.append(following)
        for node, uses in sums.items():
            if uses > 1 and REST in users[mark := self._mark(node), 0] and self.meter is not None:
                ids[mark] = self._sums[id(node.variable)] = next(self._of_node)
                self._owner_of[ids[mark]] = REST
        results: dict[int, list[tuple[PartCall, int]]] = defaultdict(list)
        for call in self._new:
            for k, (mark, _) in enumerate(call.outputs):
                if mark in ids:
                    results[ids[mark]].append((call, k))
            call.shared |= {k for k, source in enumerate(call.sources)
                            if source[0] and (source[0] in end or users[source] - {call.number})}
            call.places = [place for _, place in call.outputs]
            call.dropped = {k for k, (key, lives) in call.living.items()
                            if key not in call.handed and not lives()}
            call.sources, call.outputs, call.living, call.edges = [], [], {}, set()
        self._new.clear()
        for node in order:
            number, owner = ids[mark := self._mark(node)], self._nodes.get(mark, REST)
            self._owner_of[number] = owner
            then = tuple((ids.get(self._mark(n), -1), k) for n, k in node.next_functions)
            node.register_prehook(partial(self._begins, number, tuple(results.get(number, ()))))
            node.register_hook(partial(self._ends, number, then))

    def _begins(self, number: int, results: Sequence[tuple[PartCall, int]], grads: Sequence[Any]) -> None:
        self.backward_seen = True
        if self._backward is not None and self.meter is not None:
            if not self._hooks:
                self._watch_gradients()
            self._enter_stretch(number)
            self._inside = number
        for call, output in results:
            place = call.places[output]
            if 0 <= place < len(grads) and grads[place] is not None and (
                    (number, place) not in self._from_inside or (number, place) in self._from_outside):
                call.taught.add(output)
                if (number, place) not in self._from_inside and is_spread_out(grads[place]):
                    call.strides[output] = tuple(grads[place].stride())

    def _watch_gradients(self) -> None:
        """The backward begins: notice which parameters get new gradients."""
        found = [p for ref in self._parameters if (p := ref()) is not None]
        self._without = {id(p) for p in found if p.grad is None}
        self._hooks = [p.register_post_accumulate_grad_hook(self._accumulated) for p in found]

    def _accumulated(self, parameter: torch.Tensor) -> None:
        """A parameter has got its gradient: inside of a node, in a backward that the node's backward
        contains (reversible layers, reentrant checkpoints), another stretch begins."""
        self._pending.pop((self._sums.get(id(parameter), REST), 0), None)
        if id(parameter) not in self._without or parameter.grad is None:
            return
        self._without.discard(id(parameter))
        if self._inside and self._stretch is not None:
            stretches, number = self._stretches_of[self._inside], next(self._of_node)
            new = stretches[-1][1] if stretches else 0
            stretches.append((number, new + bytes_held(parameter.grad)))
            self._enter_stretch(number)

    def _enter_stretch(self, number: int) -> None:
        assert self.meter is not None
        self._end_stretch()
        self._stretch = self.meter.part(number)
        self._stretch.__enter__()

    def _measure_backward(self) -> None:
        """Measure the caller's loss, and then each node of the backward."""
        if self.meter is None:
            return
        try:
            self._backward = OpenRun(self.meter, self.finish, lambda: self.backward_seen)
        except MeterError:                      # somebody measures, or profiles
            return
        self._levels.clear()
        self._stretches_of.clear()
        self._enter_stretch(_LOSS)

    def finish(self) -> None:
        """Read what was measured since the forward. Called in the next forward, or by another measurement: a
        profiler that is stopped inside of a backward runs again, as autograd restores its thread's state."""
        running, self._backward = self._backward, None
        while self._hooks:
            self._hooks.pop().remove()
        if running is None or self.meter is None or not running.may_go_on():
            return
        self._end_stretch()
        running.close()
        levels = self.meter.levels()
        peaks = {k: max(levels[part][1] - new for part, new in ((k, 0), *self._stretches_of.get(k, ()))
                        if part in levels) - start for k, (start, _) in levels.items()}
        if self.backward_seen:
            self.loss = peaks.get(_LOSS, self.loss)
            self.peak = max(self.peak, self._returned + self.loss)
        for number, (level, others, held) in self._levels.items():
            level += peaks.get(number, 0)
            self.peak = max(self.peak, level + others)
            call = self._calls.get(self._owner_of[number])
            if call is not None:
                call.backward = max(call.backward, level)
                continue
            self._note(0, level, held)
            if others:
                self.alone = max(self.alone, level)
            else:
                self.early = max(self.early, level)

    def _ends(self, number: int, then: Sequence[tuple[int, int]], found: Sequence[Any],
              given: Sequence[Any]) -> None:
        self.backward_seen, self._inside = True, 0
        if self._backward is not None:
            self._end_stretch()
        for taken in [p for p in self._pending if p[0] == number]:
            del self._pending[taken]
        owner = self._owner_of[number]
        if owner in self._handing:
            self._handing, self._holding = self._handing - {owner}, None
        sizes: dict[int, int] = {}
        waiting: dict[int, int] = {}
        for (node, _), grads in self._pending.items():
            (waiting if self._owner_of[node] != owner or owner == REST else sizes).update(grads)
        running = _sizes(given) | _sizes(found)
        rest = self._saved[REST] + self.unsaved + self.outputs
        self._levels[number] = (rest + sum((waiting | sizes | _sizes(given)).values()),
                                self._saved.total() - self._saved[REST], self.holding)
        if owner == REST:
            level = rest + sum((waiting | running).values())
            self._note(REST, level)
            if self._saved.total() > self._saved[REST]:
                self.alone = max(self.alone, level)
            else:
                self.early = max(self.early, level)
        else:
            self.beside = max(self.beside, rest + sum(waiting.values()))
            self._note(owner, rest + sum(waiting.values()))
        self.peak = max(self.peak, self.early, self._saved.total() + self.unsaved + self.outputs
                        + sum((waiting | sizes | running).values()))
        for (node, place), grad in zip(then, found, strict=False):
            if node != -1 and grad is not None:
                self._pending[node, place] = _sizes((grad,))
                inside = owner == self._owner_of[node] != REST
                (self._from_inside if inside else self._from_outside).add((node, place))


def _sizes(tensors: Iterable[Any]) -> dict[int, int]:
    return {k: t.untyped_storage().nbytes() for t in tensors
            if isinstance(t, torch.Tensor) and (k := key_of(t)) is not None}
