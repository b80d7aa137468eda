"""Handle each operation of the program."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any, NamedTuple

import torch

from rkmate.device.random_state import state_of
from rkmate.dtr.heuristics import Heuristic
from rkmate.dtr.runtime.buffer import Buffer, Operation, Place
from rkmate.dtr.runtime.logging import LogWriter
from rkmate.dtr.runtime.memory import Memory, Report
from rkmate.dtr.runtime.rematerialize import Rematerializer, generator_of
from rkmate.dtr.runtime.schema import Arguments, Traits, map_tensors, traits_of, without_statistics
from rkmate.dtr.runtime.settling import Settling
from rkmate.dtr.runtime.sizes import Need, Ran, Sizes
from rkmate.errors import RkmateError
from rkmate.graph.ops.properties import ALIASES
from rkmate.torch_seam.schema import OpOverload
from rkmate.torch_seam.tensors import base_of, storage_id

_STATE_BYTES = 3 * 5056
"""A generator's state passes through tensors when it is kept and when it is set."""


class _Call(NamedTuple):
    """An operation that the program calls."""

    function: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    traits: Traits
    seen: Arguments
    written: list[torch.Tensor]
    """Arguments that it changes."""


class _Demand(NamedTuple):
    """Memory that a call needs before it can run."""

    key: Any
    """Key under which the call's need is remembered."""
    need: Need
    sure: int
    """Bytes that it will allocate."""
    hoped: int
    """Bytes that it may allocate too: an estimate."""
    state: bytes | None
    """State of the generator that the call draws from; None if it draws nothing."""


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
        self.rematerializer = Rematerializer(self.memory, overhead_limit)
        self.sizes = Sizes()
        self.interrupts = Interrupts()
        self.banish = banish
        self.log = log
        self.settled = Settling(self.memory, self.rematerializer)
        self.memory.on_forget = self.settled.forget
        self.memory.on_lose = self.settled.lose
        if log is not None:
            self.memory.on_drop = log.release

    # -- one operation ------------------------------------------------------------------------

    def call(self, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run ``function`` for the program."""
        if function in ALIASES:
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
            self._fill_viewed(args)
            return function(*args, **kwargs)
        began, again = time.perf_counter_ns(), self.rematerializer.spent_ns
        if memory.dropped:
            memory.tidy()
        if self.banish:
            self.settled.banish()
        call = _Call(function, args, kwargs, traits, Arguments(memory.live, args, kwargs),
                     self._written(traits, function, args, kwargs))
        self.settled.before_writing(call.written)
        self._note_leaves(call.seen)
        demand = self._demand(call)
        ran = self._reserve_and_run(call, demand)
        # Expected times, not the clock's: a pause of the machine would make all look equally stale.
        memory.clock += ran.cost
        self.rematerializer.own_ns += ran.cost
        self._record(_recorded(call, demand, ran), call.seen, call.written, ran.result)
        report = memory.report
        report.operations += 1
        report.operation_seconds += ran.nanoseconds / 1e9
        others = ran.nanoseconds + self.rematerializer.spent_ns - again
        report.bookkeeping_seconds += (time.perf_counter_ns() - began - others) / 1e9
        return ran.result

    def _fill_viewed(self, args: tuple[Any, ...]) -> None:
        """Bring the contents that views look at into memory. The views themselves need no memory."""
        for value in args:
            if isinstance(value, torch.Tensor):
                viewed = self.memory.live.get(storage_id(value))
                if viewed is not None and not viewed.resident:
                    self.rematerializer.materialize(viewed)

    def _note_leaves(self, seen: Arguments) -> None:
        """Prepare parameters without a gradient: the gradient that the backward gives them does not count."""
        for constant in seen.constants.values():
            # A product reads a view of its weight.
            leaf = constant if base_of(constant) is None else base_of(constant)
            if leaf.requires_grad and leaf.is_leaf and leaf.grad is None:
                self.memory.expect_gradient(leaf)

    def _demand(self, call: _Call) -> _Demand:
        key = (call.function, *call.seen.key)
        need = self.sizes.need(key, call.function, call.args, call.kwargs)
        extra, state = need.extra, None
        if call.traits.random:
            extra += _STATE_BYTES
            state = state_of(generator_of(call.args, call.kwargs))
        sure, hoped = (extra, 0) if need.measured else (0, extra)
        return _Demand(key, need, need.outputs + sure, hoped, state)

    def _reserve_and_run(self, call: _Call, demand: _Demand) -> Ran:
        """Evict until there is room, with the inputs in memory; then call the function."""
        memory, inputs = self.memory, call.seen.inputs
        if memory.fits(demand.sure + demand.hoped) and all(buffer.resident for buffer in inputs):
            for buffer in inputs:
                memory.columns.touch(buffer, memory.clock)
            ran = self.sizes.run(demand.key, demand.need, call.function, call.args, call.kwargs)
            # What was hoped for is an estimate until the first run, which knows better.
            learned = ran.measured and not demand.need.measured
            memory.count(demand.sure + (ran.extra if learned else demand.hoped))
            return ran
        locked = self._bring_in(inputs)
        name = str(call.function)
        try:
            memory.reserve(demand.sure, demand.hoped, name)
            while call.written and self.settled.readers_of(call.written):
                memory.reserve(demand.sure, demand.hoped, name)
            return self.sizes.run(demand.key, demand.need, call.function, call.args, call.kwargs)
        finally:
            for buffer in locked:
                memory.unlock(buffer)

    def _written(
        self, traits: Traits, function: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return the tensors whose contents the call changes."""
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
                    self.rematerializer.materialize(buffer)
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
                address = storage_id(storage)
                if address not in live and address not in constants:
                    fresh.setdefault(address, (position, tensor, storage))
        changed: dict[Buffer, None] = {}
        for tensor in written:
            buffer = live.get(storage_id(tensor))
            if buffer is not None:
                changed[buffer] = None
        if not fresh and not changed:
            return
        parents = operation.inputs = list(seen.inputs)
        for address in constants:
            operation.constants.append(address)
            self.settled.reads(operation, address)
        if self.log is not None:
            self.log.begin(operation, constants)
        for old in changed:
            # What is made from a version that nothing can compute, nothing can compute either.
            lost = old.operation is None
            buffer = memory.succeed(old, parents, operation.cost)
            operation.written.append((old, buffer))
            self._made(operation, buffer)
            if lost:
                self.settled.cut(buffer)
        for position, tensor, storage in fresh.values():
            buffer = memory.add(storage, parents, operation.cost)
            operation.outputs.append((position, Place(buffer, tensor)))
            self._made(operation, buffer)
        if self.log is not None:
            self.log.end(operation)

    def _made(self, operation: Operation, buffer: Buffer) -> None:
        buffer.operation = operation
        operation.alive += 1

    # -- outside operations -------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor) -> None:
        """Bring a tensor in, for good: something outside the runtime reads its memory."""
        buffer = self.memory.live.get(storage_id(tensor))
        if buffer is None:
            return
        if not buffer.resident:
            self.rematerializer.materialize(buffer)
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
                    self.rematerializer.materialize(buffer)
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
        """Remove the budget and the limit on recomputation from here on."""
        self.memory.budget = self.rematerializer.overhead_limit = float("inf")

    def close(self) -> None:
        """Forget everything; the program's tensors are ordinary ones from here on."""
        self.memory.stop_watching()
        self.settled.close()

    def take_report(self) -> Report:
        """Return the numbers since the last call."""
        report = self.memory.report
        self.memory.report = Report(peak_bytes=self.memory.held)
        return report


def _recorded(call: _Call, demand: _Demand, ran: Ran) -> Operation:
    """Record the call in a form that can be repeated."""
    args = call.seen.args
    if call.traits.keeps_statistics:
        args = without_statistics(call.function, args)
    operation = Operation(call.function, args, call.seen.kwargs)
    operation.random_state = demand.state
    operation.cost = ran.cost
    if ran.measured:
        operation.extra_bytes = ran.extra
    else:
        operation.hoped_bytes = ran.extra
    return operation


class Interrupts:
    """Lets Ctrl-C arrive between two operations only: holds ``KeyboardInterrupt`` back while the runtime's
    own state is between two values.

    Only where Python's default handler is installed, and in the main thread, which alone gets it.
    """

    __slots__ = ("busy", "waiting", "_installed")

    def __init__(self) -> None:
        self.busy = False
        """Whether an operation is being run and recorded."""
        self.waiting = False
        """Whether an interrupt came meanwhile."""
        self._installed = False

    def install(self) -> None:
        """Take over from the default handler."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._arrive)
            self._installed = True

    def remove(self) -> None:
        """Give the default handler back."""
        if self._installed:
            self._installed = False
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def deliver(self) -> None:
        """Raise what waits."""
        if self.waiting:
            self.waiting = False
            raise KeyboardInterrupt

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        if not self.busy:
            raise KeyboardInterrupt
        self.waiting = True
