"""Bring tensors that can no longer be recomputed into memory, and keep them there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from rkmate.dtr.runtime.buffer import Buffer, Operation
from rkmate.dtr.runtime.memory import Memory
from rkmate.dtr.runtime.rematerialize import Rematerializer
from rkmate.torch_seam.tensors import storage_id


class Settling:
    """Cuts buffers off from the operations that made them."""

    def __init__(self, memory: Memory, rematerializer: Rematerializer) -> None:
        self.memory = memory
        self.rematerializer = rematerializer
        self._waiting: list[Buffer] = []
        """Dropped by the program, and still needed to compute an evicted buffer."""
        self._readers: dict[int, set[Operation]] = {}
        """Operations that read each untracked storage, by the storage's address."""

    def reads(self, operation: Operation, address: int) -> None:
        """Note that a recorded operation reads the untracked storage at an address."""
        self._readers.setdefault(address, set()).add(operation)

    def close(self) -> None:
        """Forget all readers: nothing will be recomputed any more."""
        self._readers.clear()

    def before_writing(self, written: list[torch.Tensor]) -> None:
        """Settle the tensors that are computed from contents that are about to change."""
        if not written:
            return
        for tensor in written:
            address = storage_id(tensor)
            if address not in self.memory.live and address in self._readers:
                self._freeze(address)
        self.readers_of(written)

    def banish(self) -> None:
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
                self.cut(child)

    def _freeze(self, address: int) -> None:
        """Settle the tensors that were computed from a constant that is about to change."""
        first: list[Buffer] = []
        for operation in self._readers.get(address, ()):
            first += [spot.owner for _, spot in operation.outputs if isinstance(spot.owner, Buffer)]
            first += [after for _, after in operation.written]
        self._settle(first)

    def readers_of(self, written: list[torch.Tensor]) -> bool:
        """Settle the tensors that are computed from contents that are about to be overwritten and that
        nothing can recompute. Returns whether there were any."""
        memory = self.memory
        if memory.dropped:
            memory.tidy()
        found: list[Buffer] = []
        for tensor in written:
            buffer = memory.live.get(storage_id(tensor))
            if buffer is not None and buffer.operation is None:
                found += buffer.made()
        self._settle(found)
        return bool(found)

    def lose(self, buffer: Buffer) -> None:
        """Note that ``buffer`` is gone and nothing can recompute it: tensors made from it stay in memory."""
        for child in buffer.made():
            if child.in_memory:
                self.cut(child)
            else:
                # Dropped in the same moment: it would have been kept for a child out of memory.
                self.lose(child)
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
                self.rematerializer.materialize(buffer)
            self.memory.pin(buffer)
        for buffer in held:
            self.cut(buffer)

    def cut(self, buffer: Buffer) -> None:
        """Remove the operation that computes ``buffer``: the buffer stays, and needs no parents."""
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
                self.forget(operation)

    def forget(self, operation: Operation) -> None:
        """Forget an operation none of whose results is in the graph any more."""
        for address in operation.constants:
            readers = self._readers.get(address)
            if readers is not None:
                readers.discard(operation)
                if not readers:
                    del self._readers[address]
