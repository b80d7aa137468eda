"""Running recorded operations again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from rkmate import device as devices
from rkmate.device.random_state import set_state, state_of
from rkmate.dtr.errors import RuntimeStateError, ThrashingError
from rkmate.dtr.runtime.buffer import Buffer, Operation, Place, map_places
from rkmate.dtr.runtime.memory import Memory
from rkmate.dtr.runtime.schema import traits_of

_PATIENCE_NS = 50_000_000
"""Less recomputation than this is not called thrashing: early on, any ratio can be large."""


class _Frame:
    """An operation about to run again, and its inputs that must come back first."""

    __slots__ = ("operation", "missing", "locked")

    def __init__(self, operation: Operation) -> None:
        self.operation = operation
        self.missing: list[Buffer] = []
        self.locked: list[Buffer] = []


class Rematerializer:
    """Brings evicted buffers back (paper, section 2 and appendix C.4), without recursion."""

    def __init__(self, memory: Memory, overhead_limit: float) -> None:
        self.memory = memory
        self.overhead_limit = overhead_limit
        self.own_ns = 0
        """Expected nanoseconds of the program's own operations so far."""
        self.again_ns = 0
        """Expected nanoseconds of the repetitions so far."""
        self.spent_ns = 0
        """Nanoseconds that repetitions took."""

    def materialize(self, buffer: Buffer) -> None:
        """Compute ``buffer`` and whatever evicted inputs that takes."""
        stack: list[_Frame] = []
        self.memory.tell()
        self.memory.want(_uses(buffer))
        try:
            stack.append(self._enter(buffer))
            while stack:
                frame = stack[-1]
                if frame.missing:
                    wanted = frame.missing[-1]
                    if not wanted.resident:
                        stack.append(self._enter(wanted))
                        continue
                    self.memory.lock(wanted)
                    frame.locked.append(wanted)
                    frame.missing.pop()
                    continue
                self._perform(frame.operation)
                stack.pop()
                self._leave(frame)
        finally:
            for frame in stack:
                self._leave(frame)
            for held in list(self.memory.wanted):
                self.memory.wanted[held] = 1
                self.memory.used(held)

    def _enter(self, buffer: Buffer) -> _Frame:
        operation = buffer.operation
        if operation is None:
            raise RuntimeStateError("a tensor was evicted that nothing can compute")
        frame = _Frame(operation)
        for parent in operation.inputs:
            self.memory.columns.touch(parent, self.memory.clock)
            if parent.resident:
                self.memory.lock(parent)
                frame.locked.append(parent)
            else:
                frame.missing.append(parent)
        frame.missing.reverse()
        return frame

    def _leave(self, frame: _Frame) -> None:
        for parent in frame.locked:
            self.memory.used(parent)
            self.memory.unlock(parent)
            if self.memory.wanted.get(parent):
                continue
            self.memory.discard(parent)
            if parent.private is not None and parent.resident and not parent.locks:
                # The program dropped it, and whatever needed it is in memory again: evict it as
                # eagerly as at its last release. With an evicted child left it stays a candidate.
                if all(child.resident for child in parent.children):
                    self.memory.evict(parent)
        frame.locked.clear()

    def _perform(self, operation: Operation) -> None:
        self.memory.tell()
        if operation.written:
            back = self._run_in_place(operation)
        else:
            back = self._run(operation)
        self.memory.around.materialize(back)
        # What was just computed or read is likely to be read again by the operations that wait.
        for buffer in (*operation.inputs, *back):
            self.memory.columns.touch(buffer, self.memory.clock)
        for buffer in back:
            self.memory.shelve(buffer)
            self.memory.watch_parents(buffer)
        self.memory.report.rematerializations += 1
        # Expected times, not the clock's: a pause of the machine is no thrashing.
        self.again_ns += operation.cost
        if self.again_ns > max((self.overhead_limit - 1) * self.own_ns, _PATIENCE_NS):
            raise ThrashingError(
                f"operations worth {self.again_ns / 1e9:.2f} s ran again, and the program's own so "
                f"far are worth {self.own_ns / 1e9:.2f} s: more than {self.overhead_limit} times in "
                f"all. A larger budget than {int(self.memory.budget):,} bytes is needed"
            )

    def _call(self, operation: Operation, tensors: dict[Buffer, torch.UntypedStorage]) -> object:
        def place(spot: Place) -> torch.Tensor:
            owner = spot.owner
            if not isinstance(owner, Buffer):
                return spot.on(owner)
            storage = tensors.get(owner)
            if storage is None:
                storage = owner.storage()
            assert storage is not None
            return spot.on(storage)

        began = time.perf_counter_ns()
        try:
            return self._function(operation, tensors.get(_RESULT), place)
        finally:
            spent = time.perf_counter_ns() - began
            self.spent_ns += spent
            self.memory.clock += operation.cost
            self.memory.report.recompute_seconds += spent / 1e9

    def _function(
        self,
        operation: Operation,
        target: torch.UntypedStorage | None,
        place: Callable[[Place], torch.Tensor],
    ) -> object:
        args = map_places(operation.args, place)
        kwargs = {name: map_places(value, place) for name, value in operation.kwargs.items()}
        with torch.set_grad_enabled(operation.gradients), self._randomness(operation, args, kwargs):
            if target is not None:
                traits = traits_of(operation.function)
                assert traits.into is not None
                kwargs[traits.into_name] = operation.outputs[0][1].on(target)
                return traits.into(*args, **kwargs)
            return operation.function(*args, **kwargs)

    def _randomness(
        self, operation: Operation, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> AbstractContextManager[None]:
        if operation.random_state is None:
            return nullcontext()
        return replayed(generator_of(args, kwargs), operation.random_state)

    def _run(self, operation: Operation) -> list[Buffer]:
        memory = self.memory
        made = [
            (position, spot.owner)
            for position, spot in operation.outputs
            if isinstance(spot.owner, Buffer)
        ]
        total = sum(buffer.size for _, buffer in made)
        wanted = [(p, b) for p, b in made if b.index >= 0 and not b.resident]
        direct = (
            len(made) == 1
            and wanted[0][1].program is not None
            and traits_of(operation.function).into is not None
        )
        if direct:
            buffer = wanted[0][1]
            memory.reserve(
                buffer.size + operation.extra_bytes, operation.hoped_bytes, operation.name
            )
            storage = buffer.storage()
            assert storage is not None
            storage.resize_(buffer.size)
            self._call(operation, {_RESULT: storage})
            memory.fill(buffer)
            return [buffer]
        # The program's storages are filled by copying: one at a time, each result freed after it.
        copied = max((b.size for _, b in wanted if b.program is not None), default=0)
        need = total + max(operation.extra_bytes, copied)
        memory.reserve(need, operation.hoped_bytes, operation.name)
        result = self._call(operation, {})
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        del result
        back = []
        for position, buffer in wanted:
            tensor = results[position]
            results[position] = None
            assert isinstance(tensor, torch.Tensor)
            fresh = tensor.untyped_storage()
            storage = buffer.storage() if buffer.program is not None else None
            if storage is None:
                buffer.private = fresh
            else:
                storage.resize_(buffer.size)
                storage.copy_(fresh)
            del tensor, fresh
            memory.fill(buffer)
            back.append(buffer)
        return back

    def _run_in_place(self, operation: Operation) -> list[Buffer]:
        memory = self.memory
        fresh = sum(s.owner.size for _, s in operation.outputs if isinstance(s.owner, Buffer))
        stolen = {before for before, after in operation.written if _can_steal(memory, before, after)}
        copies = sum(a.size for b, a in operation.written if b not in stolen)
        need = fresh + copies + operation.extra_bytes
        memory.reserve(need, operation.hoped_bytes, operation.name)
        targets: dict[Buffer, torch.UntypedStorage] = {}
        for before, after in operation.written:
            source = before.storage()
            assert source is not None
            if before in stolen:
                targets[before] = source
                memory.hand_over(before)
                continue
            # A version that is in memory, or that nothing needs, is computed into scratch memory.
            storage = after.storage() if after.index >= 0 and not after.resident else None
            if storage is None:
                storage = torch.UntypedStorage(after.size, device=after.device)
            else:
                storage.resize_(after.size)
            storage.copy_(source)
            targets[before] = storage
        result = self._call(operation, targets)
        results = list(result) if isinstance(result, (list, tuple)) else [result]
        back = []
        for before, after in operation.written:
            if after.index >= 0 and not after.resident:
                if after.program is None:
                    after.private = targets[before]
                memory.fill(after)
                back.append(after)
        for position, spot in operation.outputs:
            buffer = spot.owner
            tensor = results[position]
            assert isinstance(buffer, Buffer) and isinstance(tensor, torch.Tensor)
            if buffer.index < 0 or buffer.resident:
                continue
            storage = buffer.storage() if buffer.program is not None else None
            if storage is None:
                buffer.private = tensor.untyped_storage()
            else:
                storage.resize_(buffer.size)
                storage.copy_(tensor.untyped_storage())
            memory.fill(buffer)
            back.append(buffer)
        return back


def _uses(buffer: Buffer) -> dict[Buffer, int]:
    """Return how often each buffer is read on the way to an evicted one, if each operation runs once.

    Keeping these in memory while they are wanted, where that is possible, is what keeps a
    rematerialization from running shared parts of its way again and again.
    """
    uses: dict[Buffer, int] = {}
    seen: set[Operation] = set()
    stack = [buffer]
    while stack:
        operation = stack.pop().operation
        if operation is None or operation in seen:
            continue
        seen.add(operation)
        for parent in operation.inputs:
            uses[parent] = uses.get(parent, 0) + 1
            if not parent.resident:
                stack.append(parent)
    return uses


def _can_steal(memory: Memory, before: Buffer, after: Buffer) -> bool:
    """Return whether the old version's memory may become the new one's: nothing else will need it soon."""
    return (
        before.private is not None
        and before.locks == 1
        and memory.wanted.get(before, 0) <= 1
        and after.index >= 0
        and not after.resident
        and after.program is None
        and all(child.resident or child is after for child in before.children)
    )


_RESULT = Buffer(-1, 0, torch.device("cpu"))
"""Stands for the one result of an operation that writes into a storage it is given."""


def generator_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    """Return the generator that a random operation draws from."""
    given = kwargs.get("generator")
    if isinstance(given, torch.Generator):
        return given
    for value in args:
        if isinstance(value, torch.Generator):
            return value
    device = kwargs.get("device")
    for value in args:
        if isinstance(value, torch.Tensor):
            device = value.device
            break
    return devices.of("cpu" if device is None else device).generator()


@contextmanager
def replayed(generator: torch.Generator, state: bytes) -> Iterator[None]:
    """Draw from ``state`` inside the block; the generator continues as before after it."""
    now = state_of(generator)
    set_state(generator, state)
    try:
        yield
    finally:
        set_state(generator, now)
