"""What happens at each operation of the program."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch._ops import OpOverload

from rkmate.dtr.heuristics.protocol import Heuristic
from rkmate.dtr.interrupts import Interrupts
from rkmate.dtr.runtime.arguments import Arguments
from rkmate.dtr.runtime.buffer import Buffer
from rkmate.dtr.runtime.logging import LogWriter
from rkmate.dtr.runtime.memory import Memory
from rkmate.dtr.runtime.operation import (
    Operation,
    Place,
    Traits,
    map_tensors,
    traits_of,
    without_statistics,
)
from rkmate.dtr.runtime.random_state import generator_of, state_of
from rkmate.dtr.runtime.replay import Replayer
from rkmate.dtr.runtime.report import Report
from rkmate.dtr.runtime.sizes import Sizes
from rkmate.errors import RkmateError

_ALIASES = (torch.ops.aten.detach.default, torch.ops.aten.alias.default)
_STATE_BYTES = 3 * 5056
"""A generator's state passes through tensors when it is kept and when it is set."""


class Engine:
    """Keeps what is needed to repeat each operation, and evicts before each allocation."""

    def __init__(
        self,
        budget: float,
        heuristic: Heuristic,
        *,
        overhead_limit: float,
        banish: bool,
        log: LogWriter | None,
    ) -> None:
        self.memory = Memory(budget, heuristic)
        self.replayer = Replayer(self.memory, overhead_limit)
        self.sizes = Sizes()
        self.interrupts = Interrupts()
        self.banish = banish
        self.log = log
        self._waiting: list[Buffer] = []
        self._readers: dict[int, set[Operation]] = {}
        self.memory.on_forget = self._forget
        self.memory.on_lose = self._lose
        if log is not None:
            self.memory.on_drop = log.release

    # -- one operation ------------------------------------------------------------------------

    def call(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``function`` for the program."""
        if function in _ALIASES:
            return function(*args, **kwargs)
        interrupts = self.interrupts
        interrupts.busy = True
        try:
            return self._call(function, args, kwargs)
        finally:
            interrupts.busy = False
            if interrupts.waiting:
                interrupts.deliver()

    def _call(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        memory = self.memory
        traits = traits_of(function)
        if traits.view:
            for value in args:
                if isinstance(value, torch.Tensor):
                    viewed = memory.live.get(value.untyped_storage()._cdata)
                    if viewed is not None and not viewed.resident:
                        self.replayer.materialize(viewed)
            return function(*args, **kwargs)
        began = time.perf_counter_ns()
        if memory.dropped:
            memory.tidy()
        if self.banish:
            self._banish()
        seen = Arguments(memory.live, args, kwargs)
        again = self.replayer.spent_ns
        written: list[torch.Tensor] = []
        if traits.mutated or traits.keeps_statistics:
            written = self._written(traits, function, args, kwargs)
            for tensor in written:
                address = tensor.untyped_storage()._cdata
                if address not in memory.live and address in self._readers:
                    self._freeze(address)
            self._settle_readers(written)
        for constant in seen.constants.values():
            if constant.requires_grad and constant.is_leaf and constant.grad is None:
                memory.leaves[id(constant)] = weakref.ref(constant)
        key = (function, *seen.key)
        need = self.sizes.need(key, function, args, kwargs)
        state = None
        extra = need.extra
        if traits.random:
            extra += _STATE_BYTES
            state = state_of(generator_of(args, kwargs))
        sure, hope = (extra, 0) if need.measured else (0, extra)
        if memory.fits(need.outputs + extra) and all(b.resident for b in seen.inputs):
            for buffer in seen.inputs:
                memory.columns.touch(buffer, memory.clock)
            ran = self.sizes.run(key, need, function, args, kwargs)
        else:
            locked = self._bring_in(seen.inputs)
            try:
                memory.reserve(need.outputs + sure, hope, str(function))
                while written and self._settle_readers(written):
                    memory.reserve(need.outputs + sure, hope, str(function))
                ran = self.sizes.run(key, need, function, args, kwargs)
            finally:
                for buffer in locked:
                    memory.unlock(buffer)
        result, spent = ran.result, ran.nanoseconds
        # Expected times, not the clock's: a pause of the machine would make all look equally stale.
        memory.clock += ran.cost
        self.replayer.own_ns += ran.cost
        report = memory.report
        report.operations += 1
        report.operation_seconds += spent / 1e9
        operation = Operation(function, seen.args, seen.kwargs)
        operation.random_state = state
        operation.cost = ran.cost
        if ran.measured:
            operation.extra_bytes = ran.extra
        else:
            operation.hoped_bytes = ran.extra
        if traits.keeps_statistics:
            operation.args = without_statistics(function, seen.args)
        self._record(operation, seen, written, result)
        again = self.replayer.spent_ns - again
        report.bookkeeping_seconds += (time.perf_counter_ns() - began - spent - again) / 1e9
        return result

    def _written(
        self, traits: Traits, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for place, name in traits.mutated:
            value = args[place] if place < len(args) else kwargs.get(name)
            map_tensors(value, found.append)
        if traits.keeps_statistics:
            repeated = without_statistics(function, args)
            for value, other in zip(args, repeated, strict=True):
                if other is not value and isinstance(value, torch.Tensor):
                    found.append(value)
        return found

    def _bring_in(self, inputs: Iterable[Buffer]) -> list[Buffer]:
        memory = self.memory
        locked: list[Buffer] = []
        missing: list[Buffer] = []
        try:
            for buffer in inputs:
                memory.columns.touch(buffer, memory.clock)
                if buffer.resident:
                    memory.lock(buffer)
                    locked.append(buffer)
                else:
                    missing.append(buffer)
            for buffer in missing:
                if not buffer.resident:
                    self.replayer.materialize(buffer)
                memory.lock(buffer)
                locked.append(buffer)
        except RkmateError:
            for buffer in locked:
                memory.unlock(buffer)
            raise
        return locked

    def _record(
        self, operation: Operation, seen: Arguments, written: list[torch.Tensor], result: Any
    ) -> None:
        memory, live = self.memory, self.memory.live
        constants = seen.constants
        fresh: dict[int, tuple[int, torch.Tensor, torch.UntypedStorage]] = {}
        results = result if isinstance(result, (list, tuple)) else (result,)
        for position, tensor in enumerate(results):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                address = storage._cdata
                if address not in live and address not in constants:
                    fresh.setdefault(address, (position, tensor, storage))
        changed: dict[Buffer, None] = {}
        for tensor in written:
            buffer = live.get(tensor.untyped_storage()._cdata)
            if buffer is not None:
                changed[buffer] = None
        if not fresh and not changed:
            return
        parents = operation.inputs = list(seen.inputs)
        for address in constants:
            operation.constants.append(address)
            self._readers.setdefault(address, set()).add(operation)
        if self.log is not None:
            self.log.begin(operation, constants)
        for old in changed:
            # What is made from a version that nothing can compute, nothing can compute either.
            lost = old.operation is None
            buffer = memory.succeed(old, parents, operation.cost)
            operation.written.append((old, buffer))
            self._made(operation, buffer)
            if lost:
                self._cut(buffer)
        for position, tensor, storage in fresh.values():
            buffer = memory.add(storage, parents, operation.cost)
            operation.outputs.append((position, Place(buffer, tensor)))
            self._made(operation, buffer)
        if self.log is not None:
            self.log.end(operation)

    def _made(self, operation: Operation, buffer: Buffer) -> None:
        buffer.operation = operation
        operation.alive += 1

    # -- what can no longer be computed -------------------------------------------------------

    def _banish(self) -> None:
        """Free for good what the program dropped and no evicted buffer depends on (appendix C.5).

        What was computed from it can no longer be, and stays in memory.
        """
        self._waiting += self.memory.take_drops()
        waiting = [buffer for buffer in self._waiting if buffer.index >= 0]
        self._waiting = []
        for buffer in waiting:
            children = buffer.made()
            if any(not child.in_memory for child in children):
                self._waiting.append(buffer)
                continue
            for child in children:
                self._cut(child)

    def _freeze(self, address: int) -> None:
        """A constant is about to change: settle whatever was computed from it."""
        first: list[Buffer] = []
        for operation in self._readers.get(address, ()):
            first += [spot.owner for _, spot in operation.outputs if isinstance(spot.owner, Buffer)]
            first += [after for _, after in operation.written]
        self._settle(first)

    def _settle_readers(self, written: list[torch.Tensor]) -> bool:
        """The same for what is about to be written over and nothing can compute again.

        Returns whether there was anything to settle.
        """
        memory = self.memory
        if memory.dropped:
            memory.tidy()
        found: list[Buffer] = []
        for tensor in written:
            buffer = memory.live.get(tensor.untyped_storage()._cdata)
            if buffer is not None and buffer.operation is None:
                found += buffer.made()
        self._settle(found)
        return bool(found)

    def _lose(self, buffer: Buffer) -> None:
        """``buffer`` is gone, and nothing can compute it: what was made from it stays in memory."""
        for child in buffer.made():
            if child.in_memory:
                self._cut(child)
            else:
                # Dropped in the same moment: it would have been kept for a child out of memory.
                self._lose(child)
                self.memory.discard(child)

    def _settle(self, roots: Iterable[Any]) -> None:
        """Make ``roots`` and all below them independent of how they were computed.

        What the program still holds is brought in and stays; the rest leaves the graph with it.
        """
        found: dict[Buffer, None] = {}
        stack = [root for root in roots if root.index >= 0]
        while stack:
            buffer = stack.pop()
            if buffer not in found:
                found[buffer] = None
                stack.extend(buffer.children)
        held = [buffer for buffer in found if buffer.program is not None]
        for buffer in held:
            if not buffer.resident:
                self.replayer.materialize(buffer)
            self.memory.pin(buffer)
        for buffer in held:
            self._cut(buffer)

    def _cut(self, buffer: Buffer) -> None:
        operation, buffer.operation = buffer.operation, None
        self.memory.pin(buffer)
        buffer.watch()
        parents = list(buffer.parents)
        buffer.parents.clear()
        for parent in parents:
            parent.children.discard(buffer)
            assert isinstance(parent, Buffer)
            if parent.guard is not None:
                parent.watch()
            self.memory.discard(parent)
        if operation is not None:
            operation.alive -= 1
            if operation.alive == 0:
                self._forget(operation)

    def _forget(self, operation: Operation) -> None:
        for address in operation.constants:
            readers = self._readers.get(address)
            if readers is not None:
                readers.discard(operation)
                if not readers:
                    del self._readers[address]

    # -- outside operations -------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor) -> None:
        """Bring a tensor in, for good: something outside the runtime reads its memory."""
        buffer = self.memory.live.get(tensor.untyped_storage()._cdata)
        if buffer is None:
            return
        if not buffer.resident:
            self.replayer.materialize(buffer)
        self.memory.pin(buffer)

    def finish(self) -> None:
        """Bring in everything that the program still holds (paper, appendix C.6: the output
        condition) and stop tracking it. Over the budget, everything is still brought in, so that
        no tensor is left empty; then ``BudgetExceeded`` is raised."""
        memory = self.memory
        memory.tidy()
        memory._leave_gradients_out()
        failure: RkmateError | None = None
        for buffer in list(memory.live.values()):
            if buffer.program is None:
                # It was only kept for one that came before.
                continue
            while not buffer.resident:
                try:
                    self.replayer.materialize(buffer)
                except RkmateError as error:
                    if failure is not None:
                        raise
                    failure = error
                    self.lift_limits()
            memory.pin(buffer)
        self.close()
        if failure is not None:
            raise failure

    def lift_limits(self) -> None:
        """No budget and no limit on recomputation from here on."""
        self.memory.budget = self.replayer.overhead_limit = float("inf")

    def close(self) -> None:
        """Forget everything; the program's tensors are ordinary ones from here on."""
        self.memory.stop_watching()
        self._readers.clear()

    def take_report(self) -> Report:
        """The numbers since the last call."""
        report = self.memory.report
        self.memory.report = Report(peak_bytes=self.memory.held)
        return report
