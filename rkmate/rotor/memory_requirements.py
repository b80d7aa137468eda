"""Memory needs, in bytes, of each choice of the dynamic program: the part that budgets do not change.

For the sub-problem (s, t) (forward and backward of blocks s .. t-1, cut s kept outside, gradients
of cut t inside), Rockmate's appendix C.2 has two kinds of choice: run block s with an option and go
on with (s+1, t), or run plain forwards up to cut i and solve (i, t), then (s, i). Arrays over
options, over s, i or t hold bytes.

Two remarks on the printed accounting. In its equation (1) the remainder starts at block s+1. And
when t is the end of the chain, every forward of the sub-problem runs before the loss: the gradients
of the outputs are not there yet, and are charged to the backward only.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rkmate.ir.chain import Chain, Floats, Ints


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
