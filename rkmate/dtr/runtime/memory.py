"""The buffers in memory, the budget over them, evictions, and the figures of a batch."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch.utils.hooks import RemovableHandle

from rkmate.dtr.errors import BudgetExceeded
from rkmate.dtr.heuristics import Heuristic
from rkmate.dtr.pool import Columns, Pool
from rkmate.dtr.runtime.buffer import Buffer, Operation
from rkmate.torch_seam.tensors import storage_id

_SLACK = 0.04
"""Part of the budget that evictions leave free beyond the need, so that they come in bursts."""


@dataclass
class Report:
    """Counts and times of one batch; times are seconds, sizes are bytes."""

    operations: int = 0
    """Operations that the program asked for, views left out."""
    evictions: int = 0
    """Buffers that the heuristic evicted."""
    rematerializations: int = 0
    """Operations that ran again."""
    operation_seconds: float = 0.0
    """Seconds in the program's own operations."""
    recompute_seconds: float = 0.0
    """Seconds in operations that ran again."""
    bookkeeping_seconds: float = 0.0
    """Seconds of the runtime's own work around the operations."""
    peak_bytes: int = 0
    """Greatest number of bytes held for the program at one time, temporary memory included."""

    def copy(self) -> Report:
        """Return a copy of the report."""
        return replace(self)


class Memory:
    """Bytes held for the program, and which buffer goes when they would exceed the budget."""

    def __init__(self, budget: float, heuristic: Heuristic) -> None:
        self.budget = budget
        """Bytes; infinity for none."""
        self.heuristic = heuristic
        self.columns = Columns()
        self.pool = Pool()
        """Buffers that may be evicted."""
        self.reluctant = Pool()
        """Buffers that may be evicted when the pool is empty: waiting operations will read them."""
        self.wanted: dict[Buffer, int] = {}
        """Number of waiting operations that read each buffer."""
        self.around = heuristic.tracker(self.columns)
        self.held = 0
        """Bytes of the resident buffers that count."""
        self.clock = 0
        """Nanoseconds spent in operations so far: what staleness is measured by."""
        self.live: dict[int, Buffer] = {}
        """The newest version on each storage of the program's, by the storage's address."""
        self.report = Report()
        self.leaves: dict[int, tuple[weakref.ref[torch.Tensor], RemovableHandle]] = {}
        """Parameters that the program used before they had a gradient, with the hook that waits for it."""
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.dropped: list[tuple[Buffer, bool]] = []
        self._untold: list[Buffer] = []
        self.on_drop: Callable[[Buffer], None] = lambda buffer: None
        """Function called when the program lets go of a storage."""
        self.on_forget: Callable[[Operation], None] = lambda operation: None
        """Function called when nothing that an operation made is left in the graph."""
        self.on_lose: Callable[[Buffer], None] = lambda buffer: None
        """Function called when a buffer is gone that nothing can compute, and others were made from it."""

    # -- buffers come and go ------------------------------------------------------------------

    def add(self, storage: torch.UntypedStorage, parents: Iterable[Buffer], cost: int) -> Buffer:
        """Track a storage that an operation on ``parents`` has just filled."""
        buffer = Buffer(self.columns.claim(), storage.nbytes(), storage.device)
        self._join(buffer, parents, cost)
        buffer.resident = True
        self.held += buffer.size
        self.own(buffer, storage)
        self.shelve(buffer)
        return buffer

    def succeed(self, old: Buffer, parents: Iterable[Buffer], cost: int) -> Buffer:
        """Return the version after an in-place operation on ``old``: it takes over storage and memory."""
        buffer = Buffer(self.columns.claim(), old.size, old.device)
        storage = old.storage()
        assert storage is not None
        buffer.counted = old.counted
        self._join(buffer, parents, cost)
        buffer.resident = True
        buffer.program, buffer.private = old.program, old.private
        if buffer.program is not None:
            self.live[storage_id(storage)] = buffer
        old.program = old.private = None
        old.resident = False
        self.remove(old)
        self._guard_parents(old)
        self.around.evict(old)
        self.shelve(buffer)
        return buffer

    def own(self, buffer: Buffer, storage: torch.UntypedStorage) -> None:
        """Note that the program holds ``storage`` and learn when it lets go of it."""
        address = storage_id(storage)
        self.live[address] = buffer
        buffer.program = watch = weakref.ref(storage, lambda _: self._let_go(address))
        self._watched[address] = watch

    def _join(self, buffer: Buffer, parents: Iterable[Buffer], cost: int) -> None:
        buffer.cost = cost
        buffer.last_access = self.clock
        for parent in parents:
            buffer.parents.add(parent)
            parent.children.add(buffer)
        self.columns.add(buffer)
        self.around.born(buffer)

    def _let_go(self, address: int) -> None:
        # Called while the storage is being freed, perhaps in the middle of an operation: memory is
        # accounted at once, the graph is tidied at the next operation.
        self._watched.pop(address, None)
        buffer = self.live.pop(address, None)
        if buffer is None:
            return
        buffer.program = None
        self.on_drop(buffer)
        self.dropped.append((buffer, buffer.resident))
        if buffer.resident:
            # It stays marked as resident until the neighbourhoods are told, in ``tidy``.
            if buffer.counted:
                self.held -= buffer.size
            self.remove(buffer)
        if buffer.operation is None:
            # What was made from it must last until ``tidy`` knows.
            for child in buffer.made():
                if child.children and child.program is not None:
                    child.guard = child.program()
        if buffer.children:
            self._guard_parents(buffer)

    def _guard_parents(self, buffer: Buffer) -> None:
        """Keep the parents of a buffer that has left memory, if nothing can compute them."""
        for parent in buffer.parents:
            assert isinstance(parent, Buffer)
            if parent.operation is None and parent.program is not None:
                parent.guard = parent.program()

    def watch_parents(self, buffer: Buffer) -> None:
        """Stop keeping the parents of a buffer that is in memory again."""
        for parent in buffer.parents:
            assert isinstance(parent, Buffer)
            if parent.guard is not None:
                parent.watch()

    def shelve(self, buffer: Buffer) -> None:
        """Make a resident buffer evictable."""
        (self.reluctant if self.wanted.get(buffer) else self.pool).append(buffer)

    def remove(self, buffer: Buffer) -> None:
        """Make a buffer not evictable."""
        self.pool.remove(buffer)
        self.reluctant.remove(buffer)

    def want(self, uses: dict[Buffer, int]) -> None:
        """Note that operations are about to run that read these buffers. `uses`: the number of reads of each
        buffer."""
        self.wanted = uses
        for buffer in uses:
            if buffer in self.pool:
                self.pool.remove(buffer)
                self.reluctant.append(buffer)

    def used(self, buffer: Buffer) -> None:
        """Note that one of the waiting operations has read ``buffer``."""
        left = self.wanted.get(buffer, 0)
        if left > 1:
            self.wanted[buffer] = left - 1
        elif left:
            del self.wanted[buffer]
            if buffer in self.reluctant:
                self.reluctant.remove(buffer)
                self.pool.append(buffer)

    def tidy(self) -> None:
        """Take what the program dropped since the last call out of the graph, where possible."""
        while self.dropped:
            buffer, was_resident = self.dropped.pop()
            if buffer.index < 0:
                continue
            self.discard(buffer)
            if buffer.index >= 0 and buffer.operation is None:
                self.on_lose(buffer)
            if was_resident and buffer.index >= 0:
                self._untold.append(buffer)

    def tell(self) -> None:
        """Tell the neighbourhoods of drops. Most buffers leave the graph before it matters."""
        self.tidy()
        while self._untold:
            buffer = self._untold.pop()
            if buffer.index >= 0 and buffer.resident and buffer.storage() is None:
                buffer.resident = False
                self.around.evict(buffer)

    def take_drops(self) -> list[Buffer]:
        """Return buffers that the program dropped and that are still in the graph, since neighbourhoods were
        told."""
        return [buffer for buffer in self._untold if buffer.index >= 0]

    def fits(self, need: int) -> bool:
        """Return whether ``need`` bytes more fit as things are."""
        return self.held + need <= self.budget

    def count(self, need: int) -> None:
        """Count ``need`` bytes that an operation took in addition to the bytes held."""
        if self.held + need > self.report.peak_bytes:
            self.report.peak_bytes = self.held + need

    def discard(self, buffer: Buffer) -> None:
        """Remove a buffer that nothing needs, and then its parents that nothing needs any more."""
        stack = [buffer]
        while stack:
            node = stack.pop()
            busy = node.children or node.program is not None or node.locks > node.pinned
            if node.index < 0 or busy:
                continue
            if node.resident and node.private is not None:
                self._release(node)
            node.resident = False
            self.around.forget(node)
            parents = list(node.parents)
            for parent in parents:
                parent.children.discard(node)
                if isinstance(parent, Buffer) and parent.guard is not None:
                    parent.watch()
            node.parents.clear()
            self.columns.release(node)
            node.index = -1
            if node.operation is not None:
                node.operation.alive -= 1
                if node.operation.alive == 0:
                    self.on_forget(node.operation)
                node.operation = None
            stack.extend(parent for parent in parents if isinstance(parent, Buffer))

    # -- eviction -----------------------------------------------------------------------------

    def reserve(self, need: int, hope: int, operation: str) -> None:
        """Evict until ``need`` bytes more fit, and ``hope`` on top of them if that is possible.

        Raises ``BudgetExceeded`` when the first cannot be had.
        """
        if self.held + need + hope > self.budget:
            self._leave_gradients_out()
            self.tell()
            room = self.budget - self.budget * _SLACK
            if self.held + need + hope > self.budget:
                while self.held + need + hope > room and len(self.pool):
                    self._evict_one(self.pool)
            while self.held + need > self.budget and len(self.reluctant):
                self._evict_one(self.reluctant)
            if self.held + need > self.budget:
                least = self.held + need
                raise BudgetExceeded(
                    f"{operation} needs {need:,} bytes, and {self.held:,} bytes cannot be evicted "
                    f"while it runs: the budget is {int(self.budget):,} bytes, and at least "
                    f"{least:,} are needed",
                    least,
                    operation,
                )
        self.report.peak_bytes = max(self.report.peak_bytes, self.held + need)

    def _evict_one(self, pool: Pool) -> None:
        self.around.refresh(pool)
        pick = self.heuristic.choose(pool, self.columns, self.clock)
        buffer = self.columns.nodes[pick.row]
        assert isinstance(buffer, Buffer)
        self.evict(buffer)
        self.report.evictions += 1

    def evict(self, buffer: Buffer) -> None:
        """Free a resident buffer's memory; it stays in the graph."""
        self._release(buffer)
        self._guard_parents(buffer)
        self.around.evict(buffer)

    def _release(self, buffer: Buffer) -> None:
        self.remove(buffer)
        buffer.resident = False
        if buffer.counted:
            self.held -= buffer.size
        storage = buffer.storage()
        if buffer.program is not None and storage is not None:
            storage.resize_(0)
        buffer.private = None

    def hand_over(self, buffer: Buffer) -> None:
        """Evict a locked buffer whose private memory an in-place repetition takes."""
        buffer.resident = False
        buffer.private = None
        if buffer.counted:
            self.held -= buffer.size
        self._guard_parents(buffer)
        self.around.evict(buffer)

    def fill(self, buffer: Buffer) -> None:
        """Note that an evicted buffer has its contents again."""
        buffer.resident = True
        if buffer.counted:
            self.held += buffer.size

    def lock(self, buffer: Buffer) -> None:
        """Keep a resident buffer in memory until it is unlocked as often."""
        if buffer.locks == 0:
            self.remove(buffer)
        buffer.locks += 1

    def unlock(self, buffer: Buffer) -> None:
        """Undo one ``lock``."""
        buffer.locks -= 1
        if buffer.locks == 0 and buffer.resident and buffer.storage() is not None:
            self.shelve(buffer)

    def pin(self, buffer: Buffer) -> None:
        """Keep a resident buffer in memory for good: it cannot be computed again."""
        if not buffer.pinned:
            self.lock(buffer)
            buffer.pinned = True
            self.around.pin(buffer)

    def stop_watching(self) -> None:
        """Let the program's storages come and go unnoticed."""
        self._watched.clear()
        for _, hook in self.leaves.values():
            hook.remove()
        self.leaves.clear()
        for buffer in self.live.values():
            buffer.program = None
        self.live.clear()
        self.dropped.clear()
        self._untold.clear()
        # Without their cycles, buffers and operations go at once, not at a garbage collection.
        for node in self.columns.nodes:
            if isinstance(node, Buffer):
                node.parents.clear()
                node.children.clear()
                node.operation = None

    def leave_out(self, tensor: torch.Tensor) -> None:
        """Stop counting a parameter's gradient, which stays after the step."""
        buffer = self.live.get(storage_id(tensor))
        if buffer is not None and buffer.counted and buffer.resident:
            buffer.counted = False
            self.held -= buffer.size
            self.pin(buffer)

    def expect_gradient(self, leaf: torch.Tensor) -> None:
        """Stop counting the gradients of a parameter without a gradient, as soon as a backward sets them."""
        known = self.leaves.get(id(leaf))
        if known is None or known[0]() is not leaf:
            hook = leaf.register_post_accumulate_grad_hook(self._leave_gradient_out)
            self.leaves[id(leaf)] = weakref.ref(leaf), hook

    def _leave_gradient_out(self, leaf: torch.Tensor) -> None:
        if leaf.grad is not None and leaf.grad.layout is torch.strided:
            self.leave_out(leaf.grad)

    def _leave_gradients_out(self) -> None:
        """Stop counting all parameters' gradients, including those that the program has set itself."""
        for reference, _ in self.leaves.values():
            leaf = reference()
            if leaf is not None:
                self._leave_gradient_out(leaf)
