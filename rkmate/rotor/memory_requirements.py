"""Memory that each operation of a chain needs, and the smallest budget of a chain."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rkmate.ir.chain import Chain, Floats, Ints

# -- Memory needs, in bytes, of each choice of the dynamic program: the part that budgets do not change ---

@dataclass(frozen=True)
class BlockOptions:
    """The options of one block as arrays."""

    seconds: Floats
    """Forward and backward together."""
    keep: Ints
    """Bytes kept until the backward, the block's outputs included."""
    forward: Ints
    """Bytes during the forward, gradients and held outputs left out."""
    backward: Ints
    """Bytes during the backward, all included."""
    backward_last: Ints
    """Bytes during the backward if the loss comes right between forward and backward (last block)."""


class MemoryRequirements:
    """Byte needs of every choice of a chain."""

    def __init__(self, chain: Chain, kept: Ints | None = None) -> None:
        """`kept`: bytes per block that are in memory until the block's backward, whatever is chosen; the
        bytes of the sub-problem's own blocks belong to its memory."""
        n = len(chain)
        self.blocks = n
        kept = np.zeros(n, dtype=np.int64) if kept is None else kept
        upto = np.concatenate(([0], np.cumsum(kept)))
        self.inside = np.triu(upto[None, :] - upto[:, None])
        """``inside[s, t]``: bytes kept of blocks s .. t-1."""
        self.between = chain.between + self.inside
        """Bytes that a sub-problem (s, t) spares for what (i, t) has: of the cuts, and kept."""
        pinned = chain.held_by
        self.base = np.array([g + pinned[-1] for g in chain.grads], dtype=np.int64)
        """For each t < L: bytes of gradients and held outputs during forwards of sub-problem (s, t)."""
        self.first = pinned + chain.grads_at_start
        """For each block: bytes of gradients and held outputs during the first forward, where t = L."""
        self.options = [self._options(chain, s, int(kept[s])) for s in range(n)]
        peaks = np.array([b.forward_peak_bytes for b in chain.blocks], dtype=np.int64)
        during = chain.between[:n, :n] + peaks
        lower = np.tril(np.ones((n, n), dtype=bool), -1)
        self.run = np.maximum.accumulate(np.where(lower, 0, during), axis=1)
        """``run[s, i-1]``: bytes during plain forwards of blocks s .. i-1, cut s left out."""
        self.run_first = np.maximum.accumulate(np.where(lower, 0, during + self.first), axis=1)
        """Bytes during the first plain forwards, everything included."""
        self.duration = [b.forward_seconds for b in chain.blocks]
        """Seconds of each block's plain forward."""
        self.elapsed = np.concatenate(([0.0], np.cumsum(self.duration)))
        """Seconds of the plain forwards of blocks 0 .. i-1."""

    @staticmethod
    def _options(chain: Chain, s: int, kept: int) -> BlockOptions:
        block = chain.blocks[s]
        pinned = int(chain.held_by[-1])
        outputs = int(chain.between[s, s + 1])
        saved = np.array([o.saved_bytes for o in block.options], dtype=np.int64)
        backward = np.array([o.backward_peak_bytes for o in block.options], dtype=np.int64)
        backward += pinned + block.passing_bytes + kept
        return BlockOptions(
            np.array([o.forward_seconds + o.backward_seconds for o in block.options], dtype=float),
            saved + outputs + kept,
            np.array([o.forward_peak_bytes for o in block.options], dtype=np.int64),
            backward,
            np.maximum(backward, saved + outputs + kept + pinned + chain.grads[-1]))

    def option(self, s: int, t: int) -> Ints:
        """Return bytes that running block s with each of its options needs in sub-problem (s, t)."""
        o = self.options[s]
        if t == self.blocks:
            first: Ints = np.maximum(o.forward + self.inside[s, t] + self.first[s],
                                     o.backward_last if s + 1 == t else o.backward)
            return first
        need: Ints = np.maximum(o.forward + self.inside[s, t] + self.base[t], o.backward)
        return need

    def option_rows(self, s: int, k: int) -> Ints:
        """Return the needs of option k of block s for every t in s+1 .. L."""
        o = self.options[s]
        need: Ints = np.maximum(o.forward[k] + self.inside[s, s + 1:] + self.base[s + 1:],
                                o.backward[k])
        need[-1] = self.option(s, self.blocks)[k]
        return need

    def split(self, s: int, t: int) -> Ints:
        """Return bytes that the plain forwards to each cut i in s+1 .. t-1 need in sub-problem (s, t)."""
        if t == self.blocks:
            need: Ints = self.run_first[s, s:t - 1] + self.inside[s, t]
        else:
            need = self.run[s, s:t - 1] + self.inside[s, t] + self.base[t]
        return need

    def split_rows(self, s: int, i: int) -> Ints:
        """Return the needs of the plain forwards from cut s to cut i for every t in i+1 .. L."""
        need: Ints = self.run[s, i - 1] + self.inside[s, i + 1:] + self.base[i + 1:]
        need[-1] = self.run_first[s, i - 1] + self.inside[s, -1]
        return need


# -- The smallest memory in which a persistent sequence exists, to the byte ------------------------

NEVER = np.int64(2**62)
"""More bytes than any chain needs (sums of two of them still fit an int64)."""


@dataclass(frozen=True)
class Smallest:
    """The smallest memory of every sub-problem."""

    bytes: Ints
    """``bytes[s, t]``: smallest memory for blocks s .. t-1, cut s not included."""
    seconds: Floats
    """Time of a sequence that needs no more than that (an upper bound of the least time)."""


def smallest(chain: Chain, needs: MemoryRequirements | None = None, *, keep: bool = True,
             span: int | None = None) -> Smallest:
    """Fill the table of smallest memories.

    `keep`: options may stay in memory while later blocks run; without it an option's backward
    follows its forward at once (automatic differentiation's model). `span`: only sub-problems of so
    many blocks at most.
    """
    needs = needs or MemoryRequirements(chain)
    n = len(chain)
    memory = np.full((n + 1, n + 1), NEVER, dtype=np.int64)
    time = np.full((n + 1, n + 1), np.inf)
    for s in range(n - 1, -1, -1):
        end = n if span is None else min(n, s + span)
        options = needs.options[s]
        for k, cost in enumerate(options.seconds):
            need = needs.option_rows(s, k)[:end - s]
            if keep:
                need[1:] = np.maximum(need[1:], options.keep[k] + memory[s + 1, s + 2:end + 1])
                total = np.concatenate(([cost], cost + time[s + 1, s + 2:end + 1]))
            else:
                need[1:] = NEVER
                total = np.full(end - s, cost)
            _improve(memory[s, s + 1:end + 1], time[s, s + 1:end + 1], need, total)
        for i in range(s + 1, end):
            need = np.maximum(needs.split_rows(s, i)[:end - i],
                              needs.between[s, i] + memory[i, i + 1:end + 1])
            need = np.maximum(need, memory[s, i])
            elapsed = needs.elapsed[i] - needs.elapsed[s]
            _improve(memory[s, i + 1:end + 1], time[s, i + 1:end + 1], need,
                     time[i, i + 1:end + 1] + (elapsed + time[s, i]))
    return Smallest(memory, time)


def _improve(memory: Ints, time: Floats, need: Ints, total: Floats) -> None:
    """Take over, in place, what needs less memory, or as much for less time."""
    better = (need < memory) | ((need == memory) & (total < time))
    np.copyto(memory, need, where=better)
    np.copyto(time, total, where=better)
