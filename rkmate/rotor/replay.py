"""Replay a sequence of block operations on a chain: its time, its peak, or why it cannot run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rkmate.errors import ScheduleError
from rkmate.ir.chain import Backward, Chain, ForwardPlain, Op


@dataclass(frozen=True)
class Cost:
    """Cost of a sequence of block operations."""

    peak_bytes: int
    """Most bytes at once, the first cut included."""
    seconds: float


def replay(chain: Chain, ops: Sequence[Op]) -> Cost:
    """Time and peak of a sequence, a cut staying in memory exactly as long as it is still read.

    Cut i is read by the forwards and by the backward of block i. Raises `ScheduleError` when an
    operation lacks its input, when backwards are out of order, or when one is left out.
    """
    last = len(chain) - 1
    drops = deaths(ops)
    cuts = _Cuts(chain)
    cuts.add(0)
    kept = 0                                        # bytes that options have saved
    held = int(chain.held_by[-1])
    options: dict[int, tuple[int, int]] = {}        # block -> its option, the bytes saved
    waiting = last       # the block whose backward comes next
    loss = False
    reached = -1
    peak = 0
    for k, op in enumerate(ops):
        b = op.block
        if b not in cuts:
            raise ScheduleError(f"operation {k} ({op}): cut {b} is not in memory")
        reached = max(reached, b)
        if isinstance(op, Backward):
            found, saved = options.get(b, (None, 0))
            if b != waiting or found != op.option:
                raise ScheduleError(f"operation {k} ({op}): block {waiting}'s backward is next, and "
                                    f"option {found} of block {b} is saved")
            others = cuts.bytes_without(b + 1) + kept - saved + held
            if not loss:
                outputs = int(chain.between[b, b + 1])
                peak = max(peak, others + saved + outputs + chain.grads[-1])
                loss = True
            block = chain.blocks[b]
            peak = max(peak, others + block.options[op.option].backward_peak_bytes
                       + block.passing_bytes)
            del options[b]
            kept -= saved
            cuts.discard(b + 1)
            waiting = b - 1
        else:
            if b > waiting or b in options:
                raise ScheduleError(f"operation {k} ({op}): the block's backward has run, or its "
                                    "forward is saved already")
            around = (held + chain.grads[waiting + 1] if loss
                      else int(chain.held_by[reached]) + chain.grads_at_start)
            if isinstance(op, ForwardPlain):
                own = chain.blocks[b].forward_peak_bytes
                saved = 0
            else:
                option = chain.blocks[b].options[op.option]
                own, saved = option.forward_peak_bytes, option.saved_bytes
                options[b] = op.option, saved
            peak = max(peak, cuts.bytes_without(b + 1) + kept + around + own)
            kept += saved
            cuts.add(b + 1)
        for i in drops[k]:
            cuts.discard(i)
    if waiting >= 0:
        raise ScheduleError(f"the backward of block {waiting} never runs")
    return Cost(peak, seconds(chain, ops))


def seconds(chain: Chain, ops: Iterable[Op]) -> float:
    """Sum of the times of all operations."""
    return math.fsum(chain.seconds(op) for op in ops)


class _Cuts:
    """The cuts in memory, and the bytes of their tensors."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._there: set[int] = set()
        self._count: dict[int, int] = {}
        """For each tensor, the number of cuts in memory that it is in."""
        self._bytes = 0

    def __contains__(self, i: int) -> bool:
        return i in self._there

    def add(self, i: int) -> None:
        """Put a cut into memory."""
        if i not in self._there:
            self._there.add(i)
            for j in self._chain.cuts[i]:
                count = self._count[j] = self._count.get(j, 0) + 1
                if count == 1:
                    self._bytes += self._chain.sizes[j]

    def discard(self, i: int) -> None:
        """Drop a cut, if it is in memory."""
        if i in self._there:
            self._there.discard(i)
            for j in self._chain.cuts[i]:
                self._count[j] -= 1
                if not self._count[j]:
                    self._bytes -= self._chain.sizes[j]

    def bytes_without(self, i: int) -> int:
        """Return the bytes of all cuts in memory except one."""
        if i not in self._there:
            return self._bytes
        return self._bytes - sum(self._chain.sizes[j] for j in self._chain.cuts[i] if self._count[j] == 1)


def deaths(ops: Sequence[Op]) -> list[set[int]]:
    """Return, for each operation, the cuts that nobody reads after it before they are made again."""
    needed: set[int] = set()
    result: list[set[int]] = [set() for _ in ops]
    for k in range(len(ops) - 1, -1, -1):
        op = ops[k]
        if not isinstance(op, Backward):
            # Outputs that an option keeps belong to its peaks until the block's own backward.
            if op.block + 1 not in needed:
                result[k].add(op.block + 1)
            needed.discard(op.block + 1)
        if op.block not in needed:
            result[k].add(op.block)
            needed.add(op.block)
    return result
